"""What the documentation shows is what the code takes."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from async_rl.algorithms.members import Tokens
from async_rl.algorithms.registry import policy_loss
from async_rl.cli.main import parse as parse_command
from async_rl.config import bounds, parse
from async_rl.config.reference import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.splitlines():
                if line.startswith("async-rl "):
                    yield page.name, line


def test_the_configuration_page_is_made_from_the_schema() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference()


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_a_command_in_the_docs_is_one_the_parser_takes(page: str, line: str) -> None:
    options = parse_command(shlex.split(line, comments=True)[1:])
    for override in options.overrides:
        assert "=" in override or (ROOT / override).is_file(), page


def test_the_readme_shows_a_whole_configuration() -> None:
    (text,) = blocks(ROOT / "README.md", "toml")
    config = parse(tomllib.loads(text), "README.md")
    assert bounds(config).eta == 2


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_make_targets_that_the_docs_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        for named in re.findall(r"(?:^|`)\s*make ([a-z-]+)", page.read_text(), flags=re.MULTILINE):
            assert named in targets, f"{page.name}: make {named}"


def test_the_loss_of_ones_own_on_its_page_works_and_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks(ROOT / "docs" / "algorithms.md", "python")
    *_, table = blocks(ROOT / "docs" / "algorithms.md", "toml")
    assert len(code.splitlines()) < 20
    (tmp_path / "my_losses.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    base = tomllib.loads(blocks(ROOT / "README.md", "toml")[0])
    settings = parse(base | tomllib.loads(table)).algorithm.loss
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    old, advantages = torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 1.0])
    everything = torch.ones(2, dtype=torch.bool)
    made = policy_loss(settings).evaluate(
        Tokens(lp, old, old, advantages, everything, torch.zeros(2, dtype=torch.int64), 1), settings
    )
    assert made.values.tolist() == pytest.approx([-1.0, -1.2])
    made.values.sum().backward()
    assert lp.grad is not None and lp.grad.tolist() == pytest.approx([-1.0, 0.0])


def test_tables_on_the_page_of_algorithms_are_settings() -> None:
    base = tomllib.loads(blocks(ROOT / "README.md", "toml")[0])
    for table in blocks(ROOT / "docs" / "algorithms.md", "toml"):
        parse(base | tomllib.loads(table), "docs/algorithms.md")
