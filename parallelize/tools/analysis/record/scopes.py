"""Which module is running, in forward and in backward.

In forward, a stack of modules answers this. In backward, the sequence number of the running autograd node is compared with the
sequence numbers at which forward entered and left modules. No hooks are put on nodes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from parallelize.base.torch_private import torch_tensors as private


class Scopes:
    """Follows the modules of one model while `watching`."""

    def __init__(self, root: nn.Module):
        self.names = {id(module): name for name, module in reversed(list(root.named_modules()))}
        self.root = root
        self._stack: list[str] = []
        self._numbers: list[int] = []  # sequence numbers of autograd nodes, ascending
        self._modules: list[str | None] = []  # for each of them, the module that ran from there on
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
    def current(self) -> str | None:
        """The name of the running module; "" is the root, None means that no module runs."""
        if self._stack:  # also during recompute in backward
            return self._stack[-1]
        node = private.running_node()
        return None if node is None else self._module_of(node)

    def _module_of(self, node: Any) -> str | None:
        variable = getattr(node, "variable", None)
        if variable is not None:
            name = self.parameters.get(id(variable))
            return name.rpartition(".")[0] if name is not None else None
        index = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._modules[index] if index >= 0 else None
