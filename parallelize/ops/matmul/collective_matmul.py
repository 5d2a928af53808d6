"""Linears whose collective is overlapped with their matmul: eager, differentiable, on any process group.

    all_gather_linear      rows are gathered while matmuls run   backward: reduce-scatter overlapped with the weight gradients
    linear_reduce_scatter  sums are scattered while matmuls run  backward: all-gather overlapped with both gradients
    linear_all_reduce      sums are reduced while matmuls run    backward: no communication
    column_linear          no communication                      backward: all-reduce overlapped with the weight gradients

On plain tensors they work on this rank's shards and take the group. On DTensors they are equivalent to `F.linear`, and
take mesh and layout from their arguments. `overlap` is "auto" (`decide` returns the choice with its reason, from one
calibration per group), "off", "chunked" (on any group), or "symm_mem" (PyTorch's symmetric-memory kernels, CUDA).

Collectives of one call, for P ranks, R rows in full, K input features and N output features:

| op                               | forward            | backward                                                 |
|----------------------------------|--------------------|----------------------------------------------------------|
| all_gather_linear, save gathered | all-gather  R x K  | reduce-scatter  R x K                                    |
| all_gather_linear, save shard    | all-gather  R x K  | all-gather  R x K,  reduce-scatter  R x K                |
| linear_reduce_scatter            | reduce-scatter R x N | all-gather  R x N                                      |
| linear_all_reduce                | all-reduce  R x N  | none                                                     |
| column_linear                    | none               | all-reduce  R x K                                        |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallelize.ops.matmul.linear_gradients import DeferredGradients
from parallelize.ops.matmul.overlapped_linear import AnyGroup, OverlappedLinear

T = torch.Tensor


def all_gather_linear(
    x: T,
    weights: T | Sequence[T],
    biases: T | Sequence[T | None] | None = None,
    *,
    dim: int = 0,
    group: AnyGroup | None = None,
    full: int | None = None,
    overlap: str = "auto",
    chunks: int | None = None,
    save: str = "gathered",
    deferred: DeferredGradients | None = None,
) -> T | list[T]:
    """Gather the rows of all ranks and multiply them by this rank's weights; matmuls run while rows arrive.

    Args:
        x: local rows [.., s, .., K], split along `dim` as by `torch.chunk`; shards may be uneven or empty.
        weights: [N, K], or several weights that share the gather.
        biases: [N] or None, one per weight.
        dim: dimension of the rows; not the last one.
        group: a 1-D mesh, such as `mesh["tp"]`, or a process group; not needed for DTensors.
        full: number of rows of all ranks together. Default: P times s; required if shards are uneven.
        overlap: "auto", "off", "chunked" or "symm_mem".
        chunks: chunks per shard for "chunked". Default: 4.
        save: "gathered" saves the gathered rows, R x K, for backward, which then sends one reduce-scatter. "shard"
            saves the local rows, s x K, and backward gathers them again.
        deferred: receives the weight gradients while `deferred.deferring()` is active; plain tensors only.

    Returns: [.., full, .., N] for one weight, or a list of them. The gradient of `x` is summed over ranks, for the
        local rows; those of weights and biases are over all rows.
    Raises:
        ShapeError: `wrong-shape`, `wrong-dtype`, `wrong-placement`, `no-group`, `bad-overlap`, `cannot-defer`;
            `ranks-disagree` on every rank.
        MeshError: `several-axes` for a mesh of more dims; `no-symmetric-memory`.
    Cost: one all-gather of R x K forward; one reduce-scatter of R x K backward, with `save="shard"` also an all-gather.

    Source: Wang et al., ASPLOS 2023; Korthikanti et al., arXiv:2205.05198 (sequence parallelism).
    """
    call = OverlappedLinear("all_gather_linear", x, _weights(weights), biases, group, overlap=overlap, chunks=chunks)
    trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in call.weights)
    outs, _ = call.gather(dim, full, save == "gathered" and trains, deferred)
    return outs[0] if isinstance(weights, torch.Tensor) else outs


def linear_reduce_scatter(
    x: T,
    weight: T,
    bias: T | None = None,
    *,
    dim: int = 0,
    group: AnyGroup | None = None,
    overlap: str = "auto",
    chunks: int | None = None,
    deferred: DeferredGradients | None = None,
) -> T:
    """Multiply by this rank's columns of a weight, sum over ranks, and keep the local rows; sums are sent meanwhile.

    Args:
        x: all rows with the local features, [.., S, .., k].
        weight: [N, k].
        bias: [N], added once, after the sum.
        dim: dimension of the rows, which are split as by `torch.chunk`; not the last one.
        group: a 1-D mesh, such as `mesh["tp"]`, or a process group; not needed for DTensors.
        overlap: "auto", "off", "chunked" or "symm_mem".
        chunks: chunks per shard for "chunked". Default: 4.
        deferred: receives the weight gradient while `deferred.deferring()` is active; plain tensors only.

    Returns: [.., s, .., N], summed in rank order. The gradients of `x` and `weight` are complete; that of `bias` is
        over the local rows, one part of a sum over ranks.
    Raises:
        ShapeError: `wrong-shape`, `wrong-dtype`, `wrong-placement`, `no-group`, `bad-overlap`, `cannot-defer`;
            `ranks-disagree` on every rank.
        MeshError: `several-axes` for a mesh of more dims; `no-symmetric-memory`.
    Cost: one reduce-scatter of R x N forward, one all-gather of R x N backward.

    Source: as for `all_gather_linear`.
    """
    call = OverlappedLinear("linear_reduce_scatter", x, [weight], bias, group, overlap=overlap, chunks=chunks)
    return call.scatter(dim, deferred)


def linear_all_reduce(
    x: T,
    weight: T,
    bias: T | None = None,
    *,
    group: AnyGroup | None = None,
    overlap: str = "auto",
    chunks: int | None = None,
    deferred: DeferredGradients | None = None,
) -> T:
    """Multiply by this rank's columns of a weight and sum over ranks; sums are sent while later rows are multiplied.

    Args:
        x: local features [.., k].
        weight: [N, k].
        bias: [N], added once, after the sum.
        group: a 1-D mesh, such as `mesh["tp"]`, or a process group; not needed for DTensors.
        overlap: "auto", "off" or "chunked"; "symm_mem" runs in chunks.
        chunks: chunks per shard for "chunked". Default: 4.
        deferred: receives the weight gradient while `deferred.deferring()` is active; plain tensors only.

    Returns: [.., N], the full sum on every rank. Gradients are complete.
    Raises:
        ShapeError: `wrong-shape`, `wrong-dtype`, `wrong-placement`, `no-group`, `bad-overlap`, `cannot-defer`;
            `ranks-disagree` on every rank.
        MeshError: `several-axes` for a mesh of more dims; `no-symmetric-memory`.
    Cost: one all-reduce of R x N forward, none backward.

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
    """
    call = OverlappedLinear("linear_all_reduce", x, [weight], bias, group, overlap=overlap, chunks=chunks)
    return call.reduce(deferred)


def column_linear(
    x: T,
    weights: T | Sequence[T],
    biases: T | Sequence[T | None] | None = None,
    *,
    group: AnyGroup | None = None,
    overlap: str = "auto",
    chunks: int | None = None,
    deferred: DeferredGradients | None = None,
) -> T | list[T]:
    """Multiply a replicated input by this rank's weights; backward all-reduces its gradient meanwhile.

    Args:
        x: [.., K], the same on every rank.
        weights: [N, K], or several weights that share the input.
        biases: [N] or None, one per weight.
        group: a 1-D mesh, such as `mesh["tp"]`, or a process group; not needed for DTensors.
        overlap: "auto", "off" or "chunked"; "symm_mem" runs in chunks.
        chunks: chunks per shard for "chunked". Default: 4.
        deferred: receives the weight gradients while `deferred.deferring()` is active; plain tensors only.

    Returns: [.., N] for one weight, or a list of them. The gradient of `x` is summed over ranks, on every rank.
    Raises:
        ShapeError: `wrong-shape`, `wrong-dtype`, `wrong-placement`, `no-group`, `bad-overlap`, `cannot-defer`;
            `ranks-disagree` on every rank, in backward.
        MeshError: `several-axes` for a mesh of more dims; `no-symmetric-memory`.
    Cost: none forward; one all-reduce of R x K backward.

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
    """
    call = OverlappedLinear("column_linear", x, _weights(weights), biases, group, overlap=overlap, chunks=chunks)
    outs = call.column(deferred)
    return outs[0] if isinstance(weights, torch.Tensor) else outs


def _weights(weights: T | Sequence[T]) -> list[T]:
    return [weights] if isinstance(weights, torch.Tensor) else list(weights)
