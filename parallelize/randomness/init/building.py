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
    thread = threading.get_ident()

    def convert(module: nn.Module, name: str, parameter: Any) -> Any:
        is_wrong = isinstance(parameter, nn.Parameter) and parameter.is_floating_point() and parameter.dtype != dtype
        if not is_wrong or threading.get_ident() != thread:
            return None
        converted = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
        converted.__dict__.update(parameter.__dict__)
        return converted

    handle = register_module_parameter_registration_hook(convert) if dtype is not None else None
    try:
        with torch.device(device) if device is not None else nullcontext():
            yield
    finally:
        if handle is not None:
            handle.remove()
