"""What each rank does in the tests of pipelines and of whole meshes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize import build_mesh, full_parameter
from parallelize.pipeline.cut import cut_pipeline
from parallelize.pipeline.engine import Pipeline
from parallelize.plan.schema import Cuts
from parallelize.sharding import record_of
from parallelize.ties import tie_parameters
from parallelize.training import parallelize_model
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import TOLERANCE, loss_of, worst


class Blocks(nn.Module):
    """A plain model: embedding, blocks, head; a skip from the first block to the last."""

    def __init__(self, layers: int = 8, width: int = 10, vocab: int = 67):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids) * self.scale
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def build(family: str, dtype: torch.dtype, layers: int) -> nn.Module:
    torch.manual_seed(0)
    if family == "blocks":
        return Blocks(layers).to(dtype)
    if family == "qwen3-sliding":  # the first layer sees everything, the others four tokens
        return tiny_model("qwen3", dtype, num_hidden_layers=layers, **SLIDING)
    if family == "gemma3-long":  # more layers than its pattern of two sliding ones and a full one
        kinds = ["full_attention" if n % 3 == 2 else "sliding_attention" for n in range(max(layers, 4))]
        return tiny_model("gemma3", dtype, num_hidden_layers=len(kinds), layer_types=kinds)
    if family == "llama-shared":  # one key/value head for all ranks, tied embeddings, frozen norms
        model = tiny_model("llama", dtype, num_hidden_layers=layers, num_key_value_heads=1, tie_word_embeddings=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layernorm" not in name)
        return model
    if family == "llama-tied":
        return tiny_model("llama", dtype, num_hidden_layers=layers, tie_word_embeddings=True)
    return tiny_model(family, dtype, num_hidden_layers=layers)


def logits_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits


def reference(
    model: nn.Module, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = copy.deepcopy(model)
    loss = loss_of(logits_of(model(ids)), labels)
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return loss.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


def schedules(
    rank: int, family: str, name: str, stages_per_rank: int, dtype: torch.dtype, microbatches: int = 4
) -> float:
    """The largest relative error of loss and gradients of a pipeline alone."""
    world = torch.distributed.get_world_size()
    model = build(family, dtype, world * stages_per_rank + 1)
    ids, labels = tiny_batch(batch=8, length=7)
    want_loss, want = reference(model, ids, labels)
    mesh = build_mesh("cpu", pp=world)
    cuts = Cuts("blocks", first=("embed", "scale"), last=("head",)) if family == "blocks" else None
    cut_pipeline(model, mesh, schedule=name, stages_per_rank=stages_per_rank, cuts=cuts)
    tie_parameters(model)
    pipeline = Pipeline(model, mesh, schedule=name, stages_per_rank=stages_per_rank, num_microbatches=microbatches)
    loss = pipeline.step(ids, targets=labels)
    got = {n: p.grad for n, p in model.named_parameters()}
    owned = {n for n, p in model.named_parameters()}
    assert owned
    error, name_ = worst(got, {n: want[n] for n in owned})
    assert error <= TOLERANCE[dtype], (name_, error)
    return max(error, abs(float(loss - want_loss)) / abs(float(want_loss)))


def whole(module: nn.Module, name: str, value: Any) -> torch.Tensor:
    """A parameter or its gradient, whole, whatever has split it."""
    if not isinstance(value, DTensor):
        return value.detach()
    if record_of(module) is not None:
        return full_parameter(module, name, value).detach()
    return value.full_tensor().detach()


def mesh_parity(rank: int, family: str, axes: dict[str, int], dtype: torch.dtype, options: dict[str, Any]) -> float:
    """Loss, gradients, norm and weights after three SGD steps of a model on a whole mesh; the largest relative error."""
    layers = options.pop("layers", axes.get("pp", 1) * (2 if "schedule" in options else 1) + 1)
    model = build(family, dtype, layers)
    unsharded = copy.deepcopy(model)
    mesh = build_mesh("cpu", **axes)
    if family == "blocks":
        options["cuts"] = Cuts("blocks", first=("embed", "scale"), last=("head",))
    parallel = parallelize_model(model, mesh, **options)
    data = [axis for axis in ("dp_replicate", "dp") if axis in axes]
    count = 1
    place = 0
    for axis in data:
        place = place * axes[axis] + mesh.get_local_rank(axis)
        count *= axes[axis]
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.05)
    reference_optimizer = torch.optim.SGD(unsharded.parameters(), 0.05)
    rows = 2 * parallel.pipeline.schedule.num_microbatches
    errors = {}
    for step in range(3):
        ids, labels = tiny_batch(batch=rows * count, length=7, seed=step)
        mine = slice(rows * place, rows * (place + 1))
        loss = parallel.step(ids[mine], targets=labels[mine])
        want = loss_of(logits_of(unsharded(ids)), labels)
        want.backward()
        errors[f"loss {step}"] = float((loss - want).abs() / want.abs())
        wanted = dict(unsharded.named_parameters(remove_duplicate=False))
        if step == 0:
            got = {n: whole(model, n, p.grad) for n, p in model.named_parameters() if p.grad is not None}
            assert got.keys() == {n for n, _ in model.named_parameters() if wanted[n].grad is not None}
            error, name = worst(got, {n: wanted[n].grad for n in got})
            errors[f"gradient of {name}"] = error
            parallel.step(ids[mine], targets=labels[mine])  # once more, on top of gradients that were reduced
            twice = {n: whole(model, n, p.grad) / 2 for n, p in model.named_parameters() if p.grad is not None}
            error, name = worst(twice, {n: wanted[n].grad for n in twice})
            errors[f"gradient after two steps of {name}"] = error
            for parameter in model.parameters():
                if parameter.grad is not None:
                    (parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad).div_(2)
        largest = parallel.clip_grad_norm_(1e9, float("inf"))
        norm = parallel.clip_grad_norm_(0.5)
        want_largest = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 1e9, float("inf"))
        want_norm = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.5)
        errors[f"norm {step}"] = float((norm - want_norm).abs() / want_norm)
        errors[f"largest {step}"] = float((largest - want_largest).abs() / want_largest)
        for one in (optimizer, reference_optimizer):
            one.step()
            one.zero_grad()
    parallel.check_ties()
    got = {n: whole(model, n, p) for n, p in model.named_parameters()}
    errors["weights"] = worst(got, {n: wanted[n].detach() for n in got})[0]
    assert max(errors.values()) <= TOLERANCE[dtype], errors
    return max(errors.values())


def from_meta(rank: int, axes: dict[str, int], options: dict[str, Any]) -> list[float]:
    """Losses of three steps of a GPT-2 with dropout that began on meta: the same on every mesh."""
    import transformers

    from parallelize import build_on_meta
    from parallelize.pieces import data_rank

    sizes = {"vocab_size": 67, "n_embd": 48, "n_layer": 4, "n_head": 8, "n_positions": 64, "n_inner": 72}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.1, "attn_pdrop": 0.2, "embd_pdrop": 0.1}
    model = build_on_meta(
        transformers.GPT2LMHeadModel, transformers.GPT2Config(**sizes, **ends, use_cache=False)
    ).train()
    mesh = build_mesh("cpu", **axes)
    parallel = parallelize_model(model, mesh, initialize=3, dropout_seed=5, **options)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
    place, ranks = data_rank(mesh, ("dp_replicate", "dp"))
    losses = []
    for step in range(3):
        ids, labels = tiny_batch(batch=8, length=7, seed=step)
        mine = slice(8 // ranks * place, 8 // ranks * (place + 1))
        losses.append(float(parallel.step(ids[mine], targets=labels[mine])))
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses
