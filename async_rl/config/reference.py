"""docs/configuration.md, made from the schema: `python -m async_rl.config.reference > docs/configuration.md`."""

import ast
import inspect
from collections.abc import Iterator

from async_rl.config import algorithms, schema

INTRODUCTION = """\
# Configuration

One TOML file describes a run. Every key can be overridden on the command line (`trainer.learning_rate=1e-5`,
`data.train.0.seed=3`); an unknown key is refused with the nearest right one. `async-rl check RUN.toml` validates
a file without starting anything. This page is made from `async_rl/config/schema.py` and `algorithms.py`.
"""


def reference() -> str:
    """The whole page: one section a table of the TOML, in the schema's order, the run itself first, `[algorithm]`
    last."""
    sections: list[str] = []
    for module in (schema, algorithms):
        source = inspect.getsource(module)
        classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        classes.sort(key=lambda node: node.name not in ("Config", "Algorithm"))
        sections += ["\n".join(_section(node, _comments(source))) + "\n" for node in classes]
    return INTRODUCTION + "".join(sections)


def _section(node: ast.ClassDef, comments: dict[int, str]) -> Iterator[str]:
    tags = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg in ("tag", "tag_field")}
    chosen = f' (`{tags["tag_field"]} = "{tags["tag"]}"`)' if tags else ""
    yield f"\n## {node.name}{chosen}\n"
    yield inspect.cleandoc(ast.get_docstring(node) or "").replace("\n", " ") + "\n"
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    if not fields:
        return
    yield "| key | type | default | |"
    yield "|---|---|---|---|"
    for field in fields:
        default = "required" if field.value is None else f"`{ast.unparse(field.value)}`"
        kind = ast.unparse(field.annotation).replace("|", "\\|")
        yield f"| `{ast.unparse(field.target)}` | {kind} | {default} | {comments.get(field.end_lineno or 0, '')} |"


def _comments(source: str) -> dict[int, str]:
    """The comment at the end of each line, by line number."""
    found = {}
    for number, line in enumerate(source.splitlines(), start=1):
        code, mark, comment = line.partition("  # ")
        if mark and code.strip():
            found[number] = comment.strip().replace("|", "\\|")
    return found


if __name__ == "__main__":
    print(reference(), end="")
