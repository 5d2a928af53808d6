"""Convert logits and head weights of any form (plain, sharded, DTensor) to local shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from parallelize.axes.vocabulary.logits.sharded_logits import ShardedLogits
from parallelize.base.errors import Problem, ShapeError
from parallelize.base.mesh import DATA_AXES
from parallelize.comm.groups import Group
from parallelize.comm.mesh_view import AnyMesh, MeshView
from parallelize.ops import collectives as ops
from parallelize.ops.vocabulary.class_targets import Vocabulary
from parallelize.ops.vocabulary.cross_entropy import prepare_targets
from parallelize.ops.vocabulary.linear_cross_entropy import HeadLoss, check_storage, default_chunk, linear_losses
from parallelize.ops.vocabulary.softmax import working_dtype

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
    for name, value in (("hidden states", hidden), ("weight", weight), ("bias", bias)):
        if not isinstance(value, T) and not (name == "bias" and value is None):
            fix = "tensors: the last hidden states of the model, and `weight` and `bias` of its head"
            raise ShapeError(Problem("bad-head", f"{name}: a {type(value).__name__}", fix=fix))
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


# -- head ------------------------------------------------------------------------------------------------------------
# A vocabulary head whose loss and statistics are computed from hidden states and weight, one chunk of tokens at a
# time.


@dataclass(frozen=True, eq=False)
class Head:
    """logits = tail(hidden @ weight.T + bias), for this rank's shard of the vocabulary.

    Attributes:
        weight: [V/P, H].
        bias: [V/P], or None.
        vocabulary: the rank's interval of the vocabulary, and the group.
        chunk: number of tokens whose logits are in memory at the same time; None: `default_chunk`.
        tail: an elementwise function without parameters, or None.
    """

    weight: T
    bias: T | None
    vocabulary: Vocabulary
    chunk: int | None = None
    tail: Callable[[T], T] | None = None

    def logits(self, hidden: T) -> T:
        """The local logits [..., V/P], with autograd."""
        out = F.linear(hidden, self.weight, self.bias)
        return out if self.tail is None else self.tail(out)

    @property
    def working_dtype(self) -> torch.dtype:
        """The dtype of the logits, at least float32."""
        probe = self.weight.detach().new_empty(0)
        return working_dtype(probe if self.tail is None else self.tail(probe))

    def detached(self) -> Head:
        return replace(self, weight=self.weight.detach(), bias=None if self.bias is None else self.bias.detach())

    def cross_entropy(
        self,
        hidden: T,
        targets: T,
        *,
        mesh: AnyMesh | None = None,
        weight: T | None = None,
        z_loss: float = 0.0,
        reduction: str = "mean",
        num_tokens: T | int | None = None,
        **options: Any,
    ) -> T:
        """As `parallelize.cross_entropy` of the logits."""
        check_head(self, hidden)
        lead, dtype = tuple(hidden.shape[:-1]), self.working_dtype
        prepared = prepare_targets(targets, lead, self.vocabulary, dtype, weight=weight, reduction=reduction, **options)
        flat = self._flat(hidden)
        work = self._work(flat, prepared.targets, prepared.ignored, dtype, z_loss=z_loss)
        losses, _ = linear_losses(flat, self.weight, self.bias, work, total=reduction != "none")
        count = num_tokens
        if reduction == "mean" and num_tokens is None:
            count = sum_over_data_axes(prepared.divisor, mesh)
        return prepared.reduced(losses, reduction, count)

    def token_statistics(self, hidden: T, ids: T, ignore_index: int, *, entropy: bool) -> tuple[T, T | None]:
        """(log-probabilities, entropies or None) of tokens [...]; both are 0 for ignored tokens."""
        check_head(self, hidden)
        check_token_ids(ids)
        lead, dtype = tuple(hidden.shape[:-1]), self.working_dtype
        prepared = prepare_targets(ids, lead, self.vocabulary, dtype, ignore_index=ignore_index, reduction="none")
        flat = self._flat(hidden)
        work = self._work(flat, prepared.targets, prepared.ignored, dtype, entropy=entropy)
        losses, entropies = linear_losses(flat, self.weight, self.bias, work, total=False)
        assert prepared.ignored is not None
        return -losses.view(lead), entropies.masked_fill(prepared.ignored, 0.0).view(lead) if entropy else None

    def _work(self, flat: T, targets: Any, ignored: T | None, dtype: torch.dtype, **options: Any) -> HeadLoss:
        loss = HeadLoss(targets, ignored, self.vocabulary.group, 0, dtype, self.tail, **options)
        in_place = loss.has_gradients_in_place and torch.is_grad_enabled()
        chunk = self.chunk if self.chunk is not None else default_chunk(flat, self.weight, in_place=in_place)
        return replace(loss, chunk=chunk)

    def _flat(self, hidden: T) -> T:
        return hidden.reshape(prod(hidden.shape[:-1]), hidden.shape[-1])


def check_head(head: Head, hidden: T) -> None:
    """Raises: ShapeError `bad-head`; ModelError `weight-let-go`."""
    weight, bias, vocabulary = head.weight, head.bias, head.vocabulary
    classes = vocabulary.stop - vocabulary.start
    what = f"hidden {list(hidden.shape)} {hidden.dtype}, weight {list(weight.shape)} {weight.dtype}"
    if weight.ndim != 2 or weight.shape[0] != classes or hidden.shape[-1:] != weight.shape[1:]:
        raise ShapeError(Problem("bad-head", what, fix=f"hidden [..., H], and weight [{classes}, H] on this rank"))
    if bias is not None and tuple(bias.shape) != (classes,):
        raise ShapeError(Problem("bad-head", f"bias {list(bias.shape)} for {what}", fix=f"[{classes}] on this rank"))
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        raise ShapeError(Problem("bad-head", what, fix="one dtype for hidden states, weight and bias"))
    if isinstance(head.chunk, bool) or (head.chunk is not None and head.chunk < 1):
        raise ShapeError(Problem("bad-chunk", f"a chunk of {head.chunk} tokens", fix="1 or more, or None"))
    check_storage(weight)


def check_token_ids(ids: T) -> None:
    """Raises: ShapeError `bad-targets` unless the ids are integers."""
    if ids.is_floating_point():
        raise ShapeError(Problem("bad-targets", f"token ids are {ids.dtype}", fix="one integer per token"))


def autocast_inputs(hidden: T, weight: T, bias: T | None) -> tuple[T, T, T | None]:
    """The operands that a linear would use: cast to the autocast dtype if autocast is on."""
    device = hidden.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or torch.float64 in (hidden.dtype, weight.dtype):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def sum_over_data_axes(count: T | int, mesh: AnyMesh | None) -> T | int:
    """The sum of a count over all data axes of the mesh (one scalar all-reduce if there are any)."""
    group = Group.alone() if mesh is None else MeshView.of(mesh).group(*DATA_AXES)
    if mesh is None or group.pg is None:
        return count
    count = count if isinstance(count, torch.Tensor) else torch.tensor(count, device=mesh.device_type)
    dist.all_reduce(count, group=group.pg)
    return count
