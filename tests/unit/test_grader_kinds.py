"""exact, reasoning_gym and the user's own grader."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl.config.schema import CustomGrader, Data, ExactGrader, ReasoningGym, ReasoningGymGrader
from async_rl.data import held_out_tasks
from async_rl.errors import UserError
from async_rl.services.reward.graders import build
from async_rl.services.reward.graders.custom import score_of
from async_rl.trajectory import Score, Task, Trajectory
from async_rl.user_code import load


def said(text: str) -> Trajectory:
    return Trajectory(
        tokens=np.zeros(2, np.int32),
        action=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        versions=[(0, 1)],
        stop="eos",
        text=text,
    )


def asked(answer: str | None) -> Task:
    return Task(index=4, source="words", prompt="?", answer=answer)


# --- exact ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text", "ignore_case", "reward"),
    [
        ("tac", " tac\n", False, 2.0),
        ("tac", "Tac", False, -1.0),
        ("tac", "Tac", True, 2.0),
        ("tac", "tac.", False, -1.0),
        (" 5", "5", False, 2.0),
        ("5", "", False, -1.0),
    ],
)
def test_exact_compares_what_is_left_after_stripping(answer: str, text: str, ignore_case: bool, reward: float) -> None:
    grader = build(ExactGrader(correct=2.0, wrong=-1.0, ignore_case=ignore_case))
    score = grader.grade(asked(answer), said(text))
    assert (score.reward, score.status) == (reward, "graded")
    assert score.components == {"accuracy": float(reward > 0)}


def test_exact_fails_a_task_without_an_answer() -> None:
    score = build(ExactGrader()).grade(asked(None), said("x"))
    assert score == Score(reward=None, status="failed", detail="task 4 of 'words' has no answer to compare with")


# --- reasoning-gym -------------------------------------------------------------------------------------


def entry(name: str) -> Task:
    """The first task of the set, as it arrives at a grader: through JSON."""
    source = ReasoningGym(name=name, seed=3, size=4)
    task = held_out_tasks(Data(train=[source], held_out=[source], held_out_size=1))[0]
    return msgspec.json.decode(msgspec.json.encode(task), type=Task)


@pytest.mark.parametrize("name", ["spell_backward", "chain_sum", "countdown", "arc_agi", "rearc", "codeio"])
def test_a_set_s_own_answer_scores_1(name: str) -> None:
    task = entry(name)
    score = build(ReasoningGymGrader()).grade(task, said(f" {task.answer}\n"))
    assert (score.reward, score.status, score.components) == (1.0, "graded", {"accuracy": 1.0})


def test_the_last_answer_tag_counts() -> None:
    task = entry("chain_sum")
    grader = build(ReasoningGymGrader())
    right = said(f"<answer>0.5</answer> no: <answer> {task.answer} </answer>.")
    assert grader.grade(task, right).reward == 1.0
    assert grader.grade(task, said("<answer>0.5</answer>")).reward != 1.0


def test_an_answer_that_the_set_cannot_read_is_the_policy_s() -> None:
    """prime_factorization raises ValueError on text that is no number."""
    score = build(ReasoningGymGrader()).grade(entry("prime_factorization"), said("nonsense"))
    assert (score.reward, score.status, score.votes) == (0.0, "unparsed", True)
    assert "ValueError" in score.detail


def test_a_task_of_another_kind_fails() -> None:
    score = build(ReasoningGymGrader()).grade(asked("1"), said("1"))
    assert score.status == "failed" and "was not made by reasoning-gym" in score.detail


# --- the user's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0.5, Score(reward=0.5)),
        (1, Score(reward=1.0)),
        (True, Score(reward=1.0)),
        (np.float32(0.25), Score(reward=0.25)),
        (None, Score(reward=None, status="abstained")),
        (Score(reward=-1, status="unparsed", components={"len": np.float64(2)}), None),
        (float("nan"), Score(reward=None, status="failed", detail="the grader returned reward = nan")),
        (float("-inf"), Score(reward=None, status="failed", detail="the grader returned reward = -inf")),
        (
            Score(reward=1.0, components={"x": float("inf")}),
            Score(reward=None, status="failed", detail="the grader returned x = inf"),
        ),
        (
            Score(reward=None),
            Score(reward=None, status="failed", detail="the grader returned reward None with status 'graded'"),
        ),
        (
            Score(reward=0.0, status="failed"),
            Score(reward=None, status="failed", detail="the grader returned reward 0.0 with status 'failed'"),
        ),
        (
            "1.0",
            Score(
                reward=None,
                status="failed",
                detail="the grader returned str, neither a Score, a number nor None",
            ),
        ),
    ],
)
def test_what_a_grader_may_return(value: Any, score: Score | None) -> None:
    wanted = Score(reward=-1.0, status="unparsed", components={"len": 2.0}) if score is None else score
    assert score_of(value) == wanted


def test_a_failed_member_has_no_vote() -> None:
    """Field report 46: [1, 3, 2, failed] - the failed one is excluded, never a reward of 0."""
    scores = [score_of(value) for value in (1, 3, 2, float("nan"))]
    assert [score.votes for score in scores] == [True, True, True, False]
    assert [score.reward for score in scores if score.votes] == [1.0, 3.0, 2.0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a module of graders in it."""
    name = f"graders_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "constant = 3\n"
        "def length(task, trajectory): return len(trajectory.text)\n"
        "def broken(task, trajectory): return 1 / 0\n"
        "async def later(task, trajectory): return 1.0\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / f"{name}.py"


def test_a_grader_is_imported_from_the_current_folder(here: Path) -> None:
    grader = build(CustomGrader(function=f"{here.stem}:length"))
    assert grader.grade(asked(None), said("four")) == Score(reward=4.0)


def test_an_exception_is_a_status_with_the_place(here: Path) -> None:
    score = build(CustomGrader(function=f"{here.stem}:broken")).grade(asked(None), said(""))
    assert score == Score(reward=None, status="failed", detail=f"ZeroDivisionError: division by zero ({here.name}:3)")


def test_what_cannot_be_imported_is_one_clear_line(here: Path) -> None:
    (here.parent / "needs_more.py").write_text("import no_such_module_at_all\n")
    (here.parent / "raises.py").write_text("raise RuntimeError('not today')\n")
    wanted = {
        "no_colon": "write module:attribute",
        f"{here.stem}:lenght": "has no 'lenght' (did you mean 'length'?)",
        f"{here.stem}:later": "write it as a plain `def later(task, trajectory)`",
        f"{here.stem}:constant": "write it as a plain `def constant(task, trajectory)`",
        f"{here.stem[:-1]}:length": f"(did you mean '{here.stem}'?)",
        "needs_more:grade": "needs_more needs the module 'no_such_module_at_all'",
        "raises:grade": "importing it raises RuntimeError: not today",
    }
    for name, words in wanted.items():
        with pytest.raises(UserError) as error:
            load("reward.grader.function", name, "grade(task, trajectory)")
        text = str(error.value)
        assert text.startswith(f"reward.grader.function = '{name}'") and words in text and "\n" not in text


def test_importing_the_worker_pulls_in_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "datasets", "math_verify", "sympy", "reasoning_gym")
    program = (
        "import sys\nfrom async_rl.services.reward import graders, pipe, worker\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == []
