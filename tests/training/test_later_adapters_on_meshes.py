"""Adapters that are added, and switched, after `parallelize_model`: losses, norms, weights and files are those of one
process."""

from __future__ import annotations

import copy
import threading
from math import prod

import pytest
import torch
import torch.nn.functional as F

from parallelize import Checkpointer, build_mesh, full_state_dict, parallelize_model
from parallelize.axes.zero.buckets import to_local
from parallelize.base.errors import ModelError
from tests.axes.tensor.install.adapted_models import config, move
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

peft = pytest.importorskip("peft")

LOCK = threading.Lock()  # ranks are threads with one default generator
IDS, LABELS = (torch.cat(parts) for parts in zip(*(tiny_batch(67, seed=seed) for seed in range(4)), strict=True))
OPTIONS = dict(lr=0.01, weight_decay=0.1)
CASES = {
    "dp2-tp2-zero2": ("llama", "lora", {"dp": 2, "tp": 2}, {"zero": 2, "sequence_parallel": True}),
    "dp2-zero1": ("llama", "ia3", {"dp": 2}, {"zero": 1}),
    "dp2-zero0": ("llama", "lora", {"dp": 2}, {"zero": 0}),
    "dp2-zero2-dora": ("llama", "dora", {"dp": 2}, {"zero": 2}),
    "cp2-tp2": ("llama", "lora", {"cp": 2, "tp": 2}, {"loss_parallel": True}),
    "dp2-copies": ("llama", "copies", {"dp": 2}, {"zero": 1}),
    "dp2-zero3": ("llama", "lora", {"dp": 2}, {"zero": 3}),
    "dp2-zero3-ia3": ("qwen2", "ia3", {"dp": 2}, {"zero": 3, "num_microbatches": 2}),
    "dp2-zero3-embedding": ("llama", "embedding", {"dp": 2}, {"zero": 3, "recompute": "full"}),
    "dp2-zero3-conv1d": ("gpt2", "lora", {"dp": 2}, {"zero": 3, "defer": True, "num_microbatches": 2}),
    "dp2-tp2-zero3": ("llama", "lora", {"dp": 2, "tp": 2}, {"zero": 3, "sequence_parallel": True}),
    "pp2-dp2-zero3": ("llama", "lora", {"pp": 2, "dp": 2}, {"zero": 3, "num_microbatches": 2}),
    "pp2": ("llama", "lora", {"pp": 2}, {"num_microbatches": 2}),
    "pp2-gpipe": ("llama", "lora", {"pp": 2}, {"schedule": "gpipe", "num_microbatches": 4}),
    "pp2-interleaved": ("llama", "lora", {"pp": 2}, {"schedule": "interleaved_1f1b", "num_microbatches": 4}),
    "pp2-zero-bubble": (
        "llama",
        "lora",
        {"pp": 2, "tp": 2},
        {"schedule": "interleaved_zero_bubble", "num_microbatches": 4},
    ),
    "pp2-looped": ("llama", "lora", {"pp": 2}, {"schedule": "looped_bfs", "num_microbatches": 4}),
    "pp2-dualpipe": ("llama", "lora", {"pp": 2}, {"schedule": "dualpipe_v", "num_microbatches": 4}),
    "pp2-zbv": ("llama", "lora", {"pp": 2, "dp": 2}, {"schedule": "zbv", "zero": 2, "num_microbatches": 4}),
    "pp2-dora": ("llama", "dora", {"pp": 2}, {"num_microbatches": 2}),
    "pp2-ia3": ("llama", "ia3", {"pp": 2}, {"num_microbatches": 4}),
    "pp2-ends": ("llama", "embedding", {"pp": 2}, {"num_microbatches": 2}),
    "pp2-a-stage-without": ("llama", "some layers", {"pp": 2}, {"num_microbatches": 2}),
    "pp2-copies": ("llama", "copies", {"pp": 2}, {"num_microbatches": 2}),
    "pp2-experts": ("mixtral", "experts", {"pp": 2}, {"num_microbatches": 2}),
    "tp2-experts": ("mixtral", "experts", {"tp": 2}, {}),
    "dp2-tp2-experts": ("mixtral", "experts", {"dp": 2, "tp": 2}, {"zero": 1}),
    "pp2-tp2": ("llama", "lora", {"pp": 2, "tp": 2}, {"sequence_parallel": True, "num_microbatches": 2}),
    "pp2-tp2-recompute": ("gpt2", "lora", {"pp": 2, "tp": 2}, {"recompute": "full", "num_microbatches": 2}),
    "pp2-dp2-zero2": ("llama", "lora", {"pp": 2, "dp": 2}, {"zero": 2, "num_microbatches": 2}),
    "pp2-dp2-tp2-zero1": (
        "llama",
        "lora",
        {"pp": 2, "dp": 2, "tp": 2},
        {"zero": 1, "num_microbatches": 2},
    ),
}
SOME = {"dp2-zero1"}


