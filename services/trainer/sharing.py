"""Attention over rows in which the members of a group share their prompt.

Around the attention that models/attention.py chose: queries, keys and values are laid out as whole sequences,
and of the outputs those of the row are taken. All the rest of the model computes a shared prompt once; with
8 members, 50 tokens of prompt and 12 of completion that is a quarter of the work.
"""

from typing import Any

from torch import Tensor

from async_rl.models.attention import use_packed_attention


def share_prompts(model: Any) -> None:
    """Set `model` to attention that takes `expand` and `collapse` (packing.Pack) beside `cu_seq_lens`."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    chosen = use_packed_attention(model)
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
        q, k, v = (states.index_select(2, expand) for states in (query, key, value))
        output, weights = attend(module, q, k, v, attention_mask, **arguments)
        return output.index_select(1, collapse), weights

    name = f"{chosen}_shared"
    AttentionInterface.register(name, whole_sequences)
    model.config._attn_implementation = name
