"""`cp` applied to a model: full sequences in, local tokens through the model, attention over all tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.axes.batch.input_batch import InputBatch
from parallelize.axes.batch.media_rows import TOWER_OUTPUTS
from parallelize.axes.context.cached_calls import CachedCall, logits_on_every_rank
from parallelize.axes.context.divided_features import install_division
from parallelize.axes.context.forward_state import Context, ContextAttention, attention_of, context_of
from parallelize.axes.context.gathered_modules import GATHERED, check_masks, check_overlap, install_gathered
from parallelize.axes.context.inputs import ContextInputs, config_with_masks, is_registered, register_masks
from parallelize.axes.context.stock_attention import NAME, forward_over_context, register, unplanned_refused
from parallelize.axes.context.text_calls import OuterInputs, install_part
from parallelize.axes.tensor.recorded_outputs import refuse_attentions
from parallelize.axes.tensor.region import Region
from parallelize.axes.vocabulary.generation.transformers_generate import install_generation
from parallelize.base.errors import MeshError, ModelError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.handshake import agree_on, check_replicas
from parallelize.comm.mesh_view import MeshView
from parallelize.ops.attention.flex_attention import serve_flex
from parallelize.ops.matmul.op_handshake import agree
from parallelize.plan.choose import plan_of
from parallelize.plan.options import Options, wrong_ulysses
from parallelize.plan.resolve import resolve
from parallelize.plan.resolved import ResolvedPlan
from parallelize.state.forward_steps import ATTENTION, SEQUENCES, add_step, run_inner
from parallelize.state.guards.guard_table import LEFT_UNREDUCED, ON_CONTEXT, Guarded, set_up
from parallelize.state.local_config import LocalConfig
from parallelize.state.randomness.dropout.install import install_draws, refuse_early_dropout, require_installed_dropout
from parallelize.state.records import facts_of, mark_applied, pipeline_cut, record_of, resolution_of
from parallelize.state.step_results import as_instance
from parallelize.state.transaction import Transaction


def context_parallel(
    module: nn.Module, mesh: DeviceMesh, plan: Any = None, *, ulysses: int = 1, own_reduction: bool = False
) -> nn.Module:
    """Shard the sequences of a stock module over the mesh's `cp` axis, in place, and return the module.

    The module is then called with full sequences, the same on every rank of cp. Each rank keeps its local tokens, and
    its output is for those tokens: see `split_sequence` and `gather_sequence`. Gradients of parameters are this rank's
    part of a sum over cp, which `shard_data` (and `parallelize_model`) reduce like those of any data axis. A mesh
    without cp, or with cp of size 1, leaves the module as it is.

    Args:
        module: the root of a model, stock or after `cut_pipeline` and `parallelize_module`.
        mesh: a mesh with an axis named `cp`; the module is on all its ranks.
        plan: as for `parallelize_module`; its `attention:` names the modules whose attention runs over cp.
        ulysses: size of the groups that exchange heads by all-to-all; a ring connects the groups. 1: a ring only; the
            size of cp: no ring.
        own_reduction: the caller sums gradients over cp, in its own code. Otherwise a backward before `shard_data` is
            refused.

    Returns: `module`.
    Raises: before anything is changed,
        MeshError: `bad-ulysses`.
        PlanError: `no-attention`, `unmatched-attention`.
        ModelError: `no-positions`, `already-parallelized`, `length-dependent-rotary`, `unplanned-attention`.
        HandshakeError: if ranks differ.
        In a backward that nothing reduces, ModelError: `unreduced-gradients`.
    Cost: a handshake now. Attention of each layer sends s tokens' keys and values P/U - 1 times around a ring of P/U
        ranks, and exchanges queries, keys, values and output once in a group of U ranks; backward about twice that.

    Source: Liu et al., Ring Attention, arXiv:2310.01889; Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
    """
    view = MeshView.of(mesh)
    spec = view.spec

    def decide() -> ResolvedPlan:
        if ulysses < 1 or spec.ranks("cp") % ulysses:
            raise MeshError(wrong_ulysses(ulysses, spec.ranks("cp")))
        earlier, options = resolution_of(module), Options(ulysses=ulysses)
        if earlier is not None:
            options = replace(earlier.options, ulysses=ulysses)
        applied_plan = earlier.plan if plan is None and earlier is not None and earlier.plan.attention else plan
        return resolve(plan_of(module, applied_plan), facts_of(module), spec.only("cp"), options, earlier=earlier)

    apply_context(module, view, decide)
    if on_context(spec):
        require_installed_dropout(module)
        install_draws(module, view)
        if not own_reduction:
            set_up(LEFT_UNREDUCED, Guarded(module, view))
    return module


def apply_context(module: nn.Module, mesh: MeshView, decide: Callable[[], ResolvedPlan]) -> nn.Module:
    """`context_parallel` by a resolved plan. decide: returns it; what it raises is raised on every rank."""
    if not on_context(mesh.spec):
        return module
    with agree_on(mesh) as agreed:
        resolved = decide()
        agreed |= resolved.structure()
        check_context(resolved)
        if context_of(module) is not None:
            raise ModelError(Problem("already-parallelized", f"{type(module).__name__} is on cp", fix="apply it once"))
        named = dict(module.named_modules())
        check_masks(dict(resolved.attention), named)
        check_overlap(dict(resolved.attention), named)
        refuse_early_dropout(module)
        part = named[resolved.sequences] if resolved.sequences else None
        inputs = ContextInputs(module, resolved.plan) if part is None else OuterInputs(module, resolved.plan)
    with Transaction(module):
        mark_applied(module, resolved=resolved)
        serve_flex()
        context = Context(mesh, dict(resolved.attention), resolved.options.ulysses)
        _install(module, context, inputs, resolved.sequences)
        if part is not None:
            install_part(part, context, resolved.plan)
            install_division(named[resolved.sequences.rpartition(".")[0]], part, context)
        set_up(ON_CONTEXT, Guarded(module, mesh))
    install_generation(module)
    return module


def on_context(spec: MeshSpec) -> bool:
    """Whether a mesh has ranks along `cp`."""
    return "cp" in spec.names and spec.size("cp") > 1


def check_context(resolved: ResolvedPlan) -> None:
    """Raises: ModelError `unplanned-attention`, `length-dependent-rotary` for a model that cannot run over `cp`."""
    model = resolved.facts
    within = f"{resolved.sequences}." if resolved.sequences else ""  # a tower beside the text has all of its tokens
    unsupported = [
        fqn for fqn, inner in model.objects.items() if isinstance(inner, _ATTENDS) and fqn.startswith(within)
    ]
    if unsupported:
        kind = type(model.objects[unsupported[0]]).__name__
        what = f"{unsupported[0]}, a {kind}, computes attention itself, over the tokens of one rank"
        raise ModelError(Problem("unplanned-attention", what, fix="a module that calls F.scaled_dot_product_attention"))
    rotary = _changing_rotary(model.config)
    if rotary:
        what = f"the rotary table is {rotary}: it changes with the largest position on a rank"
        raise ModelError(Problem("length-dependent-rotary", what, fix="leave this model off cp"))


_ATTENDS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def _changing_rotary(config: Any) -> str:
    """The kind of rotary table whose values depend on the length of the sequence; empty if there is none."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None)
        # one table, or a table for each kind of layer
        for table in (parameters, *parameters.values()) if isinstance(parameters, dict) else ():
            kind = table.get("rope_type", table.get("type")) if isinstance(table, dict) else None
            if kind in ("dynamic", "longrope"):
                return str(kind)
    return ""


