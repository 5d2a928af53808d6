"""Local gradients that a backward pass has completed, moved to their parameters together when the pass ends.

A hook in Python costs about 6 us where it runs between the ops of a backward pass, and one on every parameter was a third of
the host cost of a plan. So what autograd calls at each leaf is a C function, `setattr`, which records the leaf in an object's
dictionary; the work is done in one loop at the end, where it costs a tenth of that. The class of that object decides what
`setattr` does: it runs Python at the first leaf of a pass, which asks for the end of the pass, and none at the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch

from parallelize.base.torch_private import torch_tensors as private


class Receiver(Protocol):
    """Takes the gradient of a leaf. It is the leaf's attribute `receiver`."""

    param: Any

    def __call__(self, leaf: torch.Tensor) -> None:
        """Take the gradient out of the leaf now, in the middle of a pass."""

    def receive(self, grad: torch.Tensor) -> None:
        """Take a gradient while the pass ends."""


class GradientCollector:
    """The completed gradients of one model.

    Args:
        at_end: called with the number of a pass that ends; it calls `receive_all`. None: that alone.
    """

    def __init__(self, at_end: Callable[[int], None] | None = None) -> None:
        self._recorder: _Recorder = _Idle()
        object.__setattr__(self._recorder, "at_end", at_end)

    def hook(self, leaf: torch.Tensor, receiver: Receiver) -> Callable[[torch.Tensor], None]:
        """What is called with `leaf` when its gradient is complete; `receiver` then gets the gradient when the pass ends.

        A pass that adds to a gradient which exists already delivers at once, so that no second gradient is stored. A pass
        that fails adds nothing.
        """
        leaf.receiver = receiver  # type: ignore[attr-defined]
        return partial(setattr, self._recorder, f"leaf{next(_NUMBERS)}")

    def receive_all(self) -> None:
        """Let the receivers have what is recorded so far."""
        _receive(self._recorder.close())

    def __reduce__(self):
        return GradientCollector, ()


_NUMBERS = count()


class _Recorder:
    """Its attributes are the leaves that the running pass has completed."""

    __slots__ = ("__dict__", "at_end")
    at_end: Callable[[int], None] | None

    def close(self) -> list[Any]:
        """The recorded leaves, which are forgotten.

        In this order no leaf is lost of a pass that another thread runs: it is in the old dictionary, or begins to record anew.
        """
        object.__setattr__(self, "__class__", _Idle)
        leaves = self.__dict__
        object.__setattr__(self, "__dict__", {})
        return list(leaves.values())


class _Idle(_Recorder):
    """No pass records."""

    __slots__ = ()

    def __setattr__(self, name: str, leaf: Any) -> None:
        backward = private.backward_id()
        if backward == -1 or leaf.receiver.param.grad is not None:
            leaf.receiver(leaf)
            return
        object.__setattr__(self, "__class__", _Recording)
        setattr(self, name, leaf)
        private.call_after_backward(_EndOfPass(self, backward))


class _Recording(_Recorder):
    """A pass records: `setattr` is that of `object`, without Python."""

    __slots__ = ()


class _EndOfPass:
    """Called at the end of a pass; deleted without a call when the pass fails."""

    __slots__ = ("_backward", "_recorder")

    def __init__(self, recorder: _Recorder, backward: int):
        self._recorder: _Recorder | None = recorder
        self._backward = backward

    def __call__(self) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        if recorder.at_end is None:
            _receive(recorder.close())
        else:
            recorder.at_end(self._backward)

    def __del__(self) -> None:
        if self._recorder is not None:
            _drop(self._recorder.close())


def _receive(leaves: list[Any]) -> None:
    try:
        for leaf in leaves:
            grad = leaf.grad
            if grad is not None:  # None: the op defers this gradient
                leaf.grad = None
                leaf.receiver.receive(grad)
    except BaseException:
        _drop(leaves)
        raise


def _drop(leaves: list[Any]) -> None:
    for leaf in leaves:
        leaf.grad = None
