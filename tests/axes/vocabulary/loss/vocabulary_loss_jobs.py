"""Jobs of `test_vocabulary_loss.py`, run on every rank."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from parallelize import (
    DeferredLogits,
    ModelError,
    build_mesh,
    cross_entropy,
    full_gradients,
    generate,
    linear_cross_entropy,
    linear_token_log_probs,
    parallelize_model,
    parallelize_module,
    token_log_probs_and_entropy,
)
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.class_targets import Vocabulary
from parallelize.plan.choose import plan_of
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import compare, planned_run, reference_run, worst

BOUND = {torch.float64: 1e-12, torch.float32: 5e-6}


def losses(rank: int, vocab: int, dtype: torch.dtype) -> dict[str, float]:
    """Largest relative error of loss and gradients, by what was computed."""
    torch.manual_seed(0)
    tp = dist.get_world_size()
    mesh = build_mesh("cpu", tp=tp)
    group = Group(mesh.get_group())
    start, stop = even_interval(vocab, tp, rank)
    hidden, weight = torch.randn(3, 5, 7, dtype=dtype), torch.randn(vocab, 7, dtype=dtype)
    bias, class_weight = torch.randn(vocab, dtype=dtype) + 20, torch.rand(vocab, dtype=dtype) + 0.1
    targets, soft = torch.randint(0, vocab, (3, 5)), torch.rand(3, 5, vocab, dtype=dtype).softmax(-1)
    targets[1, :2] = -100
    results = {}
    for name, expected_targets, options in (
        ("mean", targets, {"label_smoothing": 0.1, "weight": class_weight}),
        ("sum", targets, {"reduction": "sum"}),
        ("none", targets, {"label_smoothing": 0.1, "reduction": "none"}),
        ("soft", soft, {"weight": class_weight}),
    ):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        z = 3 * torch.tanh(F.linear(*leaves) / 3)
        z.retain_grad()
        flat = expected_targets.flatten(0, 1) if expected_targets is soft else expected_targets.flatten()
        loss = F.cross_entropy(z.flatten(0, 1), flat, **options)
        loss.square().sum().backward()
        expected = {"hidden": leaves[0].grad, "weight": leaves[1].grad, "bias": leaves[2].grad}
        expected["loss"] = loss.detach().reshape(-1)
        ours = {"hidden": hidden.clone().requires_grad_()}
        ours |= {n: _sharded(x, mesh, start, stop) for n, x in (("weight", weight), ("bias", bias))}
        fused = {"class_weight" if key == "weight" else key: value for key, value in options.items()}
        actual = linear_cross_entropy(
            ours["hidden"], ours["weight"], expected_targets, bias=ours["bias"], softcap=3.0, chunk=4, **fused
        )
        actual.square().sum().backward()
        grads = {n: x.grad.full_tensor() if isinstance(x, DTensor) else x.grad for n, x in ours.items()}
        results[f"fused {name}"] = worst(grads | {"loss": actual.detach().reshape(-1)}, expected)[0]
        leaf = z.detach()[..., start:stop].clone().requires_grad_()
        actual = cross_entropy(mark(leaf * 1, Vocabulary(vocab, group)), expected_targets, **options)
        actual.square().sum().backward()
        results[f"unfused {name}"] = worst({"": leaf.grad}, {"": z.grad[..., start:stop]})[0] if stop > start else 0.0
        results[f"unfused {name} loss"] = worst({"": actual.detach().reshape(-1)}, {"": expected["loss"]})[0]
    return results


def log_probs(rank: int, vocab: int, dtype: torch.dtype) -> dict[str, float]:
    torch.manual_seed(0)
    tp = dist.get_world_size()
    mesh = build_mesh("cpu", tp=tp)
    start, stop = even_interval(vocab, tp, rank)
    hidden, weight = torch.randn(3, 5, 7, dtype=dtype), torch.randn(vocab, 7, dtype=dtype)
    ids = torch.randint(0, vocab, (3, 5))
    leaf = hidden.clone().requires_grad_()
    logits = leaf @ weight.T
    logits.retain_grad()
    log_p = (logits / 0.7).log_softmax(-1)
    chosen, entropy = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    (chosen.square().sum() + entropy.square().sum()).backward()
    expected = {"chosen": chosen.detach(), "entropy": entropy.detach()}
    ours = hidden.clone().requires_grad_()
    a, b = linear_token_log_probs(
        ours, _sharded(weight, mesh, start, stop), ids, entropy=True, temperature=0.7, chunk=4
    )
    (a.square().sum() + b.square().sum()).backward()
    actual = {"chosen": a.detach(), "entropy": b.detach(), "hidden": ours.grad}
    results = {"linear": worst(actual, expected | {"hidden": leaf.grad})[0]}
    part = logits.detach()[..., start:stop].clone().requires_grad_()
    marked = mark(part * 1, Vocabulary(vocab, Group(mesh.get_group())))
    a, b = token_log_probs_and_entropy(marked, ids, temperature=0.7)
    (a.square().sum() + b.square().sum()).backward()
    results["values"] = worst({"chosen": a.detach(), "entropy": b.detach()}, expected)[0]
    results["logits"] = worst({"": part.grad}, {"": logits.grad[..., start:stop]})[0] if stop > start else 0.0
    return results


def _sharded(x: torch.Tensor, mesh, start: int, stop: int) -> DTensor:
    local = x[start:stop].clone()
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride()
    ).requires_grad_()


def planned(rank: int, family: str, options: dict) -> None:
    """A planned model with `fuse_loss` equals the unsharded one."""
    model = tiny_model(family, torch.float64)
    data = [tiny_batch(seed=1), tiny_batch(seed=2)]
    tp = dist.get_world_size()
    compare(
        planned_run(copy.deepcopy(model), tp, data, fuse_loss=True, **options),
        reference_run(model, data),
        torch.float64,
    )


def own_loss(rank: int, family: str) -> tuple[float, float, bool]:
    """(error of the loss, of the gradients, whether logits stayed deferred) of a model that computes its own loss."""
    model = tiny_model(family)
    ids, labels = tiny_batch()
    expected = copy.deepcopy(model)
    loss = expected(input_ids=ids, labels=labels).loss
    loss.backward()
    parallelize_module(model, build_mesh("cpu", tp=dist.get_world_size()), fuse_loss=True)
    out = model(input_ids=ids, labels=labels)
    out.loss.backward()
    grads = {name: p.grad for name, p in expected.named_parameters() if p.grad is not None}
    deferred = isinstance(out.logits, DeferredLogits) and out.logits.deferred is not None
    error = abs(float(out.loss) - float(loss)) / float(loss)
    return error, worst(full_gradients(model), grads)[0], deferred


def compiled(rank: int, loss_parallel: bool) -> tuple[float, str]:
    """(error of gradients, what the head gave) of a compiled model with a head that would defer its logits."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 11)).double()
    x, targets = torch.randn(9, 5, dtype=torch.float64), torch.randint(0, 11, (9,))
    F.cross_entropy(net(x), targets).backward()
    expected = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    plan = plan_of(net, {"0": "replicate", "1": "colwise(output=vocabulary)"})
    parallelize_module(net, build_mesh("cpu", tp=2), plan, fuse_loss=True, loss_parallel=loss_parallel)
    torch._dynamo.reset()
    logits = torch.compile(net, backend="aot_eager", fullgraph=True)(x)
    F.cross_entropy(logits, targets).backward()
    return worst(full_gradients(net), expected)[0], type(logits).__name__


