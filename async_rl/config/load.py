"""Reads a run's TOML: overrides applied, unknown keys refused with the nearest right name."""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from async_rl.config.schema import Config
from async_rl.errors import ConfigError, nearest


def load(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` under `overrides` ("trainer.learning_rate=1e-5"); ConfigError otherwise."""
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = [str(p) for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such file{nearest(str(path), beside)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    for override in overrides:
        apply_override(tree, override)
    return parse(tree, str(path))


def parse(tree: dict[str, Any], where: str = "configuration") -> Config:
    """`tree` as a Config. `where` names the file in errors."""
    for problem in unknown_keys(tree, inspect.type_info(Config), ""):
        raise ConfigError(f"{where}: {problem}")
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$.", "`").replace("`$`", "the file")
        raise ConfigError(f"{where}: {text}") from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `key.sub=value` in `tree`. The value is TOML; what is not TOML is a string."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override '{override}': write key.sub=value")
    node: Any = tree
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            node = node[_position(node, part, override)]
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"override '{override}': {'.'.join(parts[: depth + 1])} is a value, not a table")
    if isinstance(node, list):
        node[_position(node, parts[-1], override)] = _value(text.strip())
    else:
        node[parts[-1]] = _value(text.strip())


def _position(items: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(f"override '{override}': '{part}' is no position in a list of {len(items)}")
    return int(part)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def unknown_keys(value: Any, kind: inspect.Type, path: str) -> Iterator[str]:
    """A line for each key of `value` that `kind` does not have, with the nearest that it has."""
    structs = [t for t in _alternatives(kind) if isinstance(t, inspect.StructType)]
    if isinstance(value, dict) and structs:
        struct = _chosen(value, structs)
        if struct is None:
            field, tags = structs[0].tag_field or "kind", [str(s.tag) for s in structs]
            tag = value.get(field)
            here = f"{path}.{field}" if path else str(field)
            yield (
                f"{here} is missing{nearest('', tags)}"
                if tag is None
                else f"{here} = {tag!r} is unknown{nearest(str(tag), tags)}"
            )
            return
        fields = {f.encode_name: f.type for f in struct.fields}
        for key, item in value.items():
            here = f"{path}.{key}" if path else key
            if key in fields:
                yield from unknown_keys(item, fields[key], here)
            elif key != struct.tag_field:
                yield f"unknown key '{here}'{nearest(key, fields)}"
    elif isinstance(value, list):
        for item_type in (t.item_type for t in _alternatives(kind) if isinstance(t, inspect.ListType)):
            for position, item in enumerate(value):
                yield from unknown_keys(item, item_type, f"{path}.{position}")


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    return list(kind.types) if isinstance(kind, inspect.UnionType) else [kind]


def _chosen(value: dict[str, Any], structs: list[inspect.StructType]) -> inspect.StructType | None:
    if len(structs) == 1:
        only = structs[0]
        tag = value.get(only.tag_field) if only.tag_field else None
        return only if tag in (None, only.tag) else None
    return next((s for s in structs if s.tag_field and value.get(s.tag_field) == s.tag), None)
