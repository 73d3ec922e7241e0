"""reasoning-gym: tasks made from (name, seed, position).

The grader needs the entry as the generator made it, and JSON has neither tuples nor keys that are no text
(two of the sets score a correct answer 0.05 when their tuples come back as lists): `pack` keeps both.

reasoning-gym makes entry i from seed + i, so seeds 0 and 1 name nearly the same tasks. The stream therefore
compares questions, not seeds, to keep held-out tasks out of training (async_rl/data/stream.py).
"""

import dataclasses
import random
from typing import Any

import numpy as np

from async_rl.config.schema import ReasoningGym
from async_rl.data.rows import Row
from async_rl.errors import UserError, nearest

_TUPLE, _PAIRS = "$tuple", "$pairs"


class GymTasks:
    def __init__(self, config: ReasoningGym, setting: str) -> None:
        self.name = config.name
        self._settings = {**config.config, "seed": config.seed, "size": config.size}
        for key in ("seed", "size"):
            if key in config.config:
                raise UserError(f"{setting}.config.{key}: write it as {setting}.{key}")
        try:
            self._entries = create(config.name, self._settings)
        except UserError as error:
            raise UserError(f"{setting}: {error}") from None
        self._size = config.size

    def __len__(self) -> int:
        return self._size

    def row(self, position: int) -> Row:
        # list_functions draws from the global generator: the same entry must come out at every asking
        before = random.getstate()
        random.seed(f"{self._settings['seed']} {position}")
        try:
            entry = self._entries[position]
        except Exception as error:  # a generator is foreign code, and any error of it is the data's
            raise UserError(f"reasoning-gym '{self.name}' entry {position}: {type(error).__name__}: {error}") from None
        finally:
            random.setstate(before)
        try:
            packed = pack(entry)
        except TypeError as error:
            raise UserError(f"reasoning-gym '{self.name}' entry {position}: {error}") from None
        answer = entry.get("answer")
        return Row(
            prompt=entry["question"],
            messages=None,
            answer=None if answer is None else str(answer),
            metadata={"dataset": self.name, "config": self._settings, "entry": packed},
        )


def create(name: str, settings: dict[str, Any]) -> Any:
    """The data set `name` under `settings`; UserError with the nearest name of a set or of a setting."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if name == "composite":
        raise UserError("reasoning-gym 'composite': name each of its sets as a source of its own, with a weight")
    if name not in DATASETS:
        raise UserError(f"reasoning-gym has no data set '{name}'{nearest(name, DATASETS)}")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])}
    for key in settings:
        if key not in known:
            raise UserError(f"reasoning-gym '{name}' has no setting '{key}'{nearest(key, known - {'seed', 'size'})}")
    try:
        return create_dataset(name, **settings)
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"reasoning-gym '{name}' refuses {settings}: {error}") from None


def pack(value: Any) -> Any:
    """`value` in JSON's types, tuples and keys that are no text marked."""
    match value:
        case dict() if all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        case dict():
            return {_PAIRS: [[pack(key), pack(item)] for key, item in value.items()]}
        case tuple():
            return {_TUPLE: [pack(item) for item in value]}
        case list():
            return [pack(item) for item in value]
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise TypeError(f"{type(value).__name__} has no form in JSON")


def unpack(value: Any) -> Any:
    """What `pack` was given."""
    match value:
        case {"$tuple": list(items)} if len(value) == 1:
            return tuple(unpack(item) for item in items)
        case {"$pairs": list(pairs)} if len(value) == 1:
            return {unpack(key): unpack(item) for key, item in pairs}
        case dict():
            return {key: unpack(item) for key, item in value.items()}
        case list():
            return [unpack(item) for item in value]
        case _:
            return value
