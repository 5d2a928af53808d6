"""Learning-rate schedulers and classes of optimizers as plain values, from which a resumed run rebuilds them.

A described scheduler is a dict for JSON:

    class       {"module", "name"}
    state       its state_dict(), encoded; without the schedulers inside it
    schedulers  those inside a SequentialLR or ChainedScheduler, described; [] otherwise
    functions   whether it calls functions of the user, which no state dict contains
    stepped     whether its optimizer had stepped, which PyTorch checks to warn about calls in the wrong order

Only classes of PyTorch itself are looked up by name, so a checkpoint cannot name other code to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as stock
from torch.optim.lr_scheduler import LRScheduler

from parallelize.base.errors import CheckpointError, Problem
from parallelize.checkpoint.format.json_encoder import decode, encode
from parallelize.state.optimizers.muon import Muon

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

    Raises: CheckpointError `other-scheduler` where the classes differ, also of inner schedulers; `bad-value`. Nothing is
        changed then.
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


# -- building -------------------------------------------------------------------------------------------------------------


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
