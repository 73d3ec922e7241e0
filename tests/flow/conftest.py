"""A small run whose policy has something to learn, and whose model is warmed up already."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flow import ring

FAKE = "{ kind = 'fake', tokens_per_s = 200.0, median_tokens = 4, sigma = 0.3, vocabulary = 2 }"


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    ring.make_run(folder)
    status, output = ring.run("warmup", "run.toml", cwd=folder)
    assert status == 0, output
    return folder


@pytest.fixture
def graded(warm: Path, tmp_path: Path) -> Path:
    """A copy with a grader that gives nearly every group different rewards: each step moves the weights."""
    folder = tmp_path / "graded"
    shutil.copytree(warm, folder)
    (folder / "grading.py").write_text(
        "from pathlib import Path\n\n\n"
        "def grade(task, trajectory):\n"
        "    return None if Path('abstain').exists() else trajectory.text.count('a') / 5\n"
    )
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text + "\n[reward]\ngrader = { kind = 'custom', function = 'grading:grade' }\n")
    return folder


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a fake engine, and an untrained model whose vocabulary has all that it says."""
    folder = tmp_path_factory.mktemp("wide")
    path = ring.make_run(folder)
    characters = "abcde=" + "".join(map(chr, range(0x100, 0x180)))
    text = (
        path.read_text()
        .replace('characters = "abcde="', f'characters = "{characters}"')
        .replace("\nsteps = 60", "\nsteps = 1")
    )
    path.write_text(text + f"\n[rollout]\nengine = {FAKE}\n")
    status, output = ring.run("warmup", "run.toml", cwd=folder)
    assert status == 0, output
    return folder


@pytest.fixture
def faked(wide: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wide, tmp_path / "faked"))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Any]:
    from tests.flow.weights_material import Nursery  # torch's distributed part, for those tests alone that need it

    with Nursery() as one:
        yield one
