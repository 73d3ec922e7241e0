"""Trajectories to micro-batches without padding, the prompt of a group computed once.

Members of a group have the same prompt; it lies in the row once, with each member's own tokens behind it:

    row         P P P a a a b b        group with prompt P, members a and b
    position    0 1 2 3 4 5 3 4
    attention   P P P a a a | P P P b b        what `expand` makes of the row, `collapse` takes back

Everything but the attention works on the row. The attention sees whole sequences, kept apart by
`cu_seq_lens`, so a member reads the same as alone. Its last token predicts nothing and is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from async_rl.errors import InvariantError
from async_rl.services.trainer.balance import balanced
from async_rl.services.trainer.samples import Sample
from async_rl.trajectory import UNROUTED


@dataclass(frozen=True)
class Columns:
    """What is known of the A action tokens of S whole trajectories, one after the other, as in Sample. The columns
    that a step adds are there where its algorithm asks for them."""

    sequence: Tensor  # [A] int64, 0..S-1
    sequences: int
    behaviour: Tensor  # [A] float32
    finite: Tensor  # [A] bool
    loss: Tensor  # [A] bool
    lag: Tensor  # [A] int64
    advantages: Tensor  # [A] float32
    old: Tensor | None  # [A], as the rest
    reference: Tensor | None
    weights: Tensor | None
    chosen: Tensor | None
    values: Tensor | None
    returns: Tensor | None


@dataclass(frozen=True)
class Pack(Columns):
    """S trajectories in a row of T tokens, A of their tokens sampled, E tokens with each prompt repeated."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, from 0 in each sequence
    expand: Tensor  # [E] int64, where in the row the tokens of the whole sequences are
    collapse: Tensor  # [T] int64, where among those the tokens of the row are
    cu_seq_lens: Tensor  # [S + 1] int32, of the whole sequences
    max_length: int
    predict: Tensor  # [A] int64, where in the row the logits of each action token stand
    targets: Tensor  # [A] int64, the action tokens
    survivors: Tensor | None  # [A, k] int64, -1 padded
    routing: Tensor | None  # [T, layers, k] int, experts of each token of the row, or -1
    outcomes: Tensor  # [S] float32
    numbers: list[int]  # of the S trajectories, as in Sample
    idle: bool = False  # passed for the sake of the other ranks: nothing of it counts

    def to(self, device: torch.device) -> "Pack":
        """The same on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Positions of `lengths` in bins of at most `capacity` together; one that is longer has its own bin.

    Deterministic: equal lengths in their order, bins and what is in them in the order of the input.
    """
    bins: list[tuple[int, list[int]]] = []
    for position in sorted(range(len(lengths)), key=lambda p: (-lengths[p], p)):
        length = lengths[position]
        for number, (room, members) in enumerate(bins):
            if length <= room:
                members.append(position)
                bins[number] = (room - length, members)
                break
        else:
            bins.append((max(capacity - length, 0), [position]))
    return sorted(sorted(members) for _, members in bins)


def packs(samples: Sequence[Sample], capacity: int) -> list[Pack]:
    """`samples` in micro-batches of at most `capacity` tokens (trainer.micro_batch_tokens)."""
    return [pack(own) for own in micro_batches(samples, capacity)]


def micro_batches(samples: Sequence[Sample], capacity: int) -> list[list[Sample]]:
    """What goes into each of `packs`."""
    parts = [part for family in families(samples) for part in _cut(family, capacity)]
    bins = first_fit_decreasing([_tokens(part) for part in parts], capacity)
    return [[sample for p in members for sample in parts[p]] for members in bins]


def share_of_packs(samples: Sequence[Sample], share: int, shares: int, capacity: int, width: int) -> list[Pack]:
    """The packs of one of `shares`, as many as of every other: where an exchange between ranks is a part of a pass,
    those with fewer pass idle ones in the end. What is passed at the same time costs about the same."""
    everyone = [micro_batches(own, capacity) for own in shared_out(samples, shares, capacity, width)]
    mine = sorted(everyone[share], key=lambda own: -sum(_cost(family, width) for family in families(own)))
    missing = max(len(own) for own in everyone) - len(mine)
    shortest = min(samples, key=lambda sample: len(sample.tokens), default=None)
    return [pack(own) for own in mine] + [replace(pack([shortest]), idle=True) for _ in range(missing) if shortest]


def shared_out(samples: Sequence[Sample], shares: int, capacity: int, width: int) -> list[list[Sample]]:
    """`samples` in `shares`, evenly by what passes over them cost. Members of a group that fit into one
    micro-batch stay together, so that their prompt is computed once. width: of the model's states."""
    parts = [part for family in families(samples) for part in _cut(family, capacity)]
    chosen = balanced([_cost(part, width) for part in parts], shares)
    return [[sample for p in members for sample in parts[p]] for members in chosen]


