"""What one module of a planned model runs when it is called, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from parallelize.base.errors import ModelError, Problem, did_you_mean
from parallelize.plan.resolved import ModuleRow, ParameterRow
from parallelize.state.forward_steps import ATTENTION, GATHERED, PLACES, PLANNED, describe_steps
from parallelize.state.records import applied, pipeline_cut, record_of
from parallelize.state.report_tables import row_text, shape_text, table


def describe_module(root: nn.Module, name: str) -> str:
    """The steps that a call of one module runs, from the outermost one, with the hooks of this package around them.

    Args:
        root: a model on a mesh. name: of a module in it; empty for the model itself.

    Raises: ModelError `no-such-module`.
    """
    modules = dict(root.named_modules())
    cut = pipeline_cut(root)
    if name not in modules or (cut is not None and not cut.present(name)):
        raise _absent(name, modules, elsewhere=name in modules)
    module, record = modules[name], record_of(root)
    row = record.resolved.modules.get(name) if record is not None else None
    rows = [("hook", text) for text in _hooks(module._forward_pre_hooks.values())]
    for place, text in describe_steps(module):
        rows.append((place, text))
        if place == PLANNED and row is not None:
            rows += [("", text) for text in _conversions(row)]
    if applied(module).attention is not None and not {ATTENTION, GATHERED} & {place for place, _ in rows}:
        rows.append((ATTENTION, f"{PLACES[ATTENTION]}, where `transformers` calls the registered attention"))
    rows += [("hook after", text) for text in _hooks(module._forward_hooks.values())]
    title = f"{name or 'the model'}, a {type(module).__name__}" + (f", {row.rule.style}" if row is not None else "")
    lines = [title, *table(("step", "what a call does, from the outside inwards"), rows)]
    if record is not None and (own := list(_parameters(record.resolved.parameters, module, name))):
        of_rank = [
            (key, shape_text(p.layout.shape), shape_text(p.layout.local_shape(record.group_for(p).rank)), row_text(p))
            for key, p in own
        ]
        lines += ["", *table(("parameter", "full", "this rank", "over tp"), of_rank)]
    return "\n".join(lines)


def _conversions(row: ModuleRow) -> Iterator[str]:
    """The collectives at the boundary of a planned module."""
    for where, conversion in (("input", row.contract.enter), ("output", row.contract.leave)):
        if conversion.forward or conversion.backward:
            yield f"{where}: {conversion.forward or 'nothing sent'}; backward: {conversion.backward or 'nothing sent'}"


def _parameters(rows: Mapping[str, ParameterRow], module: nn.Module, name: str) -> Iterator[tuple[str, ParameterRow]]:
    """(key, row) of a module's own parameters, also of tied ones."""
    by_name = {alias: row for row in rows.values() for alias in row.fact.names}
    for key in module._parameters:
        if (row := by_name.get(f"{name}.{key}" if name else key)) is not None:
            yield key, row


def _hooks(hooks: Iterable[Callable[..., Any]]) -> Iterator[str]:
    """What the hooks of this package do, by the first sentence of their docstrings, and those of `fully_shard`."""
    for hook in hooks:
        function: Any = hook.func if isinstance(hook, partial) else hook
        function = getattr(function, "__func__", function)
        owner = function if hasattr(function, "__qualname__") else type(function)
        if owner.__module__.startswith("torch.distributed.fsdp"):
            yield f"fully_shard: {owner.__name__.strip('_').replace('_', ' ')}"
        elif owner.__module__.partition(".")[0] == __package__.partition(".")[0]:
            text = (owner.__doc__ or owner.__name__.strip("_").replace("_", " ")).partition("\n\n")[0]
            yield " ".join(text.split()).removesuffix(".")


def _absent(name: str, modules: Mapping[str, nn.Module], elsewhere: bool) -> ModelError:
    what = f"another pipeline stage has {name}" if elsewhere else f"the model has no module {name!r}"
    fix = "call this on a rank of that stage" if elsewhere else did_you_mean(name, modules)
    return ModelError(Problem("no-such-module", what, fix=fix))
