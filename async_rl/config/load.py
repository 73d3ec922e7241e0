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
    """The configuration in `path` under `overrides`; ConfigError otherwise.

    An override is a setting ("trainer.learning_rate=1e-5"), or another file ("recipes/algorithms/dapo.toml") laid over
    what there is so far; files come before settings.
    """
    tree = read(Path(path))
    for override in overrides:
        if is_file(override):
            lay_over(tree, read(Path(override)))
    for override in overrides:
        if not is_file(override):
            apply_override(tree, override)
    if "model" not in tree:
        raise ConfigError(f"{path}: has no [model]; a file that holds a part of a run goes behind one: RUN.toml {path}")
    return parse(tree, str(path))


def is_file(override: str) -> bool:
    return override.endswith(".toml") and "=" not in override


def lay_over(tree: dict[str, Any], more: dict[str, Any]) -> None:
    """`more` over `tree`, table by table. A table of another `kind`, and a list, takes the place of what was there."""
    for key, value in more.items():
        there = tree.get(key)
        if isinstance(there, dict) and isinstance(value, dict) and value.get("kind") in (None, there.get("kind")):
            lay_over(there, value)
        else:
            tree[key] = value


def read(path: Path) -> dict[str, Any]:
    """What the TOML file `path` holds; ConfigError where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = [str(p) for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such file{nearest(str(path), beside)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def parse(tree: dict[str, Any], where: str = "configuration") -> Config:
    """`tree` as a Config. `where` names the file in errors."""
    tree = spelt_out(tree, inspect.type_info(Config))
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


def spelt_out(value: Any, kind: inspect.Type) -> Any:
    """`value` with what may be left out of a table with a kind: `loss = "cispo"` is `loss = { kind = "cispo" }`, and
    `loss = { clip_low = 0.1 }` is of the kind that the default has."""
    alternatives = _alternatives(kind)
    structs = [t for t in alternatives if isinstance(t, inspect.StructType)]
    if isinstance(value, str) and len(structs) > 1 and not any(isinstance(t, inspect.StrType) for t in alternatives):
        return {structs[0].tag_field: value}
    if isinstance(value, dict) and structs:
        struct = _chosen(value, structs)
        fields = {f.encode_name: f for f in struct.fields} if struct is not None else {}
        return {
            key: spelt_out(_of_a_kind(item, fields[key].default), fields[key].type) if key in fields else item
            for key, item in value.items()
        }
    if isinstance(value, list):
        kinds = [t.item_type for t in alternatives if isinstance(t, inspect.ListType)]
        return [spelt_out(item, kinds[0]) for item in value] if kinds else value
    return value


def _of_a_kind(value: Any, default: Any) -> Any:
    settings = getattr(default, "__struct_config__", None)
    if isinstance(value, dict) and settings is not None and settings.tag is not None:
        return {settings.tag_field: settings.tag} | value
    return value


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
