"""The warm-up: cached, deterministic, never over a folder that is somebody else's; and the other preparations."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from async_rl.config import Config, parse
from async_rl.config.schema import Model, Warmup
from async_rl.errors import ConfigError, UserError
from async_rl.models import prepare
from async_rl.models.load import end_tokens, load_policy, load_tokenizer
from async_rl.models.routers import experts, routers
from async_rl.models.tiny import EOS, build_model, build_tokenizer
from async_rl.models.warmup import Example, add_noise, answer_loss, digest, learning_rate, warmup

PAIRS = [("ab", "ba"), ("abc", "cba"), ("ca", "ac"), ("bbc", "cbb")]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Any:
    """The warm-up sets the process's threads to trainer.threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_config(folder: Path, **changes: Any) -> Config:
    """A run over PAIRS with a model that is warmed up in a second; `changes` go into [warmup]."""
    rows = folder / "pairs.jsonl"
    if not rows.exists():
        rows.write_text("".join(json.dumps({"prompt": p + "=", "answer": a}) + "\n" for p, a in PAIRS))
    shape = {"characters": "abc=", "hidden_size": 16, "layers": 1, "heads": 2, "context": 16}
    return parse(
        {
            "name": "warm",
            "max_steps": 1,
            "model": {"path": str(folder / "model")},
            "warmup": {**shape, "steps": 3, "batch_size": 4, **changes},
            "data": {"format": "plain", "train": [{"kind": "jsonl", "path": str(rows)}]},
        }
    )


def warmed(config: Config) -> list[str]:
    """Warm up; what was reported."""
    lines: list[str] = []
    warmup(config, report=lines.append)
    return lines


def weights(config: Config) -> dict[str, torch.Tensor]:
    return load_file(Path(config.model.path) / "model.safetensors")


def test_the_folder_is_one_that_a_run_loads(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    warmed(config)
    tokenizer, policy = load_tokenizer(config.model), load_policy(config.model)
    assert tokenizer("ab=").input_ids == tokenizer.encode("ab=", add_special_tokens=False)
    assert end_tokens(Path(config.model.path), tokenizer) == [tokenizer.convert_tokens_to_ids(EOS)]
    assert policy.get_input_embeddings().weight is policy.get_output_embeddings().weight
    assert policy(input_ids=torch.tensor([tokenizer.encode("ab=")])).logits.shape == (1, 3, len(tokenizer))


def test_a_second_call_with_the_same_settings_returns_at_once(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    warmed(config)
    before = (Path(config.model.path) / "model.safetensors").stat().st_mtime_ns
    assert any("up to date" in line for line in warmed(config))
    assert (Path(config.model.path) / "model.safetensors").stat().st_mtime_ns == before


def test_other_settings_replace_a_folder_that_the_warm_up_made(tmp_path: Path) -> None:
    warmed(run_config(tmp_path))
    other = run_config(tmp_path, layers=2)
    warmed(other)
    assert any("layers.1." in name for name in weights(other))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "pairs.jsonl"]


def test_a_folder_that_the_warm_up_did_not_make_is_left_alone(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    foreign = Path(config.model.path)
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    for attempt in (warmed, prepare.check):
        with pytest.raises(UserError, match=r"model\.path = .*not made by the warm-up") as refused:
            attempt(config)
        assert "\n" not in str(refused.value)
    assert [p.name for p in foreign.iterdir()] == ["config.json"]


def test_a_warm_up_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path)

    def fail(*_: object) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr("async_rl.models.warmup._save", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        warmed(config)
    assert [p.name for p in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    made = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(len(made))  # the caller's generator has no say
        (tmp_path / name).mkdir()
        config = run_config(tmp_path / name)
        config = parse({**_tree(config), "seed": seed})
        warmed(config)
        made.append(weights(config))
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert any(not torch.equal(made[0][name], made[2][name]) for name in made[0])


def test_the_digest_follows_what_the_result_depends_on(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    tree = _tree(config)
    same = parse({**tree, "name": "other", "max_steps": 9, "batch": {"groups": 2}})
    assert digest(same) == digest(config)
    others: list[dict[str, Any]] = [
        {"seed": 5},
        {"model": {**tree["model"], "dtype": "bfloat16"}},
        {"warmup": {**tree["warmup"], "noise": 0.5}},
        {"data": {**tree["data"], "template": "{prompt}:"}},
    ]
    assert len({digest(config), *(digest(parse({**tree, **change})) for change in others)}) == 5


def _tree(config: Config) -> dict[str, Any]:
    import msgspec

    tree: dict[str, Any] = msgspec.to_builtins(config)
    return tree


def test_a_warmed_up_model_answers(tmp_path: Path) -> None:
    config = run_config(tmp_path, hidden_size=32, layers=2, steps=150, batch_size=16, learning_rate=5e-3)
    warmed(config)
    tokenizer, policy = load_tokenizer(config.model), load_policy(config.model)
    for prompt, answer in PAIRS:
        ids = torch.tensor([tokenizer.encode(prompt + "=")])
        out = policy.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == answer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"characters": "ab"}, r"warmup\.characters lacks '=c'"),
        ({"characters": "abcab="}, r"warmup\.characters: 'ab' stands in it more than once"),
        ({"context": 5}, r"warmup\.context = 5: .* are 6 tokens|warmup\.context = 5: .* are 8 tokens"),
        ({"hidden_size": 18}, r"warmup\.hidden_size = 18 must be a multiple of 2 x warmup\.heads = 4"),
    ],
)
def test_settings_that_do_not_suit_the_data_are_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = run_config(tmp_path, **changes)
    for attempt in (warmed, prepare.check):
        with pytest.raises(ConfigError, match=message) as refused:
            attempt(config)
        assert "\n" not in str(refused.value)
    assert not Path(config.model.path).exists()


