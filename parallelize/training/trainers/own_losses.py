"""A `compute_loss` of the user's over data ranks: what it returns must be this rank's part of the mean over all of
them.

It is where it divides a sum by `num_items_in_batch`, and where it is a multiple of the loss that the model itself
computes, which is such a part already. A mean that it takes of its own would count once for each data rank, without an
error.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem

T = torch.Tensor
_STOCK = ("transformers.", "trl.", "parallelize.")
_COUNT = "num_items_in_batch"
_NEAR = 1e-4  # relative


def own_compute_loss(trainer: Any) -> Callable[..., Any] | None:
    """The `compute_loss` of the user's class, or of the trainer itself; None where it is that of a library."""
    own = vars(trainer).get("compute_loss")
    if own is not None:
        return own
    home = next((cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls)), None)
    return None if home is None or home.__module__.startswith(_STOCK) else vars(home)["compute_loss"]


def reads_count(function: Callable[..., Any]) -> bool:
    """Whether the code of a function reads its `num_items_in_batch`, or the keywords that it came with; True for code
    that is not Python's."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function if inspect.isroutine(function) else type(function).__call__, "__code__", None)
    if code is None:
        return True
    parameters = inspect.signature(function).parameters.values()
    names = {_COUNT, *(parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD)}
    read = (step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD"))
    return any(names & {*value} if isinstance(value, tuple) else value in names for value in read)


@contextmanager
def checked_parts(trainer: Any, count: Any) -> Iterator[None]:
    """Compares the losses of the user that are computed inside with that of the model, where they read no count.

    Raises: ModelError `trainer-option`, on every rank, before its backward.
    """
    own, function = own_compute_loss(trainer), trainer.compute_loss_func
    several = trainer.mesh_view.sample_place[1] > 1
    if own is None and several and function is not None and not reads_count(function):
        raise _refused(trainer, "compute_loss_func")
    if own is None or not several or (count is not None and reads_count(own)):
        yield
        return
    losses: list[Any] = []
    hook = trainer.model.register_forward_hook(lambda module, args, output: losses.append(_loss_of(output)))
    before = vars(trainer).get("compute_loss")
    call = trainer.compute_loss

    def compared(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if not is_multiple(result[0] if isinstance(result, tuple) else result, losses):
            raise _refused(trainer, "compute_loss")
        return result

    trainer.compute_loss = compared
    try:
        yield
    finally:
        hook.remove()
        del trainer.compute_loss
        if before is not None:
            trainer.compute_loss = before


def is_multiple(loss: T, losses: list[Any]) -> bool:
    """Whether a loss is a sum of multiples of these, and of nothing else."""
    own = [value for value in losses if isinstance(value, T) and value.requires_grad]
    if not own or not loss.requires_grad:
        return False
    factors = torch.autograd.grad(loss, own, retain_graph=True, allow_unused=True)
    total = sum(
        float(factor * value.detach()) for factor, value in zip(factors, own, strict=True) if factor is not None
    )
    return abs(total - float(loss.detach())) <= _NEAR * abs(float(loss.detach()))


def _loss_of(output: Any) -> Any:
    return output.get("loss") if hasattr(output, "get") else output[0] if isinstance(output, tuple) else None


def _refused(trainer: Any, setting: str) -> ModelError:
    what = (
        f"{setting} of {type(trainer).__name__} is a mean over one data rank, of which the gradients would be summed "
        "over all"
    )
    fix = f"divide a sum by its {_COUNT}, which counts the labels of all data ranks; or a multiple of outputs.loss"
    return ModelError(Problem("trainer-option", what, fix=fix))