def _install(module: nn.Module, context: Context, inputs: ContextInputs, part: str) -> None:
    registered = is_registered(module)
    if registered:
        register()
        register_masks()
    cut = pipeline_cut(module)
    named = dict(module.named_modules())  # in a pipeline, modules of other stages exist in name only
    present = {name: inner for name, inner in named.items() if cut is None or cut.present(name)}
    kinds = {fqn: kind for fqn, kind in context.attention.items() if fqn in present}
    record = record_of(module)
    region = None if record is None else as_instance(record.region, Region)
    for fqn, kind in kinds.items():
        attention = ContextAttention(context, fqn, kind)
        present[fqn].register_forward_hook(_FirstCallCheck())
        mark_applied(present[fqn], attention=attention)
        if kind == GATHERED:
            attention.region = region
            install_gathered(present[fqn], attention)
        elif not registered:
            add_step(present[fqn], ATTENTION, forward_over_context)
    if registered:
        inside = {name: inner for name, inner in present.items() if not part or f"{name}.".startswith(f"{part}.")}
        _set_implementation(context, kinds, inside)
        if refuse_attentions not in module._forward_pre_hooks.values():  # as after a plan over tp
            module.register_forward_pre_hook(refuse_attentions, with_kwargs=True)
    call = _RootForward(inputs, set(kinds), cut is not None)
    forward = _forward_with_signature(type(module).forward)
    add_step(module, SEQUENCES, forward, context=context, context_call=call)


def _set_implementation(context: Context, attention: dict[str, str], present: dict[str, nn.Module]) -> None:
    """Configs that name the attention over cp, and no mask; gathered modules keep theirs, and get masks of the full
    sequence."""
    inside = {id(m) for fqn, kind in attention.items() if kind == GATHERED for m in present[fqn].modules()}
    for inner in present.values():
        config = inner.__dict__.get("config")
        if hasattr(config, "_attn_implementation") and id(inner) not in inside:
            over_ranks = LocalConfig(config, {"_attn_implementation": NAME})
            inner.__dict__["config"] = config_with_masks(config, context) if context.makes_masks else over_ranks