def test_a_chat_format_has_no_warm_up(tmp_path: Path) -> None:
    tree = _tree(run_config(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.format = 'plain'"):
        warmed(parse({**tree, "data": {**tree["data"], "format": "chat"}}))


@given(st.text(alphabet="ab<>eos \n,.'é", max_size=30))
def test_decoding_gives_the_exact_text_back(text: str) -> None:
    tokenizer = build_tokenizer(Warmup(characters="ab<>eos \n,.'é"))
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_an_unknown_character_is_one_token_at_run_time() -> None:
    tokenizer = build_tokenizer(Warmup(characters="ab"))
    assert tokenizer("aéb").input_ids == [4, tokenizer.unk_token_id, 5]


@given(st.lists(st.integers(4, 9), max_size=20), st.floats(0, 1), st.integers(0, 2**32))
def test_noise_replaces_by_another_of_the_alphabet(answer: list[int], share: float, seed: int) -> None:
    noisy = add_noise(answer, np.arange(4, 10), share, np.random.default_rng(seed))
    assert len(noisy) == len(answer)
    assert set(noisy) <= set(range(4, 10))
    certain = add_noise(answer, np.arange(4, 10), 1.0, np.random.default_rng(seed))
    assert all(a != b for a, b in zip(answer, certain, strict=True))


def test_the_share_of_noise_is_the_one_asked_for() -> None:
    answer = [4, 5, 6, 7] * 2500
    noisy = add_noise(answer, np.arange(4, 10), 0.22, np.random.default_rng(0))
    assert np.mean(np.asarray(answer) != noisy) == pytest.approx(0.22, abs=0.02)


def test_learning_rate_ramps_up_and_decays() -> None:
    settings = Warmup(characters="ab", steps=100, learning_rate=1.0)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.05)
    assert max(rates) <= 1.0
    assert rates[-1] == pytest.approx(0.109)


@pytest.mark.parametrize("common", ["", "cab:"])
def test_the_shared_prefix_changes_neither_loss_nor_gradient(common: str) -> None:
    """Against one example at a time, without padding or cache."""
    settings = Warmup(characters="abc:=", hidden_size=16, layers=2, heads=2)
    tokenizer = build_tokenizer(settings)
    batch = [Example(tokenizer.encode(common + p + "="), tokenizer.encode(a)) for p, a in PAIRS]
    end = tokenizer.eos_token_id
    model = build_model(settings, tokenizer, seed=3)
    answer_loss(model, batch, end).backward()  # type: ignore[no-untyped-call]
    shared = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    total = torch.zeros(())
    for example in batch:
        ids = torch.tensor([[*example.prompt, *example.answer, end]])
        scores = model(input_ids=ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
        own = scores.gather(-1, ids[0, 1:, None])[len(example.prompt) - 1 :]
        total = total - own.sum()
    loss = total / sum(len(e.answer) + 1 for e in batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert answer_loss(model, batch, end).item() == pytest.approx(loss.item(), rel=1e-5)
    for gradient, parameter in zip(shared, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def packaged(config: Config, package: str) -> Config:
    return parse({**_tree(config), "warmup": None, "model": {"path": config.model.path, "from_package": package}})


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path) -> None:
    config = packaged(run_config(tmp_path), "no_such_model_package")
    for attempt in (prepare.check, lambda c: prepare.prepare(c, report=lambda _: None)):
        with pytest.raises(UserError, match="pip install no-such-model-package"):
            attempt(config)
    assert not Path(config.model.path).exists()


def test_a_package_is_converted_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = packaged(run_config(tmp_path), "a_model_package")
    package = tmp_path / "a_model_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "only.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", _present("gguf"))
    converted = []

    def convert(source: Path, target: Path) -> None:
        if not converted:
            converted.append(source)
            (target / "config.json").write_text("{")
            raise RuntimeError("power cut")
        converted.append(source)
        for name in ("config.json", "model.safetensors"):
            (target / name).touch()

    monkeypatch.setattr(prepare, "from_gguf", convert)
    with pytest.raises(RuntimeError, match="power cut"):
        prepare.prepare(config, report=lambda _: None)
    assert not Path(config.model.path).exists()
    for _ in range(2):
        assert prepare.prepare(config, report=lambda _: None) == Path(config.model.path)
    assert converted == [package / "only.gguf"] * 2


def _present(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
    return module


def test_warm_up_and_package_exclude_each_other(tmp_path: Path) -> None:
    tree = _tree(run_config(tmp_path))
    both = parse({**tree, "model": {"path": "m", "from_package": "x"}})
    with pytest.raises(ConfigError, match=r"model\.from_package = 'x' and \[warmup\]"):
        prepare.check(both)


def test_a_model_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    warmed(config)
    plain = parse({**_tree(config), "warmup": None})
    assert prepare.prepare(plain, report=lambda _: None) == Path(config.model.path)
    missing = parse({**_tree(plain), "model": {"path": str(tmp_path / "none")}})
    with pytest.raises(UserError, match="no such folder"):
        prepare.prepare(missing, report=lambda _: None)
    assert isinstance(plain.model, Model)


def test_a_mixture_of_experts_is_warmed_up_alike(tmp_path: Path) -> None:
    config = run_config(tmp_path, architecture="qwen3_moe", experts=4, experts_per_token=3)
    warmed(config)
    policy = load_policy(config.model)
    assert policy.config.model_type == "qwen3_moe" and [experts(r) for r in routers(policy).values()] == [4]
    assert policy(input_ids=torch.tensor([[4, 5]])).logits.isfinite().all()
    with pytest.raises(ConfigError, match=r"warmup\.experts_per_token = 3 is more than warmup\.experts = 2"):
        warmed(run_config(tmp_path, architecture="qwen3_moe", experts=2, experts_per_token=3))
