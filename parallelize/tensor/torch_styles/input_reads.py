"""What the code of a forward does with one of its values: whether only the modules inside it read it.

PyTorch's `PrepareModuleInput` and `SequenceParallel` return DTensors by default. Where only planned modules read such a value, a
plain tensor means the same and costs less. The source text is analyzed; what cannot be understood counts as read.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from typing import Any

_SHAPE = ("shape", "size", "dtype", "device", "ndim", "dim", "is_cuda")


def readers_of_input(cls: Any) -> frozenset[str] | None:
    """The children to which a forward passes its first argument, as their first argument; None if it is used otherwise too.

    Reading its shape, dtype or device does not count.
    """
    code = _Forward.of(cls)
    if code is None or len(code.definition.args.args) < 2:
        return None
    return code.readers_of_argument(code.definition.args.args[1].arg)


def readers_of_output(cls: Any, child: str) -> frozenset[str] | None:
    """The children to which a forward passes the output of a child: `self.attention(self.norm(x))`, or by a variable.

    None if anything else reads it, its shape included, which differs between a DTensor and its shard.
    """
    code = _Forward.of(cls)
    if code is None:
        return None
    calls = [
        node for node in ast.walk(code.definition) if isinstance(node, ast.Call) and code.children(node.func) == {child}
    ]
    readers: set[str] = set()
    for call in calls:
        reading = code.reading_children(call) or code.readers_of_variable(call)
        if reading is None:
            return None
        readers |= reading
    return frozenset(readers) if calls else None


def _stores(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


class _Forward:
    """The syntax tree of one forward."""

    def __init__(self, definition: ast.FunctionDef):
        self.definition = definition
        self.parents = {child: node for node in ast.walk(definition) for child in ast.iter_child_nodes(node)}
        self.receiver = definition.args.args[0].arg if definition.args.args else ""

    @classmethod
    def of(cls, module_class: Any) -> _Forward | None:
        """None where there is no source to read."""
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(module_class.forward))))
        except (OSError, TypeError, SyntaxError):
            return None
        definition = tree.body[0]
        return cls(definition) if isinstance(definition, ast.FunctionDef) else None

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
        loads = (node for statement in following for node in ast.walk(statement) if not _stores(node))
        return self._readers(target.id, loads, ())

    def readers_of_argument(self, name: str) -> frozenset[str] | None:
        """The children that an argument is passed to; None if anything else is done with it, except reading its shape."""
        return self._readers(name, ast.walk(self.definition), _SHAPE)

    def _readers(self, name: str, nodes: Iterable[ast.AST], allowed: tuple[str, ...]) -> frozenset[str] | None:
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
