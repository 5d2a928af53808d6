"""Losses that are means over the targets of one rank, where gradients are summed over several data ranks.

Such a gradient is as many times too large as there are ranks, and a token counts by which rank it is on. The mean that
PyTorch's losses take is the last node of a graph that begins at a model; what is divided or weighed afterwards is not
judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import DATA_AXES
from parallelize.comm.mesh_view import MeshView

T = torch.Tensor
_RANKS = "parallelize: data ranks"
"""What the nodes of a model's outputs are marked with, in the metadata that PyTorch keeps for each node."""
_MEANS = ("NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "L1Loss")
_MEAN = 1  # of `_saved_reduction`
_OF_RANK = "parallelize: mean over one rank"
_FARTHEST = 64  # nodes between a loss and the model's output


def mark_outputs(module: nn.Module, mesh: MeshView) -> None:
    """Let the outputs of a model remember over how many ranks its gradients are summed."""
    module.register_forward_hook(_Marks(mesh.spec.ranks(*DATA_AXES)))


class _Marks:
    """Marks what the forward returns, for the check that no rank takes a mean of its own."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def __deepcopy__(self, memo: dict) -> _Marks:
        return self

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for tensor in _tensors(output):
                node: Any = tensor.grad_fn
                if node is not None:
                    node.metadata[_RANKS] = self.ranks


def _tensors(output: Any) -> Iterator[T]:
    if isinstance(output, T):
        yield output
    elif isinstance(output, Mapping):
        yield from (value for value in output.values() if isinstance(value, T))
    elif isinstance(output, Iterable):
        yield from (value for value in output if isinstance(value, T))


def refuse_rank_mean(roots: Any) -> None:
    """Refuse the backward of a mean over one rank's targets.

    Args:
        roots: what `torch.autograd.backward` is given first.

    Raises: ModelError `mean-of-rank`.
    Cost: the name of a node; a walk of the graph only from a loss that is a mean.
    """
    for root in (roots,) if isinstance(roots, T) else roots if isinstance(roots, (tuple, list)) else ():
        ranks = data_ranks_of(root.grad_fn) if isinstance(root, T) and is_mean(root) else 1
        if ranks > 1:
            raise rank_mean(ranks)


def marked_mean(loss: T) -> T:
    """A mean over one rank's targets by a loss of this package, which remembers that it is one."""
    node: Any = loss.grad_fn
    if node is not None and not torch.compiler.is_compiling():
        node.metadata[_OF_RANK] = True
    return loss


def is_mean(loss: T) -> bool:
    """Whether a tensor is the mean that a loss of PyTorch or of this package takes, as it is."""
    node: Any = loss.grad_fn
    if node is None:
        return False
    of_torch = node.name().startswith(_MEANS) and getattr(node, "_saved_reduction", None) == _MEAN
    return of_torch or _OF_RANK in node.metadata


def data_ranks_of(node: Any) -> int:
    """Over how many ranks the gradients of the model are summed from whose output a node computes; 1 where it is
    none's."""
    seen, waiting = {node}, [node]
    while waiting and len(seen) < _FARTHEST:
        node = waiting.pop(0)
        if _RANKS in node.metadata:
            return node.metadata[_RANKS]
        new = [parent for parent, _ in node.next_functions if parent is not None and parent not in seen]
        seen.update(new)
        waiting += new
    return 1


def rank_mean(ranks: int) -> ModelError:
    what = (
        f"this loss is a mean over the targets of one rank, and its gradients would be summed over {ranks} data ranks"
    )
    fix = (
        "give a loss of parallelize the mesh, as cross_entropy(logits, targets, mesh=mesh); or a sum, divided by "
        "valid_tokens(targets, mesh)"
    )
    return ModelError(Problem("mean-of-rank", what, fix=fix))