def families(samples: Sequence[Sample]) -> list[list[Sample]]:
    """`samples` by equal prompts, in the order in which they come. With router replay, prompts are equal that went
    through the same experts."""
    by_prompt: dict[bytes, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prefix, []).append(sample)
    return list(by_prompt.values())


def pack(samples: Sequence[Sample]) -> Pack:
    """All of `samples` as one micro-batch."""
    row: list[Tensor] = []
    positions: list[Tensor] = []
    expand: list[Tensor] = []
    collapse: list[Tensor] = []
    predict: list[Tensor] = []
    lengths: list[int] = []
    ordered = [sample for family in families(samples) for sample in family]
    placed = 0  # tokens in the row so far
    for family in families(samples):
        prompt, start = family[0].prompt, placed
        shared = len(prompt)
        row.append(prompt)
        positions.append(torch.arange(shared))
        collapse.append(torch.arange(shared) + sum(lengths))
        placed += shared
        for sample in family:
            own = sample.own
            before = sample.action - 1
            predict.append(torch.where(before < shared, start + before, placed + before - shared))
            expand += [torch.arange(start, start + shared), torch.arange(placed, placed + len(own))]
            collapse.append(torch.arange(len(own)) + sum(lengths) + shared)
            positions.append(torch.arange(shared, shared + len(own)))
            row.append(own)
            lengths.append(shared + len(own))
            placed += len(own)
    return Pack(
        **columns(ordered),
        input_ids=torch.cat(row)[None],
        position_ids=torch.cat(positions)[None],
        expand=torch.cat(expand),
        collapse=torch.cat(collapse),
        cu_seq_lens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max_length=max(lengths),
        predict=torch.cat(predict),
        targets=torch.cat([sample.tokens[sample.action] for sample in ordered]),
        survivors=_survivors([sample.survivors for sample in ordered]),
        routing=_routing(families(samples)),
        outcomes=torch.tensor([sample.outcome for sample in ordered]),
        numbers=[sample.number for sample in ordered],
    )


def columns(samples: Sequence[Sample]) -> dict[str, Any]:
    """The fields of Columns of `samples`, in their order."""
    counts = torch.tensor([len(sample.action) for sample in samples])
    found: dict[str, Any] = {
        "sequence": torch.arange(len(samples)).repeat_interleave(counts),
        "sequences": len(samples),
    }
    return {f.name: found[f.name] if f.name in found else _column(samples, f.name) for f in fields(Columns)}


def _tokens(family: Sequence[Sample]) -> int:
    """Tokens of a row that holds `family`, whose prompt is one."""
    return len(family[0].prompt) + sum(len(sample.own) for sample in family)


def _cost(family: Sequence[Sample], width: int) -> float:
    """In tokens: 12 width^2 multiplications in a layer for each token, length^2 width for each causal attention."""
    return _tokens(family) + sum(len(sample.tokens) ** 2 for sample in family) / (12 * width)


def _cut(family: list[Sample], capacity: int) -> list[list[Sample]]:
    """`family` in parts that fit `capacity`, each with the prompt again; one sample at least in each."""
    parts: list[list[Sample]] = [[]]
    for sample in family:
        if parts[-1] and _tokens([*parts[-1], sample]) > capacity:
            parts.append([])
        parts[-1].append(sample)
    return parts


def _column(samples: Sequence[Sample], name: str) -> Tensor | None:
    """What a step added to all of `samples`, or to none."""
    found = [getattr(sample, name) for sample in samples]
    return None if found[0] is None else torch.cat(found)


def _routing(row: Sequence[Sequence[Sample]]) -> Tensor | None:
    """[T, layers, k] of a row that holds these families; -1 for those that have none."""
    shape = next((s.routing.shape[1:] for family in row for s in family if s.routing is not None), None)
    if shape is None:
        return None
    parts: list[Tensor] = []
    for family in row:
        for number, sample in enumerate(family):
            begin = 0 if number == 0 else int(sample.action[0])
            length = int(sample.action[-1]) - begin
            known = sample.routing
            parts.append(torch.full((length, *shape), UNROUTED) if known is None else known[begin : begin + length])
    return torch.cat(parts)


def _survivors(kept: Sequence[Tensor | None]) -> Tensor | None:
    given = [k for k in kept if k is not None]
    if not given:
        return None
    if len(given) < len(kept):
        raise InvariantError("some trajectories of the draw have their top_p / top_k survivors, some have not")
    widest = max(k.shape[1] for k in given)
    padded = [torch.nn.functional.pad(k, (0, widest - k.shape[1]), value=-1) for k in given]
    return torch.cat(padded)
