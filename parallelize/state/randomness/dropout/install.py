"""`install_dropout`: make the dropout of a model, and what else its forward draws, a function of seed, step and global
index."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

from torch import nn

from parallelize.base.errors import ModelError, Problem, short_list
from parallelize.base.layout import Layout
from parallelize.comm.mesh_view import AnyMesh, MeshView
from parallelize.plan.adapters import is_adapted, layer_name
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.styles.contract import Conversion
from parallelize.state.forward_steps import DROPOUT, add_step
from parallelize.state.randomness.dropout.call_sites import (
    ColumnOutput,
    DropoutSites,
    ModuleDropout,
    dropout_forward,
    rates_of,
    refused_modules,
    scoped_forward,
    unsupported_modules,
)
from parallelize.state.randomness.dropout.draw_hooks import first_seed, install_draw_hooks, remove_draw_hooks
from parallelize.state.randomness.dropout.global_index import ActivationLayout, columns_of, no_global_mask
from parallelize.state.randomness.dropout.position import Clock
from parallelize.state.records import applied, mark_applied, record_of, resolution_of
from parallelize.state.sharding import PlanRecord
from parallelize.state.step_results import ShardedSequences, as_instance


def install_dropout(module: AnyModel, seed: int = 0, mesh: AnyMesh | None = None) -> Clock:
    """Make `nn.Dropout`, `F.dropout` and attention dropout of a model draw one global mask on any mesh, and its forward
    the same numbers.

    Call it after `parallelize_module`, or on an unsharded model in one process: both draw the same mask. Each forward
    of `module` in training counts as a step, unless `clock.move(Position(...))` sets the position in training. Data
    ranks draw the masks of consecutive rows of the global batch. Noise, masks, timesteps and skipped layers that the
    forward draws by torch are drawn in the same way; a draw that has no row is that of the step on all data ranks. Of
    Python's `random` and NumPy's generator, the forward draws from a state that is set for it: the former of the step,
    the latter of the step and the first row.

    Args:
        module: the model. Its forwards define the steps, so install it on the module that is called.
        seed: any integer, the same on every rank.
        mesh: the mesh with the data axes, if the model has no plan.

    Returns: the dropout clock. Its `state_dict()`, three numbers, belongs in a checkpoint.
    Raises: before anything is changed, ModelError `unplaceable-dropout` with all dropout that is not supported
        (`Dropout2d`, `MultiheadAttention`, ...) or after a dict of style objects that shards the sequence,
        `already-installed`. During a forward, `unplaceable-dropout`, `unplaceable-draw`, `dropout-outside-forward`,
        `ambiguous-dropout`.
    Cost: no communication. Attention with dropout computes explicit weights, [batch, heads, S, S] in memory; over `cp`
        it draws masks block by block, in both passes, and stores none.
    """
    module = module_of(module)
    _check(module, record_of(module), mesh)
    remove_draw_hooks(module)
    sites = _sites(module, mesh, seed)
    for fqn, inner in module.named_modules():
        if type(inner).forward is nn.Dropout.forward and "forward" not in inner.__dict__:
            add_step(inner, DROPOUT, dropout_forward, dropout=ModuleDropout(sites, fqn))
        elif drops_by_function(inner.__class__):
            add_step(inner, DROPOUT, scoped_forward, dropout=ModuleDropout(sites, fqn, rates_of(inner)))
    record = record_of(module)
    if record is not None and sites.size > 1:
        sites.layouts |= _adapter_dropout_layouts(module, record)
    install_draw_hooks(module, sites, _columns(module), masks=True)
    mark_applied(module, dropout_clock=sites.clock)
    return sites.clock


def install_draws(module: nn.Module, mesh: AnyMesh | None = None, seed: int | None = None) -> Clock:
    """`install_dropout` for a model without dropout: its forward draws the same numbers on any mesh.

    Args:
        seed: None: the ranks of `tp` and `cp` take that of PyTorch's generator on the first of them, when something is
            drawn.

    Cost: no communication, but one broadcast at the first draw where there is no seed.
    """
    remove_draw_hooks(module)
    sites = _sites(module, mesh, seed)
    install_draw_hooks(module, sites, _columns(module))
    return sites.clock


def _sites(module: nn.Module, mesh: AnyMesh | None, seed: int | None) -> DropoutSites:
    record, sequences = record_of(module), _sequences(module)
    if mesh is None:
        mesh = record.mesh if record is not None else sequences.mesh if sequences is not None else None
    view = MeshView.of(mesh) if mesh is not None else None
    groups = [holder.group for holder in (record, sequences) if holder is not None and holder.group.size > 1]
    agree = partial(first_seed, groups, view.device_type if view is not None else "cpu")
    clock = Clock(seed, view.sample_place if view is not None else (0, 1), agree)
    group = record.group if record is not None else None
    over_tp = (group.rank, group.size, record.region) if group and record else (0, 1, None)
    return DropoutSites(clock, *over_tp, sequences)


def _columns(module: nn.Module) -> list[tuple[nn.Module, ColumnOutput | None]]:
    record = record_of(module)
    if record is None or record.group.size == 1:
        return []
    return [(module.get_submodule(fqn), columns) for fqn, columns in _layout_changes(record)]


def _sequences(module: nn.Module) -> ShardedSequences | None:
    """How the sequences of a model are sharded over `cp`, or None."""
    return applied(module).context


def dropout_clock(module: nn.Module) -> Clock | None:
    """The clock of a model that `install_dropout` was called on, or None."""
    return as_instance(applied(module).dropout_clock, Clock)


def _check(module: nn.Module, record: PlanRecord | None, mesh: AnyMesh | None) -> None:
    problems = refused_modules(module) + unknown_layouts(resolution_of(module))
    if dropout_clock(module) is not None:
        fix = "call it once; change `clock.seed` for another seed"
        problems.append(Problem("already-installed", f"{type(module).__name__} has its dropout installed", fix=fix))
    config = getattr(module, "config", None)
    rates = {name: getattr(config, name, 0.0) for name in _ATTENTION_RATES}
    kind = getattr(config, "_attn_implementation", None)
    own_masks = kind in (None, "eager", "sdpa") or _sequences(module) is not None  # that of cp draws them itself
    if not own_masks and any(isinstance(rate, float) and rate for rate in rates.values()):
        problems += no_global_mask(f"attention by {kind!r}", "build the model with attn_implementation='sdpa'").problems
    inner = [fqn for fqn, part in module.named_modules() if fqn and applied(part).context is not None]
    if inner and _sequences(module) is None:
        what = f"{inner[0]}, which is on the axis cp, inside of {type(module).__name__}, which is not"
        problems += no_global_mask(what, "install dropout on the model that is on cp").problems
    if problems:
        raise ModelError(*problems)


_ATTENTION_RATES = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def _layout_changes(record: PlanRecord) -> Iterator[tuple[str, ColumnOutput | None]]:
    """Modules after which activations are sharded by columns, or (None) not."""
    sharded: dict[str, Layout] = {}
    unsharded = []
    rows = record.resolved.parameters
    row_of = {name: row for row in rows.values() for name in row.fact.names}
    for fqn, row in record.resolved.modules.items():
        weight = row_of.get(f"{fqn}.{record.resolved.facts.modules[fqn].weight_key}")
        traits, leave = row.contract.traits, row.contract.leave
        used = [row_of[name] for key in ("weight", *row.contract.uses) if (name := f"{fqn}.{key}") in row_of]
        layout = next((parameter.layout for parameter in used if parameter.layout.dim is not None), None)
        if traits.splits_output and leave is Conversion.NONE and layout is not None:
            sharded[fqn] = layout
        elif not traits.keeps_layout:
            norm_of_heads = traits.replicates and not traits.by_token
            partial_sums = weight is not None and weight.partial and norm_of_heads
            if not partial_sums:
                unsharded.append(fqn)
    for fqn, layout in sharded.items():
        parent = layer_name(fqn).rpartition(".")[0]
        siblings = [other for name, other in sharded.items() if layer_name(name).rpartition(".")[0] == parent]
        yield fqn, ColumnOutput(layout, max(sibling.local_size(record.group.rank) for sibling in siblings))
    yield from ((fqn, None) for fqn in unsharded)


def _adapter_dropout_layouts(module: nn.Module, record: PlanRecord) -> dict[str, ActivationLayout]:
    """The layouts of what adapters drop of: the input of the linear beside them, after its conversion."""
    group, layouts = record.group, {}
    for name, row in record.resolved.modules.items():
        wrapper = layer_name(name)
        if (
            not is_adapted(name)
            or not row.contract.is_linear
            or f"{wrapper}.lora_dropout" not in record.resolved.facts.modules
        ):
            continue
        weight = record.resolved.weight_layout(name)
        assert weight is not None
        local = (
            columns_of(weight, group.rank, weight.local_size(group.rank)) if row.contract.traits.sums_output else None
        )
        for adapter in module.get_submodule(f"{wrapper}.lora_dropout")._modules:
            layouts[f"{wrapper}.lora_dropout.{adapter}"] = local or ActivationLayout("full")
    return layouts


def drops(module: nn.Module) -> bool:
    """Whether the model has any dropout at a rate above zero that a global mask can replace."""
    return any(_drops_by_itself(inner) for inner in module.modules())


def modules_that_drop(module: nn.Module) -> dict[str, nn.Module]:
    """The modules, by name, that drop at a rate above zero, also those whose dropout has no global mask."""
    supported = {fqn: inner for fqn, inner in module.named_modules() if _drops_by_itself(inner)}
    return supported | unsupported_modules(module)


def _drops_by_itself(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout) and module.p > 0:
        return True
    cls: Any = type(module)
    return drops_by_function(cls) and any(getattr(holder, name) > 0 for holder, name in rates_of(module))


def unknown_layouts(resolved: ResolvedPlan | None) -> list[Problem]:
    """Problems for a dict of style objects after which nothing says which rows or columns of an activation a rank
    has."""
    if resolved is None or resolved.mesh.ranks("tp") == 1:
        return []
    sequence = (Conversion.SCATTER_SEQUENCE, Conversion.GATHER_SEQUENCE)
    rows = resolved.modules.values()
    shards_sequence = any(row.contract.enter in sequence or row.contract.leave in sequence for row in rows)
    if not resolved.plan.unlowered_styles and (resolved.regions or not shards_sequence):
        return []
    what = "a dict of style objects that shards the sequence, or that is applied as PyTorch does"
    return list(no_global_mask(what, "a plan file with `sequence_parallel:`, or dropout rates of 0").problems)


@lru_cache(maxsize=4096)
def drops_by_function(cls: Any) -> bool:
    """Whether a class's forward, or a method that it calls, calls a dropout function. True if there is no source."""
    pending, seen = ["forward"], set()
    while pending:
        name = pending.pop()
        seen.add(name)
        method = getattr(cls, name, None)
        if not inspect.isfunction(method) or getattr(nn.Module, name, None) is method:
            continue
        try:
            source = inspect.getsource(inspect.unwrap(method))
        except (OSError, TypeError):
            return True
        if _FUNCTIONAL.search(source):
            return True
        pending += [called for called in _OWN_CALL.findall(source) if called not in seen]
    return False


