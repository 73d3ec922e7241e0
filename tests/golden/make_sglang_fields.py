"""The fields of SGLang's requests, read from the source of its wheel: nothing of it is imported.

pip download --no-deps sglang==0.5.23 && python tests/golden/make_sglang_fields.py sglang-*.whl
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

REQUESTS = {
    "/generate": ("managers/io_struct.py", "GenerateReqInput"),
    "/pause_generation": ("managers/io_struct.py", "PauseGenerationReqInput"),
    "/continue_generation": ("managers/io_struct.py", "ContinueGenerationReqInput"),
    "/update_weights_from_disk": ("managers/io_struct.py", "UpdateWeightFromDiskReqInput"),
    "/abort_request": ("managers/io_struct.py", "AbortReq"),
    "sampling_params": ("sampling/sampling_params.py", "SamplingParams"),
}


def fields(tree: ast.Module, name: str) -> list[str]:
    """The annotated fields of a class and of its bases in the same file."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found, todo = set(), [name]
    while todo:
        node = classes[todo.pop()]
        found |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        for function in node.body:
            if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                found |= {a.arg for a in function.args.args + function.args.kwonlyargs} - {"self"}
        todo += [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    return sorted(found)


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        made = {
            route: fields(ast.parse(archive.read(f"sglang/srt/{file}")), name)
            for route, (file, name) in REQUESTS.items()
        }
    made["version"] = Path(wheel).name.split("-")[1]
    Path(__file__).with_name("sglang_fields.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