def seeded(add):
    with LOCK:
        torch.manual_seed(3)
        return add()


def trained(model) -> list:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def locals_of(model) -> list[torch.Tensor]:
    return [to_local(parameter).detach() for parameter in model.parameters()]


def train(module, kind: str, step, optimizer_of, clip) -> torch.Tensor:
    """Twenty steps: of a first adapter, of a second one, and of the first again."""
    values = []
    model = seeded(lambda: move(peft.get_peft_model(module, config(kind))))
    for number in range(20):
        if number == 6:
            seeded(lambda: model.add_adapter("second", config(kind)))
            model.set_adapter("second")
        if number == 14:
            model.set_adapter("default")
        if number in (0, 6, 14):
            optimizer = optimizer_of(trained(model))
        loss = step()
        values += [loss.detach().double(), torch.as_tensor(clip(0.5)).detach().double()]
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(values)


def unsharded(model, kind: str):
    def step():
        loss = F.cross_entropy(model(input_ids=IDS, use_cache=False).logits.flatten(0, 1), LABELS.flatten())
        loss.backward()
        return loss

    def clip(most):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), most)

    values = train(model, kind, step, lambda params: torch.optim.AdamW(params, **OPTIONS), clip)
    return values, {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SOME else pytest.mark.sweep) for c in CASES])
def test_steps_of_two_adapters(case, tmp_path):
    family, kind, axes, options = CASES[case]
    layers = {} if options.get("schedule", "gpipe") == "gpipe" else {"num_hidden_layers": 4}
    base = tiny_model(family, torch.float64, **layers)
    models = [copy.deepcopy(base) for _ in range(prod(axes.values()))]

    def body(rank):
        mesh = build_mesh("cpu", **axes)
        parallel = parallelize_model(models[rank], mesh, **options)
        rows = len(IDS) // axes.get("dp", 1)
        first = rows * (mesh.get_local_rank("dp") if "dp" in axes else 0)
        part = slice(first, first + rows)
        values = train(
            parallel.module,
            kind,
            lambda: parallel.step(input_ids=IDS[part], targets=LABELS[part], use_cache=False),
            lambda params: parallel.optimizer(torch.optim.AdamW, params, **OPTIONS),
            parallel.clip_grad_norm_,
        )
        with Checkpointer(tmp_path / "run", parallel) as checkpointer:
            checkpointer.save(20)
            before = [local.clone() for local in locals_of(parallel.module)]
            with torch.no_grad():
                for parameter in trained(parallel.module):
                    parameter.zero_()
            checkpointer.resume()
        same = all(torch.equal(a, b) for a, b in zip(before, locals_of(parallel.module), strict=True))
        names = [name for name, _ in parallel.module.named_parameters()]  # of this rank's stages
        state = full_state_dict(parallel.module, every_rank=True)
        return values, {name: state[name] for name in names}, same

    results = run_ranks(len(models), body)
    values, weights = unsharded(base, kind)
    seen: set[str] = set()
    for actual, state, same in results:
        assert (actual - values).abs().max() < 1e-11 and same
        assert worst(state, {name: weights[name] for name in state})[0] < 1e-9
        seen |= {*state}
    assert seen >= {name for name, _ in base.named_parameters()}


def test_what_cannot_be_added_over_data_axes_is_named():
    base = tiny_model("llama", torch.float64)
    models = [copy.deepcopy(base) for _ in range(4)]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2, tp=2), zero=1)
        seeded(lambda: peft.get_peft_model(parallel.module, config("copies")))
        with pytest.raises(ModelError, match=r"was copied, on a mesh with data axes") as error:
            parallel.optimizer(torch.optim.AdamW)
        return error.value.slugs

    assert set(run_ranks(4, body)) == {("added-parameter",)}
