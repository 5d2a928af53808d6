"""What the code of a forward does with one of its values: whether only the modules inside it read it.

PyTorch's `PrepareModuleInput` and `SequenceParallel` return DTensors by default. Where only planned modules read such a value, a
plain tensor means the same and costs less. The source text is analyzed; what cannot be understood counts as read.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from typing import Any

from parallelize.axes.tensor.syntax import parsed

_NOT_CALLED = ("__init__", "reset_parameters", "init_weights", "_init_weights", "extra_repr")
_CLOSURES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.NamedExpr)
_SHAPE = ("shape", "size", "dtype", "device", "ndim", "dim", "is_cuda")


def readers_of_input(cls: Any) -> frozenset[str] | None:
    """The children to which a forward passes its first argument, as their first argument; None if it is used otherwise too.

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
        """The children that `h` is passed to, of a statement `h = value` of the forward, until `h` gets another value."""
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
        """The children that an argument is passed to; None if anything else is done with it, except reading its shape."""
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
