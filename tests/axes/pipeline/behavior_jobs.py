"""What each rank does in the tests of how pipelines behave: odd models, mistakes, failures."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize import build_mesh
from parallelize.axes.pipeline.cut import cut_pipeline
from parallelize.axes.pipeline.engine import Pipeline
from parallelize.axes.pipeline.ties import tie_parameters
from parallelize.base.errors import ParallelizeError
from parallelize.plan.schema import Cuts
from parallelize.training.apply_axes import parallelize_model
from tests.axes.pipeline.pipeline_jobs import build, full_value, reference
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst

BLOCKS = Cuts("blocks", first=("embed", "scale"), last=("head",))


class Odd(nn.Module):
    """Units that take and return tuples and dicts, a tensor that skips stages, and data-dependent control flow."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.down = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Odd.Block(width) for _ in range(4))
        self.up = nn.Linear(width, 3)

    class Block(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, state: dict[str, torch.Tensor], memory: torch.Tensor, flag: bool = False):
            h = torch.tanh(self.a(state["h"]))
            if float(h.detach().sum()) > 0 or flag:  # free inside a stage
                h = h + self.b(h)
            return {"h": h + memory.mean(), "n": state["n"]}, memory * 0.5 + h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down(x)
        state, memory = {"h": first, "n": torch.ones(1, dtype=torch.int64)}, first * 2
        for block in self.blocks:
            state, memory = block(state, memory, flag=True)
        return self.up(state["h"] + memory + first)


def odd_model(rank: int, schedule: str, stages_per_rank: int) -> float:
    """Tuples, dicts, skips, and other shapes at the second step."""
    torch.manual_seed(0)
    model = Odd().double()
    unsharded = copy.deepcopy(model)
    mesh = build_mesh("cpu", pp=2)
    cuts = Cuts("blocks", first=("down",), last=("up",), skips=(("down", "up"),), carry=("state", "memory"))
    cut_pipeline(model, mesh, cuts=cuts, schedule=schedule, stages_per_rank=stages_per_rank)
    pipeline = Pipeline(
        model,
        mesh,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        num_microbatches=2,
        loss=lambda out, y: (out - y).pow(2).sum(),
        count=lambda y: y.numel(),
    )
    errors = []
    for length in (3, 5, 3):
        generator = torch.Generator().manual_seed(length)
        x = torch.randn(4, length, 5, generator=generator, dtype=torch.float64)
        y = torch.randn(4, length, 3, generator=generator, dtype=torch.float64)
        loss = pipeline.step(x, targets=y)
        parts = [unsharded(part) for part in x.split(2)]  # its control flow looks at a microbatch
        reference_loss = (torch.cat(parts) - y).pow(2).mean()
        reference_loss.backward()
        errors.append(float((loss - reference_loss).abs()))
    actual = {n: p.grad for n, p in model.named_parameters()}
    expected = {n: p.grad for n, p in unsharded.named_parameters()}
    errors.append(worst(actual, {n: expected[n] for n in actual})[0])
    return max(errors)


def inputs_reach_every_stage(rank: int, first_stage_only: bool) -> float:
    """A padding mask and position ids [1, S], passed on every rank or on the first stage only."""
    model = tiny_model("llama", torch.float64, num_hidden_layers=3)
    ids, labels = tiny_batch(batch=4, length=7)
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[3, :3] = 0
    positions = torch.arange(7)[None] + 3
    inputs = {"attention_mask": mask, "position_ids": positions}
    unsharded = copy.deepcopy(model)
    out = unsharded(input_ids=ids, **inputs).logits
    torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten()).backward()
    expected = {n: p.grad for n, p in unsharded.named_parameters()}
    mesh = build_mesh("cpu", pp=2)
    cut_pipeline(model, mesh)
    pipeline = Pipeline(model, mesh, num_microbatches=2, share_inputs=first_stage_only)
    if first_stage_only and rank:
        pipeline.step()
    else:
        pipeline.step(input_ids=ids, targets=labels, **inputs)
    actual = {n: p.grad for n, p in model.named_parameters()}
    return worst(actual, {n: expected[n] for n in actual})[0]


