"""Causal attention over packed sequences, the same for the sampler and the trainer.

Sequences lie behind one another in one row, told apart by cumulative lengths; there is neither a padded batch
nor a mask of [tokens, tokens]. transformers' models call it under a name that contains "flash": they then
build no mask, and the continuous batching manager hands over cumulative lengths instead of one.

    tokens      a a a a b b c c c c c      cumulative lengths [0, 4, 6, 11]
    batches     [a a a a] [c c c c c]      lengths alike: padded on the right; causality hides it
                [b b]

On CUDA the kernel of the flash-attn package does this where it is installed.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from async_rl.errors import UserError

NAME = "async_rl_packed_flash"
PADDED_SHARE = 0.25  # of a batch's longest sequence that a shorter one may waste as padding
PADDED_TOKENS = 8  # as much may be wasted in any case: a call costs more than that

Lengths = Sequence[int] | torch.Tensor


class _Batch(NamedTuple):
    """Sequences of one call, n of them, at most q queries and k keys long."""

    n: int
    q: int
    k: int
    q_rows: torch.Tensor | slice  # [n * q] packed rows; a slice where they lie together unpadded
    k_rows: torch.Tensor | slice  # [n * k]
    mask: torch.Tensor | None  # bool, True is seen; None: causal, or one query that sees all its keys


class _Plan(NamedTuple):
    batches: list[_Batch]
    order: torch.Tensor | None  # [Tq] where each token stands in the batches' outputs; None: in order already


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: Lengths,
    cu_k: Lengths,
    scale: float | None,
    key_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention inside each packed sequence; differentiable.

    query [Tq, H, D], key and value [Tk, Hk, D] with H a multiple of Hk; cu_q and cu_k are cumulative lengths,
    [sequences + 1]. A sequence with more keys than queries is aligned at its end: its last query sees all
    keys. key_rows [Tk]: the keys and values are these rows of `key` and `value`, the pages of a cache.
    Returns [Tq, H, D]. ValueError where a sequence has fewer keys than queries or lengths do not add up.
    """
    bounds_q, bounds_k = _integers(cu_q), _integers(cu_k)
    queries, keys = query.shape[0], (key if key_rows is None else key_rows).shape[0]
    if (bounds_q[-1], bounds_k[-1]) != (queries, keys):
        raise ValueError(
            f"cumulative lengths end at {bounds_q[-1]} and {bounds_k[-1]} for {queries} queries, {keys} keys"
        )
    plan = _plan(bounds_q, bounds_k, query.device)
    outputs = [_attend(batch, query, key, value, scale, key_rows) for batch in plan.batches]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if plan.order is None else output.index_select(0, plan.order)


def register() -> str:
    """Make `packed_attention` known to transformers; the name it has there."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _forward)
    return NAME


def use_packed_attention(model: Any, dtype: torch.dtype | None = None) -> str:
    """Set `model` to packed attention; the name of the implementation. dtype: that it computes in; None: its own.

    Forward passes then take `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` beside input_ids
    [1, T] and position_ids [1, T] that begin at 0 with each sequence. On CUDA with the flash-attn package and
    a half-precision model its kernel is used, else `packed_attention`.
    """
    from transformers.utils.import_utils import is_flash_attn_2_available

    half = (dtype or model.dtype) in (torch.bfloat16, torch.float16)
    if model.device.type == "cuda" and half and is_flash_attn_2_available():
        model.set_attn_implementation("flash_attention_2")
        return "flash_attention_2"
    # The public setter would look for a downloadable kernel of that name.
    model.config._attn_implementation = register()
    return NAME


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Lengths | None = None,
    cu_seq_lens_k: Lengths | None = None,
    key_rows: torch.Tensor | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: query [1, H, Tq, D], key and value [1, Hk, Tk, D]; returns [1, Tq, H, D]."""
    if query.shape[0] != 1 or attention_mask is not None:
        raise ValueError("packed attention takes one row of packed sequences and no mask")
    if dropout or extra.get("softcap") is not None or extra.get("s_aux") is not None:
        raise UserError("the model asks for dropout, soft-capping or sinks, which packed attention has not")
    cu_q = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q
    cu_k = [0, key.shape[2]] if cu_seq_lens_k is None else cu_seq_lens_k
    if sliding_window is not None and _longest(cu_k) > sliding_window:
        raise UserError(f"a sequence is longer than the model's sliding window, {sliding_window}")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return packed_attention(q, k, v, cu_q, cu_k, scaling, key_rows).unsqueeze(0), None


