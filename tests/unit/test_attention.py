"""Packed attention: the same numbers as attention over each sequence alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from async_rl.errors import UserError
from async_rl.models.attention import packed_attention, register, use_packed_attention

torch.set_num_threads(1)


def one_by_one(query, key, value, lengths):
    """Attention of each sequence alone, with an explicit mask aligned at its end."""
    outputs, q, k = [], 0, 0
    repeat = query.shape[1] // key.shape[1]
    for lq, lk in lengths:
        mask = torch.ones(lq, lk, dtype=torch.bool).tril(lk - lq)
        states = [query[q : q + lq], *(x[k : k + lk].repeat_interleave(repeat, 1) for x in (key, value))]
        output = scaled_dot_product_attention(*(x.transpose(0, 1) for x in states), attn_mask=mask)
        outputs.append(output.transpose(0, 1))
        q, k = q + lq, k + lk
    return torch.cat(outputs)


def cumulative(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


lengths_of_sequences = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(1, 40)),
        st.integers(2, 40).map(lambda n: (n, n)),
        st.tuples(st.integers(2, 6), st.integers(7, 20)),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(lengths_of_sequences, st.sampled_from([1, 2, 4]), st.integers(0, 2**30))
def test_packed_equals_one_by_one_with_gradients(lengths, kv_heads, seed):
    torch.manual_seed(seed)
    total_q, total_k = (sum(x) for x in zip(*lengths, strict=True))
    query = torch.randn(total_q, 4, 8, requires_grad=True)
    key, value = (torch.randn(total_k, kv_heads, 8, requires_grad=True) for _ in range(2))
    weights = torch.randn(total_q, 4, 8)
    cu_q, cu_k = cumulative([q for q, _ in lengths]), cumulative([k for _, k in lengths])

    ours = packed_attention(query, key, value, cu_q, torch.tensor(cu_k, dtype=torch.int32), None)
    theirs = one_by_one(query, key, value, lengths)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    for mine, other in zip(
        torch.autograd.grad((ours * weights).sum(), (query, key, value)),
        torch.autograd.grad((theirs * weights).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-3)


def test_keys_are_read_where_they_lie_in_a_cache():
    torch.manual_seed(0)
    lengths = [(1, 9), (3, 3), (1, 30), (2, 7)]
    total_q, total_k = (sum(x) for x in zip(*lengths, strict=True))
    query = torch.randn(total_q, 4, 8)
    pages_k, pages_v = torch.randn(100, 2, 8), torch.randn(100, 2, 8)
    rows = torch.randperm(100)[:total_k]
    cu_q, cu_k = cumulative([q for q, _ in lengths]), cumulative([k for _, k in lengths])
    ours = packed_attention(query, pages_k, pages_v, cu_q, cu_k, None, rows)
    torch.testing.assert_close(ours, one_by_one(query, pages_k[rows], pages_v[rows], lengths))


def test_lengths_that_do_not_fit_are_refused():
    states = torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match="end at 3 and 4 for 4 queries, 4 keys"):
        packed_attention(states, states, states, [0, 3], [0, 4], None)
    with pytest.raises(ValueError, match="do not fit"):
        packed_attention(states, states[:3], states[:3], [0, 4], [0, 3], None)


def small_llama(**changes):
    torch.manual_seed(0)
    settings = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


def test_alone_padded_and_packed_give_equal_log_probabilities():
    """Field report 25: left padding or packing without position resets changes log-probabilities."""
    model = small_llama()
    torch.manual_seed(1)
    sequences = [torch.randint(0, 60, (n,)) for n in (7, 12, 1, 5, 12)]
    width = max(len(s) for s in sequences)
    with torch.no_grad():
        alone = [model(s[None]).logits[0].log_softmax(-1) for s in sequences]

        left = torch.stack([torch.nn.functional.pad(s, (width - len(s), 0)) for s in sequences])
        mask = torch.stack([torch.arange(width) >= width - len(s) for s in sequences]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = model(left, attention_mask=mask, position_ids=positions).logits.log_softmax(-1)

        use_packed_attention(model)
        bounds = torch.tensor(cumulative([len(s) for s in sequences]), dtype=torch.int32)
        packed = (
            model(
                input_ids=torch.cat(sequences)[None],
                position_ids=torch.cat([torch.arange(len(s)) for s in sequences])[None],
                cu_seq_lens_q=bounds,
                cu_seq_lens_k=bounds,
                max_length_q=width,
                max_length_k=width,
                use_cache=False,
            )
            .logits[0]
            .log_softmax(-1)
        )
    for i, reference in enumerate(alone):
        torch.testing.assert_close(padded[i, width - len(reference) :], reference, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed[bounds[i] : bounds[i + 1]], reference, atol=1e-5, rtol=1e-5)


def test_a_batch_of_rows_is_refused_rather_than_unmasked():
    model = small_llama()
    assert use_packed_attention(model) == register()
    with pytest.raises(ValueError, match="one row"):
        model(torch.zeros(2, 4, dtype=torch.long), attention_mask=torch.ones(2, 4))


def test_a_model_that_needs_what_packed_attention_lacks_is_refused():
    model = small_llama(attention_dropout=0.1).train()
    use_packed_attention(model)
    with pytest.raises(UserError, match="dropout"):
        model(torch.zeros(1, 4, dtype=torch.long))
