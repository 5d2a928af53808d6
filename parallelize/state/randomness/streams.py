"""Named random streams for user code: numbers that are equal along some mesh axes and differ along others.

    streams = Streams(seed=1, mesh=mesh)
    streams.declare("augment", differs_over=("dp",))
    with streams("augment"):
        image = flip(image) if random.random() < 0.5 else image

Inside the context, torch's CPU and CUDA generators, Python's `random` and NumPy's generator (if NumPy is imported) have
the stream's state; outside, their previous state. The seed of a stream comes from (seed, name, this rank's indices
along the axes over which it differs), so ranks agree along all other axes. The state of a stream is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from parallelize.base.errors import MeshError, ModelError, Problem, did_you_mean
from parallelize.comm.mesh_view import AnyMesh, MeshView
from parallelize.ops.random.counter import key
from parallelize.state.randomness.generators import State, check_state, continue_from, random_state, seed_generators


class Streams(Mapping[str, State]):
    """Random streams by name: a mapping of the declared names to the states in which they continue, as `random_state`
    gives them.

    `streams[name] = state` lets a stream continue from a state of this rank; ranks that must agree assign equal states.

    Args:
        seed: any integer, the same on every rank.
        mesh: the mesh whose axes `differs_over` may name.

    No communication.
    """

    def __init__(self, seed: int, mesh: AnyMesh | None = None):
        self.seed, self.mesh = seed, MeshView.of(mesh) if mesh is not None else None
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
        known = self.mesh.spec.names if self.mesh is not None else ()
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

    def __len__(self) -> int:
        return len(self._over)

    def __contains__(self, name: object) -> bool:
        return name in self._over

    def __iter__(self) -> Iterator[str]:
        return iter(self._over)

    def __getitem__(self, name: str) -> State:
        """The state in which a stream continues; inside it, that of the generators now. Raises: ModelError
        `unknown-stream`."""
        self._check_declared(name)
        if self._open and self._open[-1] == name:
            return random_state()
        if name not in self._states:  # not drawn from yet
            outside = random_state()
            self._enter(name)
            self._states[name] = random_state()
            continue_from(outside)
        return dict(self._states[name])

    def __setitem__(self, name: str, state: State) -> None:
        """Let a stream continue from a state; generators that `state` does not have continue from their own.

        Raises: ModelError `unknown-stream`, `not-a-random-state`; `stream-open` inside of it.
        """
        self._check_declared(name)
        if name in self._open:
            what = f"stream {name!r} is open, and its state is set"
            raise ModelError(Problem("stream-open", what, fix="set it outside; inside, set_random_state(state)"))
        check_state(state)
        self._states[name] = self._states.get(name, {}) | state

    def _check_declared(self, name: str) -> None:
        if name not in self._over:
            fix = f"declare it first; {did_you_mean(name, self._over)}" if self._over else "streams.declare(name)"
            raise ModelError(Problem("unknown-stream", f"no stream is called {name!r}", fix=fix))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A context that draws from a stream. Streams nest in any order; each continues from its last state.

        Raises: ModelError `unknown-stream`.
        """
        self._check_declared(name)
        outside = random_state()
        if self._open:
            self._states[self._open[-1]] = outside
        self._open.append(name)
        try:
            self._enter(name)
            yield
        finally:
            self._states[name] = random_state()
            self._open.pop()
            continue_from(self._states[self._open[-1]] if self._open else outside)

    def _enter(self, name: str) -> None:
        saved = self._states.get(name, {})
        seed_generators(self._seed_of(name), skip=saved)
        continue_from(saved)

    def _seed_of(self, name: str) -> int:
        return key(self.seed, f"stream {name}", *self._indices(name)).start & (2**63 - 1)

    def _indices(self, name: str) -> list[int]:
        """This rank's indices along the axes over which a stream differs."""
        if self.mesh is None:
            return []
        return [self.mesh.index(axis) for axis in self._over[name]]

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

        A stream whose saved indices are not this rank's (another mesh, or another rank's file) starts again from its
        seed.

        Args:
            state: the dict that `state_dict()` returned. Its seed and streams replace those of this object.

        Raises: ModelError `stream-open` inside a stream, `not-a-random-state`; MeshError `unknown-axis` if a saved
            stream differs over an axis that the mesh does not have. Nothing is changed then.
        """
        self.check_closed()
        loaded = Streams(int(state["seed"]), self.mesh)
        for name, axes in state["over"].items():
            loaded.declare(name, axes)
        same = {name for name in loaded if list(state["places"][name]) == loaded._indices(name)}
        for name in same & state["states"].keys():
            loaded[name] = state["states"][name]
        self.seed, self._over, self._states = loaded.seed, loaded._over, loaded._states
