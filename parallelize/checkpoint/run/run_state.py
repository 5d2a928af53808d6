"""Random state and position of a run: what a checkpoint contains besides weights and optimizer.

steps done, clock of dropout    numbers, the same on every rank
streams (`Streams`)             by stream and coordinates along its axes, from the first rank at those coordinates
generators of torch, Python     by rank: restored on the same mesh; on another mesh, seeded from what was saved and from the
and NumPy                       data rank, so that data ranks draw different numbers
position in the data            by data rank: ranks along cp have the samples of theirs
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as stock
from torch.optim.lr_scheduler import LRScheduler

from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.digests import digest_of
from parallelize.base.files.strict_json import write_json
from parallelize.base.mesh import DATA_AXES, SAMPLE_AXES
from parallelize.checkpoint.format.device_pieces import bytes_of
from parallelize.checkpoint.format.json_codec import TensorSink, TensorSource, decode, encode
from parallelize.checkpoint.run.local_tensors import ModelOnMesh
from parallelize.state.optimizers.muon import Muon
from parallelize.state.randomness.dropout.draw_hooks import draw_clock
from parallelize.state.randomness.generators import random_state, seed_generators, set_random_state
from parallelize.state.randomness.streams import Streams


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
    """The streams that this rank writes: it is the first with its coordinates."""
    if streams is None:
        return {}
    state = streams.state_dict()
    encoded = {}
    for name, stream in state["states"].items():
        other_coordinates = [index for axis, index in on_mesh.coordinates.items() if axis not in state["over"][name]]
        if not any(other_coordinates):
            coordinates = [int(index) for index in state["places"][name]]
            key = write_json([name, coordinates]).decode()
            encoded[key] = encode(stream, f"streams.{name}.{coordinates}", sink)
    return {"seed": state["seed"], "over": state["over"], "states": encoded}


def decoded_streams(streams: Streams, saved: dict[str, Any], tensors: TensorSource) -> dict[str, Any]:
    """A state for `Streams.load_state_dict`: each stream continues from the rank at these coordinates of its axes.

    An axis that one of the meshes does not have counts as an axis of size 1. Ranks at coordinates that did not exist
    before restart their streams from the seed.
    """
    axes_here = streams.mesh.spec.names if streams.mesh is not None else ()
    saved_over = {name: tuple(axes) for name, axes in saved["over"].items()}
    over = {name: tuple(axis for axis in axes if axis in axes_here) for name, axes in saved_over.items()}
    over |= streams.declared
    coordinates = {axis: streams.mesh.index(axis) for axis in axes_here} if streams.mesh is not None else {}
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
    other_coordinates = [index for axis, index in on_mesh.coordinates.items() if axis not in SAMPLE_AXES]
    return {} if any(other_coordinates) else {str(data_index): encode(state, f"data.{data_index}", sink)}


def decoded_data(
    on_mesh: ModelOnMesh, data: Any, saved: dict[str, Any], tensors: TensorSource, saved_mesh: Any = None
) -> Any:
    """The position for `data.load_state_dict` on this data rank: the ranks along cp, which have the same samples, get
    the same.

    A `data` that can merge states gets those of all data ranks of the saved run, so that it continues on any number of
    them.

    Args:
        saved_mesh: (axis, size) pairs of the mesh of the saved run. None: one without `cp`.

    Raises: CheckpointError `data-position` where data ranks saved different positions and their number is another one
        now.
    """
    data_index, count = _sample_rank(on_mesh)
    states = _states_of_data_ranks(saved, dict(saved_mesh or ()))
    if hasattr(data, "merge_states"):
        return data.merge_states([decode(state, tensors, "data") for state in states])
    if count != len(states) and any(state != states[0] for state in states):
        what = f"{len(states)} data ranks saved different positions in the data, and there are {count} now"
        fix = (
            "use a position that does not depend on the rank (GlobalBatches, IterableBatches), or resume on as many "
            "data ranks"
        )
        raise CheckpointError(Problem("data-position", what, fix=fix))
    return decode(states[data_index if count == len(states) else 0], tensors, "data")


def _states_of_data_ranks(saved: dict[str, Any], sizes: dict[str, int]) -> list[Any]:
    """One saved state of each data rank. Earlier versions saved one of each rank along cp too, which changes
    fastest."""
    states = [saved[index] for index in sorted(saved, key=int)]
    data_ranks = prod(sizes.get(axis, 1) for axis in SAMPLE_AXES)
    return states[:: sizes["cp"]] if len(states) == data_ranks * sizes.get("cp", 1) != data_ranks else states


DATA = tuple(dict.fromkeys((*DATA_AXES, "dp_shard")))


def _data_rank(on_mesh: ModelOnMesh) -> tuple[int, int]:
    """(index, number) of this rank among the data ranks."""
    return on_mesh.place(*DATA)


def _sample_rank(on_mesh: ModelOnMesh) -> tuple[int, int]:
    """(index, number) of this rank among those that have different samples."""
    return on_mesh.place(*SAMPLE_AXES)


def rank_of(on_mesh: ModelOnMesh) -> int:
    """This rank's index in its mesh."""
    return on_mesh.spec.rank(**on_mesh.coordinates) if on_mesh.spec is not None else 0


