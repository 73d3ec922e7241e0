"""A Hugging Face data set on disk: what `save_to_disk` wrote (mapped, not loaded), or parquet files (read
into memory). Nothing is looked up on a hub and nothing is written to a cache."""

import re
from pathlib import Path
from typing import Any

from async_rl.config.schema import HFDataset
from async_rl.data.rows import Row, existing, row_of
from async_rl.errors import UserError, nearest

_SHARD = re.compile(r"-\d+(-of-\d+.*)?$")  # train-00000-of-00002-a1b2


class HFRows:
    def __init__(self, config: HFDataset, setting: str) -> None:
        path = existing(config.path, f"{setting}.path")
        self.name = config.name or path.stem
        self._config = config
        saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
        self._rows = _saved(path, config.split, setting) if saved else _parquet(path, config.split, setting)
        if len(self._rows) == 0:
            raise UserError(f"{setting}.path = '{path}': empty, not a single row")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, position: int) -> Row:
        return row_of(self._rows[position], self._config, f"{self._config.path} row {position}")


class _Table:
    """Rows of a pyarrow table."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        record: dict[str, Any] = self._table.slice(position, 1).to_pylist()[0]
        return record


def _saved(path: Path, split: str, setting: str) -> Any:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{setting}.path = '{path}': datasets cannot load it: {str(error).splitlines()[0]}") from None
    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found:
        raise UserError(f"{setting}.split = '{split}': not in {path}{nearest(split, found)}")
    return found[split]


def _parquet(path: Path, split: str, setting: str) -> _Table:
    import pyarrow
    from pyarrow import parquet

    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{setting}.path = '{path}': neither saved by save_to_disk nor a folder of parquet files")
    chosen = files if path.is_file() else files_of_split(path, files, split, setting)
    try:
        return _Table(pyarrow.concat_tables([parquet.read_table(file) for file in chosen], promote_options="default"))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{setting}.path = '{path}': not parquet: {str(error).splitlines()[0]}") from None


def files_of_split(path: Path, files: list[Path], split: str, setting: str) -> list[Path]:
    """Files named after the split (train.parquet, train-00000-of-00002.parquet) or in a folder of its name;
    where no name tells a split, all files are `train`."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        folder = file.relative_to(path).parts[0] if file.parent != path else ""
        name = folder if folder and folder != "data" else _SHARD.sub("", file.stem)
        splits.setdefault(name, []).append(file)
    if split in splits:
        return splits[split]
    if split == "train" and not {"test", "validation", "valid", "dev", "eval"} & set(splits):
        return files
    raise UserError(f"{setting}.split = '{split}': no such files in {path}{nearest(split, splits)}")
