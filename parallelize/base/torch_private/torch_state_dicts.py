"""Private names of torch that `torch.distributed.checkpoint.state_dict` is made of (2.2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict as stock
from torch.optim import Optimizer

from parallelize.base.patches import active as patches

Show = Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]
Read = Callable[[nn.Module, tuple[Any, ...], Any], Any]


def show_optimizers(show: Show, read: Read) -> None:
    """Let `get_optimizer_state_dict`, `set_optimizer_state_dict` and their like take others in the place of optimizers.

    Args:
        show: (the model, optimizers) -> what is read and loaded instead of each.
        read: (the model, what is loaded instead of each optimizer, a state dict) -> the state dict that is loaded.
    """
    get, load = stock._get_optim_state_dict, stock._load_optim_state_dict

    @wraps(get)
    def get_shown(model: nn.Module, optimizers: Any, info: Any) -> Any:
        return get(model, show(model, tuple(optimizers)), info)

    @wraps(load)
    def load_shown(model: nn.Module, optimizers: Any, state_dict: Any, info: Any) -> None:
        shown = show(model, tuple(optimizers))
        load(model, shown, read(model, shown, state_dict), info)

    patches.change(stock, "_get_optim_state_dict", lambda: get_shown, show_optimizers)
    patches.change(stock, "_load_optim_state_dict", lambda: load_shown, show_optimizers)


def start_state(optimizer: Optimizer) -> None:
    """Let an optimizer that has not stepped have its state, by a step that changes no parameter."""
    stock._init_optim_state(optimizer)


def stock_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()`, also where `torch.distributed.checkpoint` has replaced that method."""
    return stock._state_dict_fn(optimizer, "state_dict")()


def load_stock_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state_dict)`, also where `torch.distributed.checkpoint` has replaced that method."""
    stock._state_dict_fn(optimizer, "load_state_dict")(state_dict=state_dict)
