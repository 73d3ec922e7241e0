"""Router replay: the trainer goes through the sampler's experts, however its rows are laid out."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from async_rl.agents.recording import Recording
from async_rl.config.schema import Sampling
from async_rl.config.schema import TransformersEngine as Settings
from async_rl.errors import InvariantError
from async_rl.models.routers import routers
from async_rl.services.rollout.held import trajectory
from async_rl.services.rollout.transformers_engine import TransformersEngine
from async_rl.services.trainer.masks import Masked
from async_rl.services.trainer.network import Network
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.packing import families, pack, packs
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.samples import samples_of
from async_rl.trajectory import Trajectory
from tests.unit.moe_material import EXPERTS, PER_TOKEN, VOCABULARY, Watched, plain_routing, tiny_moe
from tests.unit.test_rollout_engine import reader, weights_of
from tests.unit.trainer_material import configuration

torch.set_num_threads(1)
PROMPTS = [[5, 9, 13], [7] * 11, [20, 4, 6, 8, 30, 2, 2, 17, 3]]


def replaying(**tables):
    return configuration(**{"trainer": {"learning_rate": 0.01, "router_replay": True}, **tables})


def undecided(noise):
    """A model whose experts come in threes that its routers find equal, but for rounding: `noise` draws it. Whichever
    two of three a router chooses, their outputs differ as those of any experts."""
    model = tiny_moe()
    generator = torch.Generator().manual_seed(noise)
    for router in routers(model).values():
        rounding = 1e-5 * torch.randn(router.weight.shape, generator=generator)
        with torch.no_grad():
            router.weight.copy_(router.weight[: EXPERTS // 3].repeat_interleave(3, 0) + rounding)
    return model


def sampled(model, members=4):
    """What the engine samples with `model`: groups whose members share a prompt, and an episode with a branch."""

    async def episode(engine):
        recording, tokens = Recording(), []
        for number, prompt in enumerate(([3, 4, 5, 6, 7], [8, 9], [10, 11, 12], None)):
            asked = [3, 4, 5, 6, 7, 21, 22] if prompt is None else tokens + prompt  # the last begins a branch
            done = await engine.generate(asked, Sampling(max_new_tokens=5), seed=number)
            recording.add(asked, done.tokens, done.logprobs, done.versions, done.survivors, done.routing)
            tokens = asked + done.tokens
        return recording.trajectory("eos", "", None)

    async def main():
        engine = TransformersEngine(model, [], Settings(page_size=4), routing=True)
        try:
            await engine.update(reader(weights_of(model, 0)))
            asked = [(prompt, seed) for prompt in PROMPTS for seed in range(members)]
            made = await asyncio.gather(
                *(engine.generate(p, Sampling(max_new_tokens=4 + seed), seed=seed) for p, seed in asked)
            )
            return [trajectory(p, done, "") for (p, _), done in zip(asked, made, strict=True)], await episode(engine)
        finally:
            await engine.close()

    singles, branching = asyncio.run(main())
    assert len(branching.branches) == 1 and all(s.problems() is None for s in (*singles, branching))
    return [*singles, branching]


@pytest.fixture(scope="module")
def trajectories():
    return sampled(undecided(0))


def samples(trajectories):
    made = []
    for one in trajectories:
        everything = Masked(np.ones(one.sampled, bool), np.zeros(one.sampled, np.int64), {})
        made += [replace(s, advantages=torch.ones(len(s.action))) for s in samples_of(one, everything)]
    return made


def behaviour(given):
    return torch.cat([s.behaviour for s in given]).double()


def test_with_replay_an_undecided_router_reads_what_the_sampler_read_and_without_it_does_not(trajectories):
    given = samples(trajectories)
    with_replay = Policy(undecided(1), replaying()).logprobs(given)
    without = Policy(undecided(1), configuration()).logprobs(given)
    assert float((with_replay - behaviour(given)).abs().max()) < 1e-3
    assert float((without - behaviour(given)).abs().max()) > 0.5
    flipped = [
        (plain_routing(undecided(1), one.tokens.tolist())[:-1].sort(-1)[0].numpy() != np.sort(one.routing, -1)).mean()
        for one in trajectories
    ]
    assert np.mean(flipped) > 0.2


def test_an_unchanged_policy_reads_a_mismatch_of_none(trajectories):
    figures = Policy(undecided(0), replaying()).update(samples(trajectories), Objective.of(replaying())).mismatch
    assert figures.max_ratio == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("capacity", [1, 40, 4096])
def test_what_the_routers_choose_is_the_samplers_choice_for_every_token(trajectories, capacity):
    """Alone, in rows with others, groups around one prompt, turns and branches: `expand` gives the whole sequences."""
    given = samples(trajectories)
    policy = Policy(undecided(1), replaying())
    with torch.no_grad(), Watched(policy.model) as watched:
        rows = packs([replace(s, number=n) for n, s in enumerate(given)], capacity)
        for row in rows:
            policy.logits(row)
    assert len(watched.passes) == len(rows)
    seen = 0
    for row, routing in zip(rows, watched.passes, strict=True):
        whole = routing[row.expand]
        bounds = row.cu_seq_lens.tolist()
        for number, begin, end in zip(row.numbers, bounds[:-1], bounds[1:], strict=True):
            expected = given[number].routing[: end - begin].long()
            assert torch.equal(whole[begin:end], expected)
            seen += 1
    assert seen == len(given)


def test_prompts_of_a_group_lie_in_the_row_once(trajectories):
    group = samples(trajectories[:4])
    assert len(families(group)) == 1
    made = pack(group)
    assert len(made.routing) == made.input_ids.shape[1] == len(PROMPTS[0]) + sum(len(s.own) for s in group)


def test_members_whose_prompt_went_through_other_experts_do_not_share_it(trajectories):
    first, second, third = samples(trajectories[:3])
    other = second.routing.clone()
    other[1, 0] = (other[1, 0] + 1) % EXPERTS
    assert [len(family) for family in families([first, replace(second, routing=other), third])] == [2, 1]


def test_alone_and_packed_read_the_same(trajectories):
    given = samples(trajectories)
    policy = Policy(undecided(1).double(), replaying())
    alone = torch.cat([policy.logprobs([s]) for s in given])
    torch.testing.assert_close(policy.logprobs(given), alone, atol=1e-10, rtol=0)


def test_where_the_sampler_could_not_tell_the_router_chooses_by_itself(trajectories):
    given = samples(trajectories)
    free = [replace(s, routing=torch.full_like(s.routing, -1)) for s in given]
    own = Policy(undecided(1), configuration()).logprobs([replace(s, routing=None) for s in given])
    policy = Policy(undecided(1), replaying())
    torch.testing.assert_close(policy.logprobs(free), own, atol=1e-5, rtol=0)
    # Together with ones that are told, each goes its way.
    mixed = [replace(s, routing=None) if n % 2 else s for n, s in enumerate(given)]
    told = policy.logprobs(given)
    lengths = [len(s.action) for s in given]
    parts = zip(*(torch.split(read, lengths) for read in (policy.logprobs(mixed), told, own)), strict=True)
    for n, (read, with_replay, without) in enumerate(parts):
        torch.testing.assert_close(read, without if n % 2 else with_replay, atol=1e-4, rtol=0)


def test_another_policy_routes_by_itself(trajectories):
    """A reference, a teacher, a critic: the choice of the policy's routers is none of theirs."""
    given = samples(trajectories)
    own = Network(undecided(1), configuration()).logprobs(given)
    assert torch.equal(Network(undecided(1), replaying()).logprobs(given), own)


