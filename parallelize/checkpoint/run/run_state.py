"""Random state and position of a run: what a checkpoint contains besides weights and optimizer.

steps done, clock of dropout    numbers, the same on every rank
streams (`Streams`)             by stream and coordinates along its axes, from the first rank at those coordinates
generators of torch, Python     by rank: restored on the same mesh; on another mesh, seeded from what was saved and from the
and NumPy                       data rank, so that data ranks draw different numbers
position in the data            by data rank: ranks along cp have the samples of theirs
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.digests import digest_of
from parallelize.base.files.strict_json import write_json
from parallelize.base.mesh import DATA_AXES, SAMPLE_AXES
from parallelize.checkpoint.format.device_pieces import bytes_of
from parallelize.checkpoint.format.json_decoder import decode
from parallelize.checkpoint.format.json_encoder import TensorSink, TensorSource, encode
from parallelize.checkpoint.run.local_tensors import ModelOnMesh
from parallelize.state.randomness.dropout.draw_hooks import draw_clock
from parallelize.state.randomness.generators import random_state, seed_generators, set_random_state
from parallelize.state.randomness.streams import Streams
from parallelize.state.stored_slices import data_rank


def collect_position(on_mesh: ModelOnMesh, pipeline: Any) -> dict[str, Any]:
    """Numbers that are the same on every rank."""
    clock = draw_clock(on_mesh.module)
    return {
        "steps_done": pipeline.steps_done if pipeline is not None else None,
        "clock": clock.state_dict() if clock is not None else None,
    }


def restore_position(on_mesh: ModelOnMesh, pipeline: Any, state: dict[str, Any]) -> None:
    """Set what `collect_position` has saved, where the run has it."""
    clock = draw_clock(on_mesh.module)
    if pipeline is not None and state.get("steps_done") is not None:
        pipeline.steps_done = int(state["steps_done"])
    if clock is not None and state.get("clock") is not None:
        clock.load_state_dict(state["clock"])


def collect_generators(on_mesh: ModelOnMesh, sink: TensorSink) -> dict[str, Any]:
    """This rank's generators."""
    rank = rank_of(on_mesh)
    return {str(rank): encode(random_state(), f"generators.{rank}", sink)}


def decoded_generators(
    on_mesh: ModelOnMesh, saved: dict[str, Any], same_mesh: bool, tensors: TensorSource
) -> Callable[[], None]:
    """A function that sets the generators: to this rank's saved states on the same mesh, else to new ones."""
    own = saved.get(str(rank_of(on_mesh))) if same_mesh else None
    if own is not None:
        states = decode(own, tensors, "generators")
        return lambda: set_random_state(states)
    data_index, _ = _data_rank(on_mesh)
    first = [decode(saved[key], tensors, "generators") for key in sorted(saved)[:1]]
    digest = digest_of(repr([bytes_of(state["torch"].contiguous()).hex() for state in first] + [data_index]).encode())
    return lambda: seed_generators(int(digest, 16) & (2**63 - 1), skip={})


def collect_streams(on_mesh: ModelOnMesh, streams: Streams | None, sink: TensorSink) -> dict[str, Any]:
    """The streams of which this rank is the first at its coordinates."""
    if streams is None:
        return {}
    state = streams.state_dict()
    encoded = {}
    for name, stream in state["states"].items():
        others = [index for axis, index in on_mesh.coordinates.items() if axis not in state["over"][name]]
        if not any(others):
            coordinates = [int(index) for index in state["places"][name]]
            key = write_json([name, coordinates]).decode()
            encoded[key] = encode(stream, f"streams.{name}.{coordinates}", sink)
    return {"seed": state["seed"], "over": state["over"], "states": encoded}


