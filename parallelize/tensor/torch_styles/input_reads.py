"""What the code of a forward does with one of its values: whether only the modules inside it read it.

PyTorch's `PrepareModuleInput` and `SequenceParallel` return DTensors by default. Where only planned modules read such a value, a
plain tensor means the same and costs less. The source text is analyzed; what cannot be understood counts as read.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

_SHAPE = ("shape", "size", "dtype", "device", "ndim", "dim", "is_cuda")


def readers_of_input(cls: Any) -> frozenset[str] | None:
    """The children to which a forward passes its first argument, as their first argument; None if it is used otherwise too.

    Reading its shape, dtype or device does not count.
    """
    code = _Forward.of(cls)
    if code is None or len(code.definition.args.args) < 2:
        return None
    return code.readers(code.definition.args.args[1].arg)


def readers_of_output(cls: Any, child: str) -> frozenset[str] | None:
    """The children to which a forward passes the output of a child at once: `self.attention(self.norm(x))`. Else None."""
    code = _Forward.of(cls)
    if code is None:
        return None
    calls = [
        node for node in ast.walk(code.definition) if isinstance(node, ast.Call) and code.children(node.func) == {child}
    ]
    readers: set[str] = set()
    for call in calls:
        reading = code.reading_children(call)
        if reading is None:
            return None
        readers |= reading
    return frozenset(readers) if calls else None


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

    def readers(self, name: str) -> frozenset[str] | None:
        """The children that a variable is passed to; None if anything else is done with it."""
        readers: set[str] = set()
        for node in ast.walk(self.definition):
            if not isinstance(node, ast.Name) or node.id != name:
                continue
            parent = self.parents[node]
            if isinstance(parent, ast.Attribute) and parent.attr in _SHAPE:
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
