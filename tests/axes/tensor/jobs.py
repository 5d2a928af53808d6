"""What real processes run: functions of (rank, ...) that return plain data or raise."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize import build_mesh, full_gradients, full_parameter, load_plan, parallelize_module
from parallelize.base.errors import ParallelizeError
from parallelize.plan.styles.notation import parse_style
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of, worst

ERROR_RAISED = "the rank that is there has raised its error"


def fails(rank: int, setup: str) -> tuple[str, ...]:
    """Slugs of the error that a mistake on one rank gives here, and whether the model was left alone."""
    model = tiny_model("llama")
    before = {name: (id(p), type(p)) for name, p in model.named_parameters()}
    plan, options = "llama", {"handshake_timeout_s": 3.0}
    store = dist.distributed_c10d._get_default_store()
    if setup == "other plan" and rank == 1:
        llama = load_plan("llama")
        head = next(rule for rule in llama.rules if rule.pattern == "lm_head")
        plan = replace(
            llama, rules=(*(r for r in llama.rules if r is not head), replace(head, style=parse_style("replicate")))
        )
    if setup == "other option" and rank == 1:
        options["loss_parallel"] = True
    if setup == "other model" and rank == 1:
        model = tiny_model("llama", hidden_size=96)
        before = {name: (id(p), type(p)) for name, p in model.named_parameters()}
    if setup == "bad plan" and rank == 1:
        plan = {"model.layrs.*": "colwise"}
    if setup == "no such plan" and rank == 0:
        plan = "lama"
    if setup == "other weights":
        if rank == 1:
            with torch.no_grad():
                model.model.norm.weight[3] += 1e-3
        options["check_replicated"] = True
    if setup == "missing" and rank == 1:
        store.wait([ERROR_RAISED], timedelta(seconds=60))
        store.delete_key(ERROR_RAISED)
        return ("absent",)
    mesh = build_mesh("cpu", tp=2)
    try:
        parallelize_module(model, mesh, plan, **options)
    except ParallelizeError as error:
        if setup == "missing":
            store.set(ERROR_RAISED, "")
        assert {name: (id(p), type(p)) for name, p in model.named_parameters()} == before, "half applied"
        assert not any("forward" in vars(m) or "_applied" in vars(m) for m in model.modules()), "half applied"
        return (*error.slugs, str(error))
    return ("no error",)


def other_data(rank: int) -> tuple[str, ...]:
    """Inputs that differ over tp are named at the forward."""
    model = tiny_model("llama")
    parallelize_module(model, build_mesh("cpu", tp=2), check_replicated=True)
    ids, _ = tiny_batch(seed=rank)
    try:
        model(input_ids=ids)
    except ParallelizeError as error:
        return (*error.slugs, str(error))
    return ("no error",)


def fully_sharded(rank: int, family: str, options: dict[str, Any], mixed: bool, accumulate: bool) -> dict[str, float]:
    """dp=2 x tp=2 with `fully_shard` on every layer and the root: errors against the unsharded model."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = torch.float32 if mixed else torch.float64
    model = tiny_model(family, dtype)
    reference = copy.deepcopy(model)
    mesh = build_mesh("cpu", dp=2, tp=2)
    parallelize_module(model, mesh, **options)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    base = getattr(model, model.base_model_prefix)
    layers = getattr(base, "layers", None) or getattr(base, "h", None)
    for layer in layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    names = [name for name, _ in reference.named_parameters()]
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (model, reference)]
    errors: dict[str, float] = {}
    for step in range(2):
        for micro in range(2 if accumulate else 1):
            ids, labels = tiny_batch(batch=4, length=7, seed=10 * step + micro)
            labels = labels.clamp(min=0)
            local = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
            total = labels.numel()
            loss = loss_sum(model(input_ids=ids[local]).logits, labels[local]) / total
            (loss * mesh.size(0)).backward()  # fully_shard, used by hand, averages over dp
            expected = loss_sum(reference(input_ids=ids).logits, labels) / total
            expected.backward()
        actual = {n: full_parameter(model, n, model.get_parameter(n).grad) for n in names}
        errors[f"grads {step}"] = worst(actual, {n: p.grad for n, p in reference.named_parameters()})[0]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {n: full_parameter(model, n).detach() for n in names}
    errors["weights"] = worst(weights, {n: p.detach() for n, p in reference.named_parameters()})[0]
    return errors


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from parallelize import ShardedLogits, cross_entropy

    if isinstance(logits, ShardedLogits):
        return cross_entropy(logits, labels, reduction="sum")
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")


