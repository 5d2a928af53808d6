"""What is given as a module is one, and not its class or a config."""

from __future__ import annotations

from typing import Any

from torch import nn

from parallelize.base.errors import ModelError, Problem


def require_module(module: Any) -> None:
    """Raises: ModelError `not-a-module`."""
    if isinstance(module, nn.Module):
        return
    is_class = isinstance(module, type)
    what = f"the class {module.__name__} was given" if is_class else f"a {type(module).__name__} was given"
    fix = f"an instance: {module.__name__}(...)" if is_class else "the nn.Module: of a ParallelModel `parallel.module`"
    raise ModelError(Problem("not-a-module", f"{what} in the place of a module", fix=fix))
