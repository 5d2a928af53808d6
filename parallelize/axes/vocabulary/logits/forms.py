"""Convert logits and head weights of any form (plain, sharded, DTensor) to local shards."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from parallelize.axes.vocabulary.logits.head import Head, autocast_inputs
from parallelize.axes.vocabulary.logits.sharded_logits import ShardedLogits
from parallelize.base.errors import Problem, ShapeError
from parallelize.base.mesh import DATA_AXES
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.ops.vocabulary.softmax import working_dtype
from parallelize.ops.vocabulary.vocabulary_shard import Vocabulary

T = torch.Tensor


def shard_of(logits: T) -> tuple[T, Vocabulary]:
    """(local logits [..., V/P], their vocabulary) of logits in any form.

    Raises: ShapeError `bad-logits`.
    """
    if isinstance(logits, ShardedLogits):
        return logits.to_local(), logits.vocabulary
    if isinstance(logits, DTensor):
        last = logits.ndim - 1
        if logits.device_mesh.ndim == 1 and tuple(logits.placements) in ((Shard(last),), (Shard(-1),)):
            _refuse_data_axis(logits, "bad-logits", "the vocabulary of logits")
            group = Group(logits.device_mesh.get_group())
            return logits.to_local(), Vocabulary(logits.shape[-1], group)
        raise ShapeError(
            Problem("bad-logits", f"DTensor logits with placements {logits.placements}", fix="Shard(-1) on the tp axis")
        )
    return logits, Vocabulary(logits.shape[-1], _ALONE)


def linear_head(
    hidden: T, weight: T, bias: T | None, scale: float, softcap: float | None, chunk: int | None
) -> tuple[T, Head]:
    """(local hidden states, head) of plain tensors or DTensors, differentiable with respect to both.

    Raises: ShapeError `bad-head`.
    """
    if weight.ndim != 2:
        raise ShapeError(Problem("bad-head", f"a weight of shape {list(weight.shape)}", fix="[V, H]"))
    vocabulary = Vocabulary(weight.shape[0], _group_of(weight))
    if vocabulary.group.size > 1:
        if isinstance(hidden, DTensor):
            _check_replicated(hidden)
            hidden = hidden.to_local(grad_placements=[Partial()])
        else:
            hidden = ops.copy(hidden, vocabulary.group)
    elif isinstance(hidden, DTensor):
        _check_replicated(hidden)
        hidden = hidden.to_local()
    if bias is not None and isinstance(bias, DTensor) != isinstance(weight, DTensor):
        raise ShapeError(
            Problem("bad-head", "one of weight and bias is a DTensor", fix="both, with the same placements")
        )
    local, local_bias = _local(weight), None if bias is None else _local(bias)
    hidden, local, local_bias = autocast_inputs(hidden, local, local_bias)
    return hidden, Head(local, local_bias, vocabulary, chunk, tail_of(scale, softcap))


def tail_of(scale: float, softcap: float | None):
    """softcap tanh(scale z / softcap), or scale z without a softcap, in at least float32; None for the identity."""
    if softcap is not None:
        return partial(_capped, scale=scale, softcap=softcap)
    return None if scale == 1.0 else partial(_scaled, scale=scale)


def _scaled(z: T, scale: float) -> T:
    return z.to(working_dtype(z)) * scale


def _capped(z: T, scale: float, softcap: float) -> T:
    return torch.tanh(_scaled(z, scale / softcap)) * softcap


def _group_of(weight: T) -> Group:
    if not isinstance(weight, DTensor) or tuple(weight.placements) == (Replicate(),):
        return _ALONE
    if weight.device_mesh.ndim == 1 and tuple(weight.placements) == (Shard(0),):
        _refuse_data_axis(weight, "bad-head", "a head's weight")
        return Group(weight.device_mesh.get_group())
    what = f"a DTensor weight with placements {weight.placements}"
    raise ShapeError(Problem("bad-head", what, fix="Shard(0) on the tp axis alone, or a plain tensor"))


def _refuse_data_axis(x: DTensor, slug: str, what: str) -> None:
    """Refuse a shard of `fully_shard`: ranks along a data axis have different tokens, so it is no vocabulary shard."""
    names = x.device_mesh.mesh_dim_names or ()
    if any(name in DATA_AXES for name in names):
        fix = "pass its `.full_tensor()`, or use parallelize_model(..., fuse_loss=True): the weight is then unsharded"
        raise ShapeError(Problem(slug, f"{what} is sharded over the data axis {names[0]}", fix=fix))


def _local(x: T) -> T:
    return x.to_local() if isinstance(x, DTensor) else x


def _check_replicated(hidden: DTensor) -> None:
    if tuple(hidden.placements) != (Replicate(),):
        what = f"DTensor hidden states with placements {hidden.placements}"
        raise ShapeError(Problem("bad-head", what, fix="redistribute them to [Replicate()] on the tp mesh"))


_ALONE = Group.alone()
