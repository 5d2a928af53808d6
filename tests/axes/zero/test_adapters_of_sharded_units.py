"""Adapters that PEFT adds to a model whose parameters are sharded by ZeRO 3: trained in a plain loop as on one
process."""

from __future__ import annotations

import copy
import threading
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize import accumulate_gradients, build_mesh, clip_grad_norm_, parallelize_model, shard_data
from parallelize.base.errors import ModelError
from tests.axes.tensor.install.adapted_models import config, move
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

peft = pytest.importorskip("peft")

IDS, LABELS = (torch.cat(parts) for parts in zip(*(tiny_batch(67, seed=seed) for seed in range(4)), strict=True))
LOCK = threading.Lock()  # ranks are threads with one default generator


def seeded(add):
    with LOCK:
        torch.manual_seed(3)
        return add()


def loss_of(model, rows: slice) -> torch.Tensor:
    """Summed over these sequences, divided by all labels."""
    logits = model(input_ids=IDS[rows], use_cache=False).logits.flatten(0, 1)
    return F.cross_entropy(logits, LABELS[rows].flatten(), reduction="sum") / LABELS.ne(-100).sum()


def train(module, parts: list[slice], accumulating, clip) -> torch.Tensor:
    """The norms of gradients of four steps, after a forward that leaves the outermost unit gathered. parts: of each
    step's batch."""
    with torch.no_grad():
        loss_of(module, parts[0])
    model = seeded(lambda: move(peft.get_peft_model(module, config("lora"))))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    norms = []
    for _ in range(4):
        with accumulating():
            for rows in parts:
                loss_of(module, rows).backward()
        norms.append(clip(model.parameters()))
        assert not any(parameter.grad is not None for parameter in module.parameters() if not parameter.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([torch.as_tensor(norm).detach() for norm in norms])


@pytest.mark.parametrize(
    "axes",
    [{"dp": 2}, pytest.param({"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.sweep)],
    ids=lambda axes: "-".join(axes),
)
def test_a_plain_loop_with_an_optimizer_of_torch(axes):
    base = tiny_model("llama", torch.float64)
    ranks = prod(axes.values())
    models = [copy.deepcopy(base) for _ in range(ranks)]

    def body(rank):
        model = shard_data(models[rank], build_mesh("cpu", **axes), zero=3)
        rows = len(IDS) // ranks
        half = rows // 2
        parts = [slice(rows * rank, rows * rank + half), slice(rows * rank + half, rows * rank + rows)]
        norms = train(model, parts, lambda: accumulate_gradients(model), lambda _: clip_grad_norm_(model, 0.5))
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert frozen and all(isinstance(parameter, DTensor) for parameter in frozen)  # the base is sharded still
        return norms

    results = run_ranks(ranks, body)
    expected = train(base, [slice(None)], torch.enable_grad, lambda params: nn.utils.clip_grad_norm_(list(params), 0.5))
    for norms in results:
        assert (norms - expected).abs().max() < 1e-11


REFUSED = {
    "dtype": ("lora", {"dtype": torch.bfloat16}, "would compute in the dtype in which it is stored"),
    "dropout": ("dropout", {}, "masks would depend on the mesh"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_added_to_sharded_units_is_named(case):
    kind, options, text = REFUSED[case]
    base = tiny_model("llama")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", dp=2), zero=3, **options)
        seeded(lambda: peft.get_peft_model(parallel.module, config(kind)))
        with pytest.raises(ModelError, match=text) as error:
            parallel.optimizer(torch.optim.AdamW)
        return error.value.slugs

    assert set(run_ranks(2, body)) == {("added-parameter",)}


@pytest.mark.parametrize(
    ("kind", "text", "slug"),
    [
        ("dora", "reads full weights", "unplanned-adapter"),
        ("copies", "modules_to_save of LoraConfig copies full weights", "added-parameter"),
        ("tokens", "trainable_token_indices of LoraConfig copies full weights", "added-parameter"),
    ],
)
def test_what_peft_makes_of_full_weights_is_refused(kind, text, slug):
    base = tiny_model("llama")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", dp=2), zero=3)
        with LOCK, pytest.raises(ModelError, match=text) as error:
            peft.get_peft_model(parallel.module, config(kind))
        return error.value.slugs

    assert set(run_ranks(2, body)) == {(slug,)}


def test_an_adapter_of_shards_is_refused():
    """Nothing would gather it, and what `fully_shard` knows by the axis would seem to have it."""
    base = tiny_model("llama")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", dp=2), zero=3)
        seeded(lambda: peft.get_peft_model(parallel.module, config("lora")))
        layer = parallel.module.model.layers[0].self_attn.q_proj
        layer.lora_A["default"].weight = nn.Parameter(layer.base_layer.weight.detach().clone())
        with pytest.raises(ModelError, match="was copied from shards") as error:
            parallel.optimizer(torch.optim.AdamW)
        return error.value.slugs

    assert set(run_ranks(2, body)) == {("added-parameter",)}
