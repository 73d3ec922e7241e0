"""The size of transformers' paged cache, and how attention reads it."""

from typing import Any

import torch

from async_rl.config.schema import TransformersEngine as Settings
from async_rl.errors import UserError

CACHE_BYTES = 2**30  # of a cache whose size the configuration leaves open, at most


def leave_in_pages(
    cache: Any, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write new keys and values [1, Hk, T, D] to the paged cache and let attention read them where they lie.

    The cache's own `update` copies all that was cached into one tensor first; attention then copies again to
    batch sequences of like length.
    """
    allocator = cache.layer_to_allocator[layer]
    if allocator.layer_type != "full_attention":
        raise UserError(f"layer {layer} has {allocator.layer_type}, which this engine does not sample with")
    read, write = (kwargs[name][allocator.index] for name in ("read_index", "write_index"))
    kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][allocator.layer_type]
    kwargs["max_length_k"] = kwargs["max_length_k"][allocator.layer_type]
    allocator.update(key[0].transpose(0, 1), value[0].transpose(0, 1), layer, read[:0], write)
    if not read.numel():
        return key, value
    kwargs["key_rows"] = read
    keys, values = allocator.get_cache_for_block_table(layer)  # [pages, page size, Hk, D]
    return keys.flatten(0, 1).transpose(0, 1)[None], values.flatten(0, 1).transpose(0, 1)[None]


def default_blocks(model: Any, settings: Settings, positions: int) -> int:
    """Pages for `max_requests` sequences as long as the context, within CACHE_BYTES; for one at least."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block_bytes = 2 * heads * width * config.num_hidden_layers * model.dtype.itemsize * settings.page_size
    sequence = -(-min(positions, 2**20) // settings.page_size)
    return max(sequence, min(sequence * settings.max_requests, CACHE_BYTES // int(block_bytes)))
