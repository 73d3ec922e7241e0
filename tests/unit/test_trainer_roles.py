"""The roles beside the policy, and every preset, on small models in float64."""

import tomllib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from async_rl.config.algorithms import GAE
from async_rl.errors import UserError
from async_rl.services.trainer.critic import Critic, value_model
from async_rl.services.trainer.network import Network
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.reward_model import RewardModel
from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.step import batch_of, learn, train_step, update, with_roles
from tests.unit.trainer_material import (
    VOCABULARY,
    configuration,
    drawn,
    plain_logprobs,
    random_trajectory,
    tiny_llama,
    trajectory,
)

RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "algorithms").glob("*.toml"))
SIZE = 4


def preset(path, **tables):
    """A configuration of the tests under a preset."""
    given = tomllib.loads(path.read_text())
    given.get("algorithm", {}).pop("horizon", None)
    given.get("algorithm", {}).pop("overlong", None)
    batch = {"groups": 3, "group_size": SIZE}
    return configuration(batch=batch, **given, **tables)


def roles_of(config, seed=0):
    """Every role, whatever the configuration asks for."""
    settings = config.algorithm
    roles = Roles(Policy(tiny_llama(seed), config))
    roles.reference = Network(tiny_llama(7), config)
    if isinstance(settings.advantage, GAE):
        roles.critic = Critic(value_model(tiny_llama(8)), config)
    if settings.advantage.kind == "prime":
        roles.reward_model = RewardModel(tiny_llama(9), config, settings.advantage)
    roles.kl = settings.kl.coefficient if settings.kl else 0.0
    return roles


