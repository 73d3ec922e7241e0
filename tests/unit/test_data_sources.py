"""Each kind of source: what a row becomes, and the one line that a bad one gets."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.schema import Data, HFDataset, JsonLines, ReasoningGym, Source
from async_rl.data import TaskStream, check, held_out_tasks
from async_rl.data.gym import pack, unpack
from async_rl.errors import UserError
from async_rl.trajectory import Message, Task

datasets = pytest.importorskip("datasets")


def written(path: Path, *rows: Any) -> JsonLines:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return JsonLines(path=str(path))


def first(source: Source, **settings: Any) -> Task:
    return TaskStream(Data(train=[source], shuffle=False, **settings), 0).task(0)


def refused(source: Source) -> str:
    with pytest.raises(UserError) as error:
        check(Data(train=[source]))
    assert "\n" not in str(error.value)
    return str(error.value)


# --- rows --------------------------------------------------------------------------------------------


def test_a_prompt_becomes_one_user_message(tmp_path: Path) -> None:
    source = written(tmp_path / "sums.jsonl", {"prompt": "1+1?", "answer": 2, "level": {"digits": [1, 2]}})
    task = first(source)
    assert task == Task(
        index=0,
        source="sums",
        messages=[Message(role="user", content="1+1?")],
        answer="2",
        metadata={"level": {"digits": [1, 2]}},
    )


def test_plain_format_gives_the_text_itself(tmp_path: Path) -> None:
    source = written(tmp_path / "a.jsonl", {"prompt": "cat", "answer": "tac"})
    task = first(source, format="plain", template="{prompt} {x}\\boxed{}>")
    assert (task.prompt, task.messages) == ("cat {x}\\boxed{}>", None)  # only {prompt} is replaced


def test_system_template_and_suffix_stand_around_the_question(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written(path, {"prompt": "1+1?"})
    task = first(JsonLines(path=str(path), suffix=" Now."), system="Be brief.", template="Q: {prompt}\nA:")
    assert task.messages == [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Q: 1+1? Now.\nA:"),
    ]
    assert task.answer is None


def test_messages_are_kept_whatever_the_format(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    source = written(tmp_path / "a.jsonl", {"messages": talk, "answer": "x"})
    for settings in ({"format": "plain"}, {"format": "chat", "system": "other", "template": "no {prompt}"}):
        task = first(source, **settings)
        assert task.messages == [Message(role="system", content="S"), Message(role="user", content="U")]


def test_the_system_message_goes_in_front_of_messages_without_one(tmp_path: Path) -> None:
    source = written(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "U"}]})
    messages = first(source, system="S").messages
    assert messages is not None and [m.role for m in messages] == ["system", "user"]


def test_other_keys_are_named_in_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written(path, {"q": "1+1?", "gold": "2"})
    task = first(JsonLines(path=str(path), prompt_key="q", answer_key="gold", name="sums"), format="plain")
    assert (task.prompt, task.answer, task.source, task.metadata) == ("1+1?", "2", "sums", {})


# --- malformed input: field report 53, nothing is dropped silently -------------------------------------


def test_a_missing_file_is_named_with_the_nearest_right_one(tmp_path: Path) -> None:
    written(tmp_path / "train.jsonl", {"prompt": "x"})
    message = refused(JsonLines(path=str(tmp_path / "trian.jsonl")))
    assert message == (
        f"data.train.0.path = '{tmp_path}/trian.jsonl': no such file (did you mean '{tmp_path}/train.jsonl'?)"
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((), "empty, not a single row"),
        (("\n", "  \n"), "empty, not a single row"),
        (({"prompt": "x"}, "{'prompt': 1}\n"), "line 2: not a JSON object"),
        (({"prompt": "x"}, "\n", "[1, 2]\n"), "line 3: not a JSON object"),
        (
            ({"promt": "x", "answer": "y"},),
            "line 1: neither 'prompt' (prompt_key) nor 'messages' (messages_key); it has: answer, promt",
        ),
        (({"prompt": ["x"]},), "line 1: 'prompt' is list, not text"),
        (({"prompt": "x", "answer": ["y"]},), "line 1: 'answer' is list, not text or a number"),
        (({"messages": []},), "'messages' must end with a message of the user"),
        (
            ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},),
            "must end with a message of the user",
        ),
        (({"messages": [{"role": "tool", "content": "q"}]},), "Invalid enum value 'tool'"),
    ],
)
def test_a_malformed_row_is_one_clear_line(tmp_path: Path, rows: tuple[Any, ...], words: str) -> None:
    assert words in refused(written(tmp_path / "a.jsonl", *rows))


def test_a_misnamed_answer_key_is_refused_with_the_keys_that_exist(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written(path, {"prompt": "x", "answer": "y"})
    message = refused(JsonLines(path=str(path), answer_key="gold"))
    assert message.endswith("a.jsonl line 1: no 'gold' (answer_key); it has: answer, prompt")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
    assert "line 1: not a JSON object" in refused(JsonLines(path=str(tmp_path / "a.jsonl")))


def test_settings_that_would_have_no_effect_are_refused() -> None:
    source = ReasoningGym(name="chain_sum")
    with pytest.raises(UserError, match=r"data\.template = 'Solve:' has no \{prompt\}"):
        check(Data(train=[source], template="Solve:"))
    with pytest.raises(UserError, match=r"data\.system needs data\.format"):
        check(Data(train=[source], system="S", format="plain"))
    with pytest.raises(UserError, match=r"data\.train is empty"):
        check(Data(train=[]))


# --- Hugging Face data sets ----------------------------------------------------------------------------


def test_a_saved_data_set_is_read_by_split(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"], "level": [3, 4]})
    rows.save_to_disk(tmp_path / "one")
    task = first(HFDataset(path=str(tmp_path / "one")), format="plain")
    assert (task.prompt, task.answer, task.metadata, task.source) == ("a", "1", {"level": 3}, "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "two")
    assert first(HFDataset(path=str(tmp_path / "two"), split="test"), format="plain").prompt == "b"
    assert "data.train.0.split = 'tets'" in refused(HFDataset(path=str(tmp_path / "two"), split="tets"))
    assert "did you mean 'test'?" in refused(HFDataset(path=str(tmp_path / "two"), split="tets"))


def test_messages_of_a_data_set_may_have_null_columns(tmp_path: Path) -> None:
    talk = [[{"role": "user", "content": "q", "name": None}]]
    datasets.Dataset.from_dict({"messages": talk}).save_to_disk(tmp_path / "one")
    assert first(HFDataset(path=str(tmp_path / "one"))).messages == [Message(role="user", content="q")]


def test_parquet_files_are_read_by_split(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    rows.to_parquet(folder / "data" / "train-00000-of-00002.parquet")
    rows.to_parquet(folder / "data" / "train-00001-of-00002.parquet")
    rows.select([1]).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    stream = TaskStream(Data(train=[HFDataset(path=str(folder))], shuffle=False, format="plain", epochs=1), 0)
    assert [stream.task(i).prompt for i in range(stream.length or 0)] == ["a", "b", "a", "b"]
    assert first(HFDataset(path=str(folder), split="test"), format="plain").prompt == "b"
    assert "did you mean 'test'?" in refused(HFDataset(path=str(folder), split="tst"))
    assert first(HFDataset(path=str(folder / "data" / "test-00000-of-00001.parquet")), format="plain").prompt == "b"


def test_a_folder_that_is_no_data_set_is_refused(tmp_path: Path) -> None:
    assert "neither saved by save_to_disk nor a folder of parquet files" in refused(HFDataset(path=str(tmp_path)))
    (tmp_path / "train.parquet").write_text("no parquet")
    assert "not parquet" in refused(HFDataset(path=str(tmp_path)))


def test_a_column_that_json_cannot_carry_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": ["a"], "when": [__import__("datetime").datetime(2024, 1, 2)]}).save_to_disk(
        tmp_path / "one"
    )
    assert first(HFDataset(path=str(tmp_path / "one"))).metadata == {"when": "2024-01-02T00:00:00"}


# --- reasoning-gym -------------------------------------------------------------------------------------


def test_entries_are_those_of_reasoning_gym_with_name_and_seed() -> None:
    import reasoning_gym

    own = reasoning_gym.create_dataset("chain_sum", seed=42, size=10, max_terms=2, max_digits=2)
    source = ReasoningGym(
        name="chain_sum", seed=42, size=10, config={"max_terms": 2, "max_digits": 2}, suffix=" Number only."
    )
    tasks = held_out_tasks(Data(train=[source], held_out=[source], format="plain"))
    assert [t.prompt for t in tasks] == [entry["question"] + " Number only." for entry in own]
    assert [t.answer for t in tasks] == [entry["answer"] for entry in own]
    assert json.loads(json.dumps(tasks[3].metadata)) == tasks[3].metadata
    assert unpack(tasks[3].metadata["entry"]) == own[3]


def test_unknown_names_get_the_nearest() -> None:
    assert "reasoning-gym has no data set 'spell_backwards' (did you mean 'spell_backward'?)" in refused(
        ReasoningGym(name="spell_backwards")
    )
    assert "reasoning-gym 'spell_backward' has no setting 'max_word_length' (did you mean 'max_word_len'?)" in refused(
        ReasoningGym(name="spell_backward", config={"max_word_length": 5})
    )
    assert "max_word_len must be >= min_word_len" in refused(
        ReasoningGym(name="spell_backward", config={"max_word_len": 1})
    )
    assert "data.train.0.config.seed: write it as data.train.0.seed" in refused(
        ReasoningGym(name="chain_sum", config={"seed": 1})
    )
    assert "a source of its own" in refused(ReasoningGym(name="composite"))


def test_packing_keeps_tuples_and_keys_that_are_no_text() -> None:
    value = {"a": (1, (2, [3, None])), "b": {0: "x", (1, 2): {"y": 1.5}}, "c": [True, "t"]}
    packed = pack(value)
    assert unpack(json.loads(json.dumps(packed))) == value
    with pytest.raises(TypeError):
        pack({"x": object()})
