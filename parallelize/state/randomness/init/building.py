"""The device and dtype of modules that are being built."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from parallelize.base.errors import ModelError, Problem


@contextmanager
def building(device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Iterator[None]:
    """A context in which any module is built on a device and with parameters of a dtype, whatever its class.

        with building("cuda", torch.bfloat16):
            model = Transformer(config)

    Each floating-point parameter gets the dtype when it is assigned to its module, before it is initialized, and stays the object that
    it is, with its class, its hooks and its other names. Buffers keep the dtype that their module gives them: tables of positions
    lose what they are for in a narrow one, and so they would under `torch.set_default_dtype`. Contexts nest, and hold for the thread
    that enters them; of several dtypes the innermost one is given.

    Args:
        device: of parameters and buffers, unless the module names another one. None: as without the context.
        dtype: of floating-point parameters. None: as without the context.

    Returns: a context manager, whose value is None.
    Raises: ModelError `not-floating-point`.
    """
    if dtype is not None and not dtype.is_floating_point:
        fix = "torch.bfloat16, torch.float32, ...; quantize after building"
        raise ModelError(Problem("not-floating-point", f"parameters of {dtype} cannot be initialized", fix=fix))
    with torch.device(device) if device is not None else nullcontext(), _of_dtype(dtype) if dtype else nullcontext():
        yield


class _Entered(threading.local):
    """The dtypes of the contexts that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []


_entered = _Entered()


@contextmanager
def _of_dtype(dtype: torch.dtype) -> Iterator[None]:
    # of all threads; `_convert` looks for the one it is in
    handle = register_module_parameter_registration_hook(_convert)
    _entered.dtypes.append(dtype)
    try:
        yield
    finally:
        _entered.dtypes.pop()
        handle.remove()


def _convert(module: nn.Module, name: str, parameter: Any) -> None:
    """A hook: give a parameter the innermost dtype, in place. A lazy one gets its shape in this dtype later."""
    if not _entered.dtypes or not isinstance(parameter, nn.Parameter) or not parameter.is_floating_point():
        return
    if parameter.dtype != _entered.dtypes[-1]:
        parameter.data = parameter.data.to(_entered.dtypes[-1])
