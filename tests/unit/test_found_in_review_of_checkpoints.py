"""What a review of checkpoints has found: one test a finding, on one process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from parallelize import Checkpointer, Streams, load_checkpoint, load_pretrained, rebuild, save_pretrained
from parallelize.checkpoint.held import bare
from parallelize.errors import ParallelizeError


def slug_of(call) -> str:
    try:
        call()
    except ParallelizeError as error:
        return error.slugs[0]
    return ""


def linear(seed: int = 0, **options) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4, **options))


def saved(root, module, step: int = 1, **options):
    with Checkpointer(root, module, **options) as checkpoints:
        checkpoints.save(step)


def test_a_compiled_model_is_kept_under_its_own_names(tmp_path):
    module = linear()
    saved(tmp_path, torch.compile(module))
    other = linear(1)
    load_checkpoint(tmp_path, other)
    assert torch.equal(other[0].weight, module[0].weight)


def test_a_wrapper_around_a_parallel_model_is_refused():
    inner = linear()
    inner.__dict__["_parallelize_record"] = None
    assert slug_of(lambda: bare(nn.Sequential(inner))) == "wrapped-model"
    assert bare(inner) is inner


@pytest.mark.parametrize("fused", [False, True])
def test_moments_lie_as_their_parameters_do(tmp_path, fused):
    def made(seed):
        torch.manual_seed(seed)
        module = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)

    def step(module, optimizer, seed):
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
        module(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    one, optimizer = made(0)
    step(one, optimizer, 1)
    saved(tmp_path, one, optimizer=optimizer)
    other, fresh = made(1)
    load_checkpoint(tmp_path, other, optimizer=fresh)
    for module, stepped in ((one, optimizer), (other, fresh)):
        step(module, stepped, 2)
    assert torch.equal(one.weight, other.weight)


def test_what_is_not_filled_on_meta_is_an_error(tmp_path):
    saved(tmp_path, linear(bias=False))
    with torch.device("meta"):
        module = linear()
    assert slug_of(lambda: load_checkpoint(tmp_path, module, strict=False)) == "missing-tensor"
    assert all(parameter.is_meta for parameter in module.parameters())


def test_ties_outlive_a_load_that_fails(tmp_path):
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


def test_a_save_in_the_background_outlives_the_script(tmp_path):
    script = f"""
        import torch
        from torch import nn
        from parallelize import Checkpointer
        checkpoints = Checkpointer({str(tmp_path / "run")!r}, nn.Linear(2048, 4096), asynchronous=True)
        checkpoints.save(1)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    load_checkpoint(tmp_path / "run", nn.Linear(2048, 4096))


def test_a_run_does_not_save_below_what_is_there(tmp_path):
    saved(tmp_path, linear(), 100)
    with Checkpointer(tmp_path, linear(), keep_last=1) as checkpoints:
        assert slug_of(lambda: checkpoints.save(1)) == "newer-checkpoints"
        assert slug_of(lambda: checkpoints.save(10**18)) == "bad-step"
    assert load_checkpoint(tmp_path, linear()) == 100


def test_a_folder_is_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run", linear()) as checkpoints:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoints.save(1)
    assert os.listdir(tmp_path / "elsewhere") == [] and load_checkpoint(tmp_path / "run", linear()) == 1


def test_a_single_file_comes_before_an_index(tmp_path):
    save_pretrained(linear(0), tmp_path / "many", max_shard_size=64)
    save_pretrained(linear(1), tmp_path / "one")
    os.replace(tmp_path / "one" / "model.safetensors", tmp_path / "many" / "model.safetensors")
    module = linear(2)
    load_pretrained(module, tmp_path / "many")
    assert torch.equal(module[0].weight, linear(1)[0].weight)


def test_schedulers_are_rebuilt_on_their_own_optimizers(tmp_path):
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizers = {name: torch.optim.SGD(module[name].parameters(), lr=rate) for name, rate in (("a", 0.1), ("b", 0.7))}
    schedulers = {f"of {name}": torch.optim.lr_scheduler.StepLR(one, 1) for name, one in optimizers.items()}
    saved(tmp_path, module, optimizer=optimizers, scheduler=schedulers)
    made = rebuild(module, tmp_path)
    assert all(made.schedulers[f"of {name}"].optimizer is made.optimizers[name] for name in "ab")
    assert [made.optimizers[name].param_groups[0]["lr"] for name in "ab"] == [0.1, 0.7]


def test_values_behind_lazy_bits(tmp_path):
    module = nn.Linear(1, 1)
    module.register_buffer("conjugate", torch.tensor([1 + 2j, 3 - 1j]).conj())
    module.register_buffer("negative", torch._neg_view(torch.tensor([1.0, -2.0])))
    wanted = {name: buffer.clone() for name, buffer in module.named_buffers()}
    saved(tmp_path, module)
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.zero_()
    load_checkpoint(tmp_path, module)
    assert all(
        torch.equal(buffer.resolve_conj().resolve_neg(), wanted[name]) for name, buffer in module.named_buffers()
    )


def test_casts_are_of_floating_numbers(tmp_path):
    module, other = nn.Linear(1, 1), nn.Linear(1, 1)
    module.register_buffer("scale", torch.tensor([0.5]))
    other.register_buffer("scale", torch.tensor([1], dtype=torch.int8))
    saved(tmp_path, module)
    assert slug_of(lambda: load_checkpoint(tmp_path, other, cast=True)) == "narrower-dtype"


def test_moments_follow_the_dtype_of_their_parameter(tmp_path):
    one = linear().to(torch.bfloat16)
    optimizer = torch.optim.Adam(one.parameters())
    one(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    saved(tmp_path, one, optimizer=optimizer)
    other = linear(1)
    fresh = torch.optim.Adam(other.parameters())
    load_checkpoint(tmp_path, other, optimizer=fresh)
    other(torch.ones(2, 6)).sum().backward()
    fresh.step()
    assert fresh.state[other[0].weight]["exp_avg"].dtype == torch.float32


class Refusing:
    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise ValueError("no")


def test_nothing_changes_when_somebody_refuses(tmp_path):
    streams = Streams(1)
    streams.declare("s")
    saved(tmp_path, linear(0), streams=streams, user={"refusing": Refusing()})
    module = linear(1)
    before = module[0].weight.clone()
    with Checkpointer(tmp_path, module, streams=streams, user={"refusing": Refusing()}) as checkpoints:
        assert slug_of(checkpoints.resume) == "failed"
    with Checkpointer(tmp_path, module, streams=streams) as checkpoints, streams("s"):
        assert slug_of(checkpoints.resume) == "stream-open"
    assert torch.equal(module[0].weight, before)


def test_state_with_odd_names_and_dtypes_is_refused(tmp_path):
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module[0].weight][0] = torch.zeros(4, 6)
    with Checkpointer(tmp_path, module, optimizer=optimizer) as checkpoints:
        assert slug_of(lambda: checkpoints.save(1)) == "unsavable-state"
    assert slug_of(lambda: save_pretrained(module, tmp_path / "out", dtype=torch.complex64)) == "unsavable-dtype"


def test_weights_that_a_graph_has_saved_are_known_to_change(tmp_path):
    saved(tmp_path, linear(0))
    module = linear(1)
    x = torch.ones(2, 6, requires_grad=True)
    out = module(x).square().sum()
    load_checkpoint(tmp_path, module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
