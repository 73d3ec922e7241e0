"""Low-rank adapters: what is trained, saved, published, merged, and what of the settings is refused."""

import asyncio
import copy

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.cli.check import problems
from async_rl.cli.export import export
from async_rl.config.memory import estimate
from async_rl.config.schema import LoRA, Sampling, Warmup
from async_rl.errors import ConfigError, PublicationError, UserError
from async_rl.models.load import load_policy, without_weights
from async_rl.models.lora import linear_layers, targets
from async_rl.models.tiny import build_model, build_tokenizer
from async_rl.services.rollout.engine import Draft
from async_rl.services.rollout.live_adapters import LiveAdapters, merged
from async_rl.services.rollout.transformers_engine import TransformersEngine
from async_rl.services.trainer import lora
from async_rl.services.trainer.checkpoint import Checkpoints
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.trained import weights_checksum
from async_rl.weights.manifest import seal, views
from tests.flow.rollout_material import packed
from tests.unit.test_rollout_engine import reader
from tests.unit.trainer_material import configuration, random_samples

SETTINGS = Warmup(characters="abcdefghi", hidden_size=16, layers=1, heads=2)
LAYERS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture
def base(tmp_path):
    """The folder of a model."""
    tokenizer = build_tokenizer(SETTINGS)
    build_model(SETTINGS, tokenizer, seed=0).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def settings(base, **tables):
    adapters = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]} | tables.pop("lora", {})
    return configuration(
        **{"model": {"path": str(base), "lora": adapters}, "trainer": {"learning_rate": 0.05}, "seed": 3} | tables
    )


def roles_of(config, updates=0):
    roles = Roles.load(config, config.model)
    for seed in range(updates):
        roles.policy.update(random_samples(4, seed=seed), Objective.of(config))
    return roles


