"""A model folder appears whole or not at all."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A fresh folder beside `path` to write into; it takes the place of `path` when the block ends well.

    On an error `path` is left as it was and the fresh folder is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as workplace:
        fresh, old = Path(workplace) / "fresh", Path(workplace) / "old"
        fresh.mkdir()
        yield fresh
        if path.exists():
            path.rename(old)
        fresh.rename(path)
