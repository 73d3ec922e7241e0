"""A rank of the trainer that follows: it does what the leading one tells, until that tells it to leave.

python -m async_rl.services.trainer.follower HOST PORT RANK     (the leading rank starts those of its host so)
async-rl serve trainer RUN.toml --rank RANK                     (on another host)
"""

import logging
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed

from async_rl.actor.process import PARENT, die_with_parent
from async_rl.actor.service import report_end
from async_rl.config.load import parse
from async_rl.config.resume import differences
from async_rl.config.schema import Config
from async_rl.errors import AsyncRLError, ConfigError, DeadlineExceeded, RankLost
from async_rl.services.trainer.orders import CarryOut, Leave, Orders
from async_rl.services.trainer.ranks import join
from async_rl.services.trainer.team import Failed, Told, answer, beat, exchange_failed, failed, here, on_loopback
from async_rl.services.trainer.work import Work

dist: Any = torch.distributed  # whose stubs leave out what is used here
BEAT_S = 1.0
log = logging.getLogger(__name__)


def follow(host: str, port: int, rank: int, own: Config | None = None, connect_s: float = 60.0) -> int:
    """The exit status: 0 when it was told to leave, that of RankLost when the leading rank is gone.

    own: the settings of this host, which must be those of the leading rank. connect_s: until that is there.
    """
    name = f"trainer-{rank}"
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        store = _store(host, port, connect_s)
        return _follow(store, rank, own, on_loopback_host=host)
    except dist.DistNetworkError as error:
        log.error("%s: error: the leading rank is gone: %s", name, str(error).splitlines()[0])
        return RankLost.exit_status
    except BaseException as error:
        return report_end(name, error)


def _store(host: str, port: int, connect_s: float) -> Any:
    try:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=connect_s), wait_for_workers=False)
    except dist.DistError:
        what = f"the leading rank of the trainer at {host}:{port} (trainer.rendezvous)"
        raise DeadlineExceeded(what, connect_s, "services.connect_s") from None


def _follow(store: Any, rank: int, own: Config | None, *, on_loopback_host: str) -> int:
    told = msgspec.json.decode(store.get("told"), type=Told)
    config = parse(told.config)
    if own is not None:
        for difference in differences(config, own):
            raise ConfigError(f"{difference} with the leading rank: all ranks take the same file")
    store.set(here(rank), str(os.getpid()))
    torch.set_num_threads(config.trainer.threads)
    on_loopback(on_loopback_host)
    ranks = join(config.trainer, rank, dist.PrefixStore("world/", store))
    log.info("rank %d of %d, pid %d", rank, ranks.size, os.getpid())
    threading.Thread(target=_live, args=(store.clone(), rank), name="sign of life", daemon=True).start()
    work, orders = Work(config, ranks, Path(told.checkpoints)), Orders(store)
    while True:
        order = orders.take()
        try:
            found = work.do(order)
        except Exception as error:  # told to the leading rank, which may find the same, and then says it itself
            cause = RankLost(str(error)) if exchange_failed(error) else error
            status = cause.exit_status if isinstance(cause, AsyncRLError) else 1
            end = Failed(rank, status, " ".join(str(error).split()))
            store.set(failed(rank), msgspec.json.encode(end).decode())
            log.error("rank %d failed", rank, exc_info=error)
            time.sleep(config.trainer.collective_s)
            return status
        if isinstance(order, CarryOut):
            store.set(answer(orders.given - 1, rank), msgspec.json.encode(found).decode())
        if isinstance(order, Leave):
            dist.destroy_process_group()
            return 0


def _live(store: Any, rank: int) -> None:
    """A sign of life again and again; without anybody to give it to, this process ends."""
    count = 0
    while True:
        try:
            store.set(beat(rank), str(count))
        except dist.DistError:
            log.error("trainer-%d: error: the leading rank is gone", rank)
            logging.shutdown()
            os._exit(RankLost.exit_status)
        count += 1
        time.sleep(BEAT_S)


if __name__ == "__main__":
    die_with_parent(os.environ.get(PARENT))
    sys.exit(follow(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