class WithLoss(nn.Module):
    """A model whose last module is a loss without parameters."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        self.loss = nn.MSELoss(reduction="sum")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.b(torch.relu(self.a(x))), y)


def explicit_assignment(rank: int) -> float:
    torch.manual_seed(0)
    model = WithLoss().double()
    unsharded = copy.deepcopy(model)
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    (unsharded(x, y) / y.numel()).backward()
    mesh = build_mesh("cpu", pp=2)
    cut_pipeline(model, mesh, assignment=[["a"], ["b", "loss"]])
    assert {n for n, _ in model.named_parameters()} == ({"a.weight", "a.bias"} if rank == 0 else {"b.weight", "b.bias"})
    loss = Pipeline(model, mesh, num_microbatches=2, loss=lambda out, _: out, count=lambda y: y.numel())
    loss.step(x, y, targets=y)
    expected = {n: p.grad for n, p in unsharded.named_parameters()}
    actual = {n: p.grad for n, p in model.named_parameters()}
    return worst(actual, {n: expected[n] for n in actual})[0]


class FailingBlock(nn.Module):
    """Fails in the forward or the backward of one call."""

    def __init__(self, inner: nn.Module, at: int, backward: bool):
        super().__init__()
        self.inner, self.at, self.backward, self.calls = inner, at, backward, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.inner(x)
        if self.calls == self.at + 1:
            if not self.backward:
                raise ValueError("bang")
            out.register_hook(self._bang)
        return out

    def _bang(self, grad: torch.Tensor) -> None:
        raise ValueError("bang")


def a_stage_fails(
    rank: int, schedule: str, stages_per_rank: int, layer: int, at: int, backward: bool, first: bool
) -> dict:
    """The error that every rank gets, and whether the next step is right. `first`: at the very first step."""
    world = dist.get_world_size()
    model = build("blocks", torch.float64, world * stages_per_rank)
    ids, labels = tiny_batch(batch=8, length=5)
    want_loss, expected = reference(model, ids, labels)
    expected = {n.replace(f"blocks.{layer}.", f"blocks.{layer}.inner."): g for n, g in expected.items()}
    at = at if first else at + 4
    model.blocks[layer] = FailingBlock(model.blocks[layer], at, backward)
    mesh = build_mesh("cpu", pp=world)
    cut_pipeline(model, mesh, cuts=BLOCKS, schedule=schedule, stages_per_rank=stages_per_rank)
    pipeline = Pipeline(model, mesh, schedule=schedule, stages_per_rank=stages_per_rank, num_microbatches=4)
    raised = None
    for _ in range(1 if first else 2):
        model.zero_grad()
        try:
            pipeline.step(ids, targets=labels)
        except ParallelizeError as error:
            raised = error
    assert raised is not None and raised.slugs == ("stage-failed",), raised
    assert all(p.grad is None for p in model.parameters())
    loss = pipeline.step(ids, targets=labels)
    actual = {n: p.grad for n, p in model.named_parameters()}
    error = max(worst(actual, {n: expected[n] for n in actual})[0], float((loss - want_loss).abs()))
    return {"rows": dict(raised.problems[0].rows), "error": error, "cause": repr(raised.__cause__)}


def a_process_dies(rank: int) -> str:
    model = build("blocks", torch.float64, 4)
    ids, labels = tiny_batch(batch=8, length=5)
    mesh = build_mesh("cpu", pp=dist.get_world_size())
    cut_pipeline(model, mesh, cuts=BLOCKS)
    pipeline = Pipeline(model, mesh, num_microbatches=4)
    pipeline.step(ids, targets=labels)
    if rank == 1:
        os._exit(3)
    try:
        pipeline.step(ids, targets=labels)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def mistakes(rank: int, which: str) -> tuple[str, ...]:
    """The slugs of the error that a mistake ends in; parameters are as they were."""
    pool = {"pp": 2}
    model: nn.Module = build("blocks", torch.float64, 3)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    options: dict[str, Any] = {"cuts": BLOCKS}
    ids, labels = tiny_batch(batch=3, length=5)
    optimizer = None
    if which == "more stages than layers":
        options |= {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
    elif which == "too few microbatches":
        options |= {"schedule": "dualpipe_v", "num_microbatches": 2}
        model = build("blocks", torch.float64, 5)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
    elif which == "unknown axis":
        pool = {"xx": 2}
    elif which == "zero without data":
        options |= {"zero": 1}
    elif which == "early optimizer":
        pool, options = {"dp": 2}, {}
        optimizer = torch.optim.AdamW(model.parameters())
    elif which == "unknown schedule":
        options |= {"schedule": "1f2b"}
    elif which == "unassigned":
        options = {}
    try:
        parallel = parallelize_model(model, build_mesh("cpu", **pool), **options)
        assert which == "indivisible batch"
        parallel.step(ids, targets=labels)
    except ParallelizeError as error:
        if which != "indivisible batch":
            assert before.keys() == {n for n, _ in model.named_parameters()}
            assert all(torch.equal(p, before[n]) and type(p) is nn.Parameter for n, p in model.named_parameters())
        del optimizer
        return error.slugs
    return ()


class Misordered(nn.Module):
    """Uses more of an absent layer than the next one is given."""

    def __init__(self, how: str):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        h = self.layers[1](first)
        if self.how == "order":
            return self.layers[2](self.layers[3](h))
        h = self.layers[3](self.layers[2](h * 1.0))
        if self.how == "reads":
            h = h.to(self.layers[0].weight.dtype) + self.layers[0].weight.sum()
        return h + first.sum() if self.how == "uses" else h


def misread(rank: int, how: str) -> tuple[str, ...]:
    torch.manual_seed(0)
    model = Misordered(how)
    mesh = build_mesh("cpu", pp=2)
    cut_pipeline(model, mesh)
    pipeline = Pipeline(model, mesh, num_microbatches=2, loss=lambda out, y: (out * y).sum(), count=lambda y: y.numel())
    x = torch.randn(4, 4)
    try:
        pipeline.step(x, targets=x)
    except ParallelizeError as error:
        return (*error.slugs, dict(error.problems[0].rows)["error"])
    return ()


def repeats(rank: int) -> list[list[float]]:
    """Losses of two runs of three steps, to the bit."""
    runs = []
    for _ in range(2):
        model = tiny_model("gpt2", num_hidden_layers=3)
        parallel = parallelize_model(model, build_mesh("cpu", pp=2, dp=2), zero=2, num_microbatches=2, initialize=None)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
        losses = []
        for step in range(3):
            ids, labels = tiny_batch(batch=8, length=7, seed=step)
            local = slice(4 * parallel.mesh.get_local_rank("dp"), 4 * parallel.mesh.get_local_rank("dp") + 4)
            losses.append(float(parallel.step(ids[local], targets=labels[local])))
            optimizer.step()
            optimizer.zero_grad()
        runs.append([*losses, *(float(p.detach().double().sum()) for p in model.parameters())])
    return runs


def ties_in_the_plan(rank: int, members: tuple[str, ...]) -> float:
    """Parameters that are objects of their own, tied by name: gradients are sums, copies stay equal."""
    from parallelize.plan.schema import Plan, Tie

    torch.manual_seed(0)
    model = build("blocks", torch.float64, 4)
    unsharded = copy.deepcopy(model)
    first = unsharded.get_parameter(members[0])
    for name in members[1:]:
        owner, _, key = name.rpartition(".")
        setattr(unsharded.get_submodule(owner), key, first)
    ids, labels = tiny_batch(batch=8, length=5)
    _, expected = reference(unsharded, ids, labels)
    mesh = build_mesh("cpu", pp=dist.get_world_size())
    plan = Plan("tied", (), cuts=BLOCKS, ties=(Tie("one", members),))
    cut_pipeline(model, mesh, plan)
    ties = tie_parameters(model, plan)
    pipeline = Pipeline(model, mesh, num_microbatches=4)
    pipeline.step(ids, targets=labels)
    actual = {n: full_value(model, n, p.grad).clone() for n, p in model.named_parameters()}
    pipeline.step(ids, targets=labels)  # on top of gradients that were summed
    twice = {n: full_value(model, n, p.grad) / 2 for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    if ties is not None:
        ties.check()
        with torch.no_grad():
            ties.parameters(ties.groups[0])[0].add_(float(rank))
        try:
            ties.check()
            return 1.0
        except ParallelizeError as error:
            assert error.slugs == ("ties-differ",)
    return max(worst(grads, {n: expected[n] for n in actual})[0] for grads in (actual, twice))


class Ragged(nn.Module):
    """Its first block returns fewer rows for some data."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        h = h[:1] if float(x.sum()) < 0 else h
        return self.layers[1](h)


