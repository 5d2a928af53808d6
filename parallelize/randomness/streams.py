"""Named random streams for user code: numbers that are equal along some mesh axes and differ along others.

    streams = Streams(seed=1, mesh=mesh)
    streams.declare("augment", differs_over=("dp",))
    with streams("augment"):
        image = flip(image) if random.random() < 0.5 else image

Inside the context, torch's CPU and CUDA generators, Python's `random` and NumPy's generator (if NumPy is imported) have the
stream's state; outside, their previous state. The seed of a stream comes from (seed, name, this rank's indices along the axes
over which it differs), so ranks agree along all other axes. The state of a stream is small.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.data
from torch.distributed.device_mesh import DeviceMesh

from parallelize.errors import MeshError, ModelError, Problem, did_you_mean
from parallelize.ops.random.counter import key

State = dict[str, Any]  # saved states of the generators: "torch", "python", and "cuda", "numpy" if they are used


class Streams:
    """Random streams by name.

    Args:
        seed: any integer, the same on every rank.
        mesh: the mesh whose axes `differs_over` may name.

    No communication.
    """

    def __init__(self, seed: int, mesh: DeviceMesh | None = None):
        self.seed, self.mesh = seed, mesh
        self._over: dict[str, tuple[str, ...]] = {}
        self._states: dict[str, State] = {}
        self._open: list[str] = []

    def declare(self, name: str, differs_over: Sequence[str] = ()) -> None:
        """Declare a stream.

        Args:
            name: the name of the stream.
            differs_over: the mesh axes along which ranks draw different numbers. Empty (the default): all ranks draw
                the same numbers.

        Raises: MeshError `unknown-axis`; ModelError `stream-declared` if the name is declared with other axes.
        """
        axes = tuple(differs_over)
        known = tuple(self.mesh.mesh_dim_names or ()) if self.mesh is not None else ()
        for axis in axes:
            if axis not in known:
                what = f"stream {name!r} is declared to differ over {axis!r}, and the mesh has the axes {list(known)}"
                fix = did_you_mean(axis, known) if known else "give a mesh"
                raise MeshError(Problem("unknown-axis", what, fix=fix))
        if self._over.setdefault(name, axes) != axes:
            what = f"stream {name!r} differs over {list(self._over[name])}, and is declared again with {list(axes)}"
            raise ModelError(Problem("stream-declared", what, fix="use another name"))

    @property
    def declared(self) -> dict[str, tuple[str, ...]]:
        """Stream -> the axes over which it differs."""
        return dict(self._over)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A context that draws from a stream. Streams nest in any order; each continues from its last state.

        Raises: ModelError `unknown-stream`.
        """
        if name not in self._over:
            fix = f"declare it first; {did_you_mean(name, self._over)}" if self._over else "streams.declare(name)"
            raise ModelError(Problem("unknown-stream", f"no stream is called {name!r}", fix=fix))
        outside = generator_states()
        if self._open:
            self._states[self._open[-1]] = outside
        self._open.append(name)
        try:
            self._enter(name)
            yield
        finally:
            self._states[name] = generator_states()
            self._open.pop()
            restore_generators(self._states[self._open[-1]] if self._open else outside)

    def _enter(self, name: str) -> None:
        saved = self._states.get(name, {})
        seed_generators(self._seed_of(name), skip=saved)
        restore_generators(saved)

    def _seed_of(self, name: str) -> int:
        return key(self.seed, f"stream {name}", *self._indices(name)).start & (2**63 - 1)

    def _indices(self, name: str) -> list[int]:
        """This rank's indices along the axes over which a stream differs."""
        if self.mesh is None:
            return []
        return [self.mesh.get_local_rank(axis) for axis in self._over[name]]

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: numbers, text and small tensors, which `torch.load(weights_only=True)` can read.

        Ranks with the same indices along a stream's axes have the same state of that stream.
        """
        return {
            "seed": self.seed,
            "over": {name: list(axes) for name, axes in self._over.items()},
            "places": {name: self._indices(name) for name in self._over},
            "states": {name: dict(state) for name, state in self._states.items()},
        }

    def check_closed(self) -> None:
        """Raises: ModelError `stream-open` inside a stream."""
        if self._open:
            raise ModelError(
                Problem("stream-open", f"stream {self._open[-1]!r} is open", fix="load outside of streams")
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()`.

        A stream whose saved indices are not this rank's (another mesh, or another rank's file) starts again from its seed.

        Args:
            state: the dict that `state_dict()` returned. Its seed and streams replace those of this object.

        Raises: ModelError `stream-open` inside a stream; MeshError `unknown-axis` if a saved stream differs over an
            axis that the mesh does not have.
        """
        self.check_closed()
        self.seed = int(state["seed"])
        self._over = {name: tuple(axes) for name, axes in state["over"].items()}
        for name, axes in self._over.items():
            Streams(self.seed, self.mesh).declare(name, axes)
        same = {name for name in self._over if list(state["places"][name]) == self._indices(name)}
        self._states = {name: dict(saved) for name, saved in state["states"].items() if name in same}


def generator_states() -> State:
    """The current states of torch's, Python's and NumPy's generators."""
    states: State = {"torch": torch.get_rng_state(), "python": _plain(random.getstate())}
    if _uses_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, words, *rest = numpy.random.get_state()
        states["numpy"] = (kind, torch.tensor(words.tolist(), dtype=torch.int64), *_numbers(rest))
    return states


def restore_generators(state: State) -> None:
    """Set the generators to saved states."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
    if "cuda" in state and _uses_cuda():
        torch.cuda.set_rng_state(state["cuda"])
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        kind, words, *rest = state["numpy"]
        numpy.random.set_state((kind, words.tolist(), *rest))


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
    return torch.cuda.is_available() and torch.utils.data.get_worker_info() is None


def _plain(state: tuple) -> tuple:
    version, words, gauss = state
    return version, torch.tensor(words, dtype=torch.int64), gauss


def _numbers(values: Sequence[Any]) -> list[Any]:
    return [int(values[0]), int(values[1]), float(values[2])]
