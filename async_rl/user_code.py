"""What a user has written and a setting names as `module:attribute`, importable from the current folder."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from async_rl.errors import UserError, nearest

Form = Literal["def", "async def", "either"]


def load(key: str, name: str, signature: str, form: Form = "def") -> Callable[..., Any]:
    """The function `name` of the setting `key`; UserError that says what is there instead.

    signature: how it is written, "grade(task, trajectory)"."""
    setting = f"{key} = '{name}'"
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise UserError(f"{setting}: write module:attribute")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that a file of the user's never replaces a library
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{setting}: {module_name} needs the module '{error.name}'") from None
        beside = nearest(module_name, [path.stem for path in Path(here).glob("*.py")])
        raise UserError(f"{setting}: no module '{error.name}' in {here} or installed{beside}") from None
    except Exception as error:  # the user's code runs at import, and any error of it is the user's to mend
        raise UserError(f"{setting}: importing it raises {type(error).__name__}: {error}") from None
    function = getattr(module, attribute, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{setting}: {module.__file__} has no '{attribute}'{nearest(attribute, names)}")
    written = "async def" if inspect.iscoroutinefunction(function) else "def"
    if not callable(function) or form not in ("either", written):
        plain = "`async def" if form == "async def" else "a plain `def"
        raise UserError(f"{setting}: write it as {plain} {attribute}{signature[signature.index('(') :]}`")
    found: Callable[..., Any] = function
    return found
