"""What in `[algorithm]` cannot be meant together: one clear line each."""

import pytest

from async_rl.config import parse
from async_rl.config.consistency import algorithm_problems

BASE = {
    "name": "run",
    "model": {"path": "none"},
    "data": {"train": [{"kind": "jsonl", "path": "none"}]},
    "max_steps": 4,
    "sampling": {"max_new_tokens": 64},
}


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({"batch": {"group_size": 1}, "algorithm": {"advantage": "rloo"}}, "batch.group_size = 1 has none"),
        ({"algorithm": {"advantage": {"kind": "gdpo", "weights": {}}}}, "advantage.weights is empty"),
        (
            {"algorithm": {"advantage": {"kind": "gdpo", "weights": {"a": 1.0}}, "overlong": {"buffer": 2}}},
            "looks at components alone",
        ),
        ({"algorithm": {"critic": {"warmup_steps": 3}}}, "'gae' has one"),
        (
            {"staleness": {"keep_cache": True}, "algorithm": {"correction": {"proximal": "loglinear"}}},
            "use 'recompute'",
        ),
        ({"algorithm": {"correction": {"weights": {"band": [2.0, 0.5]}}}}, "0 <= low < high"),
        (
            {
                "algorithm": {
                    "correction": {"rejections": [{"kind": "reject", "by": "token_k1", "min": 1.0, "max": 0.5}]}
                }
            },
            "min = 1 is not below max = 0.5",
        ),
        ({"algorithm": {"overlong": {"buffer": 65}}}, "overlong.buffer = 65 is larger than the longest answer, 64"),
        ({"algorithm": {"overlong": {"buffer": 5, "max": 65}}}, "no answer has more than sampling.max_new_tokens = 64"),
        (
            {"batch": {"group_size": 1, "groups": 1}, "algorithm": {"resample": {}}},
            "a step of one trajectory",
        ),
    ],
)
def test_what_does_not_go_together_is_told(tables: dict[str, object], problem: str) -> None:
    (line,) = algorithm_problems(parse(BASE | tables))
    assert problem in line and line.startswith("algorithm.")


def test_the_defaults_go_together() -> None:
    assert list(algorithm_problems(parse(BASE))) == []
