"""What real processes run to compare `parallelize_module` with PyTorch's: functions of (rank, ...) that return plain
data."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as stock
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import parallelize
from parallelize import build_mesh
from parallelize.base.errors import ParallelizeError
from tests.support import tutorial
from tests.support.parity import worst

NAMES = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"}


def counted(mode: CommDebugMode) -> dict[str, int]:
    """Collectives by the names of functional ones."""
    counts = {str(op): number for op, number in mode.get_comm_counts().items() if number}
    assert all(name.startswith("c10d_functional.") for name in counts), counts
    return {name.removeprefix("c10d_functional."): number for name, number in counts.items()}


def transformer(tied: bool = True) -> nn.Module:
    torch.manual_seed(3)
    model = tutorial.Transformer(vocab=32).double()
    if tied:
        model.output.weight = model.tok_embeddings.weight
    return model


def apply_in_calls(model: Any, mesh: Any, styles: Any, sequence: bool, order: str, **options: Any) -> None:
    """One call for what is outside of layers, one for each layer, one for the head, whose tie is made again at the
    end."""
    tied = model.output.weight is model.tok_embeddings.weight
    plan = tutorial.sequence_parallel(styles, False) if sequence else tutorial.tensor_parallel(styles)
    head = plan.pop("output")
    of_layers = {name.removeprefix("layers.*."): plan.pop(name) for name in list(plan) if name.startswith("layers.")}
    calls = [(model, plan), *((layer, of_layers) for layer in model.layers.values()), (model.output, head)]
    for module, part in reversed(calls) if order == "head first" else calls:
        styles.parallelize_module(module, mesh, part, **options)
    tutorial.make_heads_local(model, mesh.size())
    if tied:
        model.output.weight = model.tok_embeddings.weight


def several_calls(rank: int, whose: str, sequence: bool, order: str) -> dict[str, Any]:
    """A tied model planned in several calls: errors of the loss, all gradients and the weights after a step;
    collectives."""
    styles = stock if whose == "stock" else parallelize
    model = transformer()
    reference = copy.deepcopy(model)
    apply_in_calls(model, build_mesh("cpu", tp=dist.get_world_size()), styles, sequence, order)
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    nets = (model, reference)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, foreach=False) for net in nets]
    losses = []
    with CommDebugMode() as mode:
        losses.append(_step(model, ids, optimizers[0]))
    losses.append(_step(reference, ids, optimizers[1]))
    gradients, weights = ({}, {}), ({}, {})
    for n, net in enumerate(nets):
        for name, parameter in net.named_parameters():
            gradients[n][name], weights[n][name] = _full(parameter.grad), _full(parameter.detach())
    errors = [worst(*pair)[0] for pair in (({"": losses[0]}, {"": losses[1]}), gradients, weights)]
    assert model.output.weight is model.tok_embeddings.weight
    return {"errors": errors, "total": mode.get_total_counts(), "counts": counted(mode) if whose == "ours" else {}}


def several_calls_and_data_axes(rank: int, how: str, sequence: bool, tied: bool) -> list[float]:
    """Errors of all gradients and of their norm, on 2 x 2 ranks, of a model planned in several calls."""
    mesh, model = build_mesh("cpu", dp=2, tp=2), transformer(tied)
    reference = copy.deepcopy(model)
    apply_in_calls(model, mesh["tp"], parallelize, sequence, "head last", own_reduction=True)
    if how == "fully_shard":
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    else:
        parallelize.shard_data(model, mesh, zero=1)
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    mine = ids.chunk(2)[mesh.get_local_rank("dp")]
    for net, batch, parts in ((model, mine, 2 if how == "shard_data" else 1), (reference, ids, 1)):
        (nn.functional.cross_entropy(net(batch).flatten(0, 1), batch.flatten()) / parts).backward()
    gradients = [{name: _full(p.grad) for name, p in net.named_parameters()} for net in (model, reference)]
    norms = [parallelize.clip_grad_norm_(model, 1e9), nn.utils.get_total_norm([p.grad for p in reference.parameters()])]
    return [worst(*gradients)[0], abs(float(norms[0] / norms[1]) - 1.0)]


class Stack(nn.Sequential):
    """Two blocks of a wide and a narrow linear, and a norm, on [tokens, features]."""

    def __init__(self, width: int):
        blocks = [nn.Sequential(nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, width)) for _ in range(2)]
        super().__init__(*blocks, nn.LayerNorm(width))


def feature_shards_and_data_axes(rank: int, whose: str, recomputes: bool) -> list[float]:
    """Errors of the loss, all gradients, their norm and the weights after two steps, on 2 x 2 ranks under
    `fully_shard`.

    The last linear's output is a shard of features, which the norm gathers.
    """
    styles = stock if whose == "stock" else parallelize
    torch.manual_seed(5)
    mesh, model = build_mesh("cpu", dp=2, tp=2), Stack(10).double()
    reference = copy.deepcopy(model)
    last = styles.RowwiseParallel(output_layouts=Shard(1))
    plan = {"0.2": styles.RowwiseParallel(use_local_output=False), "1.2": last, "2": styles.SequenceParallel()}
    plan |= {name: styles.ColwiseParallel(use_local_output=False) for name in ("0.0", "1.0")}
    options = {} if whose == "stock" else {"own_reduction": True}
    styles.parallelize_module(model, mesh["tp"], plan, **options)
    for block in model:
        if recomputes and not isinstance(block, nn.LayerNorm):
            checkpoint(block)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(1)).double()
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01, foreach=False) for net in (model, reference)]
    errors = []
    for _ in range(2):
        losses, gradients, norms = [], [], []
        batches = x.chunk(2)[mesh.get_local_rank("dp")], x
        for net, batch, optimizer, parts in zip((model, reference), batches, optimizers, (1, 2), strict=True):
            optimizer.zero_grad()
            out = net(batch)
            loss = (_full(out) ** 3).sum() / parts  # `fully_shard` averages over its two ranks
            loss.backward()
            losses.append(loss.detach())
            gradients.append({name: _full(p.grad).clone() for name, p in net.named_parameters()})
            norms.append(_full(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
            optimizer.step()
        dist.all_reduce(losses[0], group=mesh["dp"].get_group())
        weights = [{name: _full(p.detach()) for name, p in net.named_parameters()} for net in (model, reference)]
        pairs = ({"": losses[0] / 2}, {"": losses[1]}), gradients, weights, [{"": norm} for norm in norms]
        errors += [worst(*pair)[0] for pair in pairs]
    return errors


def _step(model: Any, ids: torch.Tensor, optimizer: Any) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def _full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def single(name: str, styles: Any) -> tuple[nn.Module, Any, torch.Tensor]:
    """(module, style, input) of one module under one style."""
    ids, x = torch.arange(8).reshape(4, 2), torch.rand(8, 16, generator=torch.Generator().manual_seed(0))
    part = x[:, : 16 // dist.get_world_size()].clone().requires_grad_()
    col, row = styles.ColwiseParallel, styles.RowwiseParallel
    linear, embedding = nn.Linear(16, 16, bias=False), nn.Embedding(16, 16)
    return {
        "column linear": (linear, col(), x.requires_grad_()),
        "column linear of sharded rows": (linear, col(input_layouts=Shard(0)), x),
        "column embedding": (embedding, col(), ids),
        "row linear": (linear, row(), part),
        "row linear to sharded rows": (linear, row(output_layouts=Shard(0)), part),
        "row embedding": (embedding, row(input_layouts=Replicate()), ids),
        "row embedding to shards": (embedding, row(input_layouts=Replicate(), output_layouts=Shard(1)), ids.flatten()),
    }[name]


def collectives_of_one(rank: int, whose: str, name: str) -> tuple[dict[str, int], dict[str, int], int]:
    """Collectives in forward, and in backward, by the names that `CommDebugMode` has for functional ones; the output's
    rows."""
    styles = stock if whose == "stock" else parallelize
    torch.manual_seed(0)
    module, style, x = single(name, styles)
    styles.parallelize_module(module, build_mesh("cpu", tp=dist.get_world_size()), style)
    forward, backward = CommDebugMode(), CommDebugMode()
    with forward:
        out = module(x)
    with backward:
        out.sum().backward()
    return counted(forward), counted(backward), len(out)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x) * scale + y


def inputs_and_layouts(rank: int, whose: str, in_one_dict: bool) -> tuple[torch.Tensor, str]:
    """(the output where the second input has layout None, the error of a call with more inputs than layouts)."""
    styles = stock if whose == "stock" else parallelize
    ranks, mesh = dist.get_world_size(), build_mesh("cpu", tp=dist.get_world_size())
    torch.manual_seed(0)
    module = TwoInputs()
    gather = styles.PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None))
    if in_one_dict:
        styles.parallelize_module(module, mesh, {"linear": styles.ColwiseParallel(), "": gather})
    else:
        styles.parallelize_module(module.linear, mesh, styles.ColwiseParallel())
        styles.parallelize_module(module, mesh, gather)
    x, y = torch.full((2, 8), rank + 1.0), torch.ones(2 * ranks, 8 // ranks)
    out = module(x, y)
    try:
        module(x, y, 2.0)
        error = ""
    except (ValueError, ParallelizeError) as refused:
        error = str(refused)
    return out.detach(), error


def patterns(rank: int, whose: str) -> list[str]:
    """What is warned of: a pattern without a match beside those that match; no pattern."""
    styles = stock if whose == "stock" else parallelize
    mesh = build_mesh("cpu", tp=dist.get_world_size())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    reference, x = copy.deepcopy(model), torch.ones(3, 8)
    plan = {"0": styles.ColwiseParallel(), "1": styles.RowwiseParallel(), "2.inner": styles.ColwiseParallel()}
    warned = []
    for part in (plan, {}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            styles.parallelize_module(model, mesh, part)
        warned.append(" ".join(str(warning.message) for warning in caught if warning.category is UserWarning))
        assert worst({"": model(x)}, {"": reference(x)})[0] < 1e-6
    return warned


def wrapped_parts(rank: int, how: str, kept: bool) -> str:
    """The error of a training forward under PyTorch's data parallelism around a model with a planned part."""
    mesh = build_mesh("cpu", dp=2, tp=2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    # a layout that no contract has: the style is applied as it is
    output = {"output_layouts": Shard(0)} if kept else {}
    parallelize.parallelize_module(model[0], mesh, parallelize.ColwiseParallel(**output), own_reduction=True)
    try:
        if how == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        else:
            from torch.distributed._composable.replicate import replicate

            wrapped = replicate(model, process_group=mesh["dp"].get_group())
        wrapped(torch.ones(2, 8))
    except ParallelizeError as error:
        parallelize.parallelize_module(
            other := nn.Linear(8, 8), mesh, parallelize.ColwiseParallel(), own_reduction=True
        )
        other(torch.ones(2, 8))  # nothing stays of the refused forward
        return str(error)
    return "accepted"
