"""Objects that the file of a run names: `package.module:name`, or a class of a package."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from parallelize.base.errors import LaunchError, Problem, did_you_mean


def object_of(text: str, default_module: str = "") -> Any:
    """The object of a text such as `my_data:rows`. Without a colon it is one of `default_module`.

    Raises: LaunchError `no-such-object`.
    """
    module, colon, name = text.rpartition(":")
    module = module if colon else default_module
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as under `python -m`
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and not (module == error.name or module.startswith(error.name + ".")):
            raise  # the module exists, and imports one that does not
        raise LaunchError(
            Problem("no-such-object", f"no module is called {module!r}", fix="package.module:name")
        ) from None
    except AttributeError:
        names = [known for known in dir(importlib.import_module(module)) if not known.startswith("_")]
        raise LaunchError(
            Problem("no-such-object", f"{module} has no {name!r}", fix=did_you_mean(name, names))
        ) from None