def tutorial(rank: int, kind: str, whose: str) -> dict[str, Any]:
    """PyTorch's tutorial dict under our `parallelize_module` (ours) or under PyTorch's: errors and collectives."""
    import torch.distributed.tensor.parallel as stock
    from torch.distributed.tensor.debug import CommDebugMode

    import parallelize
    from tests.support import tutorial as tut

    torch.manual_seed(3)
    model = tut.Transformer().double()
    for p in model.parameters():
        if p.ndim == 1:
            p.data.add_(torch.randn_like(p) * 0.3)
    reference = copy.deepcopy(model)
    mesh = build_mesh("cpu", tp=dist.get_world_size())
    styles = stock if whose == "stock" else parallelize
    plan = tut.tensor_parallel(styles) if kind == "tensor" else tut.sequence_parallel(styles, kind == "loss")
    before = {name: repr(sorted(vars(style).items(), key=str)) for name, style in plan.items()}
    tut.make_heads_local(model, mesh.size())
    apply = stock.parallelize_module if whose == "stock" else parallelize_module
    apply(model, mesh, plan)
    if whose == "ours":
        assert before == {name: repr(sorted(vars(style).items(), key=str)) for name, style in plan.items()}
    ids = torch.randint(0, 30, (2, 8), generator=torch.Generator().manual_seed(1))
    from contextlib import nullcontext

    loss_context = parallelize.loss_parallel() if kind == "loss" else nullcontext()
    # a whole step: PyTorch leaves norms' gradients partial, and reduces them in the optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    model(ids)  # the first forward compares its inputs over tp
    with CommDebugMode() as counts, loss_context:
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
    total = sum(counts.get_comm_counts().values())
    expected = nn.functional.cross_entropy(reference(ids).flatten(0, 1), ids.flatten())
    expected.backward()
    full = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return {
        "loss": abs(float(value) - float(expected)) / float(expected),
        "grads": worst(full, {n: p.grad for n, p in reference.named_parameters()})[0],
        "collectives": total,
        "kinds": {str(op): count for op, count in counts.get_comm_counts().items()},
    }


def norm_with_parameters_inside(rank: int) -> str:
    """The slug of the refusal."""
    from parallelize import SequenceParallel

    model = nn.ModuleDict({"norm": nn.Sequential(nn.LayerNorm(4))})
    try:
        parallelize_module(model, build_mesh("cpu", tp=dist.get_world_size()), {"norm": SequenceParallel()})
    except ParallelizeError as error:
        return error.slugs[0]
    return "accepted"


