"""The small models of the recipes: a Llama of about half a million parameters that reads characters, or a Qwen3-MoE.

The tokenizer has one token for each character of `warmup.characters`, for each of `warmup.words`, and four special
ones. It puts no
token around a text, so a text and its ids correspond exactly: decode(encode(text)) == text.
"""

import re
from collections.abc import Iterable
from typing import Any

from async_rl.config.schema import Warmup
from async_rl.errors import ConfigError

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
INIT_SCALE = 2 / 3  # of 1/sqrt(hidden size): models this small learn in half the steps that 0.02 takes


def check_shape(settings: Warmup) -> None:
    """ConfigError where no model has the shape in `settings`."""
    if len(set(settings.characters)) != len(settings.characters):
        twice = sorted({c for c in settings.characters if settings.characters.count(c) > 1})
        raise ConfigError(f"warmup.characters: {''.join(twice)!r} stands in it more than once")
    if len(settings.characters) < 2:
        raise ConfigError(f"warmup.characters = {settings.characters!r}: needs at least two")
    if settings.hidden_size % (2 * settings.heads):
        raise ConfigError(
            f"warmup.hidden_size = {settings.hidden_size} must be a multiple of "
            f"2 x warmup.heads = {2 * settings.heads}: heads have an even width"
        )
    if settings.architecture == "qwen3_moe" and settings.experts_per_token > settings.experts:
        raise ConfigError(
            f"warmup.experts_per_token = {settings.experts_per_token} is more than warmup.experts = {settings.experts}"
        )


def missing_characters(characters: str, texts: Iterable[str]) -> str:
    """The characters of `texts` that are not among `characters`, sorted."""
    known = set(characters)
    return "".join(sorted({c for text in texts for c in text if c not in known}))


def build_tokenizer(settings: Warmup) -> Any:
    """A PreTrainedTokenizerFast with a token for each of `settings.characters` and `settings.words`; anything else is
    UNKNOWN."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    listed = [PAD, BOS, EOS, UNKNOWN, *settings.characters, *settings.words]
    vocabulary = {token: i for i, token in enumerate(listed)}
    pieces = [re.escape(word) for word in sorted(settings.words, key=len, reverse=True)]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*pieces, r"[\s\S]"])), "isolated")
    tokenizer.decoder = decoders.Fuse()  # joined without the spaces that a word-level decoder adds
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "<eos>" in a text is five characters, not the end
        model_max_length=settings.context,
        chat_template=settings.template or None,
    )


def build_model(settings: Warmup, tokenizer: Any, seed: int) -> Any:
    """A LlamaForCausalLM or Qwen3MoeForCausalLM with random weights, float32, embeddings tied. Same seed, same weights.

    A token costs the same in both: its experts are together as wide as the Llama's layer.
    """
    import torch
    import transformers

    width = settings.hidden_size * 8 // 3
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "intermediate_size": _round_up(width, 16),
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "max_position_embeddings": settings.context,
        "tie_word_embeddings": True,
        "initializer_range": INIT_SCALE * settings.hidden_size**-0.5,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if settings.architecture == "qwen3_moe":
        kind: Any = transformers.Qwen3MoeForCausalLM
        shape |= {
            "head_dim": settings.hidden_size // settings.heads,
            "num_experts": settings.experts,
            "num_experts_per_tok": settings.experts_per_token,
            "moe_intermediate_size": _round_up(width // settings.experts_per_token, 16),
            "norm_topk_prob": True,
        }
    else:
        kind = transformers.LlamaForCausalLM
    config = kind.config_class(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    model.generation_config = transformers.GenerationConfig.from_model_config(config)
    return model


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
