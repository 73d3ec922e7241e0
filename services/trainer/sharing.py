"""Attention over rows in which the members of a group share their prompt.

Around the attention that models/attention.py chose: queries, keys and values are laid out as whole sequences,
and of the outputs those of the row are taken. All the rest of the model computes a shared prompt once; with
8 members, 50 tokens of prompt and 12 of completion that is a quarter of the work. Where ranks share a row, each has
all of it here, with a part of the heads (sequence.py).
"""

from typing import Any

import torch
from torch import Tensor

from async_rl.models.attention import use_packed_attention
from async_rl.services.trainer.sequence import require_heads, to_heads, to_tokens


def share_prompts(model: Any, dtype: torch.dtype, group: Any = None, cut: int = 1) -> None:
    """Set `model`, which computes in `dtype`, to attention that takes `expand` and `collapse` (packing.Pack) beside
    `cu_seq_lens`. group: of the ranks that share each row, each with one in `cut` of the heads at first.
    UserError where they cannot be shared so."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if group is not None:
        require_heads(model, group.size(), cut)
    chosen = use_packed_attention(model, dtype)
    attend = ALL_ATTENTION_FUNCTIONS[chosen]

    def whole_sequences(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        expand: Tensor,
        collapse: Tensor,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        arguments.pop("routing", None)  # where no router beside it has heard it
        whole = (query, key, value) if group is None else [to_heads(states, group) for states in (query, key, value)]
        q, k, v = (states.index_select(2, expand) for states in whole)
        output, weights = attend(module, q, k, v, attention_mask, **arguments)
        row = output.index_select(1, collapse)
        return row if group is None else to_tokens(row, group), weights

    name = f"{chosen}_shared"
    AttentionInterface.register(name, whole_sequences)
    model.config._attn_implementation = name
