"""The experts of a layer: one stack in transformers' live models, many matrices in a model's files.

    experts.gate_up_proj [E, 2 I, H]    experts.0.gate_proj.weight [I, H], experts.0.up_proj.weight [I, H], ...
    experts.down_proj    [E, H, I]      experts.0.down_proj.weight [H, I], ...

A trainer publishes the stacks; engines that read weights as they read a model's files want the matrices. Pure.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from async_rl.protocol.weight_sync import TensorEntry


class _Matrix(NamedTuple):
    """Rows `begin` to `end` of the expert's matrix in the stack."""

    name: str
    expert: int
    begin: int
    end: int


def entries_as_stored(tensors: Iterable[TensorEntry], stored: Collection[str]) -> list[TensorEntry]:
    """`tensors` by the names that are `stored` in the model's files, the matrices where they lie in the stack."""
    made: list[TensorEntry] = []
    for entry in tensors:
        matrices = _matrices(entry.name, entry.shape, stored)
        if not matrices:
            made.append(entry)
        for name, expert, begin, end in matrices:
            count, rows, width = entry.shape
            row = entry.nbytes // (count * rows)
            at = entry.offset + (expert * rows + begin) * row
            made.append(TensorEntry(name, entry.dtype, [end - begin, width], at, (end - begin) * row, []))
    return made


def tensors_as_stored(tensors: Iterable[tuple[str, Any]], stored: Collection[str]) -> Iterator[tuple[str, Any]]:
    """(name, tensor) likewise."""
    for name, tensor in tensors:
        matrices = _matrices(name, tensor.shape, stored)
        if not matrices:
            yield name, tensor
        for own, expert, begin, end in matrices:
            yield own, tensor[expert, begin:end]


def _matrices(name: str, shape: Sequence[int], stored: Collection[str]) -> list[_Matrix]:
    """Of the stack `name`; none where it is no stack, or is stored as one."""
    base, _, kind = name.rpartition(".")
    if f"{base}.0.down_proj.weight" not in stored or len(shape) != 3:
        return []
    rows = shape[1]
    halves = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
    cuts = {"gate_up_proj": halves, "down_proj": {"down_proj": (0, rows)}}.get(kind, {})
    return [_Matrix(f"{base}.{e}.{own}.weight", e, *cut) for e in range(shape[0]) for own, cut in cuts.items()]