# -- scheduler state -------------------------------------------------------------------------------------------------
# Learning-rate schedulers and classes of optimizers as plain values, from which a resumed run rebuilds them. A
# described scheduler is a dict for JSON: class {"module", "name"} state its state_dict(), encoded; without the
# schedulers inside it schedulers those inside a SequentialLR or ChainedScheduler, described; [] otherwise functions
# whether it calls functions of the user, which no state dict contains stepped whether its optimizer had stepped,
# which PyTorch checks to warn about calls in the wrong order Only classes of PyTorch itself are looked up by name, so
# a checkpoint cannot name other code to run.


Described = dict[str, Any]
_FIELDS = {"class": dict, "state": dict, "schedulers": list, "functions": bool, "stepped": bool}
_COMPOSITE = (stock.SequentialLR, stock.ChainedScheduler)
_INNER = "_schedulers"  # their attribute, and their state dict's key
_MAX_DEPTH = 16


class _StepCounter(LRScheduler):
    """Wraps `optimizer.step` as every scheduler does in its constructor, without changing a learning rate."""

    def step(self, epoch: int | None = None) -> None:
        pass


def describe_scheduler(scheduler: LRScheduler, where: str = "scheduler") -> Described:
    """A scheduler as plain values for JSON.

    Raises: CheckpointError `unsavable-value` for state that cannot be saved, with its path.
    """
    state = dict(scheduler.state_dict())
    inner: list[Described] = []
    if isinstance(scheduler, _COMPOSITE):
        del state[_INNER]
        inner = [describe_scheduler(part, f"{where}[{index}]") for index, part in enumerate(_inner(scheduler))]
    optimizer = getattr(scheduler, "optimizer", None)
    return {
        "class": _class_of(scheduler),
        "state": encode(state, where, None),
        "schedulers": inner,
        "functions": _calls_functions(scheduler),
        "stepped": bool(getattr(optimizer, "_opt_called", False)),
    }


def build_scheduler(optimizer: Optimizer, described: Described) -> LRScheduler:
    """Build the described scheduler for `optimizer`, whose groups already have their restored values and keep them.

    Only the optimizer's `step` changes: it is wrapped, as by any scheduler.

    Raises: CheckpointError `unknown-class` for a class that is not PyTorch's; `unsaved-function` for one that calls
        functions; `other-scheduler` for one with another number of parameter groups; `bad-value`.
    """
    _check(described, "scheduler", building=True)
    built = _built(optimizer, described, "scheduler")
    _count_steps(optimizer)
    _mark_stepped(optimizer, described)
    return built


