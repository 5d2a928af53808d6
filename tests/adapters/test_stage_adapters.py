"""Adapters that PEFT adds to a model that is cut into stages: files, deletion, and what is refused by name."""

from __future__ import annotations

import copy
import threading
from math import prod

import pytest
import torch
import torch.nn.functional as F

from parallelize import build_mesh, parallelize_model, save_adapter
from parallelize.base.errors import HandshakeError, ModelError
from tests.axes.tensor.install.adapted_models import adapted_model, config, move
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

peft = pytest.importorskip("peft")

IDS, LABELS = (torch.cat(parts) for parts in zip(*(tiny_batch(67, seed=seed) for seed in range(2)), strict=True))
LOCK = threading.Lock()  # ranks are threads with one default generator
PP2 = {"pp": 2}


def seeded(add):
    with LOCK:
        torch.manual_seed(3)
        return add()


def cut(model, axes=PP2, **options):
    return parallelize_model(copy.deepcopy(model), build_mesh("cpu", **axes), num_microbatches=2, **options)


def loss_of(model) -> torch.Tensor:
    return F.cross_entropy(model(input_ids=IDS, use_cache=False).logits.flatten(0, 1), LABELS.flatten())


@pytest.mark.parametrize("kind", ["embedding", pytest.param("lora", marks=pytest.mark.sweep)])
def test_files_are_those_of_one_process_and_load_after_the_cut(kind, tmp_path):
    base = tiny_model("llama")
    stock = seeded(lambda: peft.get_peft_model(copy.deepcopy(base), config(kind)))
    stock.save_pretrained(tmp_path / "stock")
    trained = adapted_model("llama", kind)
    trained.save_pretrained(tmp_path / "trained")
    expected, wide = loss_of(trained).detach(), tiny_model("llama", torch.float64)

    def body(rank):
        parallel = cut(base)
        save_adapter(seeded(lambda: peft.get_peft_model(parallel.module, config(kind))), tmp_path / "planned")
        loaded = cut(wide)
        with LOCK:
            peft.PeftModel.from_pretrained(loaded.module, tmp_path / "trained")
        return loaded.evaluate(input_ids=IDS, targets=LABELS, use_cache=False)

    for loss in run_ranks(2, body):
        assert (loss - expected).abs() < 1e-12
    files = [tmp_path / of / "adapter_model.safetensors" for of in ("planned", "stock")]
    assert files[0].read_bytes() == files[1].read_bytes()