def plain(model):
    """`model` for rows that are no packed ones, whatever attention it was set to."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    return other


def logits(model):
    with torch.no_grad():
        return plain(model)(torch.arange(8)[None]).logits


class Given:
    """What `model` publishes, as a subscriber hands it out."""

    def __init__(self, model, version=1):
        layout, self._data = packed(lora.published(model))
        manifest = seal(layout, self._data, version=version, epoch=0)
        self.version, self.manifest = version, msgspec.structs.replace(manifest, lora=lora.info(model))

    def tensors(self):
        return views(self.manifest.tensors, self._data)


# --- what is trained ---------------------------------------------------------------------------------


def test_new_adapters_change_nothing_and_an_update_changes_them_alone(base):
    config = settings(base)
    roles, first = roles_of(config), load_policy(config.model)
    assert torch.equal(logits(roles.policy.model), logits(first))
    before = {name: value.clone() for name, value in roles.policy.model.state_dict().items()}
    roles.policy.update(random_samples(4), Objective.of(config))
    changed = {name for name, value in roles.policy.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"model.layers.0.{at}.lora_B.default.weight" for at in ("self_attn.q_proj", "mlp.down_proj")}
    roles.policy.update(random_samples(4, seed=1), Objective.of(config))  # A learns once B is not zero
    assert not torch.equal(logits(roles.policy.model), logits(first))
    assert {p.shape for p in lora.adapters(roles.policy.model).values()} == {
        torch.Size(shape) for shape in ([4, 16], [16, 4], [4, 48])
    }


def test_adapters_begin_the_same_for_a_seed_whatever_was_drawn_before(base):
    config, found = settings(base), []
    for drawn in (0, 5):
        torch.manual_seed(drawn)
        state = torch.get_rng_state()
        found.append(weights_checksum(lora.load(config, config.model)))
        assert torch.equal(torch.get_rng_state(), state)
    assert found[0] == found[1]
    assert weights_checksum(lora.load(settings(base, seed=4), config.model)) != found[0]


def test_adapters_are_float32_beside_weights_of_less(base):
    config = settings(base)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="bfloat16"))
    model = lora.load(config, config.model)
    assert {p.dtype for p in lora.adapters(model).values()} == {torch.float32}
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert logits(model).dtype == torch.bfloat16


def test_the_reference_stays_without_adapters(base):
    roles = roles_of(settings(base, algorithm={"kl": {"coefficient": 0.1}}), updates=2)
    assert roles.reference is not None
    assert weights_checksum(roles.reference.model) == weights_checksum(load_policy(settings(base).model))


# --- checkpoints -------------------------------------------------------------------------------------


@pytest.fixture
def saved(base, tmp_path):
    config = settings(base)
    roles = roles_of(config, updates=3)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(roles, AutoTokenizer.from_pretrained(base), config, 1)
    checkpoints.finish()
    return roles, config, checkpoints


def test_a_checkpoint_holds_the_adapter_alone_and_peft_loads_it(saved, base):
    from peft import PeftModel

    roles, _, checkpoints = saved
    folder = checkpoints.path(1)
    assert not list(folder.glob("model*.safetensors")) and not (folder / "config.json").exists()
    assert load_file(folder / "adapter_model.safetensors").keys() == lora.adapters(roles.policy.model).keys()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    torch.testing.assert_close(logits(loaded.base_model.model), logits(roles.policy.model), atol=1e-6, rtol=0)


def test_training_goes_on_from_it_bit_for_bit(saved):
    roles, config, checkpoints = saved
    resumed = checkpoints.resume(config, config.model)
    assert resumed is not None and resumed.state.weights == weights_checksum(roles.policy.model)
    for other in (roles, resumed.roles):
        for seed in (7, 8):
            other.policy.update(random_samples(4, seed=seed), Objective.of(config))
    assert weights_checksum(roles.policy.model) == weights_checksum(resumed.roles.policy.model)


def test_adapters_of_another_base_are_refused_and_not_taken_for_damaged(saved, base):
    _, config, checkpoints = saved
    build_model(SETTINGS, build_tokenizer(SETTINGS), seed=1).save_pretrained(base)
    with pytest.raises(ConfigError, match=r"model.path = .*base': its weights are no longer those"):
        checkpoints.resume(config, config.model)
    assert checkpoints.versions == [1]


def test_a_damaged_adapter_is_put_aside(saved):
    _, config, checkpoints = saved
    path = checkpoints.path(1) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    assert checkpoints.resume(config, config.model) is None
    assert checkpoints.path(1).with_name("damaged-step-00000001").is_dir()


def test_a_checkpoint_is_merged_when_it_is_loaded_as_a_model(saved):
    roles, config, checkpoints = saved
    model = msgspec.structs.replace(config.model, path=str(checkpoints.path(1)))
    whole = load_policy(model)
    assert lora.info(whole) is None and all(parameter.requires_grad for parameter in whole.parameters())
    assert type(whole) is type(load_policy(config.model))
    torch.testing.assert_close(logits(whole), logits(roles.policy.model), atol=1e-5, rtol=0)


def test_an_export_is_a_model_that_plain_transformers_loads(saved, tmp_path, capsys):
    roles, _, checkpoints = saved
    assert export(str(checkpoints.path(1)), str(tmp_path / "out")) == 0
    assert "merged with" in capsys.readouterr().out
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(whole), logits(roles.policy.model), atol=1e-5, rtol=0)
    text = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = torch.tensor([text("abc").input_ids])
    assert whole.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 5)
    assert not list((tmp_path / "out").glob("adapter*"))
    export(str(tmp_path), str(tmp_path / "of_the_run"))  # its folder "checkpoints" makes it one
    assert (tmp_path / "of_the_run" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()
    with pytest.raises(UserError, match="there already"):
        export(str(checkpoints.path(1)), str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"no such checkpoint or run \(did you mean"):
        export(str(checkpoints.path(2)), str(tmp_path / "new"))


# --- publication -------------------------------------------------------------------------------------


def test_a_publication_is_the_adapters_alone(base):
    config = settings(base)
    model = lora.load(config, config.model)
    adapters, whole = Given(model).manifest, packed(load_policy(config.model))[0]
    assert adapters.lora is not None
    assert (adapters.lora.rank, adapters.lora.alpha, adapters.lora.targets) == (4, 8.0, ["down_proj", "q_proj"])
    assert {entry.name for entry in adapters.tensors} == lora.adapters(model).keys()
    assert adapters.nbytes == 4 * (4 * (16 + 16) + 4 * (16 + 48)) < whole.nbytes / 5
    assert lora.info(load_policy(config.model)) is None


def test_merged_in_an_engine_they_are_the_trainers_policy(base):
    """Each version from the base anew: nothing of the one before stays, and other layers are not touched."""
    config = settings(base)
    roles, engine = roles_of(config, updates=2), load_policy(config.model)
    live, untouched = LiveAdapters(engine), engine.model.layers[0].self_attn.k_proj.weight.clone()
    sums = []
    for version in (1, 2, 3):
        roles.policy.update(random_samples(4, seed=version), Objective.of(config))
        live.load(Given(roles.policy.model, version))
        torch.testing.assert_close(logits(engine), logits(roles.policy.model), atol=1e-5, rtol=0)
        sums.append(live.checksums())
    changed = {name for name in sums[0] if sums[0][name] != sums[1][name]}
    assert changed == {f"model.layers.0.{at}.weight" for at in ("self_attn.q_proj", "mlp.down_proj")}
    assert torch.equal(engine.model.layers[0].self_attn.k_proj.weight, untouched)
    fresh = load_policy(config.model)
    LiveAdapters(fresh).load(Given(roles.policy.model, 3))
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), engine.parameters(), strict=True))


def test_in_flight_each_token_is_of_the_adapter_that_its_version_names(base):
    """Field report 31: none samples the base model, and what is in flight goes on under the new adapter."""
    config = settings(base, lora={"rank": 4, "alpha": 8.0, "targets": []})
    policies = {}
    for version, updates in ((1, 3), (2, 8)):
        policies[version] = roles_of(config, updates).policy.model

    async def body():
        engine = TransformersEngine(load_policy(config.model), [], config.rollout.engine, adapters=True)
        try:
            await engine.update(reader(Given(policies[1], 1)))
            drafts = [Draft() for _ in range(6)]
            running = [
                asyncio.create_task(engine.generate([5, 3 + k, 7], Sampling(max_new_tokens=60), seed=k, draft=draft))
                for k, draft in enumerate(drafts)
            ]
            while not all(len(draft.tokens) >= 4 for draft in drafts):
                await asyncio.sleep(0.001)
            await engine.update(reader(Given(policies[2], 2)))
            return await asyncio.gather(*running)
        finally:
            await engine.close()

    tables = {version: plain(model) for version, model in {0: load_policy(config.model), **policies}.items()}
    for k, done in enumerate(asyncio.run(asyncio.wait_for(body(), 60))):
        assert [version for version, _ in done.versions] == [1, 2]
        versions = torch.tensor([version for version, count in done.versions for _ in range(count)])
        measured = torch.tensor(done.logprobs)
        for version, model in tables.items():
            with torch.no_grad():
                table = model(torch.tensor([[5, 3 + k, 7, *done.tokens]])).logits[0].log_softmax(-1)
            expected = table[2:-1].gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
            gap = (measured - expected).abs()
            assert not (versions == version).any() or gap[versions == version].max() < 1e-4
            assert gap[versions != version].max() > 1e-3


def test_adapters_that_do_not_fit_leave_the_engine_as_it_was(base):
    config = settings(base)
    engine = load_policy(config.model)
    live = LiveAdapters(engine)
    live.load(Given(roles_of(config, updates=2).policy.model))
    before = live.checksums()
    short, strange, rest = (Given(lora.load(config, config.model), version) for version in (2, 3, 4))
    short.manifest.tensors.pop()
    strange.manifest.tensors[0] = msgspec.structs.replace(strange.manifest.tensors[0], name="model.norm.weight")
    rest.manifest.tensors[:] = [entry for entry in rest.manifest.tensors if "q_proj" in entry.name]
    other = build_model(msgspec.structs.replace(SETTINGS, hidden_size=32), build_tokenizer(SETTINGS), seed=0)
    lora.attach(other, LoRA(rank=4, alpha=8.0, targets=["q_proj"]), 0)
    for given, problem in (
        (short, "is missing"),
        (strange, "is no adapter's"),
        (rest, "down_proj.weight has an adapter now and then"),
        (Given(other), r"for model.layers.0.self_attn.q_proj.weight of \[16, 16\] and rank 4 they are"),
        (Given(load_policy(config.model)), "a whole model"),
    ):
        with pytest.raises(PublicationError, match=problem):
            live.load(given)
    assert live.checksums() == before


def test_what_is_merged_is_computed_in_float32():
    torch.manual_seed(0)
    base, a, b = torch.randn(6, 5, dtype=torch.bfloat16), torch.randn(2, 5), torch.randn(6, 2)
    exact = base.double() + 0.5 * b.double() @ a.double()
    assert merged(base, a, b, 0.5).dtype == torch.float32
    torch.testing.assert_close(merged(base, a, b, 0.5).double(), exact, atol=1e-6, rtol=1e-6)


# --- settings ----------------------------------------------------------------------------------------


def test_the_layers_of_a_model_are_known_without_its_weights(base):
    assert linear_layers(without_weights(base)) == linear_layers(AutoModelForCausalLM.from_pretrained(base))
    assert targets(LoRA(), linear_layers(without_weights(base))) == LAYERS


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("q_prj", "did you mean 'q_proj'"),
        ("self_attn.q_proj", "the last part, 'q_proj'"),
        ("lm_head", "one of: down_proj"),
    ],
)
def test_an_unknown_target_is_refused_with_the_nearest(base, target, hint):
    config = settings(base, lora={"targets": ["k_proj", target]})
    (problem,) = [line for line in problems(config) if "lora" in line]
    assert f"no linear layer is named '{target}'" in problem and hint in problem
    with pytest.raises(ConfigError, match=f"'{target}'"):
        lora.load(config, config.model)


def test_check_names_what_adapters_cannot_go_with(base, saved):
    _, _, checkpoints = saved
    config = settings(base, rollout={"engine": {"kind": "sglang", "urls": ["http://localhost:1"]}})
    assert "model.lora: engine 'sglang' takes whole models alone; use 'vllm' or 'transformers'" in problems(config)
    assert any("is an adapter" in line for line in problems(settings(checkpoints.path(1))))


def test_a_missing_peft_is_one_line_that_names_the_extra(base, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"model.lora needs peft: pip install 'async-rl\[lora\]'"):
        lora.load(settings(base), settings(base).model)


def test_memory_counts_gradients_and_moments_of_the_adapters_alone(base):
    config = settings(base)
    count, adapters = sum(p.numel() for p in load_policy(config.model).parameters()), 4 * (16 + 16) + 4 * (16 + 48)
    found = estimate(config)
    assert found is not None and found.parameters == count
    assert found.trainer == 4 * count + 16 * adapters
    assert found.slots == 3 * 4 * adapters
    assert found.rollouts == 4 * (count + 16 * 16 + 16 * 48)  # the engine keeps the base of what it merges into
    everywhere = estimate(settings(base, lora={"targets": []}))
    model = lora.load(settings(base, lora={"targets": []}), config.model)
    assert everywhere is not None
    assert everywhere.slots == 3 * 4 * sum(p.numel() for p in lora.adapters(model).values())