def decoded_streams(streams: Streams, saved: dict[str, Any], tensors: TensorSource) -> dict[str, Any]:
    """A state for `Streams.load_state_dict`: each stream continues from the rank at these coordinates of its axes.

    An axis that one of the meshes does not have counts as an axis of size 1. Ranks at coordinates that did not exist
    before restart their streams from the seed.
    """
    axes_here = tuple(streams.mesh.mesh_dim_names or ()) if streams.mesh is not None else ()
    saved_over = {name: tuple(axes) for name, axes in saved["over"].items()}
    over = {name: tuple(axis for axis in axes if axis in axes_here) for name, axes in saved_over.items()}
    over |= streams.declared
    coordinates = {axis: streams.mesh.get_local_rank(axis) for axis in axes_here} if streams.mesh is not None else {}
    states = {}
    for name, axes in saved_over.items():
        new_indices = [coordinates[axis] for axis in over[name] if axis not in axes]
        key = write_json([name, [coordinates.get(axis, 0) for axis in axes]]).decode()
        if key in saved["states"] and not any(new_indices):
            states[name] = decode(saved["states"][key], tensors, f"streams.{name}")
    places = {name: [coordinates[axis] for axis in axes] for name, axes in over.items()}
    return {"seed": saved["seed"], "over": over, "places": places, "states": states}


def collect_data(on_mesh: ModelOnMesh, data: Any, sink: TensorSink) -> dict[str, Any]:
    """The position in the data of each data rank, from the first rank that has these samples."""
    if data is None:
        return {}
    state = data.state_dict()
    data_index, _ = _sample_rank(on_mesh)
    others = [index for axis, index in on_mesh.coordinates.items() if axis not in SAMPLE_AXES]
    return {} if any(others) else {str(data_index): encode(state, f"data.{data_index}", sink)}


def decoded_data(
    on_mesh: ModelOnMesh, data: Any, saved: dict[str, Any], tensors: TensorSource, saved_mesh: Any = None
) -> Any:
    """The position for `data.load_state_dict` on this data rank: the ranks along cp, which have the same samples, get the same.

    A `data` that can merge states gets those of all data ranks of the saved run, so that it continues on any number of them.

    Args:
        saved_mesh: (axis, size) pairs of the mesh of the saved run. None: one without `cp`.

    Raises: CheckpointError `data-position` where data ranks saved different positions and their number is another one now.
    """
    data_index, count = _sample_rank(on_mesh)
    states = _of_data_ranks(saved, dict(saved_mesh or ()))
    if hasattr(data, "merge_states"):
        return data.merge_states([decode(state, tensors, "data") for state in states])
    if count != len(states) and any(state != states[0] for state in states):
        what = f"{len(states)} data ranks saved different positions in the data, and there are {count} now"
        fix = "use a position that does not depend on the rank (GlobalBatches, IterableBatches), or resume on as many data ranks"
        raise CheckpointError(Problem("data-position", what, fix=fix))
    return decode(states[data_index if count == len(states) else 0], tensors, "data")


def _of_data_ranks(saved: dict[str, Any], sizes: dict[str, int]) -> list[Any]:
    """One saved state of each data rank. Earlier versions saved one of each rank along cp too, which changes fastest."""
    states = [saved[index] for index in sorted(saved, key=int)]
    data_ranks = prod(sizes.get(axis, 1) for axis in SAMPLE_AXES)
    return states[:: sizes["cp"]] if len(states) == data_ranks * sizes.get("cp", 1) != data_ranks else states


DATA = tuple(dict.fromkeys((*DATA_AXES, "dp_shard")))


def _data_rank(on_mesh: ModelOnMesh) -> tuple[int, int]:
    """(index, number) of this rank among the data ranks."""
    return data_rank(on_mesh.mesh, DATA) if on_mesh.mesh is not None else (0, 1)


def _sample_rank(on_mesh: ModelOnMesh) -> tuple[int, int]:
    """(index, number) of this rank among those that have different samples."""
    return data_rank(on_mesh.mesh, SAMPLE_AXES) if on_mesh.mesh is not None else (0, 1)


def rank_of(on_mesh: ModelOnMesh) -> int:
    """This rank's index in its mesh."""
    return on_mesh.spec.rank(**on_mesh.coordinates) if on_mesh.spec is not None else 0
