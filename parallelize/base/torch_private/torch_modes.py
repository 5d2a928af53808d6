"""Private names of torch for its modes, which intercept the operations of one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode


def modes_of_this_thread() -> Callable[[], Any]:
    """A context manager for another thread, in which the modes that are active in this one intercept its operations too.

    The modes are not entered a second time, so what they have counted is kept (the stacks of both kinds: since 2.0).
    """
    functions, dispatch = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()

    @contextmanager
    def active() -> Iterator[None]:
        for mode in functions:
            _push_mode(mode)
        for mode in dispatch:
            _push_dispatch_mode(mode)
        try:
            yield
        finally:
            for mode in reversed(dispatch):
                _pop_dispatch_mode(getattr(mode, "_mode_key", None))
            for _ in functions:
                _pop_mode()

    return active
