"""A stock model on a mesh with `cp` against the same model alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from parallelize import build_mesh, full_gradients, full_state_dict, parallelize_model
from tests.support.models import tiny_model
from tests.support.parity import worst

LEARNING_RATE = 0.05


def batch_of(length: int, rows: int = 2, vocab: int = 67) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and targets of which some are ignored: more in the first half, so that ranks count different numbers."""
    # a generator of its own, because ranks that are threads share the global one
    ids, targets = torch.randint(3, vocab, (2, rows, length), generator=torch.Generator().manual_seed(3))
    targets[:, : length // 3] = -100
    return ids, targets


def alone(model: Any, ids: torch.Tensor, targets: torch.Tensor, **inputs: Any) -> dict[str, torch.Tensor]:
    """Loss, gradients and the weights after a step of SGD, in one process."""
    model = copy.deepcopy(model)
    with softmax_in_float64():
        # with a cache, which cp has not, stock models do not look for packed documents
        logits = model(
            input_ids=ids, **inputs, **({} if "bert" in type(model).__name__.lower() else {"use_cache": False})
        ).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    results = {"loss": loss.detach()}
    results |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= LEARNING_RATE * p.grad
    return results | {f"weight {name}": p.detach() for name, p in model.named_parameters()}


@contextmanager
def softmax_in_float64() -> Iterator[None]:
    """Eager attention of `transformers` rounds its weights to float32, which would be an error of the reference."""
    stock = F.softmax

    def softmax(x: torch.Tensor, dim: int = -1, dtype: Any = None, **rest: Any) -> torch.Tensor:
        return stock(x, dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)

    with mock.patch.object(F, "softmax", softmax):
        yield


def on_mesh(
    model: Any, sizes: dict[str, int], ids: torch.Tensor, targets: torch.Tensor, inputs: dict[str, Any], **options: Any
) -> dict[str, torch.Tensor]:
    """The same on a mesh; call it on every rank. The batch is sharded over the data ranks."""
    model = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    mesh = build_mesh("cpu", **sizes)
    if sizes.get("dp", 1) > 1:
        dp_rank, dp_size = mesh.get_local_rank("dp"), sizes["dp"]
        ids, targets = ids.chunk(dp_size)[dp_rank], targets.chunk(dp_size)[dp_rank]
        inputs = {key: value.chunk(dp_size)[dp_rank] if len(value) > 1 else value for key, value in inputs.items()}
    parallel = parallelize_model(model, mesh, **options)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
    loss = parallel.step(input_ids=ids, targets=targets, **inputs)
    results = {"loss": loss.detach()}
    if options.get("zero", 0) < 2:
        results |= {f"grad {name}": grad for name, grad in full_gradients(parallel.module).items()}
    optimizer.step()
    local_names = [name for name in names if name in dict(parallel.module.named_parameters())]
    weights = full_state_dict(parallel.module, every_rank=True)
    return results | {f"weight {name}": weights[name] for name in local_names}


def error_of(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The worst relative error of losses, gradients and weights, each among its own kind."""
    errors = []
    for kind in ("loss", "grad", "weight"):
        of_kind = {name: value for name, value in results.items() if name.startswith(kind)}
        if of_kind:
            errors.append(worst(of_kind, {name: expected[name] for name in of_kind}))
    return max(errors)


def family(name: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    return tiny_model(name, dtype, **overrides)
