"""Adapters of PEFT on every axis: losses, clipped norms and weights after AdamW steps are those of one process."""

from __future__ import annotations

import copy
from math import prod

import pytest
import torch
import torch.nn.functional as F

from parallelize import build_mesh, full_state_dict, install_dropout, parallelize_model
from tests.axes.tensor.install.adapted_models import adapted_model
from tests.support.models import FAMILIES, tiny_batch
from tests.support.parity import worst
from tests.support.threads import run_ranks

pytest.importorskip("peft")

SP = {"sequence_parallel": True}
CASES = {
    "dp2-tp2-zero3-recompute": (
        "llama",
        "lora",
        {"dp": 2, "tp": 2},
        {"zero": 3, "recompute": "full", **SP, "loss_parallel": True},
    ),
    "dp2-tp2-zero2-dropout": ("llama", "dropout", {"dp": 2, "tp": 2}, {"zero": 2, **SP}),
    "pp2-a-stage-without": ("llama", "some layers", {"pp": 2}, {}),
    "pp2-tp2": ("llama", "lora", {"pp": 2, "tp": 2}, SP),
    "pp2-tp2-dropout-recompute": ("llama", "dropout", {"pp": 2, "tp": 2}, {**SP, "recompute": "full"}),
    "cp2-tp2": ("llama", "lora", {"cp": 2, "tp": 2}, SP),
    "dp2-tp2-overlap": ("llama", "lora", {"dp": 2, "tp": 2}, {"zero": 1, "overlap": "chunked"}),
    "dp2-tp2-ep4": ("mixtral", "experts", {"dp": 2, "tp": 2}, {"zero": 2, "ep": 4, **SP}),
    "dp4-ep2": ("mixtral", "experts", {"dp": 4}, {"zero": 1, "ep": 2}),
    "dp4-ep4": ("mixtral", "experts", {"dp": 4}, {"zero": 0, "ep": 4}),
    "dp4-ep2-zero3": ("mixtral", "experts", {"dp": 4}, {"zero": 3, "ep": 2}),
    "dp4-zero3": ("llama", "dora", {"dp": 4}, {"zero": 3}),
    "dp2-tokens": ("llama", "tokens", {"dp": 2}, {"zero": 1}),
    "dp2-zero3-tokens": ("llama", "tokens", {"dp": 2}, {"zero": 3}),
    "pp2-tokens": ("llama", "tokens", {"pp": 2}, {}),
}
# bert predicts no next token
OTHERS = [family for family in FAMILIES if family not in ("llama", "mixtral", "bert")]
CASES |= {f"{family}-pp2-tp2": (family, "lora", {"pp": 2, "tp": 2}, SP) for family in OTHERS}
CASES |= {
    f"{family}-dp2-tp2-zero{zero}": (family, "lora", {"dp": 2, "tp": 2}, {"zero": zero, **SP, "recompute": "full"})
    for family, zero in zip(OTHERS, (3, 2, 1, 0) * len(OTHERS), strict=False)
}

IDS, LABELS = (torch.cat(parts) for parts in zip(*(tiny_batch(67, seed=seed) for seed in range(4)), strict=True))
STEPS = 20


def unsharded(model, drops: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if drops:
        install_dropout(model, 3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    values = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(input_ids=IDS, use_cache=False).logits.flatten(0, 1), LABELS.flatten())
        loss.backward()
        values += [loss.detach(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).detach()]
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(values), {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.sweep
@pytest.mark.variants(every=40)
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps(case):
    family, kind, axes, options = CASES[case]
    model = adapted_model(family, kind)
    models = [copy.deepcopy(model) for _ in range(prod(axes.values()))]

    def body(rank):
        mesh = build_mesh("cpu", **axes)
        parallel = parallelize_model(models[rank], mesh, dropout_seed=3, **options)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert len(stepped) == sum(p.requires_grad for p in parallel.module.parameters())  # no state of the base
        rows = len(IDS) // axes.get("dp", 1)
        first = rows * (mesh.get_local_rank("dp") if "dp" in axes else 0)
        values = []
        for _ in range(STEPS):
            part = slice(first, first + rows)
            loss = parallel.step(input_ids=IDS[part], targets=LABELS[part], use_cache=False)
            values += [loss.detach().double(), torch.as_tensor(parallel.clip_grad_norm_(0.5)).double()]
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in parallel.module.parameters() if not p.requires_grad)
        state, named = full_state_dict(parallel.module, every_rank=True), parallel.module.named_parameters()
        return torch.stack(values), {n: state[n] for n, p in named if p.requires_grad}

    results = run_ranks(len(models), body)
    values, weights = unsharded(model, kind == "dropout")
    seen: set[str] = set()
    for actual, state in results:
        assert (actual - values).abs().max() < 1e-11
        names = [name for name in weights if name in state]
        seen |= {*names}
        assert not names or worst({n: state[n] for n in names}, {n: weights[n] for n in names})[0] < 1e-9
    assert seen == weights.keys()