OTHERS = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Olmoe": {"num_experts": EXPERTS},
    "Qwen2Moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 24},
    "GraniteMoe": {"num_local_experts": EXPERTS},
    "Glm4Moe": {"n_routed_experts": EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 8},
    "Dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "head_dim": 8},
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_read_what_they_sampled_through_the_samplers_experts(family):
    def made():
        torch.manual_seed(0)
        shape = tiny_moe().config.to_dict()
        names = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")
        more = ("num_attention_heads", "num_key_value_heads", "num_experts_per_tok", "initializer_range")
        given = {name: shape[name] for name in (*names, *more)} | OTHERS[family]
        kind = getattr(transformers, f"{family}ForCausalLM")
        return kind(kind.config_class(**given)).eval()

    given = samples(sampled(made(), members=2))
    policy = Policy(made(), replaying())
    with torch.no_grad(), Watched(policy.model) as watched:
        row = pack(given)
        policy.logits(row)
    assert torch.equal(watched.passes[0], row.routing.long())
    assert float((policy.logprobs(given) - behaviour(given)).abs().max()) < 1e-4


def forced_samples(seed=0, count=5):
    """In which a random generator has chosen the experts."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt, own = generator.integers(2, 8, 2)
        tokens = generator.integers(0, VOCABULARY, prompt + own).tolist()
        chosen = np.stack([generator.permutation(EXPERTS)[:PER_TOKEN] for _ in range(2 * (len(tokens) - 1))])
        made.append((tokens, int(prompt), chosen.reshape(len(tokens) - 1, 2, PER_TOKEN).astype(np.int8)))
    return made


def as_samples(material):
    return samples(
        [
            Trajectory(
                tokens=np.array(tokens, np.int32),
                action=np.arange(len(tokens)) >= prompt,
                logprobs=np.full(len(tokens), -1, np.float32),
                versions=[(0, len(tokens) - prompt)],
                stop="eos",
                text="",
                routing=routing,
            )
            for tokens, prompt, routing in material
        ]
    )


def gradients(model, given, config, prepare=lambda _: None, between=lambda _: None):
    """Of the sum of all log-probabilities; `between` is called between the passes forward and backward."""
    policy = Policy(model, config)
    prepare(policy)
    total = 0.0
    for row in packs(given, 4096):
        loss = policy.of_tokens(row, policy.logits(row))[0].sum()
        between(policy)
        loss.backward()
        total += float(loss.detach())
    return {name: p.grad.clone() for name, p in model.named_parameters()}, total


def test_the_routers_gradient_is_that_of_finite_differences():
    """The experts are given, so the function is smooth, and the weights of the experts are what the router moves."""
    given, step = as_samples(forced_samples()), 1e-3  # the model's norms are in float32
    model = tiny_moe(dtype=torch.float64)
    found, _ = gradients(model, given, replaying())
    policy = Policy(model, replaying())
    generator = torch.Generator().manual_seed(0)
    for name, router in routers(model).items():
        gradient = found[f"{name}.weight"]
        assert float(gradient.norm()) > 0.1
        direction = torch.randn(router.weight.shape, generator=generator, dtype=torch.float64)
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                router.weight.add_(sign * step * direction)
                ends.append(float(policy.logprobs(given).sum()))
                router.weight.sub_(sign * step * direction)
        measured = (ends[0] - ends[1]) / (2 * step)
        assert measured == pytest.approx(float((gradient * direction).sum()), rel=1e-2)


def reference_gradients(model, material):
    """By a model of one's own making: each sequence alone, each block with experts replaced by a loop over tokens."""

    def block(mlp, chosen):
        def forward(states):
            flat, rows = states[0], []
            probabilities = torch.softmax(flat @ mlp.gate.weight.T, dim=-1)
            for token, ids in zip(range(len(flat)), chosen, strict=True):
                weights = probabilities[token, ids] / probabilities[token, ids].sum()
                out = 0
                for weight, expert in zip(weights, ids, strict=True):
                    gate, up = (mlp.experts.gate_up_proj[expert] @ flat[token]).chunk(2)
                    out = out + weight * (mlp.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
                rows.append(out)
            return torch.stack(rows)[None]

        return forward

    total = torch.zeros((), dtype=torch.float64)
    for tokens, prompt, routing in material:
        for number, at in enumerate((0, 2)):
            mlp = model.model.layers[at].mlp
            mlp.forward = block(mlp, routing[:, number].astype(np.int64))
        logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
        targets = torch.tensor(tokens[prompt:])
        total = total + torch.log_softmax(logits[prompt - 1 :], dim=-1).gather(1, targets[:, None]).sum()
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}, float(total.detach())