def _attend(
    batch: _Batch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    key_rows: torch.Tensor | None,
) -> torch.Tensor:
    """[n * q, H, D], padding included."""
    heads, size = query.shape[1:]
    kv_heads = key.shape[1]
    k_rows = batch.k_rows if key_rows is None else key_rows[batch.k_rows]
    keys = _rows(key, k_rows).view(batch.n, batch.k, kv_heads, -1).transpose(1, 2)
    values = _rows(value, k_rows).view(batch.n, batch.k, kv_heads, -1).transpose(1, 2)
    queries = _rows(query, batch.q_rows).view(batch.n, batch.q, heads, size)
    if batch.q == 1:
        # One token sees all its keys, so the heads that share a key head can stand as its queries.
        grouped = queries.view(batch.n, kv_heads, heads // kv_heads, size)
        output = scaled_dot_product_attention(grouped, keys, values, attn_mask=batch.mask, scale=scale)
        return output.reshape(batch.n, heads, -1)
    output = scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys,
        values,
        attn_mask=batch.mask,
        is_causal=batch.mask is None,
        scale=scale,
        enable_gqa=kv_heads != heads,
    )
    return output.transpose(1, 2).reshape(batch.n * batch.q, heads, -1)


def _rows(states: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    if isinstance(rows, slice):
        return states[rows].contiguous()
    return states.index_select(0, rows)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # an index made in inference mode could not be kept for a later backward pass
def _plan(cu_q: tuple[int, ...], cu_k: tuple[int, ...], device: torch.device) -> _Plan:
    """Which sequences share a call. Every layer of a forward pass asks with the same lengths."""
    sequences = [
        (end_q - q, end_k - k, q, k)
        for (q, end_q), (k, end_k) in zip(pairwise(cu_q), pairwise(cu_k), strict=False)
        if end_q > q
    ]
    if len(cu_q) != len(cu_k) or not sequences or any(lk < lq for lq, lk, _, _ in sequences):
        raise ValueError(f"query lengths {cu_q} and key lengths {cu_k} (cumulative) do not fit together")
    batches: list[_Batch] = []
    order, placed = [0] * cu_q[-1], 0
    for group in _alike(sequences):
        batch = _batch(group, device)
        for lq, _, start, _ in group:
            order[start : start + lq] = range(placed, placed + lq)
            placed += batch.q
        batches.append(batch)
    in_order = order == list(range(placed))
    return _Plan(batches, None if in_order else torch.tensor(order, device=device))


Sequence_ = tuple[int, int, int, int]  # query length, key length, first query row, first key row


def _alike(sequences: list[Sequence_]) -> list[list[Sequence_]]:
    """Groups for one call each: single queries, whole sequences (as many queries as keys), continued ones."""
    groups: list[list[Sequence_]] = []
    single = [s for s in sequences if s[0] == 1]
    whole = [s for s in sequences if 1 < s[0] == s[1]]
    continued: dict[tuple[int, int], list[Sequence_]] = {}
    for sequence in sequences:
        if 1 < sequence[0] < sequence[1]:
            continued.setdefault(sequence[:2], []).append(sequence)
    for kind in (single, whole):
        longest = 0
        for sequence in sorted(kind, key=lambda s: (-s[1], s[3])):
            if not longest or longest - sequence[1] > max(PADDED_TOKENS, PADDED_SHARE * longest):
                longest = sequence[1]
                groups.append([])
            groups[-1].append(sequence)
    return groups + list(continued.values())


def _batch(group: list[Sequence_], device: torch.device) -> _Batch:
    q, k = max(s[0] for s in group), max(s[1] for s in group)
    mask = None
    if 1 < q < k:
        mask = torch.ones(q, k, dtype=torch.bool).tril(k - q)
    elif q == 1 and any(s[1] < k for s in group):
        mask = (torch.arange(k) < torch.tensor([s[1] for s in group])[:, None])[:, None, None, :]
    return _Batch(
        len(group),
        q,
        k,
        _row_index([(s[2], s[0]) for s in group], q, device),
        _row_index([(s[3], s[1]) for s in group], k, device),
        None if mask is None else mask.to(device),
    )


def _row_index(spans: list[tuple[int, int]], width: int, device: torch.device) -> torch.Tensor | slice:
    """Rows of the sequences (start, length), each padded to `width` with its own last row."""
    first = spans[0][0]
    if all(span == (first + i * width, width) for i, span in enumerate(spans)):
        return slice(first, first + len(spans) * width)
    starts = torch.tensor([start for start, _ in spans])[:, None]
    last = torch.tensor([length - 1 for _, length in spans])[:, None]
    return (starts + torch.arange(width).minimum(last)).reshape(-1).to(device)


def _integers(bounds: Lengths) -> tuple[int, ...]:
    return tuple(bounds.tolist()) if isinstance(bounds, torch.Tensor) else tuple(bounds)


def _longest(bounds: Lengths) -> int:
    ends = _integers(bounds)
    return max(end - start for start, end in pairwise(ends))
