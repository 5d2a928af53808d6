"""A backward split in two: gradients of the inputs first (dgrad), gradients of the weights later (wgrad).

dgrad runs the graph from the outputs to the stage's inputs, and saves the gradient that arrives at each node that has
weights. wgrad starts from these nodes and accumulates the gradients of the weights only. The weights are leaves of the
graph itself, so hooks run as in a normal backward.

Source: zero bubble pipeline parallelism, arXiv:2401.10241, sec. 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private

T = torch.Tensor


class Wgrad:
    """The rest of a backward after dgrad. Call it once."""

    def __init__(self, groups: list[_Group], independent: list[tuple[T, T | None]]):
        self._groups, self._independent = groups, independent

    def __call__(self) -> None:
        # a weight that is used twice is reached through nodes of other groups, whose saved tensors must still exist
        retain = any(len(group.nodes) > 1 for group in self._groups)
        for group in self._groups:
            group.run(retain)
        if self._independent:  # these outputs do not depend on an input, so dgrad has not run any of their nodes
            torch.autograd.backward([out for out, _ in self._independent], [grad for _, grad in self._independent])
        self._groups, self._independent = [], []


class _Group:
    """Nodes between outputs and inputs that have the same weights, and these weights."""

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
                for index, grad in enumerate(grads):
                    if grad is not None:
                        edges.append(GradientEdge(node, index))
                        values.append(grad)
                # of a weight that is used twice: `grads` has the gradient from one use to the other already
                if len(self.nodes) > 1:
                    handles.append(node.register_prehook(lambda _, saved=grads: saved))
            if edges:
                torch.autograd.backward(edges, values, inputs=list(self.leaves.values()), retain_graph=retain)
        finally:
            for handle in handles:
                handle.remove()
        self.nodes, self.grads = {}, {}


def backward_inputs(outputs: Sequence[T], grads: Sequence[T | None], inputs: Sequence[T]) -> Wgrad:
    """Accumulate the gradients of `inputs` (dgrad); the result accumulates those of the weights (wgrad).

    Args:
        outputs: tensors that require a gradient.
        grads: gradient of each output; None is 1 for a scalar.
        inputs: leaves that require a gradient.

    Raises: ModelError `split-backward` on versions of torch that cannot begin at a node with weights. Nothing has run
        then.
    """
    graph = _Graph(outputs, inputs)
    for node in (node for group in graph.groups for node in group.nodes):
        if not private.starts_at(node):
            raise _unsplittable(node)
    depends = [node is not None and node in graph.to_inputs for node in map(_node_of, outputs)]
    dependent = [(out, grad) for out, grad, reached in zip(outputs, grads, depends, strict=True) if reached]
    independent = [(out, grad) for out, grad, reached in zip(outputs, grads, depends, strict=True) if not reached]
    handles = [
        node.register_prehook(lambda arrived, group=group, node=node: group.keep(node, arrived))
        for group in graph.groups
        for node in group.nodes
    ]
    try:
        if dependent:
            outs, values = [out for out, _ in dependent], [grad for _, grad in dependent]
            torch.autograd.backward(outs, values, inputs=list(inputs), retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return Wgrad(graph.groups, independent)


def _unsplittable(node: Node) -> ModelError:
    what = f"torch {torch.__version__} cannot begin a backward at {node.name()}, which computes with weights"
    fix = "use torch 2.13 or newer, a schedule that does not split backward (1f1b), or "
    fix += "none of fuse_loss, overlap and compiled layers"
    return ModelError(Problem("split-backward", what, fix=fix))


class _Graph:
    """The autograd graph of the outputs: the nodes that lead to the inputs, and the weights of these nodes."""

    def __init__(self, outputs: Sequence[T], inputs: Sequence[T]):
        roots = [node for node in map(_node_of, outputs) if node is not None]
        nodes, self.parents = _walk(roots)
        input_nodes = {node for node in map(_node_of, inputs) if node is not None}
        self.to_inputs = self._ancestors_of(node for node in nodes if node in input_nodes)
        self.groups = self._grouped([node for node in nodes if hasattr(node, "variable") and node not in input_nodes])

    def _ancestors_of(self, below: Iterable[Node]) -> set[Node]:
        """Every node that leads to a node of `below`, and these themselves."""
        todo = list(below)
        seen = set(todo)
        while todo:
            for parent in self.parents.get(todo.pop(), ()):
                if parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        return seen

    def _first_above(self, leaf: Node) -> dict[Node, None]:
        """The nearest nodes above a leaf that lead to the inputs."""
        nearest: dict[Node, None] = {}
        seen, todo = {leaf}, [leaf]
        while todo:
            for parent in self.parents.get(todo.pop(), ()):
                if parent in self.to_inputs:
                    nearest[parent] = None
                elif parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        return nearest

    def _grouped(self, leaves: list[Node]) -> list[_Group]:
        """Groups of leaves; leaves that share a node are in one group."""
        of_node: dict[Node, _Group] = {}
        for leaf in leaves:
            nodes = self._first_above(leaf)
            group = _Group()
            for other in {id(of_node[n]): of_node[n] for n in nodes if n in of_node}.values():
                group.nodes |= other.nodes
                group.leaves |= other.leaves
            group.nodes |= nodes
            group.leaves[leaf] = leaf.variable  # type: ignore[attr-defined]
            of_node |= dict.fromkeys(group.nodes, group)
        return list({id(group): group for group in of_node.values()}.values())


def _walk(roots: list[Node]) -> tuple[dict[Node, None], dict[Node, list[Node]]]:
    """(all nodes, node to the nodes above it), in the order of the graph, so that all ranks run wgrad in one order."""
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
    """The node that computes a tensor, or that accumulates the gradient of a leaf."""
    if x.grad_fn is not None or not x.requires_grad:
        return x.grad_fn
    with torch.enable_grad():
        return x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
