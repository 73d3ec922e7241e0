"""The reshard plan: which rank of the trainer sends which part of which parameter to which host.

Computed before any byte moves, alike on both sides, from two lists of boxes: what each rank holds (FSDP shards, tensor
and expert parallel parts, pipeline stages, replicas) and what the engines of each host want (their own tensor parallel
parts, of fused and padded tensors: layouts.py). Every byte that a host wants goes there once, however many of its
engines want it. Pure: no torch, no sockets.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from async_rl.errors import PublicationError
from async_rl.weights.boxes import Box, cells, merged
from async_rl.weights.layouts import Target


class Parameter(NamedTuple):
    """A tensor of the model, by its canonical name: tied tensors are one parameter."""

    shape: tuple[int, ...]
    itemsize: int  # bytes of an element


class Shard(NamedTuple):
    """What rank `rank` of the trainer holds of a parameter, as a tensor of the box's shape."""

    rank: int
    parameter: str
    box: Box


class Want(NamedTuple):
    """What host `host` is to have of a parameter."""

    host: str
    parameter: str
    box: Box


class Piece(NamedTuple):
    """`nbytes` that go once from `rank` to `host`. `shard`: the box that `rank` holds and `box` is a part of."""

    rank: int
    host: str
    parameter: str
    box: Box
    shard: Box
    nbytes: int


class Report(NamedTuple):
    """What a plan costs; times are bytes over a bandwidth that the caller knows."""

    nbytes: int  # all that is sent
    messages: int  # buckets of bucket_bytes, each from one rank to one host
    sent: dict[int, int]  # bytes by rank
    received: dict[str, int]  # bytes by host
    largest_link: int  # bytes of the busiest end: what a rank sends, or a host receives
    lower_bound: int  # bytes below which no assignment of the same wants brings largest_link