def _forward_with_signature(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`_forward_over_cp` with the signature of the stock forward, for callers that inspect it."""

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward_over_cp(self, *args, **kwargs)

    return forward


class _RootForward:
    """The forward of the root.

    Args:
        inputs: splits the inputs of a call.
        present: the planned attention modules on this rank.
        staged: whether the model is cut into pipeline stages, of which all but the last return a tuple for the next
            stage.
    """

    def __init__(self, inputs: ContextInputs, present: set[str], staged: bool):
        self.inputs, self.present, self.staged = inputs, present, staged

    def run(self, context: Context, module: nn.Module, args: tuple, kwargs: dict, cached: CachedCall | None) -> Any:
        out = run_inner(module, SEQUENCES, args, kwargs)
        if cached is not None:
            return self._output_of_cached_call(context, cached, out)
        if not (self.staged and type(out) is tuple):
            _check_tokens(context, out)
        return out

    def _output_of_cached_call(self, context: Context, cached: CachedCall, out: Any) -> Any:
        """The output of a call with a cache, or by `generate`, whose logits of the last tokens are on every rank."""
        if cached.splits:
            checked = dict(out) if isinstance(out, dict) else list(out) if isinstance(out, tuple) else out
            if cached.keep and isinstance(checked, dict):
                checked.pop("logits", None)
            _check_tokens(context, checked)
        if cached.keep:
            logits_on_every_rank(context, cached, out, self.inputs.slices_logits)
        if cached.is_temporary and isinstance(out, dict) and out.get("past_key_values") is not None:
            out["past_key_values"] = None
        return out


def _forward_over_cp(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The root's forward, on local tokens."""
    context, call = self._applied.context, self._applied.context_call
    batch = call.inputs.form.batch(args, kwargs)
    if not context.checked:
        _check_first(context, batch)
    elif not (context.compared or torch.compiler.is_compiling() or _is_next_token(context, kwargs)):
        _compare_shapes(context, batch)
    args, kwargs, cached = call.inputs.local_call(context, self, batch)
    try:
        if context.checked:
            return call.run(context, self, args, kwargs, cached)
        with unplanned_refused(context):
            return call.run(context, self, args, kwargs, cached)
    finally:
        context.checked = context.attended >= call.present
        context.end()


def _is_next_token(context: Context, kwargs: dict) -> bool:
    """Whether `generate`, whose prompt was compared, goes on: comparing every token would take as long as a sum."""
    sequence = getattr(kwargs.get("past_key_values"), "sequence_over_cp", None)
    return context.generating and sequence is not None and sequence.full > 0


def _check_first(context: Context, batch: InputBatch) -> None:
    """Before the first forward: all ranks of cp have the same inputs. Raises: HandshakeError `replicas-differ`."""
    tensors = {name: value for name, value in batch.inputs.items() if isinstance(value, torch.Tensor)}
    check_replicas(context.group, tensors, "inputs", "cp")


def _compare_shapes(context: Context, batch: InputBatch) -> None:
    """Before each forward outside of a step: ranks whose sequences differ in length would send messages of other sizes.

    Raises: ShapeError `ranks-disagree`.
    """
    tensors = [leaf for leaf in private.tree_leaves(batch.inputs) if isinstance(leaf, torch.Tensor)]
    if tensors and not tensors[0].is_meta:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:6])
        agree(context.group, tensors[0].device, f"forward over cp, inputs {shapes}")


def _check_tokens(context: Context, out: Any) -> None:
    """Check that every tensor of an output has this rank's tokens.

    Raises: ModelError `one-row` if something was computed from one token (a pooler, a classifier), another one on each
        rank.
    """
    tokens = sum(stop - start for start, stop in context.local_runs())
    # routers flatten batch and tokens
    ignored = ("router_logits", "past_key_values", *TOWER_OUTPUTS)
    checked = {key: value for key, value in out.items() if key not in ignored} if isinstance(out, dict) else out
    for leaf in private.tree_leaves(checked):
        floating = isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
        if floating and len(leaf.shape) > 1 and leaf.shape[1] != tokens:
            what = f"an output {list(leaf.shape)} does not have this rank's {tokens} tokens: each rank pools its own"
            fix = "leave heads that pool off cp (add_pooling_layer=False), or pool gather_sequence(model, hidden)"
            raise ModelError(Problem("one-row", what, fix=fix))


class _FirstCallCheck:
    """A hook for the first call of a planned module: one that computes attention itself has seen local tokens only."""

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        attention = attention_of(module)
        if attention is not None and attention.fqn not in attention.context.attended:
            what = f"{attention.fqn}, a {type(module).__name__}, never calls attention"
            fix = "name the module that calls F.scaled_dot_product_attention, or the interface of transformers"
            raise ModelError(Problem("no-attention-call", what, fix=fix))
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, _FirstCallCheck):
                del module._forward_hooks[key]
