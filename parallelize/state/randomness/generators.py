"""The states of the random generators of a process: read, set, and made equal over ranks."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private.torch_tensors import in_data_worker

State = dict[str, Any]  # states of the generators: "torch", "python", and "cuda", "numpy" if they are used


def random_state() -> State:
    """The states of this rank's generators: torch's of the CPU and the current CUDA device, Python's, and NumPy's if it
    is imported.

    Returns: "torch", "python", "cuda", "numpy" to a state. `torch.save` and `Checkpointer(user=...)` take it.
    """
    states: State = {"torch": torch.get_rng_state(), "python": _plain(random.getstate())}
    if _uses_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, words, *rest = numpy.random.get_state()
        states["numpy"] = (kind, _words(words.tolist()), *_numbers(rest))
    return states


def set_random_state(state: State) -> None:
    """Set the generators to the states that `random_state` returned. Those that `state` does not have are left as they
    are.

    Args:
        state: what `random_state` returned, here or on another rank.

    Raises: ModelError `not-a-random-state`. Nothing is changed then.
    """
    check_state(state)
    continue_from(state)


def continue_from(state: State) -> None:
    """`set_random_state` without its check, for states that were read or checked in this process."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(_python_state(state["python"]))
    if "cuda" in state and _uses_cuda():
        torch.cuda.set_rng_state(state["cuda"])
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        numpy.random.set_state(_numpy_state(state["numpy"]))


def check_state(state: Any) -> None:
    """Raises: ModelError `not-a-random-state` for what `random_state` did not return. Nothing is set."""
    if not isinstance(state, dict) or not set(state) <= set(_TRIALS):
        what = f"a random state is a dict with some of {', '.join(_TRIALS)}, and this is {str(state)[:80]!r}"
        raise ModelError(Problem("not-a-random-state", what, fix="pass what random_state() returned"))
    for name, value in state.items():
        try:
            _TRIALS[name](value)
        except Exception as error:  # what the generators and the parts of a wrong value raise
            what = f"the state of {name} is {str(value)[:80]!r}: {error}"
            raise ModelError(Problem("not-a-random-state", what, fix="pass what random_state() returned")) from error


def _try_torch(state: Any) -> None:
    torch.Generator("cpu").set_state(state)


def _try_cuda(state: Any) -> None:
    if state.dtype != torch.uint8 or state.ndim != 1 or state.device.type != "cpu":
        raise ValueError("not bytes")
    if _uses_cuda():
        torch.Generator("cuda").set_state(state)


def _try_python(state: Any) -> None:
    random.Random(0).setstate(_python_state(state))


def _try_numpy(state: Any) -> None:
    kind, words, *rest = _numpy_state(state)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.RandomState(0).set_state((kind, words, *rest))


_TRIALS = {"torch": _try_torch, "python": _try_python, "cuda": _try_cuda, "numpy": _try_numpy}
"""By name of a generator: sets another one of its kind, which raises what the generator itself would raise."""


def _python_state(state: Any) -> tuple[int, tuple[int, ...], float | None]:
    version, words, gauss = state
    if gauss is not None and not isinstance(gauss, float):
        raise ValueError(f"{gauss!r} is no number that was drawn")
    return version, tuple(words.tolist()), gauss


def _numpy_state(state: Any) -> tuple[Any, ...]:
    kind, words, *rest = state
    return kind, words.tolist(), *_numbers(rest)


def synchronize_random_state(group: DeviceMesh | dist.ProcessGroup, source: int = 0) -> State:
    """Let the generators of all ranks of a group continue from the state of one of them. Call it on every rank of the
    group.

    Args:
        group: a 1-D mesh, such as `mesh["tp"]`, or a process group: `axis_group(mesh, "dp", "tp")`.
        source: index in the group of the rank whose state the others take.

    Returns: this rank's state before, for `set_random_state`.
    Cost: one broadcast of 10 KB (CPU).
    """
    before = random_state()
    states = [before]
    dist.broadcast_object_list(
        states, group=group.get_group() if isinstance(group, DeviceMesh) else group, group_src=source
    )
    set_random_state(states[0])
    return before


def seed_generators(seed: int, skip: State) -> None:
    """Seed every generator except those in `skip`."""
    if "torch" not in skip:
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
    if "python" not in skip:
        random.seed(seed)
    if "cuda" not in skip and _uses_cuda():
        torch.cuda.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if "numpy" not in skip and numpy is not None:
        numpy.random.seed(seed % 2**32)


def _uses_cuda() -> bool:
    """Whether to handle CUDA's generator; not in a data loader's worker, where CUDA must not be used."""
    return torch.cuda.is_available() and not in_data_worker()


def _plain(state: tuple) -> tuple:
    version, words, gauss = state
    return version, _words(words), gauss


def _words(words: Sequence[int]) -> torch.Tensor:
    """On the CPU, whatever the default device is: on meta they would be lost."""
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def _numbers(values: Sequence[Any]) -> list[Any]:
    return [int(values[0]), int(values[1]), float(values[2])]
