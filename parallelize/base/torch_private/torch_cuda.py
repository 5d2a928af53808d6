"""Private names of torch for CUDA graphs, and what a capture that fails leaves behind."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

_WAIT = "called a synchronizing CUDA operation"  # of torch's warning in the mode that `noted_waits` sets
_MODE = "Synchronization debug mode"  # of its warning about that mode


@contextmanager
def noted_waits(places: list[str]) -> Iterator[None]:
    """A context that adds to `places` where the host waits for a GPU, as "file:line". (`set_sync_debug_mode`: 1.10.)"""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if _WAIT in str(warning.message):
            places.append(f"{warning.filename}:{warning.lineno}")
        elif _MODE not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def captured(run: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of what `run` starts on `device`.

    Raises: what `run` raises, or RuntimeError if it cannot be captured. The stream is then what it was; so are the
        allocator and the
    random generator, which torch leaves as they are in a capture (`_cuda_endAllocateToPool`, 2.1;
    `graphsafe_set_state`, 2.4).
    """
    graph, stream = torch.cuda.CUDAGraph(), _capture_stream(device)
    generator = torch.cuda.default_generators[stream.device_index]
    before = generator.clone_state()
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream), _no_collection():
            # other threads may allocate meanwhile: they are not captured
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
    except BaseException:
        with suppress(RuntimeError):  # the end of the capture has closed its pool
            torch._C._cuda_endAllocateToPool(stream.device_index, graph.pool())
        generator.graphsafe_set_state(before)
        raise
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream of a device for all captures: PyTorch keeps a workspace for cuBLAS (32 MiB on Hopper) for each that
    has run a matmul.

    That of this stream is made here, not in a capture, whose memory pool it would keep.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        torch.ones(1, 1, device=device).mm(torch.ones(1, 1, device=device))
    return stream


@contextmanager
def _no_collection() -> Iterator[None]:
    """A context without garbage collections: one that frees memory of the GPU would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