def paths_differ(rank: int) -> tuple[str, ...]:
    """A stage that passes on another shape than it did for inputs of these shapes."""
    model = Ragged()
    mesh = build_mesh("cpu", pp=2)
    cut_pipeline(model, mesh)
    total = {"loss": lambda out, y: out.pow(2).sum(), "count": lambda y: y.numel()}
    pipeline = Pipeline(model, mesh, num_microbatches=2, **total)
    x = torch.ones(4, 4)
    pipeline.step(x, targets=x)
    x[2:] = -1.0
    try:
        pipeline.step(x, targets=x)
    except ParallelizeError as error:
        return (*error.slugs, dict(error.problems[0].rows)["error"])
    return ()


def compiled_layers(rank: int, compiled_first: bool, schedule: str) -> tuple[int, float]:
    """A pipeline of layers that were compiled before or after the plan: the number of graphs of this rank, and the
    error."""
    from torch._dynamo.backends.debugging import aot_eager

    num_graphs = 0

    def backend(graph: Any, inputs: list[Any]) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return aot_eager(graph, inputs)

    def compile_layers(module: nn.Module) -> None:
        for layer in module.get_submodule("model.layers"):
            layer.compile(backend=backend)

    torch._dynamo.reset()
    model = tiny_model("llama", torch.float64, num_hidden_layers=4)
    full = copy.deepcopy(model)
    ids, _ = tiny_batch(length=8)
    full(input_ids=ids, labels=ids).loss.backward()
    if compiled_first:
        compile_layers(model)
    parallel = parallelize_model(model, build_mesh("cpu", pp=2), num_microbatches=2, schedule=schedule)
    if not compiled_first:
        compile_layers(parallel.module)
    parallel.step(input_ids=ids, labels=ids)
    gradients = {name: p.grad for name, p in parallel.module.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in full.named_parameters() if name in gradients}
    torch._dynamo.reset()
    return num_graphs, worst(gradients, expected)[0]
