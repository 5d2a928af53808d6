"""Lowers a dict of style objects into a plan: rules with contracts, wherever a style means the same.

A plan has what a dict lacks: overlap, fused loss, `explain`, `verify`, checkpoints by plan. A style that cannot be
lowered is applied as it is, after the rules (`Plan.unlowered_styles`). Parameters that no style names stay plain.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from parallelize.axes.tensor.local_inputs import parsed
from parallelize.axes.tensor.placements import dim_of
from parallelize.axes.tensor.torch_styles.dicts import is_styles, match_styles, open_tie, spelled
from parallelize.axes.tensor.torch_styles.styles import (
    CONVERTING,
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from parallelize.plan.choose import plan_of, plan_or_none
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.options import Options
from parallelize.plan.resolve import for_model, layers_of
from parallelize.plan.schema import Cuts, Plan, Rule, UnloweredStyle
from parallelize.plan.styles import pytorch  # noqa: F401, so that its words are known
from parallelize.plan.styles.style import StyleText
from parallelize.state.records import facts_of, record_of

FEATURES = "dim-1"
"""A row linear's output whose features are scattered, as rules write it."""


def plan_of_styles(module: nn.Module, plan: Any, strict: bool = True, tp: int = 2) -> Plan:
    """`plan_of`, also for PyTorch's style objects: one, or a dict of name patterns to them.

    strict: whether a pattern of a dict that matches nothing is an error, or a warning as in PyTorch's
    `parallelize_module`. tp: the ranks that a plan is derived for.

    The plan's sections for other axes than `tp` are those of the model's own plan, where it has one.

    Raises: as `match_styles`, and as `plan_of`.
    """
    return _Lowering(module, match_styles(module, plan, strict)).run() if is_styles(plan) else plan_of(module, plan, tp)


def passes_dtensors(plan: Plan) -> str:
    """Why collectives cannot overlap with matmuls: because DTensors pass between modules, for the most part; empty
    where they can."""
    reasons = [f"{item.fqn or 'the model'}: {item.reason}" for item in plan.unlowered_styles]
    blocks = (f"{rule.pattern or 'the model'}: code may read the gathered input" for rule in read_by_code(plan))
    norms = (rule for rule in plan.rules if rule.style.traits.by_token and "output_type" in rule.style.options)
    features = (rule for rule in plan.rules if rule.style.options.get("output") == FEATURES)
    returned = [f"code may read the DTensor that {rule.pattern} returns" for rule in norms]
    returned += [f"{rule.pattern} returns shards of features, and not of rows" for rule in features]
    return "; ".join([*reasons, *blocks, *returned])


def read_by_code(plan: Plan) -> list[Rule]:
    """The rules of modules that gather an input for their own code, which computes with it as with any full tensor."""
    return [rule for rule in plan.rules if rule.style.traits.shares_input and "for_code" in rule.style.options]


