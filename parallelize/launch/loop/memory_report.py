"""What a rank had in memory when an allocation failed, beside what `explain` predicted."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from parallelize.base.errors import LaunchError, Problem, did_you_mean
from parallelize.base.torch_private import torch_tensors as private
from parallelize.launch.preflight.prediction import Summary

_OF_CPU = ("DefaultCPUAllocator", "not enough memory")
MOST = 20


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of an allocator; of a pipeline, that of the stage that failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)) or any(text in str(cause) for text in _OF_CPU):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def write_memory_report(folder: Path, rank: int, device: str, predicted: Summary | None, pp_rank: int) -> Path:
    """Write `out-of-memory-rank-N.txt`, and on a GPU the allocator's snapshot beside it.

    Returns: the text's path. Raises: OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"out-of-memory-rank-{rank}.txt"
    path.write_text("\n".join(_lines(device, predicted, pp_rank)) + "\n", encoding="utf-8")
    if device.startswith("cuda"):
        private.dump_memory_snapshot(str(path.with_suffix(".pickle")))
    return path


def _lines(device: str, predicted: Summary | None, pp_rank: int) -> list[str]:
    lines = [f"used on {device}: {used_bytes(device) / 1e6:,.0f} MB at its highest"]
    if predicted is not None and predicted.memory:
        parts = predicted.memory_of(pp_rank)
        lines.append(f"predicted by `explain` ({predicted.setting}): {parts['peak'] / 1e6:,.0f} MB at its highest")
        lines += [f"  {name}: {value / 1e6:,.0f} MB" for name, value in parts.items() if name != "peak" and value]
    lines += ["", "the largest tensors:", *_largest()]
    return lines


def _largest() -> list[str]:
    """Tensors that Python knows, alike ones together, the largest first."""
    counts: Counter[tuple[int, str]] = Counter()
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            counts[(thing.numel() * thing.element_size(), f"{list(thing.shape)} {thing.dtype} on {thing.device}")] += 1
    ordered = sorted(counts.items(), key=lambda item: -item[0][0] * item[1])[:MOST]
    return [f"  {count} x {size / 1e6:,.1f} MB  {text}" for (size, text), count in ordered]


# -- named objects ---------------------------------------------------------------------------------------------------
# Objects that the file of a run names: `package.module:name`, or a class of a package.


def object_of(text: str, default_module: str = "") -> Any:
    """The object of a text such as `my_data:rows`. Without a colon it is one of `default_module`.

    Raises: LaunchError `no-such-object`.
    """
    module, colon, name = text.rpartition(":")
    module = module if colon else default_module
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as under `python -m`
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and not (module == error.name or module.startswith(error.name + ".")):
            raise  # the module exists, and imports one that does not
        raise LaunchError(
            Problem("no-such-object", f"no module is called {module!r}", fix="package.module:name")
        ) from None
    except AttributeError:
        names = [known for known in dir(importlib.import_module(module)) if not known.startswith("_")]
        raise LaunchError(
            Problem("no-such-object", f"{module} has no {name!r}", fix=did_you_mean(name, names))
        ) from None


# -- process memory --------------------------------------------------------------------------------------------------
# The highest memory of this process so far: of its GPU, or of the process itself.


def used_bytes(device: str) -> float:
    """Bytes: of tensors on a GPU; else the resident set of the process, with Python and libraries."""
    if device.startswith("cuda"):
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)
