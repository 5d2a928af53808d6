"""`cp` applied to a model: whole sequences in, own rows through the model, attention over all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize import _torch_private as private
from parallelize.context.inputs import Inputs, is_registered
from parallelize.context.state import Attention, Context, context_of
from parallelize.context.stock import NAME, Unmet, register, rerouted
from parallelize.errors import MeshError, ModelError, PlanError, Problem
from parallelize.generation.stock import install_generation
from parallelize.groups import mesh_spec
from parallelize.handshake import agree_on, check_replicas
from parallelize.installer import refuse_attentions
from parallelize.local_config import LocalConfig
from parallelize.mesh import MeshSpec
from parallelize.moves import refuse_ddp
from parallelize.pipeline.cut import cut_of
from parallelize.plan.choose import plan_of
from parallelize.plan.model import ModelFacts, describe
from parallelize.plan.pattern import alternatives, matches
from parallelize.plan.resolve import for_base_model
from parallelize.plan.schema import Plan
from parallelize.randomness.install import drops
from parallelize.transaction import Transaction


def context_parallel(module: nn.Module, mesh: DeviceMesh, plan: Any = None, *, ulysses: int = 1) -> nn.Module:
    """Let a stock module take rows of its sequences to the ranks of the mesh's `cp` axis, in place, and return it.

    The module is then called with whole sequences, the same on every rank of cp; each keeps its own rows, and its output has
    those rows: see `split_sequence` and `gather_sequence`. Gradients of parameters are this rank's part of the sum over cp,
    which `shard_data` (and `parallelize_model`) add up, as those of any data axis.

    Args:
        plan: as for `parallelize_module`; its `attention:` names the modules whose attention goes over cp.
        ulysses: ranks that trade heads by all-to-all; the others form a ring. 1: a ring alone; the size of cp: none.

    Raises: MeshError `bad-ulysses`; PlanError `no-attention`, `unmatched-attention`; ModelError `no-positions`,
        `already-parallelized`, `length-dependent-rotary`, `unplanned-attention`; HandshakeError where ranks differ. Before
        anything is changed.
    """
    spec = mesh_spec(mesh)
    if not on_context(spec):
        return module
    cut = cut_of(module)
    with agree_on(mesh) as told:
        facts = cut.facts if cut is not None else describe(module)
        chosen = for_base_model(plan_of(module, plan), facts)
        told |= {f"plan {key}": value for key, value in chosen.facts().items()} | {"ulysses": str(ulysses)}
        attention = check_context(chosen, facts, spec, ulysses)
        if context_of(module) is not None:
            raise ModelError(Problem("already-parallelized", f"{type(module).__name__} is on cp", fix="apply it once"))
        inputs = Inputs(module, chosen)
    with Transaction(module):
        _install(module, Context(mesh, attention, ulysses), inputs)
        refuse_ddp(module)
    install_generation(module)
    return module


def on_context(spec: MeshSpec) -> bool:
    """Whether a mesh has ranks along `cp`."""
    return "cp" in spec.names and spec.size("cp") > 1


def check_context(plan: Plan, model: ModelFacts, spec: MeshSpec, ulysses: int) -> dict[str, str]:
    """Module name -> kind of its attention. Raises: as `context_parallel`, but for what only the module tells."""
    size = spec.size("cp")
    if ulysses < 1 or size % ulysses:
        fix = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        what = f"ulysses is {ulysses}, which does not divide cp (size {size})"
        raise MeshError(Problem("bad-ulysses", what, fix=f"one of: {fix}"))
    found = dict(_attention(plan, model))
    alone = [fqn for fqn, inner in model.objects.items() if isinstance(inner, _ATTENDS)]
    if alone:
        what = f"{alone[0]}, a {type(model.objects[alone[0]]).__name__}, attends by itself, to the rows of one rank"
        raise ModelError(Problem("unplanned-attention", what, fix="a module that calls F.scaled_dot_product_attention"))
    rotary = _changing_rotary(model.config)
    if rotary:
        what = f"the rotary table is {rotary}: it changes with the longest position that a rank sees"
        raise ModelError(Problem("length-dependent-rotary", what, fix="leave this model off cp"))
    return found


_ATTENDS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def _attention(plan: Plan, model: ModelFacts) -> Iterator[tuple[str, str]]:
    if not plan.attention:
        what = f"the plan {plan.name} does not say which modules attend"
        raise PlanError(Problem("no-attention", what, plan.source, fix="attention: {model.layers.*.self_attn: causal}"))
    for pattern, kind in plan.attention:
        for one in alternatives(pattern):
            names = [name for name in model.modules if matches(one, name)]
            if not names:
                what = f"`attention: {one}` names no module of {type(model.root).__name__}"
                raise PlanError(Problem("unmatched-attention", what, plan.source, fix="see model.named_modules()"))
            yield from ((name, kind) for name in names)


def _changing_rotary(config: Any) -> str:
    """Kinds of rotary tables whose numbers depend on how long the sequence is."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        for one in (given, *given.values()) if isinstance(given, dict) else ():
            kind = one.get("rope_type", one.get("type")) if isinstance(one, dict) else None
            if kind in ("dynamic", "longrope"):
                return str(kind)
    return ""


