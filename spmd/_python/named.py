"""Objects of ours that stand for functions. They are pickled and copied by name, as functions are."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from spmd.errors import Fault


class ByName:
    """What a decorator of ours returns. `functools.update_wrapper` gave it the module and the name of its function."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> str:
        """The name under which a module has this very object.

        Raises:
          PicklingError: If no module has it: it was made inside a function, or is hidden by another object.
        """
        module = sys.modules.get(self.__module__)
        name: str = getattr(self, "__qualname__", "")
        if _at(module, name) is self:
            return name
        own = [key for key, value in list(vars(module).items()) if value is self] if module is not None else []
        if own:
            return own[0]
        rule = "a kernel is pickled by its name in a module, as a function is, and no module has this one."
        got = [f"{name} of {self.__module__}" + (", made inside a function" if "<locals>" in name else "")]
        advice = "make it at the top of a module, or send what it is made of and make it there"
        raise pickle.PicklingError(str(Fault(rule, call=repr(self), got=got, advice=advice)))


def _at(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def module_name(path: str | Path) -> tuple[str, str]:
    """The name under which Python imports a file, and the folder from which it does.

    A folder with an `__init__.py` is a package, and a file in it is a module of the package. `from . import layers`
    starts from that name.
    """
    found = Path(path).resolve()
    folder, name = found.parent, Path(path).stem
    while (folder / "__init__.py").is_file():
        folder, name = folder.parent, f"{folder.name}.{name}"
    return name, str(folder)
