"""What each rank does in the tests of compiled models: functions of (rank, ...) that return plain data or raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelize import build_mesh, full_gradients, parallelize_model, parallelize_module
from parallelize.base.torch_private.torch_tensors import plain_local
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of, worst


def compiled(rank: int, backend: str, sequence_parallel: bool, overlap: str = "off") -> dict[str, Any]:
    """A model with one decoder layer compiled with fullgraph, against eager: differences, and collectives in its
    graphs."""
    from collections import Counter

    from torch._dynamo.backends.common import aot_autograd

    from parallelize.comm.groups import Group

    model = tiny_model("llama", torch.float64)
    parallelize_module(model, build_mesh("cpu", tp=2), sequence_parallel=sequence_parallel, overlap=overlap)
    layer = model.model.layers[1]
    ids, labels = tiny_batch(length=8)
    counts: Counter = Counter()

    def counting(which: str):
        def compile_graph(graph, inputs):
            for node in graph.graph.nodes:
                if "c10d" in str(node.target) and "wait" not in str(node.target):
                    counts[which + " " + str(node.target).split(".")[1].split("_into")[0].split("_tensor")[0]] += 1
            return graph.forward

        return compile_graph

    def step() -> torch.Tensor:
        model.zero_grad()
        logits = model(input_ids=ids).logits
        loss_of(logits, labels).backward()
        return logits.detach()

    def run() -> tuple:
        return step(), full_gradients(model)

    expected = run()
    torch._dynamo.reset()
    chosen: Any = backend
    if backend == "counting":
        chosen = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
    sent: list = []
    real = Group.all_reduce

    def noted(group: Any, x: torch.Tensor, *args: Any) -> None:  # what is sent outside graphs: the pending reductions
        sent.append(x.numel())
        real(group, x, *args)

    Group.all_reduce = noted
    try:
        step()
        eager_sent = list(sent)
        layer.compile(fullgraph=True, backend=chosen)
        run()
        sent.clear()
        actual = step(), full_gradients(model)
    finally:
        Group.all_reduce = real
    torch._dynamo.reset()
    return {
        "output": worst({"": actual[0]}, {"": expected[0]})[0],
        "gradients": worst(actual[1], expected[1])[0],
        "compiled": dict(counts),
        "step": sent,
        "eager step": eager_sent,
    }


def compiled_then_changed(rank: int, sequence_parallel: bool, whole: bool) -> list[float]:
    """A compiled model keeps finding its parameters: after assigning others, after a cast and back, after freezing.

    whole: compile the model instead of one layer.
    """
    model, other = tiny_model("llama", torch.float64), tiny_model("llama", torch.float64, seed=5)
    reference = copy.deepcopy(other)
    ids, labels = tiny_batch(length=8)
    parallelize_module(model, build_mesh("cpu", tp=2), sequence_parallel=sequence_parallel)
    torch._dynamo.reset()
    if not whole:
        model.model.layers[1].compile(fullgraph=True, backend="aot_eager")
    forward = torch.compile(model, backend="aot_eager") if whole else model

    def step(call: Any, net: nn.Module) -> None:
        net.zero_grad()
        loss_of(call(input_ids=ids).logits, labels).backward()

    def error() -> float:
        step(forward, model)
        step(reference, reference)
        expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        return worst(full_gradients(model), expected)[0]

    step(forward, model)
    model.load_state_dict(other.state_dict(), assign=True)
    errors = [error()]
    for net in (model, reference):
        net.float().double()
    errors.append(error())
    for net in (model, reference):
        net.model.layers[1].input_layernorm.weight.requires_grad_(False)
    errors.append(error())
    for net in (model, reference):
        net.model.layers[1].input_layernorm.weight.requires_grad_(True)
    errors.append(error())
    torch._dynamo.reset()
    return errors


def dtensors_of_graphs(rank: int, sequence_parallel: bool, whole: bool) -> list[int]:
    """How many DTensors each compiled graph reads, of a model whose first forward is compiled, and after others were
    assigned."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch.distributed.tensor import DTensor

    num_dtensors: list[int] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        num_dtensors.append(sum(isinstance(x, DTensor) for x in inputs))
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    model, other = tiny_model("llama"), tiny_model("llama", seed=5)
    parallelize_module(model, build_mesh("cpu", tp=2), sequence_parallel=sequence_parallel)
    if not whole:
        model.model.layers[1].compile(fullgraph=True, backend=backend)
    forward = torch.compile(model, backend=backend) if whole else model
    ids, labels = tiny_batch(length=8)
    for values in (None, other.state_dict()):
        if values is not None:
            model.load_state_dict(values, assign=True)
        loss_of(forward(input_ids=ids).logits, labels).backward()
    torch._dynamo.reset()
    return num_dtensors


