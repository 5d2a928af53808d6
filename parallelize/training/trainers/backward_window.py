"""The backward passes of one optimizer step, which a trainer runs one call at a time: ranks sum gradients after the last."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from parallelize.state.loop.accumulate import accumulate_gradients
from parallelize.state.records import applied, record_of


class BackwardWindow:
    """`accumulate_gradients` over several calls, of which each says whether it is the last one.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self._open: ExitStack | None = None

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around one backward pass. An error ends the window, and drops what was to be summed."""
        if self._open is None and not last and self._sums():
            self._open = ExitStack()
            self._open.enter_context(accumulate_gradients(self.module))
        try:
            yield
        except BaseException:
            window, self._open = self._open, None
            if window is not None:
                window.__exit__(*sys.exc_info())
            raise
        if last and self._open is not None:
            window, self._open = self._open, None
            window.close()

    def _sums(self) -> bool:
        """Whether ranks sum any gradients of this model."""
        return record_of(self.module) is not None or applied(self.module).data is not None
