"""Names, layouts, ties, dtypes and objects are after a load what they were at the save."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize import load_checkpoint, rebuild
from tests.checkpoint.small_checkpoints import linear, saved, slug_of


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path):
    module = linear()
    saved(tmp_path, torch.compile(module))
    other = linear(1)
    load_checkpoint(tmp_path, other)
    assert torch.equal(other[0].weight, module[0].weight)


@pytest.mark.parametrize("fused", [False, True])
def test_moments_have_the_memory_format_of_their_parameters(tmp_path, fused):
    def made(seed):
        torch.manual_seed(seed)
        module = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)

    def step(module, optimizer, seed):
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
        module(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made(0)
    step(model, optimizer, 1)
    saved(tmp_path, model, optimizer=optimizer)
    other, fresh = made(1)
    load_checkpoint(tmp_path, other, optimizer=fresh)
    for module, stepped in ((model, optimizer), (other, fresh)):
        step(module, stepped, 2)
    assert torch.equal(model.weight, other.weight)


def test_ties_survive_a_failed_load(tmp_path):
    def made():
        module = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        module["b"].weight = module["a"].weight
        return module

    saved(tmp_path / "good", made())
    saved(tmp_path / "bad", nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4, bias=False)}))
    with torch.device("meta"):
        module = made()
    assert slug_of(lambda: load_checkpoint(tmp_path / "bad", module)) in ("missing-tensor", "unexpected-tensor")
    assert module["b"].weight is module["a"].weight and module["a"].weight.is_meta
    load_checkpoint(tmp_path / "good", module)
    assert module["b"].weight is module["a"].weight and not module["a"].weight.is_meta


def test_buffers_of_two_modules_stay_one(tmp_path):
    def made():
        module = nn.ModuleList([nn.Module(), nn.Module()])
        shared = torch.arange(4.0)
        for inner in module:
            inner.register_buffer("table", shared)
        module.append(nn.Linear(2, 2))
        return module

    saved(tmp_path, made())
    with torch.device("meta"):
        module = made()
    load_checkpoint(tmp_path, module)
    assert module[0].table is module[1].table and torch.equal(module[0].table, torch.arange(4.0))


def test_schedulers_are_rebuilt_on_their_own_optimizers(tmp_path):
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizers = {name: torch.optim.SGD(module[name].parameters(), lr=rate) for name, rate in (("a", 0.1), ("b", 0.7))}
    schedulers = {f"of {name}": torch.optim.lr_scheduler.StepLR(optimizer, 1) for name, optimizer in optimizers.items()}
    saved(tmp_path, module, optimizer=optimizers, scheduler=schedulers)
    made = rebuild(module, tmp_path)
    assert all(made.schedulers[f"of {name}"].optimizer is made.optimizers[name] for name in "ab")
    assert [made.optimizers[name].param_groups[0]["lr"] for name in "ab"] == [0.1, 0.7]


def test_conjugated_and_negated_buffers(tmp_path):
    module = nn.Linear(1, 1)
    module.register_buffer("conjugate", torch.tensor([1 + 2j, 3 - 1j]).conj())
    module.register_buffer("negative", torch._neg_view(torch.tensor([1.0, -2.0])))
    expected = {name: buffer.clone() for name, buffer in module.named_buffers()}
    saved(tmp_path, module)
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.zero_()
    load_checkpoint(tmp_path, module)
    assert all(
        torch.equal(buffer.resolve_conj().resolve_neg(), expected[name]) for name, buffer in module.named_buffers()
    )


def test_moments_follow_the_dtype_of_their_parameter(tmp_path):
    model = linear().to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    saved(tmp_path, model, optimizer=optimizer)
    other = linear(1)
    fresh = torch.optim.Adam(other.parameters())
    load_checkpoint(tmp_path, other, optimizer=fresh)
    other(torch.ones(2, 6)).sum().backward()
    fresh.step()
    assert fresh.state[other[0].weight]["exp_avg"].dtype == torch.float32


def test_weights_that_a_graph_has_saved_are_known_to_change(tmp_path):
    saved(tmp_path, linear(0))
    module = linear(1)
    x = torch.ones(2, 6, requires_grad=True)
    out = module(x).square().sum()
    load_checkpoint(tmp_path, module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
