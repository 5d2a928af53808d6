"""Loss parallelism: cross entropy on logits that stay sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallelize import _torch_private as private
from parallelize.errors import Problem, ShapeError
from parallelize.groups import Group, axis_group, mesh_spec
from parallelize.mesh import DATA_AXES
from parallelize.ops.vocabulary import Vocabulary, vocabulary_cross_entropy
from parallelize.sharded_logits import ShardedLogits

T = torch.Tensor


def cross_entropy(
    logits: T,
    targets: T,
    *,
    mesh: DeviceMesh | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_tokens: T | int | None = None,
) -> T:
    """Cross entropy of logits sharded over the vocabulary (or whole ones).

    Shapes (P = tp size):
        logits   [..., V] `ShardedLogits`, a DTensor `Shard(-1)`, or a plain whole tensor
        targets  [...]    full-vocabulary ids, or `ignore_index`
        returns  a scalar, or [...] with reduction="none"

    Args:
        mesh: where it has data axes (dp_replicate, dp, dp_shard, cp), "mean" divides this rank's sum by the count of
            valid tokens over all of them: gradients are then to be summed over those axes, never averaged, and the sum
            of the returned values is the mean loss.
        z_loss: coefficient of the squared logsumexp (of the true one, not shifted by the maximum).
        num_tokens: the count to divide by, where it is known better than from this batch (all microbatches).

    Cost: three all-reduces of one value a token forward, nothing backward; one scalar more for a mean over data axes.
    Raises: ShapeError `bad-targets`, `bad-reduction`.
    Source: softmax cross entropy with label smoothing as `torch.nn.CrossEntropyLoss`; z-loss, arXiv:2204.02311 sec. 5.
    """
    local, vocabulary = _shard_of(logits)
    if tuple(targets.shape) != tuple(local.shape[:-1]):
        raise ShapeError(
            Problem("bad-targets", f"targets {list(targets.shape)} for logits {[*local.shape[:-1], vocabulary.full]}")
        )
    count = None
    if reduction == "mean":
        count = num_tokens if num_tokens is not None else valid_tokens(targets, mesh, ignore_index)
    return vocabulary_cross_entropy(
        local, targets, vocabulary, ignore_index, label_smoothing, reduction, z_loss=z_loss, count=count
    )


def valid_tokens(targets: T, mesh: DeviceMesh | None = None, ignore_index: int = -100) -> T:
    """How many targets count, over all data axes of the mesh (one scalar all-reduce where there are any)."""
    count = (targets != ignore_index).sum()
    axes = [axis for axis in DATA_AXES if mesh is not None and axis in mesh_spec(mesh).names]
    if mesh is not None and axes:
        dist.all_reduce(count, group=axis_group(mesh, *axes))
    return count


@contextmanager
def loss_parallel() -> Iterator[None]:
    """PyTorch's context of that name, for code that has it: safe to leave by an exception, and to nest."""
    from torch.distributed.tensor.parallel import loss_parallel as stock

    if private.loss_parallel_is_on():
        yield  # an outer one is in force
        return
    with stock():
        try:
            yield
        except BaseException:
            private.leave_loss_parallel()  # the stock context leaves its handlers behind here
            raise


def _shard_of(logits: T) -> tuple[T, Vocabulary]:
    """(this rank's logits, their vocabulary) of whatever form of logits was given."""
    if isinstance(logits, ShardedLogits):
        return logits.to_local(), logits.vocabulary
    if isinstance(logits, DTensor):
        last = logits.ndim - 1
        if logits.device_mesh.ndim == 1 and tuple(logits.placements) in ((Shard(last),), (Shard(-1),)):
            group = Group(logits.device_mesh.get_group())
            return logits.to_local(), Vocabulary(logits.shape[-1], group)
        raise ShapeError(
            Problem("bad-logits", f"DTensor logits with placements {logits.placements}", fix="Shard(-1) on the tp axis")
        )
    return logits, Vocabulary(logits.shape[-1], _ALONE)


_ALONE = Group.alone()
