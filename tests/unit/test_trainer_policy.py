"""Log-probabilities and optimizer updates on a small model in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rl.algorithms.registry import AGGREGATIONS
from async_rl.errors import AsyncRLError
from async_rl.services.trainer.network import token_logprobs
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.packing import pack, packs
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.ranks import Ranks
from tests.unit.trainer_material import (
    VOCABULARY,
    configuration,
    plain_logprobs,
    random_samples,
    random_trajectory,
    sample,
    tiny_llama,
    trajectory,
)


def gradients(samples, config, objective=None):
    """Of one update, by parameter: what the optimizer was given."""
    policy = Policy(tiny_llama(), config)
    seen = {}

    def remember(*_):
        seen.update({name: p.grad.clone() for name, p in policy.model.named_parameters()})

    policy._optimizer.register_step_pre_hook(remember)
    update = policy.update(samples, objective or Objective.of(config))
    return seen, update


def read(model, made):
    """Log-probabilities of a pack."""
    policy = Policy(model, configuration())
    return policy.of_tokens(made, policy.logits(made))[0]


def largest_difference(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_alone_padded_and_packed_read_the_same():
    """Field report 25."""
    generator = np.random.default_rng(1)
    several = [random_trajectory(generator, longest=12) for _ in range(6)]
    model = tiny_llama()
    alone = [plain_logprobs(model, t) for t in several]
    width = max(len(t.tokens) for t in several)
    for t, expected in zip(several, alone, strict=True):  # on the left, with the positions that it needs
        missing = width - len(t.tokens)
        ids = torch.tensor([[0] * missing + t.tokens.tolist()])
        seen = torch.tensor([[0] * missing + [1] * len(t.tokens)])
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=seen, position_ids=positions).logits[0]
        at = torch.tensor(np.flatnonzero(t.action)) + missing
        padded, _ = token_logprobs(logits[at - 1], ids[0, at], None, 1.0)
        torch.testing.assert_close(padded, expected, atol=1e-10, rtol=0)
    packed = read(model, pack([sample(t) for t in several]))
    torch.testing.assert_close(packed.detach(), torch.cat(alone), atol=1e-10, rtol=0)


def test_members_that_share_a_prompt_read_the_same_as_alone():
    """Field report 25, for the prompt that lies in the row once."""
    generator, model = np.random.default_rng(3), tiny_llama()
    prompts = [generator.integers(0, VOCABULARY, n).tolist() for n in (5, 1, 9)]
    several = [
        trajectory(prompt, generator.integers(0, VOCABULARY, length).tolist())
        for length in (1, 4, 7)
        for prompt in prompts
    ]
    made = pack([sample(t) for t in several])
    assert made.input_ids.shape[1] == sum(map(len, prompts)) + 3 * (0 + 3 + 6)
    alone = {tuple(t.tokens.tolist()): plain_logprobs(model, t) for t in several}
    in_order = sorted(several, key=lambda t: prompts.index(t.tokens[~t.action].tolist()))
    packed = read(model, made)
    expected = torch.cat([alone[tuple(t.tokens.tolist())] for t in in_order])
    torch.testing.assert_close(packed.detach(), expected, atol=1e-10, rtol=0)


def test_an_unchanged_policy_reads_ratio_one_at_its_temperature():
    """Field report 14: T = 0.6 on both sides."""
    config = configuration(sampling={"temperature": 0.6})
    model, generator = tiny_llama(), np.random.default_rng(2)
    samples = []
    for _ in range(8):
        t = random_trajectory(generator)
        lp = plain_logprobs(model, t, temperature=0.6)
        samples.append(
            sample(trajectory(t.tokens[~t.action].tolist(), t.tokens[t.action].tolist(), logprobs=lp.tolist()))
        )
    figures = Policy(model, config).update(samples, Objective.of(config)).mismatch
    assert figures.mean_ratio == pytest.approx(1.0, abs=1e-6)
    assert figures.max_ratio == pytest.approx(1.0, abs=1e-6)
    assert figures.effective_sample_size == pytest.approx(1.0, abs=1e-6)


def test_the_gap_of_a_sampler_in_half_precision_is_measured():
    """Field report 26: no staleness, no other sampling; bfloat16 alone."""
    config, generator = configuration(), np.random.default_rng(3)
    given = [random_trajectory(generator) for _ in range(16)]
    gaps = {}
    for dtype in (torch.float64, torch.bfloat16):
        sampler = tiny_llama(dtype=dtype)
        samples = []
        for t in given:
            lp = plain_logprobs(sampler, t).tolist()
            samples.append(sample(trajectory(t.tokens[~t.action].tolist(), t.tokens[t.action].tolist(), logprobs=lp)))
        gaps[dtype] = Policy(tiny_llama(), config).update(samples, Objective.of(config)).mismatch.k3
    assert 0 <= gaps[torch.float64] < 1e-12
    assert 1e-10 < gaps[torch.bfloat16] < 1e-2


def test_truncated_sampling_is_renormalised_over_the_survivors():
    """Field report 15: probabilities [.6, .3, .1] under top_p 0.9: an unchanged policy reads 1.0, not 0.9."""
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]] * 2, dtype=torch.float64))
    behaviour = torch.log(torch.tensor([0.6 / 0.9, 0.3 / 0.9], dtype=torch.float64))
    targets = torch.tensor([0, 1])
    survivors = torch.tensor([[0, 1, -1], [1, 0, -1]])
    lp, entropy = token_logprobs(logits, targets, survivors, 1.0)
    assert (lp - behaviour).exp().tolist() == pytest.approx([1.0, 1.0])
    whole, _ = token_logprobs(logits, targets, None, 1.0)
    assert (whole - behaviour).exp().tolist() == pytest.approx([0.9, 0.9])
    two = -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3)
    assert entropy.tolist() == pytest.approx([two, two])


def test_survivors_reach_the_gradient():
    logits = torch.randn(1, 5, dtype=torch.float64, requires_grad=True)
    lp, _ = token_logprobs(logits, torch.tensor([2]), torch.tensor([[2, 4, -1]]), 1.0)
    lp.sum().backward()
    assert logits.grad[0, [0, 1, 3]].tolist() == [0, 0, 0]
    assert torch.isfinite(logits.grad).all() and logits.grad[0, 2] > 0


def test_entropy_is_that_of_the_tempered_distribution():
    logits = torch.zeros(1, VOCABULARY, dtype=torch.float64)
    _, entropy = token_logprobs(logits, torch.tensor([0]), None, 0.5)
    assert entropy.item() == pytest.approx(math.log(VOCABULARY))


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_gradient_does_not_depend_on_micro_batches(aggregation):
    """Field report 19: the same 8 samples as 1x8, 2x4 and 8x1."""
    fixed = [sample(trajectory([1, 2, 3, k % 2], [k, 5, 6, 7]), advantage=k - 3.3) for k in range(8)]
    assert [[p.sequences for p in packs(fixed, tokens)] for tokens in (32, 16, 7)] == [[8], [4, 4], [1] * 8]
    made = [
        gradients(
            fixed,
            configuration(
                trainer={"micro_batch_tokens": tokens},
                algorithm={"aggregation": aggregation},
            ),
        )[0]
        for tokens in (32, 16, 7)
    ]
    assert largest_difference(made[0], made[1]) < 1e-6
    assert largest_difference(made[0], made[2]) < 1e-6
    assert max(float(g.abs().max()) for g in made[0].values()) > 1e-4


def test_gradient_of_the_update_is_that_of_the_formula():
    """Against a loop over unpacked sequences with the plain mean over all tokens."""
    samples, config = random_samples(6), configuration(algorithm={"correction": {"proximal": "behaviour"}})
    model = tiny_llama()
    losses = []
    for s in samples:
        table = torch.log_softmax(model(input_ids=s.tokens[None]).logits[0], dim=-1)
        lp = table[s.action - 1, s.tokens[s.action]]
        rho = (lp - s.behaviour.double()).exp()
        a = s.advantages.double()
        loss = torch.maximum(-a * rho, -a * rho.clamp(0.8, 1.2))
        losses.append(torch.where(a < 0, torch.minimum(loss, -3 * a), loss))
    torch.cat(losses).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    expected = {name: p.grad for name, p in model.named_parameters()}
    made, update = gradients(samples, config)
    assert largest_difference(made, expected) < 1e-10
    assert update.gradient_norm == pytest.approx(float(norm))
    assert update.loss == pytest.approx(torch.cat(losses).mean().item())


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_skipping_members_of_advantage_zero_changes_no_gradient(aggregation):
    samples = random_samples(8, silent=(1, 4, 5))
    config = configuration(algorithm={"aggregation": aggregation})
    objective = Objective.of(config)
    unskipped = replace(objective, policy_loss=objective.policy_loss._replace(proportional=False))
    with_skip, update = gradients(samples, config, objective)
    without, whole = gradients(samples, config, unskipped)
    assert update.tokens < whole.tokens
    assert largest_difference(with_skip, without) < 1e-12


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_a_masked_completion_leaves_the_denominator_too(aggregation):
    """Field report 20: lengths 4 (ended) and 4 (truncated, masked) make the update of the ended one alone."""
    config = configuration(algorithm={"aggregation": aggregation})
    ended = sample(trajectory([1], [2, 3, 4, 5]))
    cut = sample(trajectory([1], [6, 7, 8, 9], stop="length"), loss=[False] * 4)
    both, update = gradients([ended, cut], config)
    alone, only = gradients([ended], config)
    assert update.loss == pytest.approx(only.loss) and update.loss != 0
    assert largest_difference(both, alone) < 1e-12


def test_all_masked_is_a_zero_gradient_and_never_nan():
    """Field report 20."""
    masked = [sample(trajectory([1], [2, 3]), loss=[False, False]) for _ in range(3)]
    made, update = gradients(masked, configuration())
    assert update.loss == 0.0 and update.gradient_norm == 0.0 and update.skipped is None
    assert not any(g.any() for g in made.values())


def test_a_masked_token_stays_as_context():
    part = sample(trajectory([1], [2, 3, 4]), loss=[False, False, True])
    last_alone = sample(trajectory([1, 2, 3], [4]))
    made, update = gradients([part], configuration())
    assert (update.tokens, update.mismatch.tokens) == (1, 3)
    assert largest_difference(made, gradients([last_alone], configuration())[0]) < 1e-12


def broken(policy):
    """Poison the gradient of one parameter."""
    weight = policy.model.model.layers[1].mlp.up_proj.weight
    return weight.register_hook(lambda gradient: gradient * float("nan"))


def test_a_non_finite_update_leaves_weights_and_optimizer_as_they_were():
    config = configuration()
    policy, objective, samples = Policy(tiny_llama(), config), Objective.of(config), random_samples(4)
    policy.update(samples, objective)
    weights = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    moments = [{k: v.clone() for k, v in state.items()} for state in policy._optimizer.state.values()]
    hook = broken(policy)
    update = policy.update(samples, objective)
    assert update.skipped is not None and "layers.1.mlp.up_proj.weight" in update.skipped
    assert all(torch.equal(p, weights[name]) for name, p in policy.model.named_parameters())
    for before, after in zip(moments, policy._optimizer.state.values(), strict=True):
        assert all(torch.equal(before[k], after[k]) for k in before)
    hook.remove()
    assert policy.update(samples, objective).skipped is None


def test_too_many_non_finite_updates_in_a_row_end_the_run():
    config = configuration(trainer={"max_nonfinite": 2})
    policy, objective, samples = Policy(tiny_llama(), config), Objective.of(config), random_samples(4)
    hook = broken(policy)
    policy.update(samples, objective)
    hook.remove()
    policy.update(samples, objective)  # a finite one in between
    broken(policy)
    policy.update(samples, objective)
    with pytest.raises(AsyncRLError, match=r"trainer\.max_nonfinite = 2"):
        policy.update(samples, objective)


def test_the_same_batches_give_the_same_weights():
    config = configuration()
    made = []
    for _ in range(2):
        policy = Policy(tiny_llama(dtype=torch.float32), config)
        for seed in range(3):
            policy.update(random_samples(8, seed), Objective.of(config))
        made.append(policy.model.state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_only_matrices_decay():
    policy = Policy(tiny_llama(), configuration(trainer={"weight_decay": 0.1}))
    decays = {g["weight_decay"]: [p.ndim for p in g["params"]] for g in policy._optimizer.param_groups}
    assert set(decays[0.1]) == {2} and set(decays[0.0]) == {1}


def test_one_rank_is_the_identity():
    values = torch.tensor([1.0, 2.0])
    assert Ranks().sum_(values) is values and Ranks().max_(values) is values


def test_an_update_without_any_gradient_moves_nothing():
    config = configuration(trainer={"learning_rate": 1e-2})
    policy = Policy(tiny_llama(), config)
    policy.update(random_samples(4), Objective.of(config))  # momentum that an empty update could go on with
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    empty = [sample(trajectory([1], [2, 3]), advantage=0.0) for _ in range(3)]
    update = policy.update(empty, Objective.of(config))
    assert update.gradient_norm == 0.0 and update.skipped is None
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    assert policy.updates == 2  # the schedule goes on
