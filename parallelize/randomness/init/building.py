"""The device and dtype of modules that are being built."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from parallelize.errors import ModelError, Problem


@contextmanager
def building(device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Iterator[None]:
    """A context in which any module is built on a device and with parameters of a dtype, whatever its class.

        with building("cuda", torch.bfloat16):
            model = Transformer(config)

    Each floating-point parameter gets the dtype when it is assigned to its module, before it is initialized. Buffers keep the dtype
    that their module gives them: tables of positions lose what they are for in a narrow one, and so they would under
    `torch.set_default_dtype`. Contexts nest, and hold for the thread that enters them.

    Args:
        device: of parameters and buffers, unless the module names another one. None: as without the context.
        dtype: of floating-point parameters. None: as without the context.

    Returns: a context manager, whose value is None.
    Raises: ModelError `not-floating-point`.
    """
    if dtype is not None and not dtype.is_floating_point:
        fix = "torch.bfloat16, torch.float32, ...; quantize after building"
        raise ModelError(Problem("not-floating-point", f"parameters of {dtype} cannot be initialized", fix=fix))
    handle = register_module_parameter_registration_hook(_convert) if dtype is not None else None
    dtypes = _open.__dict__.setdefault("dtypes", [])
    dtypes.append(dtype if dtype is not None else dtypes[-1] if dtypes else None)
    try:
        with torch.device(device) if device is not None else nullcontext():
            yield
    finally:
        dtypes.pop()
        if handle is not None:
            handle.remove()


_open = threading.local()
"""`dtypes`: of the contexts that this thread is in, the innermost last."""


def _convert(module: nn.Module, name: str, parameter: Any) -> None:
    """Give a parameter the dtype of the innermost context, in place: it may have other names, hooks and a class of its own."""
    dtype = next(reversed(getattr(_open, "dtypes", [])), None)
    if dtype is None or not isinstance(parameter, nn.Parameter) or not parameter.is_floating_point():
        return
    if parameter.dtype != dtype:
        parameter.data = parameter.data.to(dtype)
