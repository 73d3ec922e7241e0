"""One JSON object a line. Opening finds where the lines begin; a line is parsed when it is asked for."""

import os
import weakref

import msgspec
import numpy as np

from async_rl.config.schema import JsonLines
from async_rl.data.rows import Row, existing, row_of
from async_rl.errors import UserError

_decode = msgspec.json.Decoder(dict).decode


class JsonLinesFile:
    def __init__(self, config: JsonLines, setting: str) -> None:
        path = existing(config.path, f"{setting}.path")
        self.name = config.name or path.stem
        self._config = config
        starts: list[tuple[int, int, int]] = []  # first byte, length, line number
        try:
            with path.open("rb") as lines:
                begin = 0
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        starts.append((begin, len(line), number))
                    begin += len(line)
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{setting}.path = '{path}': cannot be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._file)
        if not starts:
            raise UserError(f"{setting}.path = '{path}': empty, not a single row")
        self._lines = np.asarray(starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, position: int) -> Row:
        begin, length, number = map(int, self._lines[position])
        where = f"{self._config.path} line {number}"
        try:
            record = _decode(os.pread(self._file, length, begin))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: not a JSON object: {error}") from None
        return row_of(record, self._config, where)