def load_scheduler(scheduler: LRScheduler, described: Described) -> None:
    """Load the described state into a scheduler that the user has built. The optimizer's groups are not changed.

    Raises: CheckpointError `other-scheduler` where the classes differ, also of inner schedulers; `bad-value`. Nothing
        is changed then.
    """
    check_scheduler(scheduler, described)
    scheduler.load_state_dict(_state(described, "scheduler"))
    _mark_stepped(getattr(scheduler, "optimizer", None), described)


def check_buildable(described: Described) -> None:
    """Check a description without an optimizer. Raises: as `build_scheduler`."""
    _check(described, "scheduler", building=True)


def check_scheduler(scheduler: LRScheduler, described: Described) -> None:
    """Check a description against a scheduler. Raises: as `load_scheduler`."""
    _check(described, "scheduler", building=False)
    _check_same(scheduler, described, "scheduler")


def describe_optimizer_class(optimizer: Optimizer) -> dict[str, str]:
    """{"module", "name"} of the optimizer's class."""
    return _class_of(optimizer)


def optimizer_class(described: dict[str, str]) -> type[Optimizer]:
    """The described class, if it is one of `torch.optim`, or `Muon` of this package.

    Raises: CheckpointError `unknown-class`, `bad-value`.
    """
    module, name = _names(described, "the optimizer")
    if (module, name) == Muon.saved_as:
        return Muon
    cls = getattr(torch.optim, name, None) if f"{module}.".startswith("torch.optim.") else None
    if not isinstance(cls, type) or not issubclass(cls, Optimizer) or cls is Optimizer:
        raise _unknown(module, name, "an optimizer", "torch.optim")
    return cls


# -- building ----------------------------------------------------------------------------------------------------------


def _built(optimizer: Optimizer, described: Described, where: str) -> LRScheduler:
    """A scheduler built without `__init__`, which would set learning rates and momenta as at the start of a run."""
    cls = _stock_class(described, where)
    built = cls.__new__(cls)
    built.optimizer = optimizer
    if described["schedulers"]:
        inner = [_built(optimizer, part, f"{where}[{index}]") for index, part in enumerate(described["schedulers"])]
        setattr(built, _INNER, inner)
    if cls is stock.CyclicLR:
        built._scale_fn_custom = None  # its load_state_dict reads this and does not set it
    state = _state(described, where)
    if any(type(key) is not str or key == "optimizer" or callable(getattr(cls, key, None)) for key in state):
        raise _bad(where, "has a state that would replace a method or the optimizer")
    try:
        built.load_state_dict(state)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _bad(where, f"has a state that {cls.__name__} cannot load: {error!r}") from None
    _check_groups(optimizer, built, where)
    return built


def _count_steps(optimizer: Optimizer) -> None:
    """Make `optimizer.step` count its calls, as schedulers expect, and leave the groups unchanged."""
    new = [group for group in optimizer.param_groups if "initial_lr" not in group]
    _StepCounter(optimizer)
    for group in new:
        del group["initial_lr"]


def _mark_stepped(optimizer: Any, described: Described) -> None:
    """After a save between the optimizer's and the scheduler's step, the scheduler steps first. It must not warn."""
    if described["stepped"] and optimizer is not None:
        optimizer._opt_called = True


def _state(described: Described, where: str) -> dict[str, Any]:
    state = decode(described["state"], None, where)
    if type(state) is not dict:
        raise _bad(where, "has a state that is not a dict")
    if described["schedulers"]:
        state[_INNER] = [_state(part, f"{where}[{index}]") for index, part in enumerate(described["schedulers"])]
    return state


def _inner(scheduler: Any) -> list[LRScheduler]:
    return list(getattr(scheduler, _INNER)) if isinstance(scheduler, _COMPOSITE) else []


def _calls_functions(scheduler: Any) -> bool:
    if isinstance(scheduler, stock.LambdaLR | stock.MultiplicativeLR):
        return True
    return getattr(scheduler, "_scale_fn_custom", None) is not None


# -- checking: before anything is changed -----------------------------------------------------------------------------


