"""Randomness and position of a run: what a checkpoint keeps beside weights and optimiser.

steps done, dropout's clock     numbers, the same on every rank
streams (`Streams`)             by stream and place along its axes, from the first rank of each place
torch's, Python's, NumPy's      by rank: restored on the same mesh; on another, seeded anew from what was saved and the
own generators                  rank's place along the data axes, so that data ranks draw different numbers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallelize.checkpoint.digests import digest_of
from parallelize.checkpoint.held import Place
from parallelize.checkpoint.memory import bytes_of
from parallelize.checkpoint.strict_json import write_json
from parallelize.checkpoint.tree_reader import decode
from parallelize.checkpoint.trees import TensorSink, TensorSource, encode
from parallelize.errors import CheckpointError, Problem
from parallelize.mesh import DATA_AXES
from parallelize.pieces import data_rank
from parallelize.randomness.install import dropout_clock
from parallelize.randomness.streams import Streams, generator_states, restore_generators, seed_generators


def collect_position(place: Place, pipeline: Any) -> dict[str, Any]:
    """Numbers that are the same on every rank."""
    clock = dropout_clock(place.module)
    return {
        "steps_done": pipeline.steps_done if pipeline is not None else None,
        "clock": clock.state_dict() if clock is not None else None,
    }


def restore_position(place: Place, pipeline: Any, state: dict[str, Any]) -> None:
    clock = dropout_clock(place.module)
    if pipeline is not None and state.get("steps_done") is not None:
        pipeline.steps_done = int(state["steps_done"])
    if clock is not None and state.get("clock") is not None:
        clock.load_state_dict(state["clock"])


def collect_generators(place: Place, sink: TensorSink) -> dict[str, Any]:
    """This rank's own generators."""
    return {str(rank_of(place)): encode(generator_states(), f"generators.{rank_of(place)}", sink)}


def decoded_generators(
    place: Place, saved: dict[str, Any], same_mesh: bool, tensors: TensorSource
) -> Callable[[], None]:
    """What sets the generators: to this rank's own states where the mesh is the one that saved; else to new ones."""
    own = saved.get(str(rank_of(place))) if same_mesh else None
    if own is not None:
        states = decode(own, tensors, "generators")
        return lambda: restore_generators(states)
    where, _ = _data_place(place)
    first = [decode(saved[key], tensors, "generators") for key in sorted(saved)[:1]]
    digest = digest_of(repr([bytes_of(state["torch"].contiguous()).hex() for state in first] + [where]).encode())
    return lambda: seed_generators(int(digest, 16) & (2**63 - 1), skip={})


def collect_streams(place: Place, streams: Streams | None, sink: TensorSink) -> dict[str, Any]:
    """The streams of which this rank is the first at its place."""
    if streams is None:
        return {}
    state = streams.state_dict()
    own = {}
    for name, held in state["states"].items():
        others = [index for axis, index in place.here.items() if axis not in state["over"][name]]
        if not any(others):
            places = [int(at) for at in state["places"][name]]
            own[write_json([name, places]).decode()] = encode(held, f"streams.{name}.{places}", sink)
    return {"seed": state["seed"], "over": state["over"], "states": own}


def decoded_streams(streams: Streams, saved: dict[str, Any], tensors: TensorSource) -> dict[str, Any]:
    """A state for `Streams.load_state_dict`: each stream goes on where the rank at this place of its axes was.

    An axis that one of the meshes lacks has one place there, the first. Ranks at places that were not there before begin
    their streams anew, from their seed.
    """
    known = tuple(streams.mesh.mesh_dim_names or ()) if streams.mesh is not None else ()
    saved_over = {name: tuple(axes) for name, axes in saved["over"].items()}
    over = {name: tuple(axis for axis in axes if axis in known) for name, axes in saved_over.items()} | streams.declared
    here = {axis: streams.mesh.get_local_rank(axis) for axis in known} if streams.mesh is not None else {}
    states = {}
    for name, axes in saved_over.items():
        added = [here[axis] for axis in over[name] if axis not in axes]
        key = write_json([name, [here.get(axis, 0) for axis in axes]]).decode()
        if key in saved["states"] and not any(added):
            states[name] = decode(saved["states"][key], tensors, f"streams.{name}")
    places = {name: [here[axis] for axis in axes] for name, axes in over.items()}
    return {"seed": saved["seed"], "over": over, "places": places, "states": states}


def collect_data(place: Place, data: Any, sink: TensorSink) -> dict[str, Any]:
    """The position in the data of each data rank, from the first rank at its place."""
    if data is None:
        return {}
    state = data.state_dict()
    where, _ = _data_place(place)
    others = [index for axis, index in place.here.items() if axis not in DATA]
    return {} if any(others) else {str(where): encode(state, f"data.{where}", sink)}


def decoded_data(place: Place, saved: dict[str, Any], tensors: TensorSource) -> Any:
    """This data rank's position. Raises: CheckpointError `data-position` where other data ranks saved different ones."""
    where, count = _data_place(place)
    states = list(saved.values())
    if count != len(saved) and any(state != states[0] for state in states):
        what = f"{len(saved)} data ranks saved different positions in the data, and there are {count} now"
        fix = "use a position that does not depend on the rank (GlobalBatches), or resume on as many data ranks"
        raise CheckpointError(Problem("data-position", what, fix=fix))
    return decode(saved.get(str(where), states[0]), tensors, "data")


DATA = tuple(dict.fromkeys((*DATA_AXES, "dp_shard")))


def _data_place(place: Place) -> tuple[int, int]:
    return data_rank(place.mesh, DATA) if place.mesh is not None else (0, 1)


def rank_of(place: Place) -> int:
    """This rank's number in its mesh."""
    return place.spec.rank(**place.here) if place.spec is not None else 0
