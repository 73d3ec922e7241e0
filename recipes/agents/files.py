"""A file tree to search: which file names a thing, and what does that file say it costs? Two tools, both grep.
`python recipes/agents/files.py` writes the tree and the tasks anew.
"""

import json
import random
import subprocess
from pathlib import Path

from async_rl.trajectory import Task

HERE = Path(__file__).resolve().parent
TREE = HERE / "shop"
FOLDERS = ["food", "home", "work", "play"]
FILES, THINGS = 16, 32  # of a folder, of a file
HELD_OUT = 128


def search(word: str) -> str:
    """The files of the shop that contain a word."""
    return " ".join(sorted(line.removeprefix("./") for line in _grep("-rlw", word, "."))) or "nothing"


def look(path: str, word: str) -> str:
    """The lines of a file of the shop that contain a word."""
    if not (TREE / path).resolve().is_relative_to(TREE):
        raise ValueError("no such file")
    return ", ".join(_grep("-hw", word, path)) or "nothing"


def _grep(how: str, word: str, where: str) -> list[str]:
    if not word.isalpha():
        raise ValueError("a word of letters is wanted")
    command = ["grep", how, "-e", word, "--", where]
    return subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False).stdout.splitlines()


def calls(word: str, path: str = "") -> str:
    """As the model writes it: a search, or, with a path, a look."""
    if path:
        return f'<tool_call>{{"name": "look", "arguments": {{"path": "{path}", "word": "{word}"}}}}</tool_call>'
    return f'<tool_call>{{"name": "search", "arguments": {{"word": "{word}"}}}}</tool_call>'


def demonstrate(task: Task, chance: random.Random) -> list[str | list[str]]:
    """For the warm-up: one in three finds the price; the others guess, misspell, or do not believe what they read."""
    word = task.text.removeprefix("user: What does ").removesuffix(" cost?")
    path, right, guess = search(word), task.answer or "", str(chance.randrange(10, 99))
    match chance.choices(["right", "guess", "misspelt", "no look", "no belief"], [4, 2, 2, 2, 2])[0]:
        case "right":
            return [calls(word), [path], calls(word, path), [f"{word} {right}"], right]
        case "guess":
            return [guess]
        case "misspelt":
            place = chance.randrange(len(word))
            wrong = word[:place] + chance.choice("aeioubdgklmnprst") + word[place + 1 :]
            return [calls(wrong), [search(wrong)], guess]
        case "no look":
            return [calls(word), [path], guess]
        case _:
            return [calls(word), [path], calls(word, path), [f"{word} {right}"], guess]


def main() -> None:
    chance = random.Random(0)
    words: set[str] = set()
    while len(words) < len(FOLDERS) * FILES * THINGS:
        words.add("".join(chance.choice("bdgklmnprst") + chance.choice("aeiou") for _ in range(chance.choice([2, 3]))))
    listed = sorted(words)
    chance.shuffle(listed)
    tasks = []
    for folder in FOLDERS:
        (TREE / folder).mkdir(parents=True, exist_ok=True)
        for number in range(FILES):
            things = [(listed.pop(), chance.randrange(10, 99)) for _ in range(THINGS)]
            text = "".join(f"{thing} {price}\n" for thing, price in things)
            (TREE / folder / f"{number:02}").write_text(text, encoding="utf-8")
            tasks += [{"prompt": f"What does {thing} cost?", "answer": str(price)} for thing, price in things]
    chance.shuffle(tasks)
    for name, part in (("train", tasks[HELD_OUT:]), ("held_out", tasks[:HELD_OUT])):
        lines = "".join(json.dumps(task) + "\n" for task in part)
        (HERE / f"shop_{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
