"""PyTorch's styles by their own names, arguments and meaning, on the hot path of this package.

A dict written for `torch.distributed.tensor.parallel.parallelize_module` runs unchanged. Parameters become DTensors;
plain inputs stay plain local tensors inside; where a DTensor comes in, or is asked for (`use_local_output=False`), one is
handled, with autograd. Style objects are never changed by being applied.

Backward, for a column style: each rank's input gradient is a part of the sum, so it is all-reduced (Replicate input) or
reduce-scattered (Shard input). For a row style the input gradient is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from parallelize import _torch_private as private
from parallelize.errors import ModelError, PlanError, Problem, near
from parallelize.forwards import Planned, install
from parallelize.gradients import Debt, Ledger
from parallelize.groups import Group, tp_mesh
from parallelize.layout import Layout, chunked, even_interval, replicated
from parallelize.ops import collectives as ops
from parallelize.parameters import Slot
from parallelize.plan.model import describe
from parallelize.sharding import Sharder
from parallelize.special import check_embedding, vocabulary_embedding
from parallelize.styles.registry import ModuleFacts

ParallelStyle: Any = private.parallel_style_class()
Layouts = Placement | tuple[Placement | None, ...] | None


def is_style(plan: Any) -> bool:
    return isinstance(plan, ParallelStyle)


def is_style_dict(plan: Any) -> bool:
    return isinstance(plan, Mapping) and not any(isinstance(style, str) for style in plan.values())


@dataclass(frozen=True)
class Target:
    """What a style works with: one module on one mesh."""

    module: nn.Module
    facts: ModuleFacts
    mesh: DeviceMesh
    group: Group
    sharder: Sharder
    ledger: Ledger


class _Style(ParallelStyle):
    """Ours: `_apply` is what PyTorch's own function would call."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = tp_mesh(device_mesh)
        self.install(_target(module, "", mesh, Ledger(), getattr(self, "src_data_rank", 0)))
        return module

    def check(self, facts: ModuleFacts, module: nn.Module) -> None:
        """Raises: ModelError where the style cannot serve the module."""

    def install(self, target: Target) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        inside = ", ".join(f"{key}={value!r}" for key, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({inside})"


class ColwiseParallel(_Style):
    """Split a linear's output features, or an embedding's columns.

    Weight [out, in] -> Shard(0), bias -> Shard(0), embedding weight -> Shard(1).

    Args:
        input_layouts: of the input as it comes (default Replicate); it is gathered where it is a shard.
        output_layouts: of the output (default Shard(-1)).
        use_local_output: return a plain local tensor rather than a DTensor.

    Raises: ModelError `wrong-module-for-style`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        super().__init__()
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Shard(-1),)
        self.use_local_output = use_local_output

    def check(self, facts: ModuleFacts, module: nn.Module) -> None:
        _need(self, facts, ("linear", "conv1d", "embedding"))

    def install(self, target: Target) -> None:
        facts, mesh, group = target.facts, target.mesh, target.group
        dim = 0 if facts.kind == "linear" else 1
        layouts = {
            key: chunked(shape, 0 if len(shape) == 1 else dim, group.size) for key, shape in facts.shapes.items()
        }
        planned = _planned(target, layouts)
        if facts.kind == "conv1d":
            target.module.nf = layouts["weight"].local_size(group.rank)
        if facts.kind != "embedding":
            planned.enter = partial(
                _enter, mesh=mesh, group=group, source=self.input_layouts[0], want=Replicate(), partial_grad=True
            )
        planned.leave = partial(
            _leave,
            mesh=mesh,
            group=group,
            have=Shard(-1),
            want=self.output_layouts[0],
            width=facts.shapes["weight"][dim],
            local=self.use_local_output,
        )
        install(target.module, planned)


class RowwiseParallel(_Style):
    """Split a linear's input features, or an embedding's rows; partial outputs are summed, the bias is added once.

    Weight [out, in] -> Shard(1), bias -> Replicate, embedding weight -> Shard(0).

    Args:
        input_layouts: of the input as it comes (default Shard(-1); of an embedding's ids, Replicate).
        output_layouts: of the output (default Replicate: all-reduce; Shard(1): reduce-scatter).
        use_local_output: return a plain local tensor rather than a DTensor.

    Raises: ModelError `wrong-module-for-style`, `unsplittable-embedding`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        super().__init__()
        self.input_layouts = (input_layouts or Shard(-1),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def check(self, facts: ModuleFacts, module: nn.Module) -> None:
        _need(self, facts, ("linear", "conv1d", "embedding"))
        if facts.kind == "embedding":
            check_embedding(module, facts.fqn)

    def install(self, target: Target) -> None:
        facts, group = target.facts, target.group
        dim = 1 if facts.kind == "linear" else 0
        layouts = {
            key: replicated(shape, group.size) if len(shape) == 1 else chunked(shape, dim, group.size)
            for key, shape in facts.shapes.items()
        }
        scattered = self.output_layouts[0].is_shard()
        planned = _planned(target, layouts, partial_keys=("bias",) if scattered else ())
        leave = partial(
            _leave,
            mesh=target.mesh,
            group=group,
            have=Partial(),
            want=self.output_layouts[0],
            width=None,
            local=self.use_local_output or planned.bias is not None,
        )
        if facts.kind == "embedding":
            self._install_embedding(target, planned, leave)
            return
        planned.enter = partial(
            _enter, mesh=target.mesh, group=group, source=self.input_layouts[0], want=Shard(-1), partial_grad=False
        )
        planned.leave, planned.hide_bias = leave, True
        install(target.module, planned)
        if planned.bias is not None and not self.use_local_output:
            _wrap_output(target, self.output_layouts[0])

    def _install_embedding(self, target: Target, planned: Planned, leave: Callable) -> None:
        forward = vocabulary_embedding(target.module, target.group, leave)
        planned.enter = _local_ids
        install(target.module, planned, forward)


class SequenceParallel(_Style):
    """Run a norm (or dropout) on sequence shards; its replicated parameters are owed a sum of gradients.

    Args:
        sequence_dim: the dim that the input is sharded on (default 1 of [batch, sequence, hidden]).
        use_local_output: return a plain local tensor rather than a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False):
        super().__init__()
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def install(self, target: Target) -> None:
        layouts = {key: replicated(shape, target.group.size) for key, shape in target.facts.shapes.items()}
        planned = _planned(target, layouts, partial_keys=tuple(layouts))
        here = self.sequence_sharding[0]
        planned.enter = partial(
            _enter, mesh=target.mesh, group=target.group, source=here, want=here, partial_grad=False
        )
        if not self.use_local_output:
            planned.leave = partial(_as_dtensor, mesh=target.mesh, placement=here)
        install(target.module, planned)


class PrepareModuleInput(_Style):
    """Convert inputs of a module, by position and by keyword, from the layouts they have to those it wants.

    Args:
        input_layouts, desired_input_layouts: one a positional input; None leaves it alone.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same by keyword.
        use_local_output: hand plain local tensors to the module rather than DTensors.

    Raises: PlanError `layout-count`.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ):
        super().__init__()
        self.input_layouts = _tuple(input_layouts)
        self.desired_input_layouts = _tuple(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        same_kwargs = self.input_kwarg_layouts.keys() == self.desired_input_kwarg_layouts.keys()
        if len(self.input_layouts) != len(self.desired_input_layouts) or not same_kwargs:
            raise PlanError(
                Problem("layout-count", "input layouts and desired input layouts name different inputs", "PrepareModuleInput")
            )

    def install(self, target: Target) -> None:
        convert = partial(_convert, mesh=target.mesh, group=target.group, local=self.use_local_output)

        def pre(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if len(args) < len(self.input_layouts) and not self.input_kwarg_layouts:
                fqn = target.facts.fqn
                what = f"{fqn} got {len(args)} positional inputs, the plan lays out {len(self.input_layouts)}"
                raise ModelError(Problem("layout-count", what, fix="lay keyword inputs out by input_kwarg_layouts"))
            pairs = zip(self.input_layouts, self.desired_input_layouts, strict=True)
            new = [convert(arg, have=have, want=want) for arg, (have, want) in zip(args, pairs, strict=False)]
            for name, have in self.input_kwarg_layouts.items():
                if name in kwargs:
                    kwargs[name] = convert(kwargs[name], have=have, want=self.desired_input_kwarg_layouts[name])
            return (*new, *args[len(new) :]), kwargs

        target.module.register_forward_pre_hook(pre, with_kwargs=True)


class PrepareModuleOutput(_Style):
    """Convert outputs of a module from the layouts they have to those wanted.

    Args:
        output_layouts, desired_output_layouts: one an output; None leaves it alone.
        use_local_output: return plain local tensors rather than DTensors.

    Raises: PlanError `layout-count`.
    """

    def __init__(self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True):
        super().__init__()
        self.output_layouts = _tuple(output_layouts)
        self.desired_output_layouts = _tuple(desired_output_layouts)
        self.use_local_output = use_local_output
        if len(self.output_layouts) != len(self.desired_output_layouts):
            raise PlanError(
                Problem("layout-count", "output layouts and desired output layouts differ in number", "PrepareModuleOutput")
            )

    def install(self, target: Target) -> None:
        convert = partial(_convert, mesh=target.mesh, group=target.group, local=self.use_local_output)
        pairs = list(zip(self.output_layouts, self.desired_output_layouts, strict=True))

        def post(_: nn.Module, args: tuple, out: Any) -> Any:
            outs = out if isinstance(out, tuple) else (out,)
            if len(outs) != len(pairs):
                what = f"{target.facts.fqn} returned {len(outs)} outputs, the plan lays out {len(pairs)}"
                raise ModelError(Problem("layout-count", what))
            new = tuple(convert(one, have=have, want=want) for one, (have, want) in zip(outs, pairs, strict=True))
            return new if isinstance(out, tuple) else new[0]

        target.module.register_forward_hook(post)


class PrepareModuleInputOutput(_Style):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one."""

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ):
        super().__init__()
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def install(self, target: Target) -> None:
        self.prepare_module_input.install(target)
        self.prepare_module_output.install(target)


# -- matching and applying ------------------------------------------------------------------------------------------


def match_styles(module: nn.Module, styles: Any) -> list[tuple[str, nn.Module, Any]]:
    """(fqn, module, style) for every match, in the order of the dict. Nothing is changed.

    Raises: PlanError `unmatched-rule`, `bad-plan`; ModelError where a style cannot serve its module.
    """
    if is_style(styles):
        styles = {"": styles}
    names = dict(module.named_modules(remove_duplicate=False))
    problems, matched = [], []
    for pattern, style in styles.items():
        if not is_style(style):
            problems.append(Problem("bad-plan", f"{pattern!r} has a {type(style).__name__}, not a style"))
            continue
        found = [name for name in names if _fits(pattern, name)]
        if not found:
            close = near(pattern, names)
            fix = "did you mean " + " or ".join(map(repr, close)) + "?" if close else "remove it"
            problems.append(Problem("unmatched-rule", f"{pattern!r} matches no module", fix=fix))
        matched += [(name, names[name], style) for name in found]
    facts = describe(module)
    for name, _, style in matched:
        if isinstance(style, _Style):
            try:
                style.check(facts.modules[facts.aliases[name]], names[name])
            except ModelError as error:
                problems += error.problems
    if problems:
        raise PlanError(*problems)
    return matched


def apply_styles(root: nn.Module, matched: list, mesh: DeviceMesh, source: int | None) -> None:
    """Install matched styles; ties by identity stay ties."""
    ledger = Ledger()
    ties = _Ties(root)
    for fqn, module, style in matched:
        if isinstance(style, _Style):
            style.install(_target(module, fqn, mesh, ledger, source))
        else:  # PyTorch's own, or a third party's: applied as it is
            if hasattr(style, "src_data_rank"):
                style.src_data_rank = source
            style._apply(module, mesh)
        ties.restore(module, fqn, ledger)


class _Ties:
    """Parameters that several modules share: after one is replaced, the others are given the same."""

    def __init__(self, root: nn.Module):
        holders: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in root.modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    holders.setdefault(id(parameter), []).append((owner, key))
        self.groups = [group for group in holders.values() if len(group) > 1]

    def restore(self, changed: nn.Module, fqn: str, ledger: Ledger) -> None:
        for group in self.groups:
            keys = [key for owner, key in group if owner is changed]
            if not keys or not isinstance(changed._parameters[keys[0]], DTensor):
                continue
            new = changed._parameters[keys[0]]
            for owner, key in group:
                old = owner._parameters[key]
                if old is new:
                    continue
                if isinstance(old, DTensor) and old.placements != new.placements:
                    raise PlanError(
                        Problem(
                            "broken-tie",
                            f"{fqn}.{key} is tied, and its rules split it as {old.placements} and {new.placements}",
                            fix="split the same dim: RowwiseParallel for the embedding, ColwiseParallel for the head",
                        )
                    )
                owner._parameters[key] = new
                if "_planned" not in owner.__dict__:
                    install(owner, Planned((Slot(key, new, None, None, ledger),), owner.__dict__.get("forward")))


def _fits(pattern: str, name: str) -> bool:
    tokens, parts = pattern.split("."), name.split(".")
    return len(tokens) == len(parts) and all(fnmatchcase(part, token) for token, part in zip(tokens, parts, strict=True))


def _target(module: nn.Module, fqn: str, mesh: DeviceMesh, ledger: Ledger, source: int | None) -> Target:
    group = Group(mesh.get_group())
    facts = replace(describe(module).modules[""], fqn=fqn)
    if "_planned" in module.__dict__ and module.__dict__["_planned"].slots:
        raise ModelError(Problem("already-parallelized", f"{fqn or type(module).__name__} has a style already"))
    return Target(module, facts, mesh, group, Sharder(mesh, group, source, None, None), ledger)


def _planned(target: Target, layouts: dict[str, Layout], partial_keys: tuple[str, ...] = ()) -> Planned:
    """Shard the module's parameters and give it slots for them."""
    slots = []
    for order, (key, layout) in enumerate(layouts.items()):
        held = target.module._parameters[key]
        if not isinstance(held, DTensor):  # a tied one may be sharded already
            target.module._parameters[key] = held = target.sharder.parameter(held, layout)
        owed = key in partial_keys and target.group.size > 1
        debt = Debt(order, ((target.group, None, 0, 0),)) if owed else None
        slots.append(Slot(key, held, None, debt, target.ledger))
    return Planned(tuple(slots), target.module.__dict__.get("forward"))


def _need(style: Any, facts: ModuleFacts, kinds: tuple[str, ...]) -> None:
    if facts.kind not in kinds:
        raise ModelError(
            Problem(
                "wrong-module-for-style",
                f"{type(style).__name__} needs a {' or '.join(kinds)}; {facts.fqn!r} is a {facts.class_name}",
                fix="name the module that holds the weight",
            )
        )


def _tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    return () if layouts is None else (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


# -- conversions ----------------------------------------------------------------------------------------------------


def _enter(
    x: torch.Tensor, mesh: DeviceMesh, group: Group, source: Placement, want: Placement, partial_grad: bool
) -> torch.Tensor:
    """The plain local input that the style computes with."""
    want = _positive(want, x.ndim)
    if isinstance(x, DTensor):
        if x.placements != (want,):
            x = x.redistribute(placements=(want,))
        return x.to_local(grad_placements=(Partial(),) if partial_grad else None)
    return _redistribute(x, mesh, group, _positive(source, x.ndim), want, partial_grad)


def _leave(
    y: torch.Tensor, mesh: DeviceMesh, group: Group, have: Placement, want: Placement, width: int | None, local: bool
) -> torch.Tensor:
    have, want = _positive(have, y.ndim), _positive(want, y.ndim)
    if have != want:
        if have.is_shard() and want.is_replicate() and width is not None:
            y = ops.gather_last(y, group, width)
        else:
            y = _redistribute(y, mesh, group, have, want, partial_grad=False)
        width = None
    return y if local else _as_dtensor(y, mesh, want, width)


def _redistribute(
    x: torch.Tensor, mesh: DeviceMesh, group: Group, have: Placement, want: Placement, partial_grad: bool
) -> torch.Tensor:
    """A plain local tensor from one layout to another, by the cheapest pair of collectives."""
    if have.is_replicate() and want.is_replicate():
        return ops.copy(x, group) if partial_grad else x
    if have == want:
        return x
    if have.is_shard() and want.is_replicate():
        edge = ops.gather_sequence if partial_grad else ops.leave_region
        return edge(x, group, have.dim, x.shape[have.dim] * group.size)
    if have.is_replicate() and want.is_shard() and want.dim == x.ndim - 1:
        return ops.split_last(x, group, *even_interval(x.shape[-1], group.size, group.rank))
    even = want.is_shard() and x.shape[want.dim] % group.size == 0
    if have.is_replicate() and even:
        return ops.enter_region(x, group, want.dim)
    if have.is_partial() and want.is_replicate():
        return ops.reduce(x, group)
    if have.is_partial() and even:
        return ops.scatter_sequence(x, group, want.dim)
    return DTensor.from_local(x, mesh, (have,), run_check=False).redistribute(placements=(want,)).to_local()


def _convert(x: Any, mesh: DeviceMesh, group: Group, have: Placement | None, want: Placement | None, local: bool) -> Any:
    """One input or output between layouts, as a DTensor or a plain tensor."""
    if have is None or want is None or not isinstance(x, torch.Tensor):
        return x
    have, want = _positive(have, x.ndim), _positive(want, x.ndim)
    if isinstance(x, DTensor) or not local:
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (have,), run_check=False)
        x = x if x.placements == (want,) else x.redistribute(placements=(want,))
        return x.to_local() if local else x
    return _redistribute(x, mesh, group, have, want, partial_grad=False)


def _as_dtensor(y: torch.Tensor, mesh: DeviceMesh, placement: Placement, width: int | None = None) -> DTensor:
    placement = _positive(placement, y.ndim)
    if width is None:
        return DTensor.from_local(y, mesh, (placement,), run_check=False)
    shape = (*y.shape[:-1], width)
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return DTensor.from_local(
        y, mesh, (placement,), run_check=False, shape=torch.Size(shape), stride=tuple(reversed(strides))
    )


def _wrap_output(target: Target, placement: Placement) -> None:
    """Make the output a DTensor after a bias was added to it."""
    mesh = target.mesh
    target.module.register_forward_hook(lambda _m, _a, out: _as_dtensor(out, mesh, placement))


def _local_ids(ids: torch.Tensor) -> torch.Tensor:
    return ids.full_tensor() if isinstance(ids, DTensor) else ids


def _positive(placement: Placement, ndim: int) -> Placement:
    return Shard(placement.dim + ndim) if placement.is_shard() and placement.dim < 0 else placement