def dict_details(rank: int) -> None:
    """Keyword inputs, mixed styles, ties, one style, failing entries: what stock PyTorch gets wrong."""
    import torch.distributed.tensor.parallel as stock
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from parallelize import ColwiseParallel, ParallelizeError, RowwiseParallel
    from tests.support import tutorial as tut

    mesh = build_mesh("cpu", tp=2)

    def linear(cls=nn.Linear, bias=True) -> nn.Module:
        torch.manual_seed(1)
        return cls(6, 10, bias=bias).double()

    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    # one linear by columns, by rows, and replicated with its input gathered over the batch
    for style, cut in (
        (ColwiseParallel(output_layouts=Replicate()), None),
        (RowwiseParallel(input_layouts=Replicate()), None),
        (ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()), 0),
        (RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)), "out"),
    ):
        plain, planned = linear(), linear()
        parallelize_module(planned, mesh, style)
        assert isinstance(planned.weight, DTensor)
        local_x = x.chunk(2)[rank].clone() if cut == 0 else x.clone()
        local_x.requires_grad_()
        full_x = x.clone().requires_grad_()
        actual, expected = planned(input=local_x), plain(full_x)
        if cut == "out":
            want_here = expected.chunk(2)[rank]
        else:
            want_here = expected
        assert worst({"": actual}, {"": want_here})[0] < 1e-12
        scale = torch.arange(10, dtype=torch.float64)
        (actual * scale).sum().backward()
        (expected * scale).sum().backward()
        if cut == 0:
            assert worst({"": local_x.grad}, {"": full_x.grad.chunk(2)[rank]})[0] < 1e-12
        else:
            assert worst({"": local_x.grad}, {"": full_x.grad})[0] < 1e-12
        for name, parameter in plain.named_parameters():
            assert worst({"": getattr(planned, name).grad.full_tensor()}, {"": parameter.grad})[0] < 1e-12, (
                style,
                name,
            )

    # replicated with its input gathered over the batch
    plain, planned = linear(), linear()
    from parallelize import PrepareModuleInput

    gather = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True)
    parallelize_module(planned, mesh, gather)
    local_x = x.chunk(2)[rank].clone().requires_grad_()
    full_x = x.clone().requires_grad_()
    actual, expected = planned(local_x), plain(full_x)
    actual.square().sum().backward()
    expected.square().sum().backward()
    assert worst({"": actual}, {"": expected})[0] < 1e-12
    assert worst({"": local_x.grad}, {"": full_x.grad.chunk(2)[rank]})[0] < 1e-12
    assert worst({"": planned.weight.grad}, {"": plain.weight.grad})[0] < 1e-12

    # a tie stays a tie; frozen stays frozen; DTensors come out where asked for; uneven sizes are exact
    model = nn.ModuleDict({"embed": nn.Embedding(7, 5), "head": nn.Linear(5, 7, bias=False)}).double()
    model["head"].weight = model["embed"].weight
    plain = copy.deepcopy(model)
    parallelize_module(
        model,
        mesh,
        {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(use_local_output=False)},
    )
    assert model["head"].weight is model["embed"].weight
    ids = torch.tensor([[0, 3, 6], [1, 1, 5]])
    out = model["head"](model["embed"](ids))
    assert isinstance(out, DTensor) and tuple(out.shape) == (2, 3, 7)
    expected = plain["head"](plain["embed"](ids))
    assert worst({"": out.full_tensor()}, {"": expected})[0] < 1e-12
    out.full_tensor().square().sum().backward()
    expected.square().sum().backward()
    assert worst({"": model["embed"].weight.grad.full_tensor()}, {"": plain["embed"].weight.grad})[0] < 1e-12
    from parallelize import shard_info

    info = shard_info(model)["head.weight"]
    assert info.full_shape == (7, 5) and [pair.full[0] for pair in info.slices(1)] == [slice(4, 7)]
    assert worst(full_gradients(model), {"embed.weight": plain["embed"].weight.grad})[0] < 1e-12
    # a shard, not [V, H]
    assert tuple(model["embed"].weight.grad.to_local().shape) == ((4, 5) if rank == 0 else (3, 5))

    model = copy.deepcopy(plain)  # a tie whose other end has no style would be misread
    model["head"].weight = model["embed"].weight
    parallelize_module(model, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
    try:
        model["head"](model["embed"](ids))
        raise AssertionError("accepted")
    except ParallelizeError as error:
        assert error.slugs == ("broken-tie",)
    parallelize_module(model["head"], mesh, ColwiseParallel(output_layouts=Replicate()))
    out = model["head"](model["embed"](ids))
    assert worst({"": out}, {"": expected.detach()})[0] < 1e-12

    # a PyTorch style in the dict is applied as it is
    mixed = nn.Sequential(linear(), nn.Linear(10, 6).double())
    plain = copy.deepcopy(mixed)
    parallelize_module(mixed, mesh, {"0": ColwiseParallel(), "1": stock.RowwiseParallel()})
    assert worst({"": mixed(x)}, {"": plain(x)})[0] < 1e-12

    # uneven shards meet: 5 columns over 2 ranks, then 5 rows; AdamW(foreach) steps on the mix of plain and DTensor
    torch.manual_seed(4)
    odd = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6), nn.LayerNorm(6)).double()
    odd[0].weight.requires_grad_(False)
    plain = copy.deepcopy(odd)
    stock_row = stock.RowwiseParallel()
    before = dict(vars(stock_row))
    parallelize_module(odd, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    parallelize_module(copy.deepcopy(plain), mesh, {"2": stock_row})
    assert vars(stock_row) == before
    assert not odd[0].weight.requires_grad
    from parallelize import local_optimizer

    optimizers = [
        local_optimizer(torch.optim.AdamW(odd.parameters(), foreach=True)),
        torch.optim.AdamW(plain.parameters(), foreach=True),
    ]
    for _ in range(2):
        for net in (odd, plain):
            net(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in plain.named_parameters():
        actual = odd.get_parameter(name)
        actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
        assert worst({"": actual.detach()}, {"": parameter.detach()})[0] < 1e-8, name

    # nothing is half applied, and mistakes are errors
    for plan, slug in (
        ({"layers.*.attention.wq": ColwiseParallel(), "layers.*.attention.wk": "colwise "}, "bad-plan"),
        ({"layers.*.attention.wq": ColwiseParallel(), "norm": ColwiseParallel()}, "wrong-module-for-style"),
    ):
        model = tut.Transformer()
        try:
            parallelize_module(model, mesh, plan)
            raise AssertionError("accepted")
        except ParallelizeError as error:
            assert slug in error.slugs
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    class Failing(stock.ParallelStyle):
        def _apply(self, module, device_mesh):
            module.register_forward_pre_hook(lambda *a: None)
            raise RuntimeError("third party")

    model = tut.Transformer()
    try:
        parallelize_module(model, mesh, {"layers.*.attention.wq": ColwiseParallel(), "norm": Failing()})
        raise AssertionError("accepted")
    except RuntimeError as error:
        assert "third party" in str(error)
    assert not any(isinstance(p, DTensor) or m._forward_pre_hooks for m in model.modules() for p in m.parameters())
    assert not any("forward" in vars(m) for m in model.modules())


def layer_collectives(rank: int, sequence_parallel: bool) -> dict[str, dict[str, int]]:
    """Collectives of one Llama decoder layer, forward and backward."""
    from torch.distributed.tensor.debug import CommDebugMode

    model = tiny_model("llama", attention_bias=False)
    parallelize_module(model, build_mesh("cpu", tp=2), sequence_parallel=sequence_parallel)
    layer = model.model.layers[1]
    forward, backward = CommDebugMode(), CommDebugMode()
    layer_calls: list = []
    layer.register_forward_pre_hook(lambda m, args, kwargs: layer_calls.append((args[0], kwargs)), with_kwargs=True)
    model(input_ids=tiny_batch(length=8)[0], use_cache=False)
    hidden, kwargs = layer_calls.pop()
    x = hidden.detach().requires_grad_()
    if sequence_parallel:  # alone, a layer is outside the region: enter it as the first layer does
        region = model.model.layers[0]._applied.planned.enter.__self__
        region.enter(torch.zeros(2, 8, 48))
    with forward:
        out = layer(x, **kwargs)
    with backward:
        out.sum().backward()

    def counts(mode: Any) -> dict[str, int]:
        return {str(op).split(".")[-1].strip("_"): n for op, n in mode.get_comm_counts().items()}

    return {"forward": counts(forward), "backward": counts(backward)}


def embedding_gradient(rank: int, whose: str) -> dict[str, int]:
    """Elements of the vocabulary-sharded embedding's local gradient, and of the largest tensor made in backward."""
    import torch.distributed.tensor.parallel as stock
    from torch.distributed.tensor import Replicate
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if type(out) is torch.Tensor:
                largest = max(largest, out.untyped_storage().nbytes() // out.element_size())
            return out

    model = nn.Sequential(nn.Embedding(1000, 16))
    mesh = build_mesh("cpu", tp=2)
    if whose == "stock":
        stock.parallelize_module(model, mesh, {"0": stock.RowwiseParallel(input_layouts=Replicate())})
    else:
        parallelize_module(model, mesh, {"0": "embedding"})
    out = model(torch.arange(12).view(2, 6) * 80)
    with Watch():
        out.sum().backward()
    return {"gradient": model[0].weight.grad.to_local().numel(), "largest": largest}


def any_axis_order(rank: int) -> list[float]:
    """tp first in the mesh: its ranks are not neighbors; groups over several axes and over any ranks."""
    from parallelize import axis_group, group_for, mesh_spec
    from parallelize.base.torch_private import torch_groups as private_groups
    from parallelize.checkpoint.run.rank_sync import RankSync

    mesh = build_mesh("cpu", tp=2, dp=2)
    spec = mesh_spec(mesh)
    assert dist.get_process_group_ranks(axis_group(mesh, "tp")) == list(spec.group_of(rank, "tp"))
    assert dist.get_process_group_ranks(axis_group(mesh, "tp", "dp")) == list(spec.group_of(rank, "tp", "dp"))
    if rank in (0, 3):
        group = group_for([0, 3])
        assert group is group_for([0, 3])
        value = torch.tensor(float(rank))
        dist.all_reduce(value, group=group)
        assert value == 3.0
    # ranks 0 and 3 are in a group more than 1 and 2; members of the next groups agree on its name all the same
    pair = [0, 1] if rank < 2 else [3, 2] if private_groups.orders_groups() else [2, 3]
    group = group_for(pair)
    assert group is group_for(pair) and dist.get_process_group_ranks(group) == pair
    value = torch.tensor(float(rank))
    dist.all_reduce(value, group=group)
    assert value == sum(pair)
    assert RankSync().group not in private_groups.known_groups()  # a save in the background sends on it
    model = tiny_model("qwen3", torch.float64)
    ids, labels = tiny_batch(seed=1)
    reference = copy.deepcopy(model)
    loss_of(reference(input_ids=ids).logits, labels).backward()
    parallelize_module(model, mesh, sequence_parallel=True, loss_parallel=True, own_reduction=True)
    loss_of(model(input_ids=ids).logits, labels).backward()
    return [worst(full_gradients(model), {n: p.grad for n, p in reference.named_parameters()})[0]]


def input_and_output_layouts(rank: int, whose: str) -> list[torch.Tensor]:
    """`PrepareModuleInputOutput` around a stock block: what comes out, and the gradients, on this rank."""
    import torch.distributed.tensor.parallel as stock
    from torch.distributed.tensor import Replicate, Shard

    import parallelize

    styles = stock if whose == "stock" else parallelize
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
    plan = {
        "": styles.PrepareModuleInputOutput(
            input_layouts=(Shard(0),),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=(Replicate(),),
            desired_output_layouts=(Shard(0),),
        ),
        "0": styles.ColwiseParallel(),
        "2": styles.RowwiseParallel(),
    }
    apply = stock.parallelize_module if whose == "stock" else parallelize_module
    apply(model, build_mesh("cpu", tp=2), plan)
    x = torch.randn(4, 6, dtype=torch.float64)[2 * rank : 2 * rank + 2].clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    local = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return [out.detach(), x.grad, *local]


def styles_like_stock(rank: int, whose: str, configuration: str) -> list[torch.Tensor]:
    """One style on one module, by PyTorch's classes or ours: outputs and gradients as this rank sees them."""
    import torch.distributed.tensor.parallel as stock
    from torch.distributed.tensor import Partial, Replicate, Shard

    import parallelize

    s = stock if whose == "stock" else parallelize
    mesh = build_mesh("cpu", tp=2)
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 6, 8, dtype=torch.float64, generator=generator)
    ids = torch.randint(0, 10, (4, 6), generator=generator)
    local_x = x.chunk(2)[rank].clone()

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(8, 8)

        def forward(self, a, *, b):
            return self.w(a) * b

    norm, linear, embedding = nn.LayerNorm(8).double(), nn.Linear(8, 10).double(), nn.Embedding(10, 8).double()
    named = Named().double()
    kwargs: dict = {}
    if configuration == "row embedding of sharded ids":
        model, style, inputs = embedding, s.RowwiseParallel(input_layouts=Shard(0)), [ids.chunk(2)[rank]]
    elif configuration == "column embedding of sharded ids":
        model, style, inputs = embedding, s.ColwiseParallel(input_layouts=Shard(0)), [ids.chunk(2)[rank]]
    elif configuration == "column linear of partial input":
        model, style, inputs = linear, s.ColwiseParallel(input_layouts=Partial()), [x * (rank + 1)]
    elif configuration == "norm on another sequence dim":
        model, style, inputs = norm, s.SequenceParallel(sequence_dim=0, use_local_output=True), [local_x]
    elif configuration == "keyword layouts":
        style = s.PrepareModuleInput(
            input_layouts=(Shard(0),),
            desired_input_layouts=(Replicate(),),
            input_kwarg_layouts={"b": Shard(0)},
            desired_input_kwarg_layouts={"b": Replicate()},
            use_local_output=True,
        )
        model, inputs, kwargs = named, [local_x], {"b": local_x.clone() + 1}
    else:
        model, style, inputs = (
            linear,
            s.RowwiseParallel(output_layouts=Shard(1)),
            [x[..., 4 * rank : 4 * rank + 4].clone()],
        )
    apply = stock.parallelize_module if whose == "stock" else parallelize_module
    apply(model, mesh, style)
    inputs = [i.requires_grad_() if i.is_floating_point() else i for i in inputs]
    out = model(*inputs, **kwargs)
    out.square().sum().backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return [out.detach(), *(i.grad for i in inputs if i.is_floating_point()), *grads]
