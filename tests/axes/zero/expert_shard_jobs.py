"""What each rank does in the tests of folded experts as PyTorch sees them: DTensors, and
`torch.distributed.checkpoint`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from parallelize import build_mesh, parallelize_model
from tests.support.models import tiny_batch, tiny_model

EXPERTS = "model.layers.0.mlp.experts."


def experts_in_torch(rank: int, experts: int, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """By parameter: its placements, whether `full_tensor()` and a saved file have its values, of it and of Adam's
    moments."""
    model = tiny_model("mixtral", torch.float64, num_local_experts=experts)
    full = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = parallelize_model(model, build_mesh("cpu", dp=4), **options)
    optimizer = parallel.optimizer(torch.optim.Adam, lr=0.0)
    ids, labels = tiny_batch(batch=4, length=8)
    parallel.step(ids[rank : rank + 1], targets=labels[rank : rank + 1])
    optimizer.step()
    results: dict[str, Any] = {}
    for key in ("gate_up_proj", "down_proj"):
        parameter: Any = model.get_parameter(EXPERTS + key)
        like = next(state["exp_avg"] for state in moments(optimizer) if state["exp_avg"].shape == parameter.shape)
        for what, stored, expected in (("weight", parameter, full[EXPERTS + key]), ("moment", like, None)):
            value = stored.full_tensor().detach()
            expected = value if expected is None else expected
            dcp.save({"x": stored.detach()}, checkpoint_id=f"{folder}/{key}-{what}")
            loaded = {"x": torch.zeros_like(expected)}
            dcp.load(loaded, checkpoint_id=f"{folder}/{key}-{what}")
            equal = torch.equal(value, expected), torch.equal(loaded["x"], expected), bool(expected.any())
            results[f"{key} {what}"] = [type(p).__name__ for p in stored.placements], equal
    return results


def moments(optimizer: Any) -> list[dict[str, Any]]:
    return [state for state in optimizer.state.values() if "exp_avg" in state and state["exp_avg"].ndim == 3]