def assert_equal(found, expected, tolerance):
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=tolerance, rtol=tolerance, msg=name)


def test_all_gradients_are_those_of_a_model_with_these_experts():
    material = forced_samples(1)
    found, total = gradients(tiny_moe(dtype=torch.float64), as_samples(material), replaying())
    expected, reference = reference_gradients(tiny_moe(dtype=torch.float64), material)
    assert total == pytest.approx(reference, rel=1e-12)
    assert_equal(found, expected, 1e-9)


@pytest.mark.parametrize("how", ["wrapped", "built in"])
def test_activations_made_again_in_the_backward_pass_go_through_the_same_experts(how):
    """Also where another row has been read in between, and where logits are made in parts."""
    given, other = as_samples(forced_samples(2)), as_samples(forced_samples(3))
    expected, _ = gradients(tiny_moe(dtype=torch.float64), given, replaying())
    config = replaying(trainer={"router_replay": True, "logits_bytes": 3 * 4 * VOCABULARY})

    def recomputing(policy):
        if how == "wrapped":
            layers = policy.model.model.layers
            for number, layer in enumerate(layers):
                layers[number] = checkpoint_wrapper(layer)
        else:
            policy.model.train().activation_checkpointing_enable({"use_reentrant": False})

    calls = []
    model = tiny_moe(dtype=torch.float64)
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_hook(lambda *_: calls.append(0))
    found, _ = gradients(model, given, config, recomputing, lambda policy: policy.logprobs(other))
    assert len(calls) == 3 * 3  # a pass, one over another row, and the first again
    found = {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in found.items()}
    assert_equal(found, expected, 1e-9)


def test_routing_of_another_shape_is_an_error():
    policy = Policy(tiny_moe(), replaying())
    row = pack(as_samples(forced_samples()))
    with pytest.raises(InvariantError, match="for a router that chose"):
        policy.logits(replace(row, routing=row.routing[:-1]))