def _install(module: nn.Module, context: Context, inputs: Inputs) -> None:
    registered = is_registered(module)
    if registered:
        register()
    cut = cut_of(module)
    named = dict(module.named_modules())  # of a pipeline, other stages' modules are there in name only
    present = {name: inner for name, inner in named.items() if cut is None or cut.present(name)}
    for fqn, kind in context.attention.items():
        if fqn not in present:
            continue
        site = Attention(context, fqn, kind)
        present[fqn].register_forward_hook(_FirstCall())
        present[fqn].__dict__["_parallelize_attention"] = site
        if not registered:
            site.stock = present[fqn].__dict__.get("forward")
            present[fqn].__dict__["forward"] = MethodType(rerouted, present[fqn])
    if registered:
        for inner in present.values():
            if hasattr(inner.__dict__.get("config"), "_attn_implementation"):
                inner.config = LocalConfig(inner.config, {"_attn_implementation": NAME})
    module.__dict__["_parallelize_context"] = context
    if registered:
        module.register_forward_pre_hook(refuse_attentions, with_kwargs=True)
    mine = {fqn for fqn in context.attention if fqn in present}
    module.__dict__["_context_call"] = _Call(inputs, module.__dict__.get("forward"), mine, cut is not None)
    module.__dict__["forward"] = MethodType(_with_signature(type(module).forward), module)


def _with_signature(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`_over_cp` with the signature of the stock forward, for those who look what a model takes."""

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _over_cp(self, *args, **kwargs)

    return forward


class _Call:
    """The root's own call: its inputs, the forward that it had, and the planned modules that are on this rank.

    staged: whether the model is cut into stages of a pipeline, all but the last of which return a tuple of what travels on.
    """

    def __init__(self, inputs: Inputs, stock: Any, present: set[str], staged: bool):
        self.inputs, self.stock, self.present, self.staged = inputs, stock, present, staged

    def run(self, context: Context, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        forward = self.stock or MethodType(type(module).forward, module)
        out = forward(*args, **kwargs)
        if not (self.staged and type(out) is tuple):
            _check_rows(context, out)
        return out


def _over_cp(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The root's forward, on own rows."""
    context, call = self._parallelize_context, self._context_call
    if not context.checked:
        _check_first(self, context, args, kwargs)
    args, kwargs = call.inputs.own_rows(context, args, kwargs)
    try:
        if context.checked:
            return call.run(context, self, args, kwargs)
        with Unmet():
            return call.run(context, self, args, kwargs)
    finally:
        context.checked = context.attended >= call.present
        context.now = None


def _check_first(module: nn.Module, context: Context, args: tuple, kwargs: dict) -> None:
    """What the first forward tells: that all ranks of cp are called with the same, and that nothing drops out.

    Raises: HandshakeError `replicas-differ`; ModelError `dropout-over-cp`.
    """
    if module.training and drops(module):
        raise dropout_refused()
    given = {f"input {place}": value for place, value in enumerate(args)} | kwargs
    check_replicas(context.group, {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}, "inputs", "cp")


def dropout_refused() -> ModelError:
    what = "the model drops out, and masks over the rows of cp are not known"
    return ModelError(Problem("dropout-over-cp", what, fix="dropout 0 in the model's config, or a mesh without cp"))


def _check_rows(context: Context, out: Any) -> None:
    """Every tensor of an output has this rank's rows.

    Raises: ModelError `one-row` where something was computed of one row (a pooler, a classifier): each rank took another.
    """
    rows = sum(stop - start for start, stop in context.own_rows())
    for leaf in private.tree_leaves(out):
        floating = isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
        if floating and len(leaf.shape) > 1 and leaf.shape[1] != rows:
            what = f"an output of shape {list(leaf.shape)} has no row for each of this rank's {rows}: each rank pools its own"
            fix = "leave heads that pool off cp (add_pooling_layer=False), or pool gather_sequence(model, hidden)"
            raise ModelError(Problem("one-row", what, fix=fix))


class _FirstCall:
    """A hook for the first call of a planned module: one that computes attention by itself saw this rank's rows alone."""

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        site = module.__dict__["_parallelize_attention"]
        if site.fqn not in site.context.attended:
            what = f"{site.fqn}, a {type(module).__name__}, never calls attention"
            fix = "name the module that calls F.scaled_dot_product_attention, or the interface of transformers"
            raise ModelError(Problem("no-attention-call", what, fix=fix))
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, _FirstCall):
                del module._forward_hooks[key]