def _check(described: Any, where: str, building: bool, depth: int = 0) -> None:
    if type(described) is not dict or described.keys() != _FIELDS.keys() or depth > _MAX_DEPTH:
        raise _bad(where, f"is not a described scheduler, with the fields {list(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if type(described[name]) is not kind:
            raise _bad(where, f"has a value of type {type(described[name]).__name__} as its {name}")
    _, name = _names(described["class"], where)
    _state({**described, "schedulers": []}, where)
    if building:
        cls = _stock_class(described, where)
        if described["functions"]:
            what = f"{where} is of class {name}, which calls functions that no checkpoint contains"
            fix = f"build the {name} with the same functions, and pass it"
            raise CheckpointError(Problem("unsaved-function", what, fix=fix))
        if issubclass(cls, _COMPOSITE) != bool(described["schedulers"]):
            raise _bad(where, f"is of class {name}, with {len(described['schedulers'])} inner schedulers")
    for index, part in enumerate(described["schedulers"]):
        _check(part, f"{where}[{index}]", building, depth + 1)


def _check_same(scheduler: Any, described: Described, where: str) -> None:
    current, saved = _class_of(scheduler), described["class"]
    if current != saved:
        names = f"{current['module']}.{current['name']}", f"{saved['module']}.{saved['name']}"
        what = f"{where} is of class {names[0]}, and one of class {names[1]} was saved"
        fix = f"build one of class {saved['name']}, or do not load it"
        raise CheckpointError(Problem("other-scheduler", what, fix=fix))
    inner = _inner(scheduler)
    if len(inner) != len(described["schedulers"]):
        what = f"{where} has {len(inner)} inner schedulers, and {len(described['schedulers'])} were saved"
        raise CheckpointError(Problem("other-scheduler", what, fix="build it from as many schedulers"))
    for index, (part, saved_part) in enumerate(zip(inner, described["schedulers"], strict=True)):
        _check_same(part, saved_part, f"{where}[{index}]")


def _check_groups(optimizer: Optimizer, built: LRScheduler, where: str) -> None:
    count = len(optimizer.param_groups)
    saved = getattr(built, "base_lrs", None) or getattr(built, "min_lrs", None)
    if isinstance(saved, list) and len(saved) != count:
        what = f"{where} was saved for {len(saved)} parameter groups, and the optimizer has {count}"
        fix = "build the optimizer with the groups it was saved with"
        raise CheckpointError(Problem("other-scheduler", what, fix=fix))


def _stock_class(described: Described, where: str) -> Any:
    module, name = _names(described["class"], where)
    is_stock = module == stock.__name__ and not name.startswith("_")
    cls = getattr(stock, name, None) if is_stock else None
    if not isinstance(cls, type) or not issubclass(cls, LRScheduler) or cls is LRScheduler:
        raise _unknown(module, name, "a scheduler", stock.__name__)
    return cls


def _class_of(value: Any) -> dict[str, str]:
    cls = type(value)
    module, name = getattr(cls, "saved_as", (cls.__module__, cls.__qualname__))
    return {"module": module, "name": name}


def _names(described: Any, where: str) -> tuple[str, str]:
    if type(described) is not dict or described.keys() != {"module", "name"}:
        raise _bad(where, "has no module and name of its class")
    module, name = described["module"], described["name"]
    if type(module) is not str or type(name) is not str:
        raise _bad(where, "has a class whose module or name is not a string")
    return module, name


def _unknown(module: str, name: str, what: str, home: str) -> CheckpointError:
    text = f"{module[:80]}.{name[:80]} was saved, and only {what} of {home} can be built from a checkpoint"
    return CheckpointError(Problem("unknown-class", text, fix="build it yourself as in the saved run, and pass it"))


def _bad(where: str, what: str) -> CheckpointError:
    fix = "use another checkpoint; this one was damaged or edited"
    return CheckpointError(Problem("bad-value", f"{where} {what}", fix=fix))