def plan(
    parameters: Mapping[str, Parameter],
    shards: Sequence[Shard],
    wants: Sequence[Want],
    *,
    largest: int = 64 * 2**20,
) -> list[Piece]:
    """The pieces, in the order in which a rank sends them; the same for the same arguments in any order.

    largest: bytes of a piece at most (one element at least), so that large tensors, too, can be shared by replicas.

    Raises PublicationError where something is wanted that nobody holds, or a box is none of its parameter's.
    """
    _check(parameters, shards, wants)
    held = _held(shards)
    wanted: dict[str, dict[str, set[Box]]] = defaultdict(lambda: defaultdict(set))
    for want in wants:
        if want.box.size:
            wanted[want.parameter][want.host].add(want.box)
    open_: list[_Open] = []
    for name in sorted(wanted):
        itemsize = parameters[name].itemsize
        for boxes, hosts in _alike(wanted[name]):
            for box, holders in _parts(name, boxes, held[name], hosts):
                for part in box.pieces(max(largest // itemsize, 1)):
                    open_ += [_Open(name, part, host, holders, part.size * itemsize) for host in hosts]
    return _assigned(open_)


def report(pieces: Iterable[Piece], shards: Sequence[Shard], *, bucket_bytes: int = 64 * 2**20) -> Report:
    """What `pieces`, a plan over `shards`, cost."""
    sent: Counter[int] = Counter()
    received: Counter[str] = Counter()
    links: Counter[tuple[int, str]] = Counter()
    by_holders: Counter[frozenset[int]] = Counter()
    held = _held(shards)
    known: dict[tuple[str, Box], frozenset[int]] = {}
    for piece in pieces:
        sent[piece.rank] += piece.nbytes
        received[piece.host] += piece.nbytes
        links[piece.rank, piece.host] += piece.nbytes
        what = piece.parameter, piece.box
        if what not in known:
            whole = [ranks for box, ranks in held[piece.parameter].items() if box.holds(piece.box)]
            known[what] = frozenset().union(*whole)
        by_holders[known[what]] += piece.nbytes
    bound = max(received.values(), default=0)
    for ranks in by_holders:  # what only ranks among these can send, they send at least evenly
        theirs = sum(nbytes for others, nbytes in by_holders.items() if others <= ranks)
        bound = max(bound, -(-theirs // len(ranks)))
    return Report(
        nbytes=sum(sent.values()),
        messages=sum(-(-nbytes // bucket_bytes) for nbytes in links.values()),
        sent=dict(sent),
        received=dict(received),
        largest_link=max([*sent.values(), *received.values()], default=0),
        lower_bound=bound,
    )


def wants_of(host: str, targets: Iterable[Target]) -> list[Want]:
    """What `host` is to have so that each of `targets`, tensors of its engines, can be filled."""
    return [Want(host, part.parameter, part.needs) for target in targets for part in target.parts]


class Copy(NamedTuple):
    """What of `piece` goes to where in a target."""

    piece: Piece
    source: tuple[slice, ...]  # in a tensor of the piece's shape
    target: tuple[int | slice, ...]  # in the target


def copies(target: Target, pieces: Iterable[Piece]) -> Iterator[Copy]:
    """How the `pieces` that a host received fill `target`; what no copy writes is padding, and zero."""
    of: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        of[piece.parameter].append(piece)
    for part in target.parts:
        for piece in of[part.parameter]:
            common = part.box.overlap(piece.box)
            if common is not None:
                yield Copy(piece, common.inside(piece.box), part.place(common))


def _held(shards: Iterable[Shard]) -> dict[str, dict[Box, set[int]]]:
    """parameter -> box -> the ranks that hold it."""
    held: dict[str, dict[Box, set[int]]] = defaultdict(lambda: defaultdict(set))
    for shard in shards:
        if shard.box.size:
            held[shard.parameter][shard.box].add(shard.rank)
    return held


class _Open(NamedTuple):
    parameter: str
    box: Box
    host: str
    holders: dict[int, Box]  # rank -> its shard that the box is a part of
    nbytes: int


def _alike(wanted: Mapping[str, set[Box]]) -> list[tuple[frozenset[Box], list[str]]]:
    """Hosts that want the same of a parameter, together."""
    hosts: dict[frozenset[Box], list[str]] = defaultdict(list)
    for host in sorted(wanted):
        hosts[frozenset(wanted[host])].append(host)
    return sorted(hosts.items(), key=lambda item: item[1])


def _parts(
    name: str, wanted: frozenset[Box], held: Mapping[Box, set[int]], hosts: Sequence[str]
) -> list[tuple[Box, dict[int, Box]]]:
    """The union of `wanted` in disjoint boxes, each with the ranks that hold all of it."""
    by_shards: dict[tuple[Box, ...], list[Box]] = defaultdict(list)
    for cell in cells([*wanted, *held]):
        if any(box.holds(cell) for box in wanted):
            shards = tuple(sorted(box for box in held if box.holds(cell)))
            if not shards:
                raise PublicationError(f"{name}: {_indices(cell)} is wanted by {', '.join(hosts)} and held by no rank")
            by_shards[shards].append(cell)
    return [
        (box, {rank: shard for shard in shards for rank in sorted(held[shard])})
        for shards, found in by_shards.items()
        for box in merged(found)
    ]


def _assigned(open_: Iterable[_Open]) -> list[Piece]:
    """Each piece to one of its holders. Those with the fewest holders first, then the largest, each to whoever has
    the least to send: even within one piece where sets of holders are nested or apart, as a mesh of ranks makes them.
    """
    load: Counter[int] = Counter()
    pieces: list[Piece] = []
    for part in sorted(open_, key=lambda p: (len(p.holders), -p.nbytes, p.parameter, p.box, p.host)):
        rank = min(part.holders, key=lambda r: (load[r], r))
        load[rank] += part.nbytes
        pieces.append(Piece(rank, part.host, part.parameter, part.box, part.holders[rank], part.nbytes))
    return sorted(pieces)


def _check(parameters: Mapping[str, Parameter], shards: Iterable[Shard], wants: Iterable[Want]) -> None:
    for side, parameter, box in [
        *((f"rank {shard.rank} holds", shard.parameter, shard.box) for shard in shards),
        *((f"{want.host} wants", want.parameter, want.box) for want in wants),
    ]:
        if parameter not in parameters:
            raise PublicationError(f"{side} {parameter}, which is no parameter of the model")
        shape = parameters[parameter].shape
        if len(box.low) != len(shape) or not Box.whole(shape).holds(box):
            raise PublicationError(f"{side} {_indices(box)} of {parameter}, whose shape is {list(shape)}")


def _indices(box: Box) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in zip(box.low, box.high, strict=True)) + "]"
