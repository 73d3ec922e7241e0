"""What every rank of a trainer does when all do it: its part of the models, the steps, checkpoints and publications."""

import logging
from pathlib import Path
from typing import Any

from async_rl.config.load import parse
from async_rl.config.schema import Config, Model
from async_rl.models.load import load_tokenizer
from async_rl.protocol.buffer import Cursor
from async_rl.services.trainer import lora
from async_rl.services.trainer.checkpoint import Checkpoints
from async_rl.services.trainer.orders import CarryOut, Checksum, Leave, Load, LoadVersion, Save, Step, ToDo
from async_rl.services.trainer.ranks import Ranks
from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.step import train_step
from async_rl.services.trainer.trained import weights_checksum
from async_rl.weights.carry import Bench, carry_out

log = logging.getLogger(__name__)


class Work:
    """folder: of the checkpoints that it writes."""

    def __init__(self, config: Config, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.version = ranks, 0
        self.cursor: Cursor | None = None  # where the data stood at the checkpoint
        self.checkpoints = Checkpoints(folder, config.trainer.keep_checkpoints, ranks, config.trainer.checkpoint_s)
        self.loaded: Roles | None = None
        self._config, self._bench = config, Bench()

    @property
    def roles(self) -> Roles:
        assert self.loaded is not None
        return self.loaded

    def do(self, order: ToDo) -> Any:
        match order:
            case Load(first):
                return self._load(first)
            case LoadVersion():
                return self._load_version(order)
            case Step(drawn):
                return train_step(drawn, self.roles, self._config)
            case Save(version, cursor):
                return self.checkpoints.save(self.roles, self._tokenizer, self._config, version, cursor)
            case Checksum():
                return weights_checksum(self.roles.policy.model)
            case CarryOut(order=publication):
                model = lora.published(self.roles.policy.model)
                return carry_out(publication, self.ranks.rank, model, self._bench)
            case Leave():
                return self.checkpoints.finish()

    def _load(self, first: Model) -> None:
        resumed = self.checkpoints.resume(self._config, first)
        if resumed is None:
            self._begin(first)
            return
        self.loaded, self._tokenizer, self.version = resumed.roles, resumed.tokenizer, resumed.state.version
        self.cursor = resumed.state.cursor
        log.info("goes on from the checkpoint of version %d", self.version)

    def _load_version(self, order: LoadVersion) -> None:
        if order.version < 0:
            self._begin(order.first)
            return
        settings = parse(order.settings)
        theirs = Checkpoints(Path(order.folder), settings.trainer.keep_checkpoints, self.ranks)
        self.loaded, self._tokenizer, _ = theirs.load(order.version, settings, order.first, self._config)
        self.version = order.version

    def _begin(self, first: Model) -> None:
        self.loaded = Roles.load(self._config, first, self.ranks)
        self._tokenizer = load_tokenizer(first)
