"""Checkpoints: folders that plain transformers loads, complete or absent.

checkpoints/step-00000040/   config, safetensors, tokenizer after 40 steps
checkpoints/latest           the name of the newest
"""

import shutil
from pathlib import Path
from typing import Any

from async_rl.rundir import write_atomically


class Checkpoints:
    """The checkpoints that this process writes under `folder`; the newest `keep` stay.

    Folders of an earlier run are never deleted.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._written: list[Path] = []

    def save(self, model: Any, tokenizer: Any, step: int) -> Path:
        """Write `model` as it is after `step` steps. A kill in the middle leaves no folder of that name."""
        target = self._folder / f"step-{step:08d}"
        if target in self._written:
            return target
        partial = self._folder / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.replace(target)
        write_atomically(self._folder / "latest", target.name + "\n")
        self._written.append(target)
        for old in self._written[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        self._written = self._written[-self._keep :]
        return target
