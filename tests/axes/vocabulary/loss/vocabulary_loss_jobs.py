"""Jobs of `test_vocabulary_loss.py`, run on every rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallelize import (
    ModelError,
    build_mesh,
    full_gradients,
    parallelize_model,
    parallelize_module,
)
from parallelize.plan.choose import plan_of
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst


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