class _Lowering:
    """Makes one rule for each module that has a style which can be lowered."""

    def __init__(self, module: nn.Module, matched: Sequence[tuple[str, nn.Module, Any]]):
        self.module = module
        self.facts: ModelFacts = facts_of(module)
        parts = ((fqn, target, _parts(style, self._kind(fqn))) for fqn, target, style in matched)
        self.matched = [(fqn, target, part) for fqn, target, styles in parts for part in styles]
        self.styles: dict[int, list[Any]] = {}
        for _, target, style in self.matched:
            self.styles.setdefault(id(target), []).append(style)
        self.lowered: set[int] = set()  # modules whose own computation has a rule
        self.gathered: set[int] = set()  # linears whose block gathers their input

    def run(self) -> Plan:
        texts = {n: self._style(*match) for n, match in enumerate(self.matched) if not _converts(match[2])}
        self.lowered = {id(self.matched[n][1]) for n, text in texts.items() if not isinstance(text, str)}
        while open_ends := {n: tied for n in texts if (tied := self._open_tie(self.matched[n][1]))}:
            texts |= {n: f"it is tied to {tied}, which has no rule" for n, tied in open_ends.items()}
            self.lowered -= {id(self.matched[n][1]) for n in open_ends}
        # a block gathers for linears that have rules, which then begin otherwise
        texts |= {n: self._style(*match) for n, match in enumerate(self.matched) if _converts(match[2])}
        rules, unlowered = [], []
        for n, (fqn, target, style) in enumerate(self.matched):
            text = texts[n]
            if isinstance(text, str):
                unlowered.append(UnloweredStyle(fqn, style, spelled(style), text))
                continue
            if id(target) in self.gathered:
                text = replace(text, options={**text.options, "input": "gathered"})
            rules.append(Rule(self.facts.module_fqns[fqn], text, "style"))
        plan = replace(self._own_sections(), name="styles", options=Options(), source="", on_unclaimed="leave")
        return replace(plan, rules=tuple(rules), unlowered_styles=tuple(unlowered))

    def _open_tie(self, target: nn.Module) -> str:
        """What a module with a rule shares a parameter with that has none; empty where there is nothing."""
        return open_tie(self.module, target, self.lowered) if id(target) in self.lowered else ""

    def _own_sections(self) -> Plan:
        """What the model's own plan says about axes other than `tp`, where this is the model that it is for."""
        own = plan_or_none(self.module, None)
        own = for_model(own, self.facts) if own is not None else None
        if own is None or layers_of(own) not in self.facts.module_fqns:
            return Plan("", ())
        cuts, region = own.cuts, own.layers_region
        if cuts is None and region is not None:
            cuts = Cuts(region.layers, carry=(region.argument,) if region.argument else ())
        return replace(own, rules=(), base="", sizes={}, regions=(), local=(), cuts=cuts)

    def _style(self, fqn: str, target: nn.Module, style: Any) -> StyleText | str:
        """The style of the rule; or, as text, why there is none."""
        if record_of(self.module) is not None:
            return "the model has a plan already"
        competing = [other for other in self.styles[id(target)] if _converts(style) or not _converts(other)]
        if len(competing) > 1:
            return _several(style)
        if any(isinstance(parameter, DTensor) for parameter in target.parameters()):
            return "an earlier call has sharded a parameter that is tied to its own"
        if any(character in fqn for character in "*{},"):
            return "its name reads as a pattern"
        if isinstance(style, ColwiseParallel):
            return self._colwise(fqn, style)
        if isinstance(style, RowwiseParallel):
            return self._rowwise(fqn, style)
        if isinstance(style, SequenceParallel):
            return self._sequence(fqn, style)
        if isinstance(style, PrepareModuleInput):
            return self._gather(fqn, target, style)
        return f"a {type(style).__name__} has no equivalent"

    def _colwise(self, fqn: str, style: ColwiseParallel) -> StyleText:
        source, output = _text(style.input_layouts[0]), _text(style.output_layouts[0])
        options = {"input": source, "output": output}
        if style.use_local_output and output == "replicate" and self._is_head(fqn):
            options["head"] = "yes"
        return StyleText("ColwiseParallel", _with_type(options, style))

    def _rowwise(self, fqn: str, style: RowwiseParallel) -> StyleText | str:
        source, output = _text(style.input_layouts[0]), _text(style.output_layouts[0])
        if output == "features":
            output = FEATURES
        elif output == "other":
            return f"its output is {style.output_layouts[0]}"
        return StyleText("RowwiseParallel", _with_type({"input": source, "output": output}, style))

    def _sequence(self, fqn: str, style: SequenceParallel) -> StyleText:
        dim = _text(style.sequence_sharding[0])
        dim = FEATURES if dim == "features" else dim
        reads = not style.use_local_output and not self._is_read_by_styles(fqn, dim)
        return StyleText("SequenceParallel", {"dim": dim} | ({"output_type": "dtensor"} if reads else {}))

    def _gather(self, fqn: str, target: nn.Module, style: PrepareModuleInput) -> StyleText | str:
        """One gather of the first input: for the column linears of this dict, where only they read it, or for any
        code."""
        layouts, wanted = style.input_layouts or (), style.desired_input_layouts or ()
        sources, desired = [_text(layout) for layout in layouts[:1]], [_text(layout) for layout in wanted[:1]]
        other_layouts = (*layouts[1:], *style.input_kwarg_layouts.values())
        if (
            desired != ["replicate"]
            or not sources[0].startswith("dim")
            or any(layout is not None for layout in other_layouts)
        ):
            return "it does more than gather its first input"
        readers = readers_of_input(target.__class__) if _is_stock(target) else None
        linears = [getattr(target, name, None) for name in readers or ()]
        options = {"input": sources[0], "inputs": str(len(layouts))}
        if not linears or not self._has_one_name(target) or not all(map(self._reads_replicated, linears)):
            return StyleText(
                "PrepareModuleInput", {**options, "for_code": "tensor" if style.use_local_output else "dtensor"}
            )
        self.gathered |= {id(linear) for linear in linears}
        return StyleText("PrepareModuleInput", options)

    def _reads_replicated(self, module: Any) -> bool:
        """Whether a module is a column linear of the dict whose input is full, and that is called in one place."""
        styles = self.styles.get(id(module), [])
        return (
            len(styles) == 1
            and id(module) in self.lowered
            and isinstance(styles[0], ColwiseParallel)
            and isinstance(module, nn.Linear)
            and _is_stock(module)
            and self._has_one_name(module)
            and _text(styles[0].input_layouts[0]) == "replicate"
        )

    def _is_read_by_styles(self, fqn: str, dim: str) -> bool:
        """Whether only modules read the output of a norm whose styles take their first input to be sharded along
        `dim`."""
        parent_name, _, child = fqn.rpartition(".")
        parent = self.module.get_submodule(parent_name)
        norm = self.module.get_submodule(fqn)
        if not (_is_stock(parent) and _is_stock(norm) and self._has_one_name(norm) and self._has_one_name(parent)):
            return False
        readers = readers_of_output(parent.__class__, child)
        modules = [getattr(parent, name, None) for name in readers or ()]
        return bool(modules) and all(self._takes_shard(module, dim) for module in modules)

    def _takes_shard(self, module: Any, dim: str) -> bool:
        styles = self.styles.get(id(module), [])
        if len(styles) != 1 or not _is_stock(module):
            return False
        if isinstance(styles[0], PrepareModuleInput) and (styles[0].desired_input_layouts or (None,))[0] is None:
            return False
        converting = isinstance(styles[0], (ColwiseParallel, PrepareModuleInput))
        return converting and [_text(layout) for layout in (styles[0].input_layouts or ())[:1]] == [dim]

    def _has_one_name(self, module: nn.Module) -> bool:
        """Whether one module contains it, once."""
        return sum(inner is module for _, inner in self.module.named_modules(remove_duplicate=False)) == 1

    def _kind(self, fqn: str) -> str:
        return self.facts.modules[self.facts.module_fqns[fqn]].kind

    def _is_head(self, fqn: str) -> bool:
        """Whether a module makes the logits: the last linear outside of layers, with a row for each token of the first
        table."""
        tables = [facts for facts in self.facts.modules.values() if facts.kind == "embedding"]
        linears = [
            facts for name, facts in self.facts.modules.items() if facts.kind == "linear" and not _is_in_layers(name)
        ]
        facts = self.facts.modules[self.facts.module_fqns[fqn]]
        return bool(tables and linears) and facts is linears[-1] and facts.weight_shape[0] == tables[0].weight_shape[0]


