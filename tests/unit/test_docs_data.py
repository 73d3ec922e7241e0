"""docs/data.md is executed: its rows are read, its TOML parsed, its grader graded with."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from async_rl.config.load import parse
from async_rl.config.schema import Config, CustomGrader
from async_rl.data import TaskStream, check, held_out_tasks
from async_rl.services.reward.graders import build
from async_rl.trajectory import Score, ScoreStatus, Task, Trajectory

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found
    return found


def config_of(block: str) -> Config:
    """The whole configuration around a snippet of one."""
    tree: dict[str, Any] = {
        "name": "docs",
        "max_steps": 1,
        "model": {"path": "none"},
        "data": {"train": [{"kind": "reasoning_gym", "name": "chain_sum"}]},
    }
    return parse(tree | tomllib.loads(block))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder: the files that the page speaks of."""
    import datasets

    (tmp_path / "my_tasks.jsonl").write_text(blocks("json")[0], encoding="utf-8")
    (tmp_path / "my_graders.py").write_text(blocks("python")[0], encoding="utf-8")
    datasets.Dataset.from_dict({"prompt": ["p"], "answer": ["a"]}).save_to_disk(tmp_path / "saved_set")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_every_toml_snippet_is_a_configuration_whose_data_can_be_read(folder: Path) -> None:
    for block in blocks("toml"):
        data = config_of(block).data
        check(data)
        TaskStream(data, 0).task(100)


def test_one_file_serves_both_sides_as_the_first_snippet_says(folder: Path) -> None:
    data = config_of(blocks("toml")[0]).data
    assert [task.answer for task in held_out_tasks(data)] == ["19"]
    assert {TaskStream(data, 0).task(i).answer for i in range(10)} == {"7"}


def test_the_grader_on_the_page_grades(folder: Path) -> None:
    trajectory = Trajectory(
        tokens=np.zeros(4, np.int32),
        action=np.array([False, False, True, True]),
        logprobs=np.zeros(4, np.float32),
        versions=[(0, 2)],
        stop="eos",
        text=" 19",
    )
    grader = build(CustomGrader(function="my_graders:short"))
    task = Task(index=0, source="docs", prompt="?", answer="19")
    assert grader.grade(task, trajectory) == Score(reward=0.998, components={"accuracy": 1.0, "length": 2.0})
    assert grader.grade(Task(index=0, source="docs", prompt="?"), trajectory).status == "abstained"


def test_the_page_names_every_status_and_every_kind() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in get_args(ScoreStatus):
        assert f"| `{name}` |" in text
    for kind in ("exact", "math", "reasoning_gym", "custom"):
        assert f'{{kind = "{kind}"' in text