def steps_of_compiled_layers(
    rank: int, family: str, axes: dict[str, int], options: dict[str, Any], config: dict[str, Any]
) -> tuple[int, list[float]]:
    """Two steps with each layer compiled, and two in eager mode: the number of graphs, and the errors of the
    gradients."""
    from torch._dynamo.backends.debugging import aot_eager

    num_graphs = 0

    def backend(graph: Any, inputs: list[Any]) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    gradients: list[list[dict[str, torch.Tensor]]] = []
    for is_compiled in (False, True):
        parallel = parallelize_model(tiny_model(family, torch.float64, **config), build_mesh("cpu", **axes), **options)
        parallel.module.train()
        if is_compiled:
            for layer in parallel.module.get_submodule(_LAYERS[family]):
                layer.compile(backend=backend)
        ids, _ = tiny_batch(length=8)
        gradients.append([])
        for _ in range(2):
            parallel.module.zero_grad()
            parallel.step(input_ids=ids, labels=ids)
            gradients[-1].append(_local_gradients(parallel.module))
    torch._dynamo.reset()
    eager, compiled = gradients
    return num_graphs, [worst(other, own)[0] for own, other in zip(eager, compiled, strict=True)]


_LAYERS = {"gpt2": "transformer.h", "llama": "model.layers", "mixtral": "model.layers", "deepseek_v3": "model.layers"}


def _local_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: plain_local(grad).clone() for name, grad in gradients.items()}


def compiled_collectives(rank: int) -> dict[str, tuple[float, float]]:
    """Each collective in a graph that reads plain tensors alone, against eager mode: the errors of the result and of
    the gradient."""
    group = Group(build_mesh("cpu", tp=2)["tp"].get_group())
    functions = {
        "copy": lambda x: ops.copy(x, group),
        "copy_to_read": lambda x: ops.copy_to_read(x, group),
        "reduce": lambda x: ops.reduce(x, group),
        "reduce_owned": lambda x: ops.reduce_owned(x * 1, group),
        "sum_both": lambda x: ops.sum_both(x, group),
        "gather of columns": lambda x: ops.gather(x, group, 1, 8, "partial"),
        "gather of rows": lambda x: ops.gather(x, group, 0, 4, "partial"),
        "gather of a replicated gradient": lambda x: ops.gather(x, group, 1, 8, "replicate"),
        "reduce_scatter of columns": lambda x: ops.reduce_scatter(x, group, 1),
        "reduce_scatter of rows": lambda x: ops.reduce_scatter(x, group, 0),
        "split": lambda x: ops.split(x, group, 1),
        "all_to_all": lambda x: ops.all_to_all(x, group, 0, 1, 8),
    }
    return {name: _errors_of_graph(rank, function) for name, function in functions.items()}


def _errors_of_graph(rank: int, function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, float]:
    torch._dynamo.reset()
    torch.manual_seed(rank)
    values, inputs, outputs = torch.randn(2, 4, dtype=torch.float64), [], []

    def call(x: torch.Tensor) -> torch.Tensor:
        return (function(x.sin()) * 2).cos()

    for form in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        inputs.append(values.clone().requires_grad_())
        outputs.append(form(inputs[-1]))
        outputs[-1].square().sum().backward()
    result = float((outputs[1] - outputs[0]).detach().abs().max())
    return result, float((inputs[1].grad - inputs[0].grad).abs().max())
