"""What each rank does in the tests of forwards beside backwards."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize import build_mesh, overlap_report, parallelize_model
from parallelize.base.errors import ParallelizeError
from tests.axes.pipeline.behavior_jobs import FailingBlock
from tests.axes.pipeline.pipeline_jobs import build, full_value, reference
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst

DROPOUT = {"resid_pdrop": 0.2, "attn_pdrop": 0.1, "embd_pdrop": 0.1}


def gradients(parallel: Any) -> dict[str, torch.Tensor]:
    named = parallel.module.named_parameters()
    return {name: full_value(parallel.module, name, p.grad) for name, p in named if p.grad is not None}


def same_as_in_order(
    rank: int, family: str, axes: dict[str, int], options: dict[str, Any], sizes: dict[str, Any]
) -> dict[str, Any]:
    """A step in pairs and one in order: whether losses and gradients are the same bits, and the pairs that ran
    together."""
    model = tiny_model(family, torch.float64, **sizes).train()
    mesh = build_mesh("cpu", **axes)
    ids, labels = tiny_batch(batch=6, length=8)
    losses, grads, together = [], [], 0
    for overlap in (False, True):
        chosen = {"num_microbatches": 3, "dropout_seed": 7, "overlap_microbatches": overlap} | options
        parallel = parallelize_model(copy.deepcopy(model), mesh, **chosen)
        parallel.pipeline.record = True
        losses.append([float(parallel.step(ids, targets=labels)) for _ in range(2)])
        grads.append(gradients(parallel))
        spans = {str(action): (start, stop) for action, start, stop in parallel.pipeline._spans}
        together = sum(spans[f"0F{n + 1}"][0] < spans[f"0B{n}"][0] < spans[f"0F{n + 1}"][1] for n in range(2))
    bits = all(torch.equal(grads[0][name], grad) for name, grad in grads[1].items())
    return {"losses": losses[0] == losses[1], "bits": bits, "error": worst(grads[1], grads[0])[0], "together": together}


def measured(rank: int, faster: bool) -> dict[str, Any]:
    """The choice of two ranks of which one, by itself, would choose the other order."""
    model, mesh = tiny_model("llama", torch.float64), build_mesh("cpu", tp=2)
    ids, labels = tiny_batch(batch=4, length=8)
    chosen: dict[str, Any] = {"num_microbatches": 2, "sequence_parallel": True}
    in_order = parallelize_model(copy.deepcopy(model), mesh, **chosen)
    expected = float(in_order.step(ids, targets=labels))
    parallel = parallelize_model(model, mesh, overlap_microbatches="auto", **chosen)
    trial = parallel.pipeline.pair_trial
    end_step, losses = trial.end_step, set()
    gain = 3.0 if rank == 0 else -1.0  # of the faster order: the mean decides

    def timed(own_s: float) -> None:
        end_step(10.0 - gain if trial.in_pairs is faster else 10.0)

    trial.end_step = timed
    for _ in range(14):
        losses.add(float(parallel.step(ids, targets=labels)))
    return {
        "in_pairs": trial.in_pairs,
        "losses": losses == {expected},
        "report": overlap_report(parallel.module).splitlines()[-1],
    }


def a_pair_fails(rank: int, at: int, backward: bool) -> dict[str, Any]:
    """The error that every rank gets, and whether the next step is right."""
    model = build("blocks", torch.float64, 2)
    ids, labels = tiny_batch(batch=6, length=5)
    expected_loss, expected = reference(model, ids, labels)
    expected = {name.replace("blocks.1.", "blocks.1.inner."): grad for name, grad in expected.items()}
    model.blocks[1] = FailingBlock(model.blocks[1], at, backward)
    parallel = parallelize_model(model, build_mesh("cpu", dp=2), num_microbatches=3, overlap_microbatches=True)
    raised = None
    try:
        parallel.step(ids, targets=labels)
    except ParallelizeError as error:
        raised = error
    assert raised is not None and raised.slugs == ("stage-failed",), raised
    assert all(parameter.grad is None for parameter in model.parameters())
    loss = parallel.step(ids, targets=labels)
    error = max(worst(gradients(parallel), expected)[0], float((loss - expected_loss).abs()))
    return {"rows": dict(raised.problems[0].rows), "error": error}


def watched_on_one_rank(rank: int, kind: str) -> float:
    """The largest relative error of a step during which the first rank alone has a mode of PyTorch, or all have
    autocast."""
    from torch.utils.flop_counter import FlopCounterMode

    mesh, model = build_mesh("cpu", tp=2), tiny_model("llama", torch.float64, tie_word_embeddings=True)
    ids, labels = tiny_batch(batch=6, length=8)
    grads = []
    for overlap in (False, True):
        chosen = {"num_microbatches": 3, "sequence_parallel": True, "overlap_microbatches": overlap}
        parallel = parallelize_model(copy.deepcopy(model), mesh, **chosen)
        mode: Any = nullcontext()
        if kind == "autocast":
            mode = torch.autocast("cpu", torch.bfloat16)
        elif rank == 0 and overlap:
            mode = FlopCounterMode(display=False)
        with mode:
            parallel.step(ids, targets=labels)
        grads.append(gradients(parallel))
        if rank == 0 and overlap and kind == "flops":
            backward = mode.get_flop_counts()["Global"][torch.ops.aten.mm]
            assert backward > 0
    return worst(grads[1], grads[0])[0]


class _Recomputing(nn.Module):
    """A block that a user recomputes by PyTorch's own function."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def recomputed_by_the_user(rank: int) -> str:
    model = build("blocks", torch.float64, 2)
    model.blocks[0] = _Recomputing(model.blocks[0])
    parallel = parallelize_model(model, build_mesh("cpu", dp=2), num_microbatches=2, overlap_microbatches=True)
    ids, labels = tiny_batch(batch=4, length=5)
    try:
        parallel.step(ids, targets=labels)
    except ParallelizeError as error:
        return str(error)
    return "nothing was refused"


def counted_on_one_rank(rank: int) -> str:
    from torch.distributed.tensor.debug import CommDebugMode

    ids, labels = tiny_batch(batch=4, length=8)
    mesh = build_mesh("cpu", tp=2)
    parallel = parallelize_model(tiny_model("llama"), mesh, num_microbatches=2, overlap_microbatches=True)
    try:
        with CommDebugMode() if rank == 0 else nullcontext():
            parallel.step(ids, targets=labels)
    except ParallelizeError as error:
        return error.slugs[0]
    return "nothing was refused"


def refused(rank: int, why: str) -> tuple[str, str]:
    """The slug and text of what cannot be overlapped, which is known at the step alone."""
    from torch.distributed.fsdp import fully_shard

    from parallelize import recompute

    model = build("blocks", torch.float64, 2)
    ids, labels = tiny_batch(batch=4, length=5)
    mesh = build_mesh("cpu", dp=2)
    parallel = parallelize_model(model, mesh, num_microbatches=2, overlap_microbatches=True)
    if why == "recompute":
        recompute(model, units="blocks.*", mode="full")
    else:
        fully_shard(model.blocks[0], mesh=mesh["dp"])
    try:
        parallel.step(ids, targets=labels)
    except ParallelizeError as error:
        return error.slugs[0], str(error)
    return "", "nothing was refused"
