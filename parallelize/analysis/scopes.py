"""Which module is running, in forward and in backward.

In forward a stack of modules tells. In backward the running autograd node has the number that it got when it was made, and
the modules that were entered and left in between were written down with the numbers of that time. No node is hooked.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from parallelize import _torch_private as private


class Scopes:
    """Follows the modules of one model while `watching`."""

    def __init__(self, root: nn.Module):
        self.names = {id(module): name for name, module in reversed(list(root.named_modules()))}
        self.root = root
        self._stack: list[str] = []
        self._numbers: list[int] = []  # of autograd nodes; each with the module that was running from there on
        self._modules: list[str | None] = []
        self.parameters = {id(p): name for name, p in root.named_parameters()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self.names.get(id(module), self._stack[-1] if self._stack else ""))
        self._mark()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._numbers.append(private.sequence_number())
        self._modules.append(self._stack[-1] if self._stack else None)

    @property
    def now(self) -> str | None:
        """The name of the running module; "" is the root, None is outside of it."""
        if self._stack:  # also what is computed again in backward
            return self._stack[-1]
        node = private.running_node()
        return None if node is None else self._of_node(node)

    def _of_node(self, node: Any) -> str | None:
        variable = getattr(node, "variable", None)
        if variable is not None:
            name = self.parameters.get(id(variable))
            return name.rpartition(".")[0] if name is not None else None
        place = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._modules[place] if place >= 0 else None
