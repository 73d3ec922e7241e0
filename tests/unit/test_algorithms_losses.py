"""Every policy loss: gradients against finite differences, what is finite, what is proportional, what is clipped."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.losses import ppo
from async_rl.algorithms.members import Tokens
from async_rl.algorithms.registry import LOSSES, policy_loss
from async_rl.config.algorithms import (
    CISPO,
    DPPOKL,
    DPPOTV,
    DRO,
    GMPO,
    GSPO,
    PPO,
    SAPO,
    TOPR,
    ClipCov,
    CustomLoss,
    KLCov,
    Reinforce,
)
from async_rl.errors import UserError

CLIP = PPO(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
SETTINGS = {
    "ppo": CLIP,
    "dppo_tv": DPPOTV(),
    "dppo_kl": DPPOKL(),
    "gspo": GSPO(clip_low=0.2, clip_high=0.28),
    "sapo": SAPO(),
    "reinforce": Reinforce(),
    "clip_cov": ClipCov(share=0.2, low=0.0, high=9.0),
    "kl_cov": KLCov(share=0.2),
    "gmpo": GMPO(),
    "dro": DRO(beta=0.5),
    "cispo": CISPO(),
    "topr": TOPR(),
}


def tokens_of(lp, old, advantages, sequence=None, behaviour=None, loss=None):
    lp, old, advantages = (torch.as_tensor(v, dtype=torch.float64) for v in (lp, old, advantages))
    sequence = torch.zeros(len(lp), dtype=torch.int64) if sequence is None else torch.as_tensor(sequence)
    return Tokens(
        logprobs=lp,
        old=old,
        behaviour=old if behaviour is None else behaviour,
        advantages=advantages,
        loss=torch.ones(len(lp), dtype=torch.bool) if loss is None else loss,
        sequence=sequence,
        sequences=int(sequence.max()) + 1 if len(sequence) else 0,
    )


def evaluate(name, tokens):
    """With the tokens that the loss chooses for itself."""
    entry, table = LOSSES[name], SETTINGS[name]
    if entry.choose is not None:
        noise = torch.from_numpy(np.random.default_rng(0).random(len(tokens.logprobs)))
        frozen = Tokens(**{**tokens.__dict__, "logprobs": tokens.logprobs.detach()})
        tokens = Tokens(**{**tokens.__dict__, "chosen": entry.choose(frozen, table, noise)})
    return entry.evaluate(tokens, table)


def random_tokens(seed=0, count=40, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(count, dtype=torch.float64, generator=generator) * 3 - 0.01
    lp = (old + spread * torch.randn(count, dtype=torch.float64, generator=generator)).clamp(max=-1e-3)
    advantages = torch.randn(count, dtype=torch.float64, generator=generator)
    sequence = torch.arange(count) // 7
    behaviour = old + 0.3 * torch.randn(count, dtype=torch.float64, generator=generator)
    return tokens_of(lp, old, advantages, sequence, behaviour)


def test_every_loss_is_tested_here():
    assert SETTINGS.keys() == LOSSES.keys()


def surrogate(name, tokens):
    """The loss as a function of lp in which what the loss stops the gradient of is held at the value it has now."""
    d = (tokens.logprobs - tokens.old).detach()
    lengths = torch.zeros(tokens.sequences, dtype=d.dtype).index_add(0, tokens.sequence, torch.ones_like(d))

    def mean(values):
        return (torch.zeros(tokens.sequences, dtype=d.dtype).index_add(0, tokens.sequence, values) / lengths)[
            tokens.sequence
        ]

    advantages, now = tokens.advantages, tokens.logprobs.detach()
    held = evaluate(name, tokens)
    match name:
        case "dppo_tv" | "dppo_kl":
            weight = d.exp().clamp(max=20.0) * ~held.clipped
            return lambda lp: -advantages * weight * lp
        case "cispo":
            return lambda lp: -advantages * d.exp().clamp(0.0, 1.28) * lp
        case "topr":
            sums = torch.zeros(tokens.sequences, dtype=d.dtype).index_add(0, tokens.sequence, (now - tokens.behaviour))[
                tokens.sequence
            ]
            return lambda lp: -advantages * torch.where(advantages > 0, 1.0, sums.clamp(max=0).exp()) * lp
        case "gspo":

            def frozen(lp):
                ratio = (mean(d) + lp - now).exp()
                return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))

            return frozen
        case _:
            return lambda lp: evaluate(name, Tokens(**{**tokens.__dict__, "logprobs": lp})).values


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients_are_those_of_finite_differences(name, seed):
    tokens = random_tokens(seed)
    lp = tokens.logprobs.clone().requires_grad_()
    values = evaluate(name, Tokens(**{**tokens.__dict__, "logprobs": lp})).values
    values.sum().backward()
    function, step = surrogate(name, tokens), 1e-6
    assert torch.allclose(function(tokens.logprobs), values.detach())
    for k in range(len(lp)):
        moved = torch.zeros_like(tokens.logprobs)
        moved[k] = step
        difference = (function(tokens.logprobs + moved) - function(tokens.logprobs - moved)).sum() / (2 * step)
        assert lp.grad[k].item() == pytest.approx(float(difference), abs=1e-6, rel=1e-5)


@pytest.mark.parametrize("name", sorted(LOSSES))
@given(
    rows=st.lists(
        st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0), st.floats(-1e3, 1e3), st.floats(-1e4, 0)),
        min_size=1,
        max_size=12,
    )
)
@settings(deadline=None, max_examples=60)
def test_no_finite_input_gives_a_loss_or_gradient_that_is_not(name, rows):
    lp, old, advantages, behaviour = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    sequence = torch.arange(len(rows)) // 3
    lp = lp.requires_grad_()
    made = evaluate(name, tokens_of(lp, old, advantages, sequence, behaviour))
    made.values.sum().backward()
    assert torch.isfinite(made.values).all() and torch.isfinite(lp.grad).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_proportional_losses_and_they_alone_have_no_gradient_at_advantage_zero(name):
    tokens = random_tokens()
    lp = tokens.logprobs.clone().requires_grad_()
    silent = Tokens(**{**tokens.__dict__, "logprobs": lp, "advantages": torch.zeros_like(tokens.advantages)})
    evaluate(name, silent).values.sum().backward()
    assert bool((lp.grad == 0).all()) == LOSSES[name].proportional


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_unchanged_policy_has_the_policy_gradient(name):
    """At rho = 1 every loss pushes each token by -A, the two with a penalty of their own too; what is chosen by
    covariance aside."""
    tokens = random_tokens(spread=0.0)
    tokens = Tokens(**{**tokens.__dict__, "behaviour": tokens.logprobs, "old": tokens.logprobs})
    lp = tokens.logprobs.clone().requires_grad_()
    made = LOSSES[name].evaluate(Tokens(**{**tokens.__dict__, "logprobs": lp}), SETTINGS[name])
    made.values.sum().backward()
    if name == "gmpo":  # the sequence's advantages, shared out over its tokens
        lengths = torch.bincount(tokens.sequence).double()
        sums = torch.zeros(tokens.sequences, dtype=torch.float64).index_add(0, tokens.sequence, tokens.advantages)
        expected = -(sums / lengths)[tokens.sequence]
    else:
        expected = -tokens.advantages
    if name == "sapo":  # sigmoid'(0) x 4 = 1 whatever tau
        expected = -tokens.advantages
    torch.testing.assert_close(lp.grad, expected)


# --- ppo ---------------------------------------------------------------------------------------------


def naive(lp, old, advantage):
    rho = math.exp(max(-20.0, min(20.0, lp - old)))
    clipped = max(1 - CLIP.clip_low, min(1 + CLIP.clip_high, rho))
    loss = max(-advantage * rho, -advantage * clipped)
    return min(loss, -CLIP.dual_clip * advantage) if advantage < 0 else loss


log_p = st.floats(-30, 0)


@given(st.lists(st.tuples(log_p, log_p, st.floats(-3, 3)), min_size=1, max_size=20))
def test_ppo_agrees_with_the_formula(rows):
    lp, old, advantage = zip(*rows, strict=True)
    expected = [naive(*row) for row in rows]
    made = ppo(tokens_of(lp, old, advantage), CLIP)
    assert made.values.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.0, 1.0, False),
        (1.3, 1.0, True),  # over 1 + clip_high with a gain: no further
        (0.7, 1.0, False),  # moving back is allowed
        (0.7, -1.0, True),
        (1.3, -1.0, False),
        (3.5, -1.0, True),  # dual clip
        (9.0, 0.0, False),
    ],
)
def test_clipped_tokens_are_those_without_gradient(ratio, advantage, clipped):
    lp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = ppo(tokens_of(lp, [0.0], [advantage]), CLIP)
    loss.values.sum().backward()
    assert loss.clipped.tolist() == [clipped]
    assert (lp.grad.item() == 0) == (clipped or advantage == 0)


def test_the_ratio_is_taken_against_what_is_stored():
    """Field report 16: with old = lp the ratio is 1 whatever happened, and nothing is ever clipped."""
    stored, now = np.log([0.2, 0.5]), np.log([0.4, 0.5])
    loss = ppo(tokens_of(now, stored, [1.0, 1.0]), CLIP)
    assert (-loss.values).tolist() == pytest.approx([1.28, 1.0])
    assert loss.clipped.tolist() == [True, False]


# --- those that look at sequences or at the whole update ---------------------------------------------


def test_topr_agrees_with_the_formula():
    """* not in verl: Le Roux et al. 2025. Right answers as they are, wrong ones by how likely they still are."""
    lp, beh = np.log([0.5, 0.5, 0.5, 0.5]), torch.tensor(np.log([0.25, 0.5, 0.9, 0.9]))
    made = LOSSES["topr"].evaluate(tokens_of(lp, lp, [1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1], beh), TOPR())
    share = (0.5 / 0.9) ** 2
    assert made.values.tolist() == pytest.approx([-lp[0], -lp[1], share * lp[2], share * lp[3]])
    up = LOSSES["topr"].evaluate(tokens_of(lp, lp, [-1.0] * 4, [0, 0, 1, 1], beh), TOPR())
    assert up.values.tolist()[:2] == pytest.approx([lp[0], lp[1]])  # more likely than when it was sampled: weight 1
    assert up.clipped.tolist() == [True, True, False, False]


@pytest.mark.parametrize(("share", "expected"), [(1e-9, 1), (0.1, 4), (1.0, None)])
def test_clip_cov_takes_its_share_of_the_tokens_in_between(share, expected):
    tokens = random_tokens(count=40, spread=0.05)
    entry, table = LOSSES["clip_cov"], ClipCov(share=share, low=0.0, high=9.0)
    noise = torch.rand(40, dtype=torch.float64)
    chosen = entry.choose(tokens, table, noise)
    a, lp = tokens.advantages, tokens.logprobs
    between = (a - a.mean()) * (lp - lp.mean())
    assert not chosen[(between <= 0) | (between >= 9)].any()
    assert int(chosen.sum()) == (int((between > 0).sum()) if expected is None else expected)
    again = entry.choose(tokens, table, 1 - noise)
    assert expected is None or not torch.equal(chosen, again)  # it is the noise that decides


def test_clip_cov_chooses_none_where_none_fits():
    tokens = random_tokens()
    assert not LOSSES["clip_cov"].choose(tokens, ClipCov(low=100.0, high=200.0), torch.rand(40).double()).any()


def test_what_is_masked_is_neither_counted_nor_chosen():
    tokens = random_tokens()
    loss = torch.arange(40) < 20
    part = Tokens(**{**tokens.__dict__, "loss": loss})
    alone = tokens_of(tokens.logprobs[:20], tokens.old[:20], tokens.advantages[:20])
    noise = torch.rand(40, dtype=torch.float64)
    for name in ("clip_cov", "kl_cov"):
        chosen = LOSSES[name].choose(part, SETTINGS[name], noise)
        assert not chosen[20:].any() and chosen.any()
        assert torch.equal(chosen[:20], LOSSES[name].choose(alone, SETTINGS[name], noise[:20]))


def test_the_order_of_sequences_is_nothing_to_a_sequence_loss():
    tokens = random_tokens(count=42)
    turned = torch.arange(42).reshape(6, 7).flip(0).reshape(-1)
    other = tokens_of(
        tokens.logprobs[turned],
        tokens.old[turned],
        tokens.advantages[turned],
        torch.arange(42) // 7,
        tokens.behaviour[turned],
    )
    for name in ("gspo", "gmpo", "topr"):
        ours, theirs = (LOSSES[name].evaluate(t, SETTINGS[name]).values for t in (tokens, other))
        torch.testing.assert_close(ours[turned], theirs)


# --- your own ----------------------------------------------------------------------------------------


def test_a_loss_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine_loss.py").write_text(
        "import torch\n"
        "def good(tokens, settings):\n"
        "    return -tokens.advantages * tokens.logprobs * settings['scale']\n"
        "def short(tokens, settings):\n"
        "    return tokens.logprobs[:1]\n"
        "def number(tokens, settings):\n"
        "    return 1.0\n"
        "def frozen(tokens, settings):\n"
        "    return tokens.logprobs.detach()\n"
    )
    monkeypatch.chdir(tmp_path)
    tokens = random_tokens()
    lp = tokens.logprobs.clone().requires_grad_()
    tokens = Tokens(**{**tokens.__dict__, "logprobs": lp})

    def own(name):
        table = CustomLoss(function=f"mine_loss:{name}", settings={"scale": 2.0})
        entry = policy_loss(table)
        assert not entry.proportional
        return entry.evaluate(tokens, table)

    torch.testing.assert_close(own("good").values, -2 * tokens.advantages * lp)
    for name, problem in (
        ("short", r"shape \[1\], not one number for each of the 40 action tokens"),
        ("number", "float, neither a tensor nor a TokenLoss"),
        ("frozen", "without a gradient"),
    ):
        with pytest.raises(UserError, match=f"algorithm.loss.function = 'mine_loss:{name}' returned .*{problem}"):
            own(name)
    with pytest.raises(UserError, match=r"no 'goood' \(did you mean 'good'"):
        own("goood")
