"""The syntax tree of the source text of a function."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from typing import Any

# CPython 3.11 cannot build two syntax trees at once (SystemError: recursion depth mismatch)
_parsing = threading.Lock()


def parsed(function: Any) -> ast.Module | None:
    """The syntax tree of a function; None where there is no source to read."""
    with _parsing:
        try:
            return ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return None