def _several(style: Any) -> str:
    """The reason why one of several styles of a module has no rule."""
    if isinstance(style, PrepareModuleInput):
        return f"it converts the input of another style, which is {(style.input_layouts or (None,))[0]}"
    if isinstance(style, PrepareModuleOutput):
        return f"it converts the output of another style, to {style.desired_output_layouts[0]}"
    return "the module has several styles"


def _parts(style: Any, kind: str) -> list[Any]:
    """A style with layouts that no rule has, as one with those of a rule, between conversions of its input and output.

    kind: of its module.
    """
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return [style]
    inner, before, after = copy.copy(style), [], []
    is_column, source, output = isinstance(style, ColwiseParallel), style.input_layouts[0], style.output_layouts[0]
    known: tuple[str, ...] = ("replicate",)
    if kind != "embedding":
        known = ("replicate", "dim") if is_column else ("replicate", "features")
    if not _text(source).startswith(known):
        desired = Shard(-1) if "features" in known else Replicate()
        before = [PrepareModuleInput(input_layouts=source, desired_input_layouts=desired)]
        inner.input_layouts = (desired,)
    if is_column and _text(output) not in ("replicate", "features"):
        local = style.use_local_output
        after = [PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=output, use_local_output=local)]
        inner.output_layouts, inner.use_local_output = (Shard(-1),), False
    return [*before, inner, *after]


