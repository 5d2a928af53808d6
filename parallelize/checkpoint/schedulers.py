"""Learning-rate schedulers and classes of optimisers as plain values, from which a resumed run rebuilds them.

A described scheduler is a dict for JSON:

    class       {"module", "name"}
    state       its state_dict(), encoded; without the schedulers inside it
    schedulers  those inside a SequentialLR or ChainedScheduler, described; [] otherwise
    functions   whether it calls functions of the user's, which no state dict keeps
    stepped     whether its optimiser had stepped, which PyTorch asks before it warns of calls in the wrong order

Only classes of PyTorch itself are looked up by name: a checkpoint names no code to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as stock
from torch.optim.lr_scheduler import LRScheduler

from parallelize.checkpoint.trees import decode, encode
from parallelize.errors import CheckpointError, Problem

Described = dict[str, Any]
_FIELDS = {"class": dict, "state": dict, "schedulers": list, "functions": bool, "stepped": bool}
_OF_OTHERS = (stock.SequentialLR, stock.ChainedScheduler)
_INSIDE = "_schedulers"  # their attribute, and their state dict's key
_MOST_DEPTH = 16


class _Watch(LRScheduler):
    """Wraps `optimizer.step` as every scheduler does when it is made, and changes no learning rate."""

    def step(self, epoch: int | None = None) -> None:
        pass


def describe_scheduler(scheduler: LRScheduler, where: str = "scheduler") -> Described:
    """A scheduler as plain values for JSON.

    Raises: CheckpointError `unsavable-value` for state that no file can keep, with its path.
    """
    state = dict(scheduler.state_dict())
    inside: list[Described] = []
    if isinstance(scheduler, _OF_OTHERS):
        del state[_INSIDE]
        inside = [describe_scheduler(one, f"{where}[{place}]") for place, one in enumerate(_inside(scheduler))]
    optimizer = getattr(scheduler, "optimizer", None)
    return {
        "class": _class_of(scheduler),
        "state": encode(state, where, None),
        "schedulers": inside,
        "functions": _calls_functions(scheduler),
        "stepped": bool(getattr(optimizer, "_opt_called", False)),
    }


def build_scheduler(optimizer: Optimizer, described: Described) -> LRScheduler:
    """The described scheduler for `optimizer`, whose groups have their restored values and keep them.

    Of the optimiser only `step` changes, which is wrapped as by any scheduler.

    Raises: CheckpointError `unknown-class` for a class that is not PyTorch's; `unsaved-function` for one that calls
        functions; `other-scheduler` for one of another number of parameter groups; `bad-value`.
    """
    _check(described, "scheduler", building=True)
    built = _built(optimizer, described, "scheduler")
    _watch(optimizer)
    _mark_stepped(optimizer, described)
    return built


def load_scheduler(scheduler: LRScheduler, described: Described) -> None:
    """Go on as described, in a scheduler that the user has built. The optimiser's groups are not changed.

    Raises: CheckpointError `other-scheduler` where the classes differ, also of schedulers inside; `bad-value`. Then
        nothing was changed.
    """
    check_scheduler(scheduler, described)
    scheduler.load_state_dict(_state(described, "scheduler"))
    _mark_stepped(getattr(scheduler, "optimizer", None), described)


def check_buildable(described: Described) -> None:
    """Raises: what `build_scheduler` would for the description alone."""
    _check(described, "scheduler", building=True)


def check_scheduler(scheduler: LRScheduler, described: Described) -> None:
    """Raises: what `load_scheduler` would."""
    _check(described, "scheduler", building=False)
    _check_same(scheduler, described, "scheduler")


def describe_optimizer_class(optimizer: Optimizer) -> dict[str, str]:
    """{"module", "name"} of the optimiser's class."""
    return _class_of(optimizer)


def optimizer_class(described: dict[str, str]) -> type[Optimizer]:
    """The described class, if it is one of `torch.optim`.

    Raises: CheckpointError `unknown-class`, `bad-value`.
    """
    module, name = _names(described, "the optimiser")
    found = getattr(torch.optim, name, None) if f"{module}.".startswith("torch.optim.") else None
    if not isinstance(found, type) or not issubclass(found, Optimizer) or found is Optimizer:
        raise _unknown(module, name, "an optimiser", "torch.optim")
    return found


# -- building -------------------------------------------------------------------------------------------------------------


def _built(optimizer: Optimizer, described: Described, where: str) -> LRScheduler:
    """Without `__init__`, which would set learning rates and momenta as at the beginning of a run."""
    kind = _stock_class(described, where)
    built = kind.__new__(kind)
    built.optimizer = optimizer
    if described["schedulers"]:
        inside = [_built(optimizer, one, f"{where}[{place}]") for place, one in enumerate(described["schedulers"])]
        setattr(built, _INSIDE, inside)
    if kind is stock.CyclicLR:
        built._scale_fn_custom = None  # which its load_state_dict looks at and does not set
    state = _state(described, where)
    if any(type(key) is not str or key == "optimizer" or callable(getattr(kind, key, None)) for key in state):
        raise _bad(where, "has a state that would replace a method, or the optimiser")
    try:
        built.load_state_dict(state)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _bad(where, f"has a state that {kind.__name__} does not read: {error!r}") from None
    _check_groups(optimizer, built, where)
    return built


