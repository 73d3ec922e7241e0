"""What a version is made of and which rank brings which of it to which relay: decided by the leading rank alone."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from async_rl.protocol.weight_sync import Piece, TensorEntry
from async_rl.weights.boxes import Box
from async_rl.weights.holdings import held, shards
from async_rl.weights.manifest import DTYPE_BYTES, Layout, layout
from async_rl.weights.plan import Parameter, Want, plan

if TYPE_CHECKING:
    from async_rl.weights.holdings import Model

FLOATS = ("float64", "float32", "float16", "bfloat16")


class Draft(NamedTuple):
    tensors: list[TensorEntry]
    nbytes: int  # of a slot
    pieces: Mapping[str, list[list[Piece]]]  # receiver -> rank -> what it sends there, in order


def layout_of(model: "Model", bucket_bytes: int, dtype: str | None = None) -> Layout:
    """Where the tensors of `model` lie in a slot. Raises PublicationError where one cannot be published."""
    found = [one._replace(dtype=dtype) if dtype and one.dtype in FLOATS else one for one in held(model)]
    return layout([(one.name, one.aliases, one.dtype, one.shape) for one in found], bucket_bytes)


def draft(model: "Model", ranks: int, receivers: Sequence[str], bucket_bytes: int, dtype: str | None) -> Draft:
    """dtype: of all floating tensors of 16 bits and more; None: their own.

    Raises PublicationError where a tensor cannot be published, or no rank holds a part of it.
    """
    laid = layout_of(model, bucket_bytes, dtype)
    index = {entry.name: k for k, entry in enumerate(laid.tensors)}
    parameters = {one.name: Parameter(tuple(one.shape), DTYPE_BYTES[one.dtype]) for one in laid.tensors}
    wants = [Want(receiver, one.name, Box.whole(one.shape)) for receiver in receivers for one in laid.tensors]
    pieces: dict[str, list[list[Piece]]] = {receiver: [[] for _ in range(ranks)] for receiver in receivers}
    for piece in plan(parameters, shards(model, ranks), wants):
        box = piece.box
        pieces[piece.host][piece.rank].append(Piece(index[piece.parameter], list(box.low), list(box.high)))
    for of_ranks in pieces.values():
        for own in of_ranks:
            own.sort(key=lambda piece: (piece.tensor, piece.low))  # in the order of the slot
    return Draft(laid.tensors, laid.nbytes, pieces)