_OWN_CALL = re.compile(r"self\.(\w+)\(")
_FUNCTIONAL = re.compile(r"(?:\bF|functional|torch)\.\w*dropout|\bdropout(?:_p)?\s*=|scaled_dot_product_attention")


# -- not installed ---------------------------------------------------------------------------------------------------
# Refuses to train a model whose dropout still draws from PyTorch's generator, while the model is sharded over `tp` or
# `cp`. Ranks that are seeded alike drop the same elements of different shards; ranks that are seeded apart drop
# different elements of the same activation, or, over `cp`, of attention to keys that other ranks have. Neither is the
# model of one process, and nothing else notices.


def require_installed_dropout(module: nn.Module) -> None:
    """Refuse forwards of a planned model in training, until its dropout draws global masks or its rates are zero.

    A model that has no dropout at a rate above zero when it is planned gets no hook, and no model gets two.
    """
    hooked = _refuse_uninstalled in module._forward_pre_hooks.values()
    if not hooked and modules_that_drop(module):
        module.register_forward_pre_hook(_refuse_uninstalled)


def refuse_early_dropout(module: nn.Module) -> None:
    """Refuse to shard a model whose dropout draws masks of full activations already.

    Raises: ModelError `early-dropout`.
    """
    if dropout_clock(module) is not None:
        what = "install_dropout was called before the model is sharded, so its masks are those of full activations"
        raise ModelError(Problem("early-dropout", what, fix="shard the model, then install_dropout(model, seed)"))


def _refuse_uninstalled(module: nn.Module, _: Any) -> None:
    if not module.training or dropout_clock(module) is not None:
        return
    dropping = modules_that_drop(module).items()
    names = [fqn for fqn, inner in dropping if inner.training and applied(inner).dropout is None]
    if names and (unplaceable := unknown_layouts(resolution_of(module))):  # install_dropout refuses these
        raise ModelError(*unplaceable)
    if names:
        what = (
            f"{short_list([name or 'the model' for name in names], 3)} would draw masks from PyTorch's generator, "
            "which knows nothing of shards"
        )
        fix = "call install_dropout(model, seed) after parallelize_module; or use parallelize_model, or rates of 0"
        raise ModelError(Problem("dropout-not-installed", what, fix=fix))