def _watch(optimizer: Optimizer) -> None:
    """Count `optimizer.step()` for schedulers, and leave the groups as they are."""
    new = [group for group in optimizer.param_groups if "initial_lr" not in group]
    _Watch(optimizer)
    for group in new:
        del group["initial_lr"]


def _mark_stepped(optimizer: Any, described: Described) -> None:
    """A run that was saved between the two steps goes on with the scheduler's: in order, and without a warning."""
    if described["stepped"] and optimizer is not None:
        optimizer._opt_called = True


def _state(described: Described, where: str) -> dict[str, Any]:
    state = decode(described["state"], None, where)
    if type(state) is not dict:
        raise _bad(where, "has a state that is no dict")
    if described["schedulers"]:
        inside = enumerate(described["schedulers"])
        state[_INSIDE] = [_state(one, f"{where}[{place}]") for place, one in inside]
    return state


def _inside(scheduler: Any) -> list[LRScheduler]:
    return list(getattr(scheduler, _INSIDE)) if isinstance(scheduler, _OF_OTHERS) else []


def _calls_functions(scheduler: Any) -> bool:
    if isinstance(scheduler, stock.LambdaLR | stock.MultiplicativeLR):
        return True
    return getattr(scheduler, "_scale_fn_custom", None) is not None


# -- checking: before anything is changed -----------------------------------------------------------------------------


def _check(described: Any, where: str, building: bool, depth: int = 0) -> None:
    if type(described) is not dict or described.keys() != _FIELDS.keys() or depth > _MOST_DEPTH:
        raise _bad(where, f"is not a described scheduler, with the fields {list(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if type(described[name]) is not kind:
            raise _bad(where, f"has a {type(described[name]).__name__} as its {name}")
    _, name = _names(described["class"], where)
    _state({**described, "schedulers": []}, where)
    if building:
        kind = _stock_class(described, where)
        if described["functions"]:
            what = f"{where} is a {name}, which calls functions that no checkpoint keeps"
            fix = f"build the {name} with the same functions, and pass it"
            raise CheckpointError(Problem("unsaved-function", what, fix=fix))
        if issubclass(kind, _OF_OTHERS) != bool(described["schedulers"]):
            raise _bad(where, f"is a {name} of {len(described['schedulers'])} schedulers")
    for place, one in enumerate(described["schedulers"]):
        _check(one, f"{where}[{place}]", building, depth + 1)


def _check_same(scheduler: Any, described: Described, where: str) -> None:
    mine, saved = _class_of(scheduler), described["class"]
    if mine != saved:
        what = f"{where} is a {mine['module']}.{mine['name']}, and a {saved['module']}.{saved['name']} was saved"
        raise CheckpointError(Problem("other-scheduler", what, fix=f"build a {saved['name']}, or do not load it"))
    inside = _inside(scheduler)
    if len(inside) != len(described["schedulers"]):
        what = f"{where} has {len(inside)} schedulers inside, and {len(described['schedulers'])} were saved"
        raise CheckpointError(Problem("other-scheduler", what, fix="build it of as many schedulers"))
    for place, (one, other) in enumerate(zip(inside, described["schedulers"], strict=True)):
        _check_same(one, other, f"{where}[{place}]")


def _check_groups(optimizer: Optimizer, built: LRScheduler, where: str) -> None:
    count = len(optimizer.param_groups)
    saved = getattr(built, "base_lrs", None) or getattr(built, "min_lrs", None)
    if isinstance(saved, list) and len(saved) != count:
        what = f"{where} was saved for {len(saved)} parameter groups, and the optimiser has {count}"
        raise CheckpointError(Problem("other-scheduler", what, fix="give the optimiser the groups it was saved with"))


def _stock_class(described: Described, where: str) -> Any:
    module, name = _names(described["class"], where)
    known = module == stock.__name__ and not name.startswith("_")
    found = getattr(stock, name, None) if known else None
    if not isinstance(found, type) or not issubclass(found, LRScheduler) or found is LRScheduler:
        raise _unknown(module, name, "a scheduler", stock.__name__)
    return found


def _class_of(value: Any) -> dict[str, str]:
    return {"module": type(value).__module__, "name": type(value).__qualname__}


def _names(described: Any, where: str) -> tuple[str, str]:
    if type(described) is not dict or described.keys() != {"module", "name"}:
        raise _bad(where, "has no module and name of its class")
    module, name = described["module"], described["name"]
    if type(module) is not str or type(name) is not str:
        raise _bad(where, "has a class whose names are not text")
    return module, name


def _unknown(module: str, name: str, what: str, home: str) -> CheckpointError:
    text = f"{module[:80]}.{name[:80]} was saved, and only {what} of {home} is built from a checkpoint"
    return CheckpointError(Problem("unknown-class", text, fix="build it yourself as in the saved run, and pass it"))


def _bad(where: str, what: str) -> CheckpointError:
    fix = "take another checkpoint; this one was damaged or changed by hand"
    return CheckpointError(Problem("bad-value", f"{where} {what}", fix=fix))
