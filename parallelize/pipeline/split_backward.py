"""A backward in two halves: gradients of inputs first, gradients of weights later.

The first half (dgrad) walks the graph from the outputs to the stage's inputs, and keeps what arrives at each node from
which weights hang; the second (wgrad) starts again from those nodes and reaches the weights alone. Weights are the leaves
of the graph itself, so gradients come by the same way as in a whole backward, hooks included.

Source: zero bubble pipeline parallelism, arXiv:2401.10241, sec. 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

T = torch.Tensor


class WeightHalf:
    """What is left of a backward after its first half. Call it once."""

    def __init__(self, groups: list[_Group], others: list[tuple[T, T | None]]):
        self._groups, self._others = groups, others

    def __call__(self) -> None:
        # a weight used twice is reached through nodes of others, which must not have let go of what they saved
        retain = any(len(group.nodes) > 1 for group in self._groups)
        for group in self._groups:
            group.run(retain)
        if self._others:  # nothing of these reaches an input, so nothing of them was done
            torch.autograd.backward([out for out, _ in self._others], [grad for _, grad in self._others])
        self._groups, self._others = [], []


class _Group:
    """Nodes on the way to the inputs that lead to the same weights, and those weights."""

    def __init__(self) -> None:
        self.nodes: dict[Node, None] = {}
        self.leaves: dict[Node, T] = {}
        self.grads: dict[Node, tuple[T | None, ...]] = {}

    def keep(self, node: Node, grads: tuple[T | None, ...]) -> None:
        self.grads[node] = grads

    def run(self, retain: bool) -> None:
        edges, values = [], []
        handles = []
        try:
            for node in self.nodes:
                grads = self.grads.get(node, ())
                for place, grad in enumerate(grads):
                    if grad is not None:
                        edges.append(GradientEdge(node, place))
                        values.append(grad)
                # of a weight used twice: what flows from one use to the other is in `grads` already
                if len(self.nodes) > 1:
                    handles.append(node.register_prehook(lambda _, kept=grads: kept))
            if edges:
                torch.autograd.backward(edges, values, inputs=list(self.leaves.values()), retain_graph=retain)
        finally:
            for handle in handles:
                handle.remove()
        self.nodes, self.grads = {}, {}


def backward_inputs(outputs: Sequence[T], grads: Sequence[T | None], inputs: Sequence[T]) -> WeightHalf:
    """Accumulate the gradients of `inputs`; return the rest, which accumulates those of the weights.

    Args:
        outputs: that require a gradient, with theirs (None for a scalar's 1).
        inputs: leaves that require a gradient.
    """
    graph = _Graph(outputs, inputs)
    reached = [node is not None and node in graph.to_inputs for node in map(_node_of, outputs)]
    through = [(out, grad) for out, grad, here in zip(outputs, grads, reached, strict=True) if here]
    others = [(out, grad) for out, grad, here in zip(outputs, grads, reached, strict=True) if not here]
    handles = [
        node.register_prehook(lambda arrived, group=group, node=node: group.keep(node, arrived))
        for group in graph.groups
        for node in group.nodes
    ]
    try:
        if through:
            outs, values = [out for out, _ in through], [grad for _, grad in through]
            torch.autograd.backward(outs, values, inputs=list(inputs), retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return WeightHalf(graph.groups, others)


class _Graph:
    """The graph above outputs: which nodes lead to the inputs, and which weights hang from them."""

    def __init__(self, outputs: Sequence[T], inputs: Sequence[T]):
        roots = [node for node in map(_node_of, outputs) if node is not None]
        nodes, self.parents = _walk(roots)
        wanted = {node for node in map(_node_of, inputs) if node is not None}
        self.to_inputs = self._above(node for node in nodes if node in wanted)
        self.groups = self._grouped([node for node in nodes if hasattr(node, "variable") and node not in wanted])

    def _above(self, below: Iterable[Node]) -> set[Node]:
        """Every node from which one of `below` is reached."""
        todo = list(below)
        found = set(todo)
        while todo:
            for parent in self.parents.get(todo.pop(), ()):
                if parent not in found:
                    found.add(parent)
                    todo.append(parent)
        return found

    def _first_above(self, leaf: Node) -> dict[Node, None]:
        """The nodes on the way to the inputs from which a leaf hangs."""
        found: dict[Node, None] = {}
        seen, todo = {leaf}, [leaf]
        while todo:
            for parent in self.parents.get(todo.pop(), ()):
                if parent in self.to_inputs:
                    found[parent] = None
                elif parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        return found

    def _grouped(self, leaves: list[Node]) -> list[_Group]:
        """Leaves whose nodes overlap go together."""
        of_node: dict[Node, _Group] = {}
        for leaf in leaves:
            found = self._first_above(leaf)
            group = _Group()
            for other in {id(of_node[n]): of_node[n] for n in found if n in of_node}.values():
                group.nodes |= other.nodes
                group.leaves |= other.leaves
            group.nodes |= found
            group.leaves[leaf] = leaf.variable  # type: ignore[attr-defined]
            of_node |= dict.fromkeys(group.nodes, group)
        return list({id(group): group for group in of_node.values()}.values())


def _walk(roots: list[Node]) -> tuple[dict[Node, None], dict[Node, list[Node]]]:
    """(every node, node -> the nodes above it). In the graph's order, not memory's: ranks must run halves alike."""
    parents: dict[Node, list[Node]] = {}
    seen, todo = dict.fromkeys(roots), list(roots)
    while todo:
        node = todo.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            parents.setdefault(below, []).append(node)
            if below not in seen:
                seen[below] = None
                todo.append(below)
    return seen, parents


def _node_of(x: T) -> Any:
    """The node that makes a tensor, or that accumulates a leaf's gradient."""
    if x.grad_fn is not None or not x.requires_grad:
        return x.grad_fn
    with torch.enable_grad():
        return x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
