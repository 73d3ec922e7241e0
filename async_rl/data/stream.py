"""The run's tasks by position, and the held-out tasks.

Weights are shares of the stream: at any position each source has had its share of the tasks so far. An epoch
is the shortest beginning of the stream in which every task of every source occurs; a source that is smaller
than its share goes round again, in a new order, until the others are through. So equal weights over 100 and
10,000 tasks make an epoch of about 20,000, and weights in proportion to the sizes show each task once.

A task whose question is also a held-out question is never trained: another task of the same source takes its
place. That holds for every kind of source, whatever the seeds or files.
"""

import functools
import itertools
import random
from collections.abc import Sequence

import numpy as np

from async_rl.config.schema import Data, HFDataset, JsonLines, ReasoningGym, Source
from async_rl.data.mixture import Mixture
from async_rl.data.rows import OpenSource, Row, task_of
from async_rl.errors import UserError
from async_rl.trajectory import Task

_STAND_INS = 1000  # tries to replace a held-out task before the source counts as wholly held out


class TaskStream:
    """`task(position)` for any position, in any order; equal arguments give equal tasks in every process.

    `length`: tasks in `data.epochs` epochs, or None where the stream begins again for ever.
    """

    def __init__(self, data: Data, seed: int) -> None:
        self._data, self._seed = data, seed
        self._sources = [_open(source, f"data.train.{i}") for i, source in enumerate(data.train)]
        self._mixture = Mixture([source.weight for source in data.train])
        self._order = functools.lru_cache(maxsize=2 * len(self._sources))(self._order_of_pass)
        epochs = data.epochs
        self.length = None if epochs is None else self._mixture.prefix([epochs * len(s) for s in self._sources])

    def task(self, position: int) -> Task:
        """Raises IndexError beyond `length`, UserError where the row there is malformed."""
        if position < 0 or (self.length is not None and position >= self.length):
            raise IndexError(f"no task {position} in a stream of {self.length}")
        number, k = self._mixture.item(position)
        source = self._sources[number]
        again, place = divmod(k, len(source))
        row = self._trainable(number, again, int(self._order(number, again)[place]))
        return task_of(row, position, source.name, self._data.train[number], self._data)

    def _order_of_pass(self, number: int, again: int) -> Sequence[int]:
        """The order of source `number` in its pass `again` over its tasks."""
        count = len(self._sources[number])
        if not self._data.shuffle:
            return range(count)
        order: Sequence[int] = np.random.default_rng([self._seed, number, again]).permutation(count)  # type: ignore[assignment]
        return order

    @functools.cached_property
    def _held_out(self) -> frozenset[str]:
        return frozenset(row.question for _, _, row in _held_out_rows(self._data))

    def _trainable(self, number: int, again: int, place: int) -> Row:
        """The row at `place`, or one that stands in for it because its question is held out."""
        source = self._sources[number]
        row = source.row(place)
        if row.question not in self._held_out:
            return row
        others = random.Random(f"{self._seed} {number} {again} {place}")
        for _ in range(_STAND_INS):
            row = source.row(others.randrange(len(source)))
            if row.question not in self._held_out:
                return row
        raise UserError(f"data.train.{number} ({source.name}): all of its tasks are in data.held_out")


def held_out_tasks(data: Data) -> list[Task]:
    """The first `held_out_size` tasks, sources in turn by weight; fewer where all are used up."""
    return [
        task_of(row, index, name, data.held_out[number], data)
        for index, (number, name, row) in enumerate(_held_out_rows(data))
    ]


def check(data: Data) -> None:
    """Reads every row of files, and one task of a reasoning-gym set; UserError with the first thing wrong."""
    if not data.train:
        raise UserError("data.train is empty: name at least one source")
    if "{prompt}" not in data.template:
        raise UserError(f"data.template = '{data.template}' has no {{prompt}} in it")
    if data.system and data.format == "plain":
        raise UserError("data.system needs data.format = 'chat'; write it into data.template for plain text")
    _refuse_equal_sets(data)
    for setting, sources in (("data.train", data.train), ("data.held_out", data.held_out)):
        for i, config in enumerate(sources):
            source = _open(config, f"{setting}.{i}")
            for place in range(1 if isinstance(config, ReasoningGym) else len(source)):
                source.row(place)
    TaskStream(data, 0).task(0)


def _refuse_equal_sets(data: Data) -> None:
    for i, train in enumerate(data.train):
        for j, held_out in enumerate(data.held_out):
            if not isinstance(train, ReasoningGym) or not isinstance(held_out, ReasoningGym):
                continue
            if (train.name, train.seed) == (held_out.name, held_out.seed):
                raise UserError(
                    f"data.held_out.{j}.seed = {held_out.seed}: data.train.{i} is '{train.name}' with "
                    "this seed, too; give one of them another"
                )


def _held_out_rows(data: Data) -> list[tuple[int, str, Row]]:
    """(number of the source, its name, row) of each held-out task."""
    sources = [_open(source, f"data.held_out.{i}") for i, source in enumerate(data.held_out)]
    if not sources:
        return []
    turns = Mixture([source.weight for source in data.held_out]).once([len(source) for source in sources])
    chosen = itertools.islice(turns, data.held_out_size)
    return [(number, sources[number].name, sources[number].row(k)) for number, k in chosen]


def _open(config: Source, setting: str) -> OpenSource:
    match config:
        case ReasoningGym():
            from async_rl.data.gym import GymTasks

            return GymTasks(config, setting)
        case JsonLines():
            from async_rl.data.jsonl import JsonLinesFile

            return JsonLinesFile(config, setting)
        case HFDataset():
            from async_rl.data.hugging_face import HFRows

            return HFRows(config, setting)
