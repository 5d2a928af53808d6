"""What the code of a block does with the shards that its column linears return, before its row linears sum over them.

The source text is analyzed, statement by statement. Only what is certain counts: a value is a shard if every path of
the code makes it one, and its last dim is features if nothing has changed its shape.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from parallelize.axes.tensor.local_inputs import parsed

_FACTS = ("shape", "size", "dtype", "device", "ndim", "dim", "numel", "is_cuda", "requires_grad")
_ELEMENTWISE = frozenset(
    [
        "abs",
        "celu",
        "clamp",
        "contiguous",
        "dropout",
        "elu",
        "exp",
        "float",
        "gelu",
        "hardswish",
        "leaky_relu",
        "log",
        "mish",
        "mul",
        "pow",
        "relu",
        "selu",
        "sigmoid",
        "silu",
        "softplus",
        "sqrt",
        "square",
        "tanh",
        "to",
        "type_as",
    ]
)
_DIVIDES = frozenset(("chunk", "split", "tensor_split", "unbind", "glu"))
_MIXES = frozenset(
    [
        "amax",
        "amin",
        "argmax",
        "argmin",
        "cumsum",
        "log_softmax",
        "logsumexp",
        "mean",
        "norm",
        "normalize",
        "softmax",
        "sort",
        "std",
        "sum",
        "topk",
        "var",
    ]
)
_NORMALIZES = frozenset(("layer_norm", "rms_norm"))  # over the last dims, whatever their arguments
_LAST_BY_DEFAULT = frozenset(("glu", "sort", "topk"))
_DIM_IS_SECOND = frozenset(("chunk", "split", "tensor_split", "norm", "topk", "normalize"))
"""Functions with an argument before `dim`; `normalize(input, p, dim)` has one too."""


@dataclass(frozen=True)
class ShardReads:
    """What a forward does with shards of features.

    Attributes:
        readers: names of the children that are called with a shard, and of the parameters that are combined with one.
        divided: names of the column linears whose features are cut into parts.
        mixed: (column linear, function) where a function runs over all of its features.
    """

    readers: frozenset[str] = frozenset()
    divided: frozenset[str] = frozenset()
    mixed: frozenset[tuple[str, str]] = frozenset()


@lru_cache(maxsize=4096)
def shard_reads(cls: Any, columns: frozenset[str], rows: frozenset[str], elementwise: frozenset[str]) -> ShardReads:
    """Analyze the forward of a class.

    Args:
        columns: names of the children that return shards of features. rows: of those that take them and return sums.
        elementwise: names of children that are called on each feature alone, such as activations.

    Returns: nothing found, where there is no source to read.
    """
    tree = parsed(cls.forward)
    definition = tree.body[0] if tree is not None else None
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return ShardReads()
    code = _Code(definition.args.args[0].arg, columns, rows, elementwise)
    code.run(definition.body)
    return ShardReads(frozenset(code.readers), frozenset(code.divided), frozenset(code.mixed))


@dataclass(frozen=True)
class _Value:
    """A value of the code.

    Attributes:
        is_shard: whether it was computed from a shard of features.
        features: the column linears whose features are its last dim.
        parameters: attributes of the block that it was computed from, where it is no shard.
        children: the children that it is, where it is one.
    """

    is_shard: bool = False
    features: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    children: frozenset[str] = frozenset()

    def reshaped(self) -> _Value:
        return _Value(self.is_shard)


_NONE = _Value()


@dataclass
class _Code:
    """The values of the variables of one forward, and what was found so far."""

    receiver: str
    columns: frozenset[str]
    rows: frozenset[str]
    elementwise: frozenset[str]
    variables: dict[str, _Value] = field(default_factory=dict)
    readers: set[str] = field(default_factory=set)
    divided: set[str] = field(default_factory=set)
    mixed: set[tuple[str, str]] = field(default_factory=set)
    branches: int = 0

    # -- statements -----------------------------------------------------------------------------------------------

    def run(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign):
            value = statement.value
            for target in statement.targets:
                self._assign(target, value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign(statement.target, statement.value)
        elif isinstance(statement, ast.AugAssign):
            result = self._combined([self._value(statement.target), self._value(statement.value)])
            self._store(statement.target, result)
        elif isinstance(statement, ast.If):
            self._value(statement.test)
            self._branch(statement.body, statement.orelse)
        elif isinstance(statement, (ast.For, ast.While)):
            self._branch(statement.body, [])
        elif isinstance(statement, (ast.With, ast.Try)):
            self.run(statement.body)
        elif isinstance(statement, (ast.Return, ast.Expr)) and statement.value is not None:
            self._value(statement.value)

    def _branch(self, *bodies: list[ast.stmt]) -> None:
        """Run each body on its own; a variable keeps what it is on all paths."""
        before, results = self.variables, []
        self.branches += 1
        for body in bodies:
            self.variables = dict(before)
            self.run(body)
            if not (body and isinstance(body[-1], (ast.Return, ast.Raise))):
                results.append(self.variables)
        self.branches -= 1
        first = results[0] if results else {}
        self.variables = {
            name: _common(value, [other.get(name, _NONE) for other in results]) for name, value in first.items()
        }

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            values = [self._value(element) for element in value.elts]
            for element, result in zip(target.elts, values, strict=True):
                self._store(element, result)
            return
        self._store(target, self._value(value))

    def _store(self, target: ast.expr, value: _Value) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._store(element, value.reshaped())

    # -- expressions ----------------------------------------------------------------------------------------------

    def _value(self, node: ast.AST) -> _Value:
        if isinstance(node, ast.Name):
            return self.variables.get(node.id, _NONE)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            operands = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
            return self._combined([self._value(operand) for operand in operands])
        if isinstance(node, ast.Subscript):
            return self._part(node)
        if isinstance(node, ast.IfExp):
            self.branches += 1
            values = [self._value(node.body), self._value(node.orelse)]
            self.branches -= 1
            return _common(values[0], values[1:])
        if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
            return self._comprehension(node)
        if isinstance(node, (ast.Lambda, ast.FunctionDef)):
            return _NONE
        values = [self._value(child) for child in ast.iter_child_nodes(node)]
        return _Value(any(value.is_shard for value in values))

    def _comprehension(self, node: ast.GeneratorExp | ast.ListComp) -> _Value:
        outer = dict(self.variables)
        for loop in node.generators:
            elements = loop.iter.elts if isinstance(loop.iter, (ast.Tuple, ast.List)) else []
            values = [self._value(element) for element in elements] or [self._value(loop.iter).reshaped()]
            self._store(loop.target, _common(values[0], values[1:]))
        result = self._value(node.elt).reshaped()
        self.variables = outer
        return result

    def _attribute(self, node: ast.Attribute) -> _Value:
        if isinstance(node.value, ast.Name) and node.value.id == self.receiver:
            kind = "column" if node.attr in self.columns else "row" if node.attr in self.rows else node.attr
            return _Value(parameters=frozenset({node.attr}), children=frozenset({kind}))
        if node.attr in _FACTS:
            return _NONE
        return self._value(node.value).reshaped()

    def _part(self, node: ast.Subscript) -> _Value:
        value = self._value(node.value)
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        first, last = index[0], index[-1]
        from_the_end = isinstance(first, ast.Constant) and first.value is ...
        if from_the_end and isinstance(last, ast.Slice) and (last.lower or last.upper) and not self.branches:
            self.divided |= value.features
        return value.reshaped()

    def _combined(self, values: list[_Value]) -> _Value:
        """The value of arithmetic, feature by feature."""
        self._read_by_parameters(values)
        is_shard = any(value.is_shard for value in values)
        features = frozenset[str]().union(*(value.features for value in values))
        parameters = frozenset[str]().union(*(value.parameters for value in values))
        return _Value(is_shard, features, frozenset() if is_shard else parameters)

    def _read_by_parameters(self, values: Iterable[_Value]) -> None:
        values = list(values)
        if any(value.is_shard for value in values):
            self.readers |= frozenset[str]().union(*(value.parameters for value in values if not value.is_shard))

    def _call(self, node: ast.Call) -> _Value:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        values = [self._value(argument) for argument in arguments]
        is_shard = any(value.is_shard for value in values)
        function = self._value(node.func) if isinstance(node.func, (ast.Attribute, ast.Name)) else _NONE
        if function.children:
            return self._call_of_child(function, values, is_shard)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _FACTS or _sums_or_gathers(name):
            return _NONE
        receiver = self._value(node.func.value) if isinstance(node.func, ast.Attribute) else _NONE
        by_method = receiver.is_shard
        self._read_by_parameters([receiver, *values])
        subject = receiver if by_method else values[0] if values else _NONE
        if name in _ELEMENTWISE:
            return _Value(is_shard or by_method, subject.features)
        if subject.features and not self.branches and (name in _NORMALIZES or _is_over_last_dim(name, node, by_method)):
            if name in _DIVIDES:
                self.divided |= subject.features
            elif name in _MIXES | _NORMALIZES:
                self.mixed |= {(column, name) for column in subject.features}
        return _Value(is_shard or by_method)

    def _call_of_child(self, function: _Value, values: list[_Value], is_shard: bool) -> _Value:
        if function.children == {"column"}:
            return _Value(True, function.parameters)
        if function.children & {"column", "row"} or any(map(_sums_or_gathers, function.parameters)):
            return _NONE
        if is_shard:
            self.readers |= function.parameters
        keeps = function.parameters <= self.elementwise and len(values) == 1
        return _Value(is_shard, values[0].features if keeps else frozenset())


def _common(value: _Value, others: list[_Value]) -> _Value:
    """What a value is on all of several paths."""
    for other in others:
        same = value.children == other.children and bool(value.children)
        value = _Value(
            value.is_shard and other.is_shard,
            value.features & other.features,
            value.parameters | other.parameters if same else value.parameters & other.parameters,
            value.children if same else frozenset(),
        )
    return value


def _sums_or_gathers(name: str) -> bool:
    """Whether a function returns full values by hand, as far as its name tells."""
    return "gather" in name or "reduce" in name


def _is_over_last_dim(name: str, node: ast.Call, by_method: bool) -> bool:
    """Whether the dim of a call is a literal that means the last one: -1, or for parts also 2, of [batch, tokens,
    features]."""
    dims = [keyword.value for keyword in node.keywords if keyword.arg in ("dim", "axis")]
    position = 1 + (name in _DIM_IS_SECOND) - by_method
    dims += node.args[position : position + 1]
    if not dims:
        return name in _LAST_BY_DEFAULT
    try:
        dim = ast.literal_eval(dims[0])
    except ValueError:
        return False
    return dim == -1 or (dim == 2 and name in _DIVIDES)