def steps_with_looks(rank: int, mesh: dict[str, int], options: dict, look: str) -> list[float]:
    """Losses of steps and evaluations, with forwards between a backward and its step that have no backward."""
    device_mesh = build_mesh("cpu", **mesh)
    parallel = parallelize_model(tiny_model("llama"), device_mesh, fuse_loss=True, **options)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.5)
    data = device_mesh.get_local_rank("dp")
    local_rows = slice(data * 4 // mesh["dp"], (data + 1) * 4 // mesh["dp"])
    other, expected_targets = (x[local_rows] for x in tiny_batch(batch=4, length=8, seed=9))
    results = []
    for step in range(2):
        ids, labels = (x[local_rows] for x in tiny_batch(batch=4, length=8, seed=step))
        results.append(float(parallel.step(input_ids=ids, targets=labels)))
        if look == "evaluate":
            parallel.evaluate(input_ids=other, targets=expected_targets)
        elif look == "forward":
            with torch.no_grad():
                parallel.forward(input_ids=other)
        elif look == "no backward":
            parallel.module(input_ids=other)
        elif look == "generate":
            parallel.module.eval()
            generate(parallel.module, other[:, :3], max_new_tokens=2, eos_token_id=[])
            parallel.module.train()
        optimizer.step()
        optimizer.zero_grad()
        results.append(float(parallel.evaluate(input_ids=other, targets=expected_targets)))
    return results


def kept_over_a_step(rank: int) -> tuple[str, ...]:
    """The slug under which logits are refused that were promised before a step, after another forward gathered anew."""
    parallel = parallelize_model(tiny_model("llama"), build_mesh("cpu", dp=2), zero=3, fuse_loss=True)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.5)
    ids, labels = tiny_batch(batch=2, length=8)
    parallel.step(input_ids=ids, targets=labels)
    with torch.no_grad():
        logits_before = parallel.module(input_ids=ids).logits
        optimizer.step()
        parallel.module(input_ids=ids)
        try:
            logits_before.argmax(-1)
        except ModelError as error:
            return error.slugs
    return ()


def steps(rank: int, mesh: dict[str, int], options: dict) -> list[float]:
    """Losses of three steps of a whole mesh."""
    model = tiny_model("llama")
    device_mesh = build_mesh("cpu", **mesh)
    parallel = parallelize_model(model, device_mesh, **options)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.05)
    data, parts = (device_mesh.get_local_rank("dp"), mesh["dp"]) if "dp" in mesh else (0, 1)
    results = []
    for step in range(3):
        ids, labels = tiny_batch(batch=4, length=8, seed=step)
        rows = slice(data * 4 // parts, (data + 1) * 4 // parts)
        results.append(float(parallel.step(input_ids=ids[rows], targets=labels[rows])))
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return results
