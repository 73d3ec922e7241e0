"""Mathematical equality by math-verify, with the verdicts that it alone gets wrong or leaves open.

The text before the library sees it: the last \\boxed{} counts and an unclosed one is no answer; 1{,}000 and
1\\,000 are 1000; \\sqrt(2) is \\sqrt{2} (the library's parser drops what it cannot read and keeps the 4 of
4\\sqrt(2)). After it: its comparison has an absolute tolerance, so numbers below 1e-3 are compared anew, to
six significant digits.

Both of the library's time limits are off: they work by signals, in a main thread only, and score 0 elsewhere.
The pool that this runs in kills instead.
"""

import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, FiniteSet, N, Rational, Tuple

from async_rl.config.schema import MathGrader
from async_rl.services.reward.graders import failed, without_answer
from async_rl.trajectory import Score, Task, Trajectory

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

_EXTRACT = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_BOX = "\\boxed{"
_GSM8K = "####"  # in front of the answer in GSM8K's solutions
_THOUSANDS = re.compile(r"(?<![\d.,(\[])(\d{1,3})((?:(?:,|\{,\}|\\,|\\!,\\!|\\ )\d{3})+)(?![\d,])")
_CALL = re.compile(r"\\(sqrt|frac)\s*\(([^()]*)\)(?:\s*\(([^()]*)\))?")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[a-zA-Z]{2,}")
_SMALL, _DIGITS = Rational(1, 1000), Rational(1, 10**6)
_ZERO = Rational(1, 10**60)  # what sympy cannot tell from 0 comes out far below


class Math:
    def __init__(self, config: MathGrader) -> None:
        self._config = config
        equal(expressions("$1$"), expressions("1"))  # the first parsing is slow, and no answer's time

    def grade(self, task: Task, trajectory: Trajectory) -> Score:
        if task.answer is None:
            return without_answer(task)
        gold = expressions(task.answer)
        if not gold:
            return failed(f"the answer of task {task.index} of '{task.source}' is no mathematics: {task.answer!r}")
        given = expressions(trajectory.text)
        if not given:
            return Score(reward=self._config.unparsed, status="unparsed", components={"accuracy": 0.0})
        right = equal(gold, given)
        return Score(
            reward=self._config.correct if right else self._config.wrong,
            components={"accuracy": float(right)},
        )


def expressions(text: str) -> list[Any]:
    """sympy expressions of the answer in `text`; empty where there is none."""
    answer = final_answer(text)
    if answer is None:
        return []
    parsed: list[Any] = parse(answer, extraction_config=_EXTRACT, fallback_mode="no_fallback", parsing_timeout=None)
    return parsed


def equal(gold: list[Any], given: list[Any]) -> bool:
    """Whether an expression of `given` equals one of `gold`."""
    return any(
        bool(verify(right, answer, timeout_seconds=None)) and _close(right, answer)
        for right in gold
        for answer in given
    )


def final_answer(text: str) -> str | None:
    """The part of `text` that is the answer, in a form that math-verify reads; None where it is cut off."""
    start = text.rfind(_BOX)
    if start >= 0:
        content = _braced(text, start + len(_BOX))
        return None if content is None else f"{_BOX}{_plain(content)}}}"
    text = _plain(text.rpartition(_GSM8K)[2].strip())
    formula = "$" not in text and "\n" not in text and not _WORD.search(_COMMAND.sub("", text))
    enclosed = text.startswith(("\\(", "\\["))
    return f"${text.rstrip('.')}$" if formula and not enclosed and text else text


def _braced(text: str, start: int) -> str | None:
    """From `start` up to the brace that closes it; None where none does."""
    depth = 1
    for end in range(start, len(text)):
        if text[end] in "{}" and text[end - 1] != "\\":
            depth += 1 if text[end] == "{" else -1
        if depth == 0:
            return text[start:end]
    return None


def _plain(text: str) -> str:
    """`text` without thousands separators, and with braces where a command's argument has parentheses."""
    text = _THOUSANDS.sub(lambda m: m[1] + re.sub(r"\D", "", m[2]), text)
    return _CALL.sub(lambda m: f"\\{m[1]}{{{m[2]}}}" + (f"{{{m[3]}}}" if m[3] is not None else ""), text)


def _close(a: Any, b: Any) -> bool:
    """Equal to six significant digits where both are small numbers, member by member in sets and tuples."""
    if not isinstance(a, Basic) or not isinstance(b, Basic):
        return True
    if isinstance(a, FiniteSet | Tuple) and isinstance(b, FiniteSet | Tuple):
        return all(equal([x], list(b.args)) for x in a.args)
    if not (getattr(a, "is_number", False) and getattr(b, "is_number", False)):
        return True
    a, b = a.doit(), b.doit()
    exact = isinstance(a, Rational) and isinstance(b, Rational)
    difference, size_a, size_b = (abs(x if exact else N(x, 30)) for x in (a - b, a, b))
    largest = size_b if size_a < size_b else size_a
    if not (largest < _SMALL):
        return True
    return bool(difference <= _DIGITS * largest or (not exact and largest < _ZERO))