def some_draw(seed=0, *, step=3, groups=3, greedy=False, shared=True, rewards=(0.0, 1.0)):
    """Groups of SIZE with `rewards` at random, tokens of two versions; members of a group have one prompt."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        prompt = generator.integers(0, VOCABULARY, 3).tolist()
        members = []
        for _ in range(SIZE):
            length = int(generator.integers(1, 7))
            completion = generator.integers(0, VOCABULARY, length).tolist()
            first = int(generator.integers(0, length + 1))
            spans = [(v, n) for v, n in ((step - 2, first), (step, length - first)) if n]
            lp = (-2.6 + generator.normal(0, 0.3, length)).tolist()
            if not shared:
                prompt = generator.integers(0, VOCABULARY, 3).tolist()
            members.append(
                (trajectory(prompt, completion, logprobs=lp, versions=spans), float(generator.choice(rewards)))
            )
        made.append(members)
    batch = drawn(made, step=step, bound=2)
    if not greedy:
        return batch
    return msgspec.structs.replace(
        batch,
        groups=[
            msgspec.structs.replace(g, greedy=msgspec.structs.replace(g.members[0], member=SIZE)) for g in batch.groups
        ],
    )


def gradients_of(batch, roles, config):
    """What the optimizer of the policy was given, over all updates of a step."""
    seen = {}

    def remember(*_):
        for name, p in roles.policy.model.named_parameters():
            seen[name] = seen.get(name, 0) + p.grad.clone()

    roles.policy._optimizer.register_step_pre_hook(remember)
    result = train_step(batch, roles, config)
    return seen, result


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_preset_makes_a_finite_step_that_moves_the_policy(path):
    config = preset(path)
    seen, result = gradients_of(some_draw(greedy=True), roles_of(config), config)
    if config.algorithm.critic.warmup_steps > 3:
        assert not result.updates
        return
    assert seen and all(bool(torch.isfinite(g).all()) for g in seen.values())
    assert max(float(g.abs().max()) for g in seen.values()) > 1e-6
    assert all(np.isfinite(value) for value in result.figures.values())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_no_preset_depends_on_how_an_update_is_cut(path):
    """The same step as one micro-batch, as several, one trajectory each, and with its groups in another order."""
    extra = {"kl": {"coefficient": 0.05}, "entropy": 0.01}
    batch = some_draw(greedy=True)
    turned = msgspec.structs.replace(batch, groups=batch.groups[::-1])
    found = []
    for tokens, given in ((4096, batch), (30, batch), (1, batch), (30, turned)):
        config = preset(path, trainer={"micro_batch_tokens": tokens, "max_grad_norm": 1e9})
        settings = msgspec.structs.replace(
            config.algorithm,
            kl=msgspec.convert(extra["kl"], type(config.algorithm).__annotations__["kl"].__args__[0]),
            entropy=extra["entropy"],
        )
        config = msgspec.structs.replace(config, algorithm=settings)
        if given is turned and config.algorithm.loss.kind == "clip_cov":
            continue  # its random choice goes by the place in the draw
        found.append(gradients_of(given, roles_of(config), config)[0])
    for other in found[1:]:
        assert max(float((found[0][name] - other[name]).abs().max()) for name in other) < 1e-6


def test_an_epoch_more_clips_against_the_policy_before_the_step():
    """`recompute` with two epochs: the second ratio is against the weights before the first update."""
    config = configuration(
        batch={"groups": 3, "group_size": SIZE, "epochs": 2},
        trainer={"learning_rate": 0.05},
        algorithm={"correction": {"proximal": "recompute"}},
    )
    roles = roles_of(config)
    before = roles.policy.logprobs(batch_of(some_draw(), config).samples)
    seen = []
    original = roles.policy.update

    def watched(samples, objective):
        seen.append(torch.cat([s.old for s in samples]))
        return original(samples, objective)

    roles.policy.update = watched
    train_step(some_draw(), roles, config)
    assert len(seen) == 2
    for old in seen:
        torch.testing.assert_close(old, before)
    assert (roles.policy.logprobs(batch_of(some_draw(), config).samples) - before).abs().max() > 1e-3


def test_a_single_update_needs_no_pass_for_its_proximal_policy():
    config = configuration(
        batch={"groups": 3, "group_size": SIZE},
        algorithm={"correction": {"proximal": "recompute", "weights": {"cap": 2.0}}},
    )
    roles = roles_of(config)
    roles.policy.read = None  # nobody reads
    result = train_step(some_draw(), roles, config)
    assert result.updates[0].clipped == 0  # ratio 1 everywhere
    assert 0 < result.updates[0].weight / result.updates[0].tokens < 2


def test_reading_is_in_the_order_of_the_samples():
    config = configuration()
    batch = batch_of(some_draw(shared=False), config)
    read = Network(tiny_llama(7), config).logprobs(batch.samples)
    alone = [plain_logprobs(tiny_llama(7), m.trajectory) for g in batch.drawn.groups for m in g.members]
    torch.testing.assert_close(read, torch.cat(alone), atol=1e-10, rtol=0)


def test_a_strong_kl_in_the_loss_draws_the_policy_to_the_reference():
    config = configuration(
        batch={"groups": 3, "group_size": SIZE},
        trainer={"learning_rate": 2e-3},
        max_steps=100,
        algorithm={"kl": {"coefficient": 5.0, "estimator": "k2"}},
    )
    roles = roles_of(config)
    samples = batch_of(some_draw(rewards=(1.0,)), config).samples

    def distance():
        return float((roles.policy.logprobs(samples) - roles.reference.logprobs(samples)).abs().mean())

    before = distance()
    for step in range(3, 63):  # rewards that are all equal: the KL alone has a gradient
        train_step(some_draw(step=step, rewards=(1.0,)), roles, config)
    assert distance() < before / 2


def test_a_kl_in_the_reward_changes_the_advantages_and_not_the_loss():
    tables = {"batch": {"groups": 3, "group_size": SIZE}}
    kl = {"coefficient": 0.5, "place": "reward", "estimator": "k1"}
    plain = configuration(**tables)
    config = configuration(**tables, algorithm={"kl": kl})
    roles = roles_of(config)
    batch = batch_of(some_draw(), config)
    result = learn(with_roles(batch, roles), roles)
    assert result.figures["kl_coefficient"] == 0.5
    objective = Objective.of(config, 0.0)
    assert objective.kl == 0.0
    other = train_step(some_draw(), roles_of(plain), plain)
    assert result.updates[0].gradient_norm != pytest.approx(other.updates[0].gradient_norm)


def test_the_coefficient_adapts_towards_its_target():
    kl = {"coefficient": 0.1, "target": 1e-6, "horizon": 100}
    config = configuration(batch={"groups": 3, "group_size": SIZE}, algorithm={"kl": kl})
    roles = roles_of(config)
    first = train_step(some_draw(), roles, config).figures
    assert first["kl_coefficient"] == 0.1 and first["reference_kl"] != 0
    grows = first["reference_kl"] > 1e-6
    assert (roles.kl > 0.1) == grows and roles.kl != 0.1


def test_a_critic_learns_the_returns_and_the_policy_waits_for_it():
    config = configuration(
        batch={"groups": 3, "group_size": SIZE},
        max_steps=200,
        algorithm={"advantage": {"kind": "gae"}, "critic": {"learning_rate": 0.02, "warmup_steps": 80, "clip": 10.0}},
    )
    roles = roles_of(config)
    weights = {name: p.detach().clone() for name, p in roles.policy.model.named_parameters()}
    losses = []
    for step in range(2, 80):
        result = train_step(some_draw(step=step), roles, config)
        assert result.updates == []
        losses.append(result.figures["value_loss"])
    assert losses[-1] < losses[0] / 2 and result.figures["value_explained"] > 0.3
    assert all(torch.equal(p, weights[name]) for name, p in roles.policy.model.named_parameters())
    assert len(train_step(some_draw(step=80), roles, config).updates) == 1


def test_a_reward_model_learns_to_tell_right_from_wrong():
    config = configuration(
        batch={"groups": 3, "group_size": SIZE},
        max_steps=200,
        algorithm={"advantage": {"kind": "prime", "learning_rate": 0.02, "beta": 0.5}},
    )
    roles = roles_of(config)
    roles.reward_model = RewardModel(tiny_llama(7), config, config.algorithm.advantage)  # begins as the reference
    figures = [train_step(some_draw(step=step), roles, config).figures for step in range(2, 42)]
    assert figures[0]["reward_model_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert figures[-1]["reward_model_accuracy"] > 0.9


def test_a_teacher_alone_draws_the_policy_to_itself(tmp_path):
    config = configuration(
        batch={"groups": 3, "group_size": SIZE},
        trainer={"learning_rate": 0.02},
        max_steps=100,
        algorithm={"teacher": {"path": "unused", "alone": True}, "loss": {"kind": "reinforce"}},
    )
    roles = roles_of(config)
    roles.teacher = Network(tiny_llama(5), config)
    rng = np.random.default_rng(0)

    def sampled(step):
        """Fresh samples of the policy, one token each."""
        with torch.no_grad():
            p = roles.policy.model
            kind, p.config._attn_implementation = p.config._attn_implementation, "sdpa"
            table = torch.log_softmax(p(input_ids=torch.tensor([[1, 2]])).logits[0, -1].double(), -1)
            p.config._attn_implementation = kind
        ids = rng.choice(VOCABULARY, 12, p=np.array((table.exp() / table.exp().sum()).tolist()))
        rows = [trajectory([1, 2], [int(i)], logprobs=[float(table[i])], versions=[(step, 1)]) for i in ids]
        return drawn([[(t, 0.0) for t in rows[k : k + 4]] for k in (0, 4, 8)], step=step, bound=2), table

    target = plain_logprobs(tiny_llama(5), trajectory([1, 2], [0]))
    whole = torch.stack([plain_logprobs(tiny_llama(5), trajectory([1, 2], [k]))[0] for k in range(VOCABULARY)])
    assert whole[0] == target[0]
    kls = []
    for step in range(40):
        batch, table = sampled(step)
        kls.append(float((table.exp() * (table - whole)).sum()))
        train_step(batch, roles, config)
    assert kls[-1] < kls[0] / 3


def test_a_step_of_ones_own_replaces_the_dataflow(tmp_path, monkeypatch):
    (tmp_path / "mine_step.py").write_text(
        "from async_rl.algorithms.members import Estimate\n"
        "from async_rl.services.trainer.step import advantages, update\n"
        "def doubled(batch, roles):\n"
        "    made = advantages(batch, roles)\n"
        "    return update(batch, roles, Estimate(2 * made.advantages))\n"
        "def wrong(batch, roles):\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    base = {"batch": {"groups": 3, "group_size": SIZE}, "trainer": {"max_grad_norm": 1e9}}
    loss = {"loss": {"kind": "reinforce"}}
    plain = configuration(**base, algorithm=loss)
    doubled = configuration(**base, algorithm=loss | {"step": "mine_step:doubled"})
    once = train_step(some_draw(), roles_of(plain), plain).updates[0]
    twice = train_step(some_draw(), roles_of(doubled), doubled).updates[0]
    assert twice.gradient_norm == pytest.approx(2 * once.gradient_norm)
    wrong = configuration(**base, algorithm={"step": "mine_step:wrong"})
    with pytest.raises(UserError, match=r"algorithm\.step = 'mine_step:wrong' returned int"):
        train_step(some_draw(), roles_of(wrong), wrong)


@pytest.mark.parametrize("algorithm", [{"kl": {"coefficient": 0.1}}, {"advantage": "gae"}, {"advantage": "prime"}])
def test_a_step_of_ones_own_gets_what_the_roles_say(tmp_path, monkeypatch, algorithm):
    (tmp_path / "plain_step.py").write_text("from async_rl.services.trainer.step import learn as step\n")
    monkeypatch.chdir(tmp_path)
    base = {"batch": {"groups": 3, "group_size": SIZE}}
    figures = []
    for given in (algorithm, algorithm | {"step": "plain_step:step"}):
        config = configuration(**base, algorithm=given)
        seen, result = gradients_of(some_draw(), roles_of(config), config)
        figures.append((result.figures, result.updates[0].loss, float(sum(g.abs().sum() for g in seen.values()))))
    assert figures[0] == figures[1]


def test_the_values_of_a_step_are_read_once():
    config = configuration(batch={"groups": 3, "group_size": SIZE}, algorithm={"advantage": "gae"})
    roles, reads = roles_of(config), []
    read = roles.critic.values
    roles.critic.values = lambda samples: reads.append(len(samples)) or read(samples)
    train_step(some_draw(), roles, config)
    assert reads == [3 * SIZE]


def test_rejected_tokens_leave_the_denominator():
    """M2PO at a bound that nothing passes but the most likely tokens; what is left is an update of its own."""
    base = {"batch": {"groups": 3, "group_size": SIZE}}
    config = configuration(
        **base,
        algorithm={"correction": {"rejections": [{"kind": "m2po", "tau": 0.01}]}, "loss": {"kind": "reinforce"}},
    )
    roles = roles_of(config)
    batch = batch_of(some_draw(), config)
    result = learn(with_roles(batch, roles), roles)
    (made,) = result.updates
    trained = sum(sample.trained for sample in batch.samples)
    assert 0 < made.rejected < trained
    log_r = roles_of(config).policy.logprobs(batch.samples) - batch.behaviour
    kept = log_r.abs().sort().values[: trained - made.rejected]
    assert (kept**2).mean() <= 0.01 + 1e-9


def test_resampling_keeps_the_size_of_a_step():
    config = configuration(batch={"groups": 3, "group_size": SIZE}, algorithm={"resample": {"method": "max_min"}})
    roles = roles_of(config)
    sizes = []
    original = roles.policy.update
    roles.policy.update = lambda samples, objective: sizes.append(len(samples)) or original(samples, objective)
    train_step(some_draw(), roles, config)
    assert sizes == [3 * SIZE]


def test_a_critic_begins_at_zero_and_reads_in_order():
    config = configuration(algorithm={"advantage": {"kind": "gae"}})
    batch = batch_of(some_draw(), config)
    critic = Critic(value_model(tiny_llama(8)), config)
    assert not critic.values(batch.samples).any()
    marked = [replace(s, values=torch.zeros(len(s.action)), returns=s.lag.double()) for s in batch.samples]
    for _ in range(3):
        critic.update(marked)
    whole = critic.values(batch.samples)
    alone = torch.cat([critic.values([sample]) for sample in batch.samples])
    torch.testing.assert_close(whole, alone, atol=1e-9, rtol=0)
    assert whole.abs().max() > 0


def test_an_advantage_that_is_not_finite_is_refused():
    from async_rl.algorithms.members import Estimate
    from async_rl.errors import InvariantError

    config = configuration(batch={"groups": 3, "group_size": SIZE})
    batch = batch_of(some_draw(), config)
    bad = torch.full((int(batch.members.lengths.sum()),), float("nan"), dtype=torch.float64)
    with pytest.raises(InvariantError, match="not finite"):
        update(batch, roles_of(config), Estimate(bad))


def test_groups_need_no_common_prompt():
    generator = np.random.default_rng(4)
    config = configuration(batch={"groups": 2, "group_size": 2})
    batch = drawn([[(random_trajectory(generator), 1.0), (random_trajectory(generator), 0.0)] for _ in range(2)])
    assert train_step(batch, roles_of(config), config).updates[0].gradient_norm > 0
