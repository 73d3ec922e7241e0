"""What a run's tasks are made from, as checksums: a run that goes on with other data is told so."""

from importlib.metadata import version
from pathlib import Path

import msgspec
import xxhash

from async_rl.config.schema import Data, ReasoningGym, Source
from async_rl.errors import UserError

_CHUNK = 2**20


def fingerprint(data: Data, seed: int) -> dict[str, str]:
    """One checksum a source ("train.0", "held_out.1"), and one of how they are mixed, ordered and rendered."""
    rest = msgspec.structs.replace(data, train=[], held_out=[])
    sources = {f"{kind}.{i}": s for kind in ("train", "held_out") for i, s in enumerate(getattr(data, kind))}
    return {name: _source(source, f"data.{name}") for name, source in sources.items()} | {
        "order": xxhash.xxh3_64_hexdigest(msgspec.json.encode([rest, seed]))
    }


def _source(source: Source, setting: str) -> str:
    digest = xxhash.xxh3_64(msgspec.json.encode(source))
    if isinstance(source, ReasoningGym):
        digest.update(version("reasoning-gym").encode())
        return digest.hexdigest()
    try:
        for file in _files(Path(source.path)):
            digest.update(file.name.encode())
            with file.open("rb") as content:
                while chunk := content.read(_CHUNK):
                    digest.update(chunk)
    except OSError as error:
        raise UserError(f"{setting}.path = '{source.path}': cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
