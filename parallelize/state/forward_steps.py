"""What a module of a planned model runs: steps around its own forward, as one list with one order.

    own forward -> experts, sizes, heads, gathered -> planned (tp) -> overlap, beside, adapted -> attention,
        sequences (cp) -> recomputed -> stage (pp) -> dropout -> routes -> unit (ZeRO 3)

A step is a function that gets the module first, and calls what is inside of it by `run_inner`. The outermost one is set
as the `forward` of the instance. That costs less than hooks, leaves the user's hooks outside, and survives
`copy.deepcopy`: it is a bound method, whose state is in the module's `_applied`. Steps stand in the order of `PLACES`,
whichever was installed first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from parallelize.state.records import KEY, ForwardStep, applied, mark_applied

EXPERTS, SIZES, HEADS, GATHERED = "experts", "sizes", "heads", "gathered"
PLANNED, OVERLAP, BESIDE, ADAPTED = "planned", "overlap", "beside", "adapted"
ATTENTION, SEQUENCES = "attention", "sequences"
RECOMPUTED, STAGE, DROPOUT, ROUTES, UNIT = "recomputed", "stage", "dropout", "routes", "unit"

PLACES: Mapping[str, str] = {
    EXPERTS: "computes rows that are sorted by expert, or pads widths that grouped matmuls do not take",
    SIZES: "sizes that its code reads are those of a tensor's part or of all of it",
    HEADS: "numbers the heads of `flex_attention` as those of the unsharded model",
    GATHERED: "gathers the tokens of all ranks of cp, and returns those of this rank",
    PLANNED: "computes with this rank's parts of parameters, between the conversions of its plan",
    OVERLAP: "exchanges data with other ranks while it computes",
    BESIDE: "is computed ahead, while results of experts return",
    ADAPTED: "leaves the conversions to the module of its adapters, when that calls it",
    ATTENTION: "attends over the tokens of all ranks of cp",
    SEQUENCES: "gets this rank's part of each sequence",
    RECOMPUTED: "saves its inputs alone, and runs again in backward",
    STAGE: "ends with its pipeline stage",
    DROPOUT: "draws dropout masks of full activations",
    ROUTES: "takes choices of experts that are replayed",
    UNIT: "gathers what is in no ZeRO unit, where its model is not running",
}
"""The places of steps, the innermost first, and what a module does in a step there."""

_ORDER = {place: order for order, place in enumerate(PLACES)}


def add_step(
    module: nn.Module,
    place: str,
    function: Callable[..., Any],
    general: Callable[..., Any] | None = None,
    **fields: Any,
) -> None:
    """Let a module run a step; it takes the place of an earlier one with the same place.

    Args:
        place: one of `PLACES`.
        function: (module, *args, **kwargs) -> output.
        general: where `function` is a short cut past the forward of the module's class: what runs when anything else is
            inside of the step.
        fields: of the module's record, which the step reads.
    """
    steps, of_instance = _steps_and_forwards(module)
    step = ForwardStep(place, function, general)
    index = next((n for n, earlier in enumerate(steps) if earlier.place == place), None)
    if index is not None:
        steps[index] = step
    else:
        # A forward that was set on the instance later calls what was outermost then: a step is added outside of it,
        # unless it belongs inside of one that such a forward calls.
        outer = (n for n, earlier in enumerate(steps) if earlier.place and _ORDER[earlier.place] > _ORDER[place])
        steps.insert(next(outer, len(steps)), step)
    functions = [_function_of(steps, n) for n in range(len(steps))]
    inner = {step.place: function for step, function in zip(steps[1:], functions, strict=False)}
    mark_applied(module, steps=tuple(steps), inner=inner, instance_forwards=of_instance, **fields)
    module.__dict__["forward"] = MethodType(functions[-1], module)


def run_inner(module: Any, place: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run what is inside of a step of this module: another step, or its own forward."""
    inner = module._applied.inner.get(place)
    if inner is None:
        return type(module).forward(module, *args, **kwargs)
    return inner(module, *args, **kwargs)


def has_inner(module: nn.Module, place: str) -> bool:
    """Whether more than the forward of the module's class is, or would be, inside of a step of this place."""
    steps, _ = _steps_and_forwards(module)
    return any(not step.place or _ORDER[step.place] < _ORDER[place] for step in steps)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that a module had before its steps, whose signature those need not have."""
    steps, of_instance = _steps_and_forwards(module)
    is_of_instance = steps and not steps[0].place
    return of_instance[0] if is_of_instance else MethodType(type(module).forward, module)


def step_of(module: nn.Module, place: str) -> Callable[..., Any] | None:
    """The function of a module's step of this place, or None."""
    return next((step.function for step in applied(module).steps if step.place == place), None)


@contextmanager
def restored_forwards(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block, these modules may get steps; after it, they run what they ran before."""
    before = [(module.__dict__, key, module.__dict__.get(key)) for module in modules for key in (KEY, "forward")]
    try:
        yield
    finally:
        for attributes, key, value in before:
            attributes.pop(key, None)
            if value is not None:
                attributes[key] = value


def describe_steps(module: nn.Module) -> list[tuple[str, str]]:
    """(place, what the module does there) for each step that a call of the module runs, from the outermost one."""
    steps, _ = _steps_and_forwards(module)
    rows = [(step.place, PLACES[step.place]) if step.place else ("instance", _SET) for step in reversed(steps)]
    is_own = not steps or steps[0].place
    return [*rows, ("own", f"{type(module).__name__}.forward")] if is_own else rows


_SET = "runs a forward that was set on it"


def _steps_and_forwards(module: nn.Module) -> tuple[list[ForwardStep], tuple[Callable[..., Any], ...]]:
    """The steps of a module, and the forwards that others have set on it, of which the last may be new."""
    record = applied(module)
    steps, current = list(record.steps), module.__dict__.get("forward")
    is_own = steps and getattr(current, "__func__", None) is _function_of(steps, len(steps) - 1)
    if current is None or is_own:
        return (steps if current is not None else []), record.instance_forwards
    index = len(record.instance_forwards)
    return [*steps, ForwardStep("", partial(_of_instance, index))], (*record.instance_forwards, current)


def _of_instance(index: int, module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._applied.instance_forwards[index](*args, **kwargs)


def _function_of(steps: list[ForwardStep], index: int) -> Callable[..., Any]:
    step = steps[index]
    return step.general if index and step.general is not None else step.function
