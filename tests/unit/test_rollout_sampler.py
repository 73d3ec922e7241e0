"""One token a row: which, and with what log-probability."""

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config.schema import Sampling
from async_rl.services.rollout.sampler import Row, sample

torch.set_num_threads(1)
THREE = torch.tensor([[0.6, 0.3, 0.1]]).log()


def rows(n, sampling, greedy=False):
    chance = random.Random(0)
    return [Row(sampling, greedy, chance.random()) for _ in range(n)]


def test_an_unchanged_policy_reads_ratio_one_under_top_p():
    """Field report 15: [.6, .3, .1] with top_p .9 leaves two tokens, of probability 2/3 and 1/3."""
    done = sample(THREE.repeat(50, 1), rows(50, Sampling(top_p=0.9)))
    assert set(done.tokens) == {0, 1}
    assert all(kept == [0, 1] for kept in done.survivors)
    for token, logprob in zip(done.tokens, done.logprobs, strict=True):
        trainer = THREE[0, :2].log_softmax(-1)[token].item()
        assert math.exp(trainer - logprob) == pytest.approx(1.0, abs=1e-5)


def test_temperature_divides_the_logits():
    """Field report 14: at T = 0.6 the log-probability is that of log_softmax(z / 0.6)."""
    done = sample(THREE.repeat(20, 1), rows(20, Sampling(temperature=0.6)))
    expected = (THREE[0] / 0.6).log_softmax(-1)
    assert done.logprobs == pytest.approx([expected[t].item() for t in done.tokens], abs=1e-6)
    assert done.survivors == [None] * 20


def test_frequencies_are_the_probabilities():
    done = sample(THREE.repeat(4000, 1), rows(4000, Sampling()))
    counts = Counter(done.tokens)
    for token, p in enumerate((0.6, 0.3, 0.1)):
        assert counts[token] / 4000 == pytest.approx(p, abs=0.03)


@pytest.mark.parametrize("uniform", [0.0, 0.5999, 0.6001, 0.9, 1.0 - 2**-53])
def test_a_token_without_probability_is_never_taken(uniform):
    logits = torch.tensor([[-torch.inf, math.log(0.6), -torch.inf, math.log(0.4), -torch.inf]])
    done = sample(logits, [Row(Sampling(), False, uniform)])
    assert done.tokens == [1 if uniform < 0.6 else 3]
    assert math.isfinite(done.logprobs[0])


def test_rows_of_every_kind_share_a_batch():
    logits = THREE.repeat(3, 1)
    done = sample(
        logits,
        [
            Row(Sampling(temperature=3.0, top_k=1), True, 0.99),
            Row(Sampling(), False, 0.99),
            Row(Sampling(top_k=2), False, 0.99),
        ],
    )
    assert done.tokens == [0, 2, 1]
    assert done.survivors == [None, None, [0, 1]]
    assert done.logprobs == pytest.approx([math.log(0.6), math.log(0.1), math.log(1 / 3)], abs=1e-5)
    assert torch.equal(logits, THREE.repeat(3, 1))  # what came in is left as it was


@settings(max_examples=80, deadline=None)
@given(
    st.integers(2, 30),
    st.floats(0.05, 1.0),
    st.integers(0, 40),
    st.floats(0.3, 3.0),
    st.integers(0, 2**30),
)
def test_survivors_are_the_smallest_set_that_holds_top_p(size, top_p, top_k, temperature, seed):
    torch.manual_seed(seed)
    logits = 3 * torch.randn(1, size)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    done = sample(logits, rows(1, sampling))
    kept = done.survivors[0]
    if kept is None:
        assert top_p == 1.0 and top_k == 0
        kept = list(range(size))
    assert done.tokens[0] in kept and len(set(kept)) == len(kept)
    scaled = logits[0] / temperature
    assert done.logprobs[0] == pytest.approx(
        scaled[torch.tensor(kept)].log_softmax(-1)[kept.index(done.tokens[0])].item(), abs=1e-4
    )
    pool = scaled.sort(descending=True).values[: top_k or size].softmax(-1)
    assert len(kept) <= len(pool)
    if len(kept) < len(pool):
        assert pool[: len(kept)].sum().item() >= top_p - 1e-4
    if len(kept) > 1:
        assert pool[: len(kept) - 1].sum().item() < top_p + 1e-4


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        sample(torch.tensor([[0.0, torch.nan]]), rows(1, Sampling()))
