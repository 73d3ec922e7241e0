"""The stream of tasks: coverage, order, determinism, the held-out split."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from async_rl.config.schema import Data, JsonLines, ReasoningGym
from async_rl.data import TaskStream, check, held_out_tasks
from async_rl.errors import UserError


def numbered(path: Path, count: int) -> JsonLines:
    """A file of `count` prompts named after it."""
    rows = [json.dumps({"prompt": f"{path.stem} {i}", "answer": str(i)}) for i in range(count)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return JsonLines(path=str(path))


def test_an_epoch_covers_every_task_once_and_the_next_one_in_another_order(tmp_path: Path) -> None:
    data = Data(train=[numbered(tmp_path / "a.jsonl", 10)], epochs=2, format="plain")
    stream = TaskStream(data, 0)
    assert stream.length == 20
    tasks = [stream.task(i) for i in range(20)]
    assert [task.index for task in tasks] == list(range(20))
    first, second = [t.prompt for t in tasks[:10]], [t.prompt for t in tasks[10:]]
    assert sorted(first) == sorted(second) == [f"a {i}" for i in range(10)]
    assert first != second
    with pytest.raises(IndexError):
        stream.task(20)


def test_without_epochs_the_stream_has_no_end(tmp_path: Path) -> None:
    stream = TaskStream(Data(train=[numbered(tmp_path / "a.jsonl", 3)]), 0)
    assert stream.length is None
    assert stream.task(10**9).source == "a"


def test_without_shuffle_tasks_come_in_the_file_s_order(tmp_path: Path) -> None:
    data = Data(train=[numbered(tmp_path / "a.jsonl", 4)], shuffle=False, format="plain")
    stream = TaskStream(data, 0)
    assert [stream.task(i).prompt for i in range(6)] == ["a 0", "a 1", "a 2", "a 3", "a 0", "a 1"]


def test_sources_are_mixed_by_weight_and_an_epoch_covers_all_of_them(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.jsonl", 30), numbered(tmp_path / "b.jsonl", 10)
    a = JsonLines(path=a.path, weight=3.0)
    stream = TaskStream(Data(train=[a, b], epochs=1, format="plain"), 7)
    assert stream.length == 40  # weights in proportion to the sizes show each task once
    tasks = [stream.task(i) for i in range(40)]
    assert Counter(t.source for t in tasks) == {"a": 30, "b": 10}
    assert len({t.prompt for t in tasks}) == 40
    assert Counter(t.source for t in tasks[:20]) == {"a": 15, "b": 5}


def test_a_small_source_goes_round_again_until_the_large_one_is_through(tmp_path: Path) -> None:
    data = Data(train=[numbered(tmp_path / "a.jsonl", 2), numbered(tmp_path / "b.jsonl", 8)], epochs=1, format="plain")
    stream = TaskStream(data, 0)
    assert stream.length is not None
    seen = Counter(stream.task(i).prompt for i in range(stream.length))
    assert {prompt for prompt in seen if prompt.startswith("b")} == {f"b {i}" for i in range(8)}
    assert {seen["a 0"], seen["a 1"]} == {4}


def test_tasks_are_asked_for_in_any_order(tmp_path: Path) -> None:
    data = Data(train=[numbered(tmp_path / "a.jsonl", 9), ReasoningGym(name="chain_sum", size=50)])
    forward, backward = TaskStream(data, 3), TaskStream(data, 3)
    assert [forward.task(i) for i in range(60)] == [backward.task(i) for i in reversed(range(60))][::-1]
    assert [TaskStream(data, 4).task(i).text for i in range(20)] != [forward.task(i).text for i in range(20)]


def test_every_process_sees_the_same_stream(tmp_path: Path) -> None:
    data = Data(
        train=[
            numbered(tmp_path / "a.jsonl", 9),
            ReasoningGym(name="spell_backward", size=50),
            ReasoningGym(name="list_functions", size=50),  # draws from the global generator
        ]
    )
    program = (
        "import sys, msgspec, hashlib\nfrom async_rl.config.schema import Data\n"
        "from async_rl.data import TaskStream\n"
        "stream = TaskStream(msgspec.json.decode(sys.argv[1].encode(), type=Data), 5)\n"
        "print(hashlib.sha256(msgspec.json.encode([stream.task(i) for i in range(40)])).hexdigest())"
    )
    argument = msgspec.json.encode(data).decode()
    results = {
        subprocess.run(
            [sys.executable, "-c", program, argument],
            env={"PYTHONHASHSEED": str(seed), "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in (1, 2)
    }
    assert len(results) == 1


def test_held_out_tasks_take_turns_by_weight_and_are_never_shuffled(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.jsonl", 10), numbered(tmp_path / "b.jsonl", 10)
    data = Data(train=[ReasoningGym(name="chain_sum")], held_out=[a, b], held_out_size=4, format="plain")
    tasks = held_out_tasks(data)
    assert [t.prompt for t in tasks] == ["a 0", "b 0", "a 1", "b 1"]
    assert [t.index for t in tasks] == [0, 1, 2, 3]
    everything = Data(train=data.train, held_out=[a, b], held_out_size=256)
    assert len(held_out_tasks(everything)) == 20


def test_a_held_out_question_is_never_trained_whatever_the_seeds() -> None:
    """reasoning-gym makes entry i from seed + i: seeds 0 and 1 are almost the same tasks."""
    data = Data(
        train=[ReasoningGym(name="chain_sum", seed=0, size=200)],
        held_out=[ReasoningGym(name="chain_sum", seed=1, size=200)],
        held_out_size=64,
        epochs=1,
    )
    held_out = {task.text for task in held_out_tasks(data)}
    stream = TaskStream(data, 0)
    assert stream.length == 200
    trained = [stream.task(i) for i in range(200)]
    assert not held_out & {task.text for task in trained}
    assert len({task.text for task in trained}) > 100  # stand-ins are spread over the source


def test_one_file_may_be_split_by_held_out_size(tmp_path: Path) -> None:
    source = numbered(tmp_path / "a.jsonl", 20)
    data = Data(train=[source], held_out=[source], held_out_size=5, epochs=1, format="plain")
    trained = {TaskStream(data, 0).task(i).prompt for i in range(20)}
    assert trained <= {f"a {i}" for i in range(5, 20)}
    with pytest.raises(UserError, match=r"data\.train\.0 \(a\): all of its tasks are in data\.held_out"):
        check(Data(train=[source], held_out=[source]))


def test_equal_names_and_seeds_are_refused() -> None:
    same = ReasoningGym(name="chain_sum", seed=3)
    with pytest.raises(UserError, match=r"data\.held_out\.0\.seed = 3: data\.train\.0 is 'chain_sum'"):
        check(Data(train=[same], held_out=[same]))


def test_importing_the_data_package_pulls_in_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "datasets", "reasoning_gym", "pyarrow")
    program = f"import sys, async_rl.data; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