def _converts(style: Any) -> bool:
    """Whether a style leaves what the module computes itself to another one."""
    return isinstance(style, CONVERTING)


def _is_in_layers(fqn: str) -> bool:
    return any(part.isdigit() for part in fqn.split("."))


def _is_stock(module: nn.Module) -> bool:
    """Whether nothing but the code of its class runs when a module is called."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" not in module.__dict__ and not any(hooks)


def _with_type(options: dict[str, str], style: Any) -> dict[str, str]:
    return options if style.use_local_output else {**options, "output_type": "dtensor"}


def _text(layout: Placement | None) -> str:
    """A layout as rules write it; "other" for what they cannot."""
    if layout is None:
        return "other"
    if layout.is_replicate():
        return "replicate"
    if not layout.is_shard():
        return "other"
    return "features" if dim_of(layout) == -1 else f"dim{dim_of(layout)}"


# -- input reads -----------------------------------------------------------------------------------------------------
# What the code of a forward does with one of its values: whether only the modules inside it read it. PyTorch's
# `PrepareModuleInput` and `SequenceParallel` return DTensors by default. Where only planned modules read such a
# value, a plain tensor means the same and costs less. The source text is analyzed; what cannot be understood counts
# as read.


_NOT_CALLED = ("__init__", "reset_parameters", "init_weights", "_init_weights", "extra_repr")
_CLOSURES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.NamedExpr)
_SHAPE = ("shape", "size", "dtype", "device", "ndim", "dim", "is_cuda")


def readers_of_input(cls: Any) -> frozenset[str] | None:
    """The children to which a forward passes its first argument, as their first argument; None if it is used otherwise
    too.

    Reading its shape, dtype or device does not count.
    """
    code = _ForwardSyntax.of(cls)
    if code is None or len(code.definition.args.args) < 2:
        return None
    readers = code.readers_of_argument(code.definition.args.args[1].arg)
    if readers is None or any(_mentions(cls, child) != 1 for child in readers):
        return None  # such a child has other inputs too
    return readers


def readers_of_output(cls: Any, child: str) -> frozenset[str] | None:
    """The children to which a forward passes the output of a child: `self.attention(self.norm(x))`, or by a variable.

    None if anything else reads it, its shape included, which differs between a DTensor and its shard.
    """
    code = _ForwardSyntax.of(cls)
    if code is None:
        return None
    calls = [
        node for node in ast.walk(code.definition) if isinstance(node, ast.Call) and code.children(node.func) == {child}
    ]
    if len(calls) != _mentions(cls, child):
        return None
    readers: set[str] = set()
    for call in calls:
        reading = code.reading_children(call) or code.readers_of_variable(call)
        if reading is None:
            return None
        readers |= reading
    return frozenset(readers) if calls else None


def _mentions(cls: Any, child: str) -> int:
    """How often the code of a class, and of its bases, names a child, apart from where it is made."""
    count = 0
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "torch" or base is object:
            break
        for name, member in vars(base).items():
            if name in _NOT_CALLED or not inspect.isfunction(inspect.unwrap(member) if callable(member) else member):
                continue
            tree = parsed(member)
            if tree is None:
                return -1  # code without source may name it
            count += sum(isinstance(node, ast.Attribute) and node.attr == child for node in ast.walk(tree))
    return count


class _ForwardSyntax:
    """The syntax tree of one forward."""

    def __init__(self, definition: ast.FunctionDef):
        self.definition = definition
        self.parents = {child: node for node in ast.walk(definition) for child in ast.iter_child_nodes(node)}
        self.receiver = definition.args.args[0].arg if definition.args.args else ""

    @classmethod
    def of(cls, module_class: Any) -> _ForwardSyntax | None:
        """None where there is no source to read."""
        tree = parsed(module_class.forward)
        if tree is None:
            return None
        definition = tree.body[0]
        wrapped = inspect.unwrap(module_class.forward) is not module_class.forward
        if wrapped or not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
            return None  # a decorator may read the inputs
        return cls(definition)

    def readers_of_variable(self, value: ast.AST) -> frozenset[str] | None:
        """The children that `h` is passed to, of a statement `h = value` of the forward, until `h` gets another
        value."""
        assignment, body = self.parents[value], self.definition.body
        if not isinstance(assignment, ast.Assign) or assignment not in body or len(assignment.targets) != 1:
            return None
        target = assignment.targets[0]
        if not isinstance(target, ast.Name):
            return None
        following = []
        for statement in body[body.index(assignment) + 1 :]:
            following.append(statement)  # a statement that assigns may read the old value
            if isinstance(statement, ast.Assign) and any(
                isinstance(node, ast.Name) and node.id == target.id for node in statement.targets
            ):
                break
        loads = (node for statement in following for node in ast.walk(statement) if not self._stores(node))
        return self._readers(target.id, loads, ())

    def readers_of_argument(self, name: str) -> frozenset[str] | None:
        """The children that an argument is passed to; None if anything else is done with it, except reading its
        shape."""
        return self._readers(name, ast.walk(self.definition), _SHAPE)

    def _stores(self, node: ast.AST) -> bool:
        """Whether a node gives a variable a new value, without reading the old one as `h += x` does."""
        stores = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        return stores and not isinstance(self.parents[node], ast.AugAssign)

    def _readers(self, name: str, nodes: Iterable[ast.AST], allowed: tuple[str, ...]) -> frozenset[str] | None:
        if any(isinstance(node, _CLOSURES) and node is not self.definition for node in ast.walk(self.definition)):
            return None
        readers: set[str] = set()
        for node in nodes:
            if not isinstance(node, ast.Name) or node.id != name:
                continue
            parent = self.parents[node]
            if isinstance(parent, ast.Attribute) and parent.attr in allowed:
                continue
            reading = self.reading_children(node) if isinstance(node.ctx, ast.Load) else None
            if reading is None:
                return None
            readers |= reading
        return frozenset(readers)

    def reading_children(self, value: ast.AST) -> set[str] | None:
        """The children that are called with a value as their first argument; None where something else reads it."""
        call = self.parents[value]
        if not isinstance(call, ast.Call) or not call.args or call.args[0] is not value:
            return None
        return self.children(call.func)

    def children(self, function: ast.AST) -> set[str] | None:
        """The children that an expression may be: `self.w`, or the variable of `for w in (self.w1, self.w2)`."""
        if isinstance(function, ast.Attribute):
            receiver = function.value
            return {function.attr} if isinstance(receiver, ast.Name) and receiver.id == self.receiver else None
        if not isinstance(function, ast.Name):
            return None
        node: ast.AST = function
        while node in self.parents:
            node = self.parents[node]
            for loop in getattr(node, "generators", ()):
                if isinstance(loop.target, ast.Name) and loop.target.id == function.id:
                    return self._all_children(loop.iter)
        return None

    def _all_children(self, sequence: ast.AST) -> set[str] | None:
        all_children: set[str] = set()
        for element in sequence.elts if isinstance(sequence, (ast.Tuple, ast.List)) else (sequence,):
            children = self.children(element)
            if children is None:
                return None
            all_children |= children
        return all_children
