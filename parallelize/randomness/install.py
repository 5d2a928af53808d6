"""`install_dropout`: dropout of a model, planned or not, becomes a function of seed, step and global element."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import lru_cache, partial
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.errors import ModelError, Problem
from parallelize.layout import Layout
from parallelize.mesh import DATA_AXES
from parallelize.pieces import data_rank
from parallelize.randomness.position import Clock
from parallelize.randomness.sites import Columns, Sites, dropout_forward, rates_of, refused_modules, scoped_forward
from parallelize.randomness.where import unplaceable
from parallelize.sharding import Record, record_of
from parallelize.styles.contract import Edge


def install_dropout(module: nn.Module, seed: int = 0, mesh: DeviceMesh | None = None) -> Clock:
    """Make `nn.Dropout`, `F.dropout` and attention dropout of a model draw one global mask, whatever the mesh.

    Call it after `parallelize_module`, or on a whole model in one process: both draw the same. Each forward of `module` in
    training counts as a step, until `clock.move(Position(...))` says where in training it stands. Data ranks draw the
    masks of neighbouring rows. Attention with dropout runs by explicit weights, [batch, heads, S, S] in memory.

    Args:
        mesh: for its data axes, where the model has no plan.

    Returns: the clock: `state_dict()` is two numbers for the checkpoint.
    Raises: ModelError `unplaceable-dropout` naming all that cannot be served (`Dropout2d`, `MultiheadAttention`, ...),
        `already-installed`, before anything is changed.
    """
    record = record_of(module)
    _check(module, record, mesh)
    whole_mesh = mesh if mesh is not None else record.mesh if record is not None else None
    clock = Clock(seed, data_rank(whole_mesh, DATA_AXES) if whole_mesh is not None else (0, 1))
    group = record.group if record is not None else None
    sites = Sites(clock, group.rank, group.size, record.region) if group and record else Sites(clock)
    for fqn, inner in module.named_modules():
        if type(inner).forward is nn.Dropout.forward and "forward" not in inner.__dict__:
            inner.__dict__["_parallelize_dropout"] = (sites, fqn)
            inner.__dict__["forward"] = MethodType(dropout_forward, inner)
        elif drops_by_function(inner.__class__):
            inner.__dict__["_parallelize_dropout"] = (sites, fqn, inner.__dict__.get("forward"), rates_of(inner))
            inner.__dict__["forward"] = MethodType(scoped_forward, inner)
    if record is not None and sites.size > 1:
        for fqn, columns in _tracked(record):
            module.get_submodule(fqn).register_forward_hook(partial(_note, sites, columns))
    module.register_forward_pre_hook(partial(_begin, sites), with_kwargs=True)
    module.register_forward_hook(partial(_end, sites), always_call=True)
    module.__dict__["_parallelize_dropout_clock"] = clock
    return clock


def dropout_clock(module: nn.Module) -> Clock | None:
    """The clock of a model that `install_dropout` was called on, or None."""
    return module.__dict__.get("_parallelize_dropout_clock")


def _check(module: nn.Module, record: Record | None, mesh: DeviceMesh | None) -> None:
    problems = refused_modules(module)
    if dropout_clock(module) is not None:
        fix = "call it once; change `clock.seed` for another seed"
        problems.append(Problem("already-installed", f"{type(module).__name__} has its dropout installed", fix=fix))
    config = getattr(module, "config", None)
    rates = {name: getattr(config, name, 0.0) for name in _ATTENTION_RATES}
    kind = getattr(config, "_attn_implementation", None)
    if kind not in (None, "eager", "sdpa") and any(isinstance(rate, float) and rate for rate in rates.values()):
        problems += unplaceable(f"attention by {kind!r}", "build the model with attn_implementation='sdpa'").problems
    layerdrop = getattr(config, "layerdrop", 0.0)
    if isinstance(layerdrop, float) and layerdrop > 0.0:
        problems += unplaceable("layerdrop, which skips layers by PyTorch's own generator", "layerdrop=0").problems
    for whole in (mesh, record.mesh if record is not None else None):
        names = whole.mesh_dim_names or () if whole is not None else ()
        if whole is not None and "cp" in names and whole.size(names.index("cp")) > 1:
            problems += unplaceable("activations split over the axis cp", "a mesh without cp, or no dropout").problems
            break
    if problems:
        raise ModelError(*problems)


_ATTENTION_RATES = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def _tracked(record: Record) -> Iterator[tuple[str, Columns | None]]:
    """Modules whose end says how activations lie from there on: split by columns, or not."""
    split: dict[str, Layout] = {}
    whole = []
    rows = record.resolved.parameters
    owners = {name: row for row in rows.values() for name in row.fact.names}
    for fqn, row in record.resolved.modules.items():
        weight = owners.get(f"{fqn}.weight")
        style, leave = row.contract.style, row.contract.leave
        if style == "colwise" and leave is Edge.NONE and weight is not None and weight.layout.dim is not None:
            split[fqn] = weight.layout
        elif style in ("colwise", "rowwise", "embedding", "embedding_colwise", "sequence", "replicate"):
            partial_sums = weight is not None and weight.partial and style == "replicate"  # a norm on local heads
            if not partial_sums:
                whole.append(fqn)
    for fqn, layout in split.items():
        beside = [other for name, other in split.items() if name.rpartition(".")[0] == fqn.rpartition(".")[0]]
        yield fqn, Columns(layout, max(other.local_size(record.group.rank) for other in beside))
    yield from ((fqn, None) for fqn in whole)


def drops(module: nn.Module) -> bool:
    """Whether anything in the model drops out."""
    for inner in module.modules():
        if isinstance(inner, nn.Dropout) and inner.p > 0:
            return True
        cls: Any = type(inner)
        if drops_by_function(cls) and any(getattr(holder, name) > 0 for holder, name in rates_of(inner)):
            return True
    return False


@lru_cache(maxsize=4096)
def drops_by_function(cls: Any) -> bool:
    """Whether a class's forward, or a method that it calls, calls dropout as a function. Without source: yes."""
    open_, seen = ["forward"], set()
    while open_:
        name = open_.pop()
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
        open_ += [called for called in _OWN_CALL.findall(source) if called not in seen]
    return False


_OWN_CALL = re.compile(r"self\.(\w+)\(")
_FUNCTIONAL = re.compile(
    r"(?:\bF|functional|torch)\.\w*dropout|\bdropout(?:_p)?\s*=|scaled_dot_product_attention|bernoulli"
)


# -- hooks --------------------------------------------------------------------------------------------------------------


def _note(sites: Sites, columns: Columns | None, *_: Any) -> None:
    sites.last = columns


def _begin(sites: Sites, module: nn.Module, args: tuple, kwargs: dict) -> None:
    sites.clock.begin((args, kwargs))
    sites.last = None
    sites.scopes.clear()
    sites.watch_first(module.training)


def _end(sites: Sites, module: nn.Module, args: tuple, out: Any) -> None:
    sites.unwatch()
    sites.clock.end(out)
