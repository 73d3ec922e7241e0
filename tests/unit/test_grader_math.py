"""The verdicts of the math grader: field reports 42 and 44, every row, and their kind."""

import threading

import numpy as np
import pytest

from async_rl.config.schema import MathGrader
from async_rl.services.reward.graders import build
from async_rl.trajectory import Score, Task, Trajectory


def graded(gold: str | None, text: str, config: MathGrader | None = None) -> Score:
    trajectory = Trajectory(
        tokens=np.zeros(2, np.int32),
        action=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        versions=[(0, 1)],
        stop="eos",
        text=text,
    )
    return build(config or MathGrader()).grade(Task(index=0, source="sums", prompt="?", answer=gold), trajectory)


REPORT_44 = [
    (r"$\frac{1}{2^{99}}$", r"$\frac{1}{2^{98}}$", "wrong"),
    ("$4$", r"$4\sqrt(2)$", "wrong"),
    ("$6$", r"\boxed{5} wait, actually \boxed{6}", "right"),
    ("$1000$", r"\boxed{1,000}", "right"),
    ("$73$", "Final Answer: **73**", "right"),
    ("$5$", "", "unparsed"),
    ("$5$", r"\boxed{5", "unparsed"),
]
THEIR_KIND = [
    # absolute tolerance
    ("$0.0000001$", "$0.0000002$", "wrong"),
    ("$0$", "$0.0000001$", "wrong"),
    (r"$\{\frac{1}{2^{99}}, 1\}$", r"$\{\frac{1}{2^{98}}, 1\}$", "wrong"),
    (r"$\frac{2}{2^{100}}$", r"$\frac{1}{2^{99}}$", "right"),
    ("1/3", "0.333333", "right"),
    (r"\sqrt{2}\sqrt{3}-\sqrt{6}", "0", "right"),
    # what the parser cannot read and drops
    (r"$4\sqrt{2}$", r"$4\sqrt(2)$", "right"),
    (r"$\frac{1}{2}$", r"$\frac(1)(2)$", "right"),
    ("$4$", r"$4\frac(1)(2)$", "wrong"),
    # boxes
    ("$5$", r"\boxed{5} wait, actually \boxed{6}", "wrong"),
    ("$5$", r"\boxed{5} wait, actually \boxed{6", "unparsed"),
    (r"$\frac{1}{2}$", r"so \boxed{\frac{1}{2}}.", "right"),
    ("$5$", r"\boxed{}", "unparsed"),
    # separators
    ("1,234,567", "1234567", "right"),
    ("$1000$", r"\boxed{1{,}000}", "right"),
    ("$1000$", r"\boxed{1\,000}", "right"),
    ("(1,200)", r"\boxed{(1,200)}", "right"),
    ("(1,200)", r"\boxed{1200}", "wrong"),
    # plain text, as a small model writes it
    ("19", "19", "right"),
    ("19", "12 + 7 = 19", "right"),
    ("18", "The answer is 18.", "right"),
    ("-7", "-7", "right"),
    ("2^{10}", "1024", "right"),
    ("3 + 4 = 7\n#### 7", "#### 7", "right"),
    ("6", "I cannot say", "unparsed"),
]


@pytest.mark.parametrize(("gold", "prediction", "owed"), REPORT_44 + THEIR_KIND)
def test_verdicts_of_field_report_44(gold: str, prediction: str, owed: str) -> None:
    score = graded(gold, prediction, MathGrader(correct=1.0, wrong=-0.5, unparsed=-1.0))
    reward = {"right": 1.0, "wrong": -0.5, "unparsed": -1.0}[owed]
    assert score.reward == reward
    assert score.status == ("unparsed" if owed == "unparsed" else "graded")
    assert score.votes


def test_what_does_not_parse_has_reward_0_by_default_and_its_own_status() -> None:
    """Field report 44: the two last rows, told apart from a wrong answer that has reward 0 as well."""
    scores = [graded("$5$", text) for text in ("", r"\boxed{5", r"\boxed{6}")]
    assert [(score.reward, score.status) for score in scores] == [(0.0, "unparsed"), (0.0, "unparsed"), (0.0, "graded")]


def test_grading_is_right_in_any_thread() -> None:
    """Field report 42: time limits by signal fail off the main thread, and everything scores 0."""
    scores: list[Score] = []
    thread = threading.Thread(target=lambda: scores.append(graded(r"$\frac13$", r"\boxed{\frac13}")))
    thread.start()
    thread.join(60)
    assert [score.reward for score in scores] == [1.0]


def test_a_task_s_own_fault_is_a_status_and_has_no_vote() -> None:
    for gold in (None, "Paris"):
        score = graded(gold, r"\boxed{5}")
        assert (score.status, score.reward, score.votes) == ("failed", None, False)
        assert "task 0 of 'sums'" in score.detail