def train(module, step, optimizer_of) -> list[torch.Tensor]:
    """Steps of two adapters, the first of which is deleted, and then of a third one."""
    losses = []
    model = seeded(lambda: move(peft.get_peft_model(module, config("lora"))))
    for number in range(4):
        if number == 1:
            seeded(lambda: model.add_adapter("second", config("lora")))
            model.set_adapter("second")
        if number == 2:
            model.delete_adapter("default")
        if number == 3:
            seeded(lambda: move_added(model))
        optimizer = optimizer_of([parameter for parameter in model.parameters() if parameter.requires_grad])
        losses.append(step().detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def move_added(model):
    model.add_adapter("third", config("lora"))
    model.set_adapter("third")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "axes",
    [PP2, {"pp": 2, "tp": 2}, {"tp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}],
    ids=lambda axes: "-".join(axes),
)
def test_an_adapter_is_deleted(axes):
    base = tiny_model("llama", torch.float64)

    def stock_step():
        loss = loss_of(base)
        loss.backward()
        return loss

    def body(rank):
        parallel = cut(base, axes)
        rows = len(IDS) // axes.get("dp", 1)
        first = rows * (parallel.mesh.get_local_rank("dp") if "dp" in axes else 0)
        part = slice(first, first + rows)
        return train(
            parallel.module,
            lambda: parallel.step(input_ids=IDS[part], targets=LABELS[part], use_cache=False),
            lambda params: parallel.optimizer(torch.optim.AdamW, params, lr=0.01),
        )

    results = run_ranks(prod(axes.values()), body)
    expected = train(base, stock_step, lambda params: torch.optim.AdamW(params, lr=0.01))
    for losses in results:
        assert (losses - expected).abs().max() < 1e-11


def alternate(module, step, optimizer_of) -> torch.Tensor:
    """Steps of an adapter of all layers, and of one of the last layer alone, in turn."""
    model = seeded(lambda: move(peft.get_peft_model(module, config("lora"))))
    last = peft.LoraConfig(r=3, target_modules=["q_proj"], layers_to_transform=[1])
    seeded(lambda: model.add_adapter("last", last))
    losses = []
    for name in ("default", "last", "default", "last"):
        model.set_adapter(name)
        optimizer = optimizer_of([parameter for parameter in model.parameters() if parameter.requires_grad])
        losses.append(step().detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


@pytest.mark.sweep
def test_adapters_of_other_stages_are_switched():
    """The first stage has nothing that trains with one of them, and sends activations without a gradient."""
    base = tiny_model("llama", torch.float64)

    def stock_step():
        loss = loss_of(base)
        loss.backward()
        return loss

    def body(rank):
        parallel = cut(base)
        return alternate(
            parallel.module,
            lambda: parallel.step(input_ids=IDS, targets=LABELS, use_cache=False),
            lambda params: parallel.optimizer(torch.optim.AdamW, params, lr=0.01),
        )

    results = run_ranks(2, body)
    expected = alternate(base, stock_step, lambda params: torch.optim.AdamW(params, lr=0.01))
    for losses in results:
        assert (losses - expected).abs().max() < 1e-11


REFUSED = {
    "dropout": ("llama", {}, PP2, {}, lambda: config("dropout"), "masks that depend on the mesh"),
    "overlap": ("llama", {}, {"pp": 2, "tp": 2}, {"overlap": "chunked"}, lambda: config("lora"), "overlap with"),
    "copies": ("llama", {}, {"pp": 2, "tp": 2}, {}, lambda: config("copies"), "was copied, on a mesh with tp"),
    "tied": ("llama", {"tie_word_embeddings": True}, PP2, {}, lambda: config("embedding"), "which other stages have"),
    "experts": ("mixtral", {}, {"pp": 2, "dp": 2}, {"ep": 2}, lambda: config("experts"), "divided over ep"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_added_after_the_cut_is_named(case):
    family, sizes, axes, options, adapter, text = REFUSED[case]
    base = tiny_model(family, torch.float64, **sizes)

    def body(rank):
        parallel = cut(base, axes, **options)
        seeded(lambda: peft.get_peft_model(parallel.module, adapter()))
        with pytest.raises(ModelError, match=text) as error:
            parallel.optimizer(torch.optim.AdamW)
        return error.value.slugs

    assert set(run_ranks(prod(axes.values()), body)) == {("added-parameter",)}


@pytest.mark.parametrize("kind", ["pissa", "prompts"])
def test_what_reads_or_surrounds_all_stages_is_refused(kind):
    base = tiny_model("llama")

    def body(rank):
        parallel = cut(base)
        if kind == "pissa":
            adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
        else:
            adapter = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        with LOCK, pytest.raises(ModelError) as error:
            peft.get_peft_model(parallel.module, adapter)
        return error.value.slugs

    assert set(run_ranks(2, body)) == {("unplanned-adapter",) if kind == "pissa" else ("added-parameter",)}


def test_stages_with_other_adapters_are_named():
    base = tiny_model("llama")

    def body(rank):
        parallel = cut(base)
        adapter = peft.LoraConfig(r=2 + rank, target_modules=["q_proj"])
        seeded(lambda: peft.get_peft_model(parallel.module, adapter))
        with pytest.raises(HandshakeError, match="lora_A") as error:
            parallel.step(input_ids=IDS, targets=LABELS, use_cache=False)
        return error.value.slugs

    assert set(run_ranks(2, body)) == {("ranks-disagree",)}
