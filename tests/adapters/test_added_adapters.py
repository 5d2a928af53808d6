"""Adapters that PEFT adds to a planned model: trained as on one process, in optimizers that were built before they were
sharded."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F

from parallelize import ShardedLogits, build_mesh, cross_entropy, full_state_dict, parallelize_module
from parallelize.base.errors import ModelError
from tests.axes.tensor.install.adapted_models import config, move
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

peft = pytest.importorskip("peft")
peft_layers = pytest.importorskip("peft.tuners.lora.layer")

IDS, LABELS = tiny_batch(67, seed=1)
LOCK = threading.Lock()  # ranks are threads with one default generator


def with_adapter(model, kind: str):
    with LOCK:
        torch.manual_seed(0)
        return move(peft.get_peft_model(model, config(kind)))


def train(model, kind: str, values) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses of six steps, in the middle of which a second adapter is added and trained."""
    optimizer, losses = adamw(model), []
    for step in range(6):
        logits = model(input_ids=IDS, use_cache=False).logits
        if isinstance(logits, ShardedLogits):
            loss = cross_entropy(logits, LABELS)
        else:
            loss = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and kind in ("lora", "ia3", "embedding"):
            with LOCK:
                torch.manual_seed(9)
                model.add_adapter("second", config(kind))
            model.set_adapter("second")
            optimizer = adamw(model)
    return torch.stack(losses), values(model)


def adamw(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)


def parameters_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True, "loss_parallel": True}], ids=["tensor", "both"])
@pytest.mark.parametrize("kind", ["lora", "ia3", "embedding", "copies"])
def test_training(kind, options):
    model = tiny_model("llama", torch.float64)
    copies = [copy.deepcopy(model) for _ in range(2)]
    losses, weights = train(with_adapter(model, kind), kind, parameters_of)

    def body(rank):
        planned = parallelize_module(copies[rank], build_mesh("cpu", tp=2), **options)
        return train(with_adapter(planned, kind), kind, lambda model: full_state_dict(model, every_rank=True))

    for actual, state in run_ranks(2, body):
        assert (actual - losses).abs().max() < 1e-12
        assert worst({name: state[name] for name in weights}, weights)[0] < 1e-11


def test_what_cannot_be_planned_later_is_refused():
    copies = [tiny_model("llama", torch.float64) for _ in range(2)]

    def body(rank):
        model = with_adapter(parallelize_module(copies[rank], build_mesh("cpu", tp=2), overlap="chunked"), "lora")
        with pytest.raises(ModelError, match="overlaps") as error:
            model(input_ids=IDS)
        assert error.value.slugs == ("added-parameter",)

    run_ranks(2, body)


def test_adapters_of_the_sizes_of_shards_are_refused():
    """PEFT makes them where it is imported after the plan."""
    copies = [tiny_model("llama", torch.float64) for _ in range(2)]
    planned = threading.Barrier(2)  # applying the plan of the other rank would replace the function again

    def body(rank):
        model = parallelize_module(copies[rank], build_mesh("cpu", tp=2))
        planned.wait(60)
        with LOCK:
            patched = peft_layers._get_in_out_features
            peft_layers._get_in_out_features = patched.stock
            model = peft.get_peft_model(model, config("lora"))
            peft_layers._get_in_out_features = patched
        with pytest.raises(ModelError, match="sizes") as error:
            model(input_ids=IDS)
        assert error.value.slugs == ("added-parameter",)

    run_ranks(2, body)


@pytest.mark.parametrize("call", ["dora", "pissa", "add_weighted_adapter"])
def test_what_reads_full_weights_is_refused(call):
    copies = [tiny_model("llama") for _ in range(2)]
    options = {"dora": {"use_dora": True}, "pissa": {"init_lora_weights": "pissa"}}.get(call, {})

    def body(rank):
        model = parallelize_module(copies[rank], build_mesh("cpu", tp=2))
        with LOCK, pytest.raises(ModelError, match="reads full weights") as error:
            torch.manual_seed(0)
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], **options))
            model.add_weighted_adapter(["default"], [0.5], "mixed")
        assert error.value.slugs == ("unplanned-adapter",)

    run_ranks(2, body)
