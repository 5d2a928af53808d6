"""What a review of `verify` found: false passes, a caller's state that changed, hangs, and tracebacks instead of problems."""

from __future__ import annotations

import functools
import json
import pathlib
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from parallelize import Verification, assert_verified, overlap_report, training, verify
from parallelize.cli import main
from parallelize.errors import HandshakeError, MeshError, ModelError, ParallelizeError
from parallelize.mesh import MeshSpec
from parallelize.model_source import read_model
from parallelize.ops import collectives
from parallelize.threads import run_ranks, still_running
from parallelize.verification.case import Request, build_cases
from parallelize.verification.scale import _fewer, scaled
from parallelize.verification.start import Run

RULES = {"norm": "replicate", "up": "colwise", "down": "rowwise", "head": "replicate"}
HERE = "tests.sim.test_found_in_review_of_verify"


class Tower(nn.Module):
    def __init__(self, width: int = 12, inner: int = 18):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.head = nn.Linear(width, 7)

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


def tower(width: int = 12, cls: type[nn.Module] = Tower, **given):
    def inputs(batch, sequence):
        return {"x": torch.randn(batch, sequence, width), "targets": torch.randint(0, 7, (batch, sequence))}

    return {"model": cls(), "inputs": inputs, **given}


def on_a_rank() -> bool:
    return threading.current_thread() is not threading.main_thread()


# -- false passes ---------------------------------------------------------------------------------------------------------


def test_sequences_that_tp_divides_are_run(monkeypatch):
    stock = collectives.reduce_scatter_dim

    def wrong(x, group, dim):
        out = stock(x, group, dim)
        return out * 0 if dim == 1 and x.ndim == 3 and x.shape[1] % group.size == 0 else out

    monkeypatch.setattr(collectives, "reduce_scatter_dim", wrong)
    assert not verify("llama", mesh="tp=2", sequence_parallel=True).ok
    assert not verify("llama", mesh="tp=2").ok


def test_lengths_vocabularies_masks_and_microbatches_are_all_met():
    request = Request("llama-3-8b", mesh=MeshSpec(tp=4))
    variants = build_cases(request)
    assert {case.length % 4 == 0 for cases in variants for case in cases} == {True, False}
    assert {cases[0].model.config.vocab_size % 4 == 0 for cases in variants} == {True, False}
    masks = [case.inputs.get("attention_mask") for cases in variants for case in cases]
    assert any(mask is not None and (mask == 0).any() for mask in masks) and any(mask is None for mask in masks)
    trials = Run(request, "cpu").trials
    assert {trial.mode.microbatches for trial in trials} == {1, 2}
    assert {str(trial.mode) for trial in trials} == {
        "plain",
        "sequence parallel",
        "loss parallel",
        "sequence + loss parallel",
    }
    alone = Run(Request("llama", mesh=MeshSpec(tp=2), sequence_parallel=True), "cpu").trials
    assert {trial.mode.microbatches for trial in alone} == {1, 2}
    assert {trial.cases[0].model.config.vocab_size % 2 for trial in alone} == {0, 1}


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,tp=2", "pp=4,dp=2", "dp=2"])
def test_every_microbatch_has_rows(mesh):
    request = Request("llama", mesh=MeshSpec.parse(mesh))
    case = build_cases(request)[0][0]
    assert case.rows // (request.data_ranks * request.num_microbatches) >= 2


def test_kv_heads_of_a_rank():
    for heads, kv, tp in ((32, 8, 2), (32, 8, 4), (64, 8, 2), (16, 16, 4), (40, 40, 8)):
        few, few_kv = _fewer(heads, kv, tp)
        assert few_kv // tp == 2 and few % tp == 0 and (few > few_kv) == (heads > kv)
    assert _fewer(32, 8, 8)[1] == 8 and _fewer(64, 8, 16)[1] == 8 and _fewer(8, 1, 4)[1] == 1


def test_every_layer_kind_and_a_third_layer():
    gemma = scaled(read_model("gemma3_text").config, tp=2)
    assert len(set(gemma.layer_types)) == 2 and gemma.num_hidden_layers == 3
    assert scaled(read_model("llama-3-8b").config, tp=8).num_hidden_layers == 3


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 18), nn.Linear(12, 18)

    def forward(self, x):
        return self.a(x), self.b(x), self.a(x).mean()


def two():
    def loss(output, targets):
        return F.cross_entropy(output[0].flatten(0, 1), targets.flatten(), reduction="sum")

    return tower(cls=Two, loss=loss)


def test_outputs_after_the_first_are_compared():
    right = verify(two, {"a": "replicate", "b": "replicate"}, "tp=2")
    assert right.ok and any("outputs without a row" in text for text in right.unseen)
    wrong = verify(two, {"a": "replicate", "b": "colwise"}, "tp=2")
    assert not wrong.ok and [row.what for row in wrong.rows if not row.ok] == ["outputs"]
    assert wrong.difference is not None


def test_overlap_auto_is_run_as_chunked(monkeypatch):
    from parallelize.verification import run

    models, stock = [], run.apply
    monkeypatch.setattr(run, "apply", lambda *given: (models.append(given[2]), stock(*given))[1])
    found = verify("llama", mesh="tp=2", overlap="auto", sequence_parallel=True)
    assert found.ok and any("overlap=auto" in text for text in found.unseen)
    assert "chunked" in str(overlap_report(models[0]))


def test_the_helper_raises_without_assert(monkeypatch):
    code = (
        "import parallelize.verification.api as api\n"
        "api.verify = lambda *a, **k: type('F', (), {'ok': False})()\n"
        "try:\n    api.assert_verified(None)\nexcept AssertionError:\n    print('raised')"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60)
    assert "raised" in done.stdout


def test_small_scales_are_seen_in_float32(monkeypatch):
    stock = collectives.reduce_owned
    monkeypatch.setattr(collectives, "reduce_owned", lambda x, group: stock(x, group) * (1 + 5e-5))
    assert not verify("llama", mesh="tp=2", dtype="float32", sequence_parallel=False).ok


# -- the caller's state, hangs --------------------------------------------------------------------------------------------


class Slow(Tower):
    def forward(self, x):
        if on_a_rank():
            time.sleep(4)
        return super().forward(x)


class Loop(Tower):
    def forward(self, x):
        while on_a_rank():
            time.sleep(0.01)
        return super().forward(x)


def test_late_ranks_leave_the_callers_group_alone(tmp_path):
    with pytest.raises(HandshakeError, match="ranks-timed-out"):
        verify(lambda: tower(cls=Slow), RULES, "dp=2", timeout_s=0.5)
    assert still_running()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        until = time.monotonic() + 20
        while still_running() and time.monotonic() < until:
            time.sleep(0.1)
        assert not still_running() and dist.is_initialized()
        assert verify(tower, RULES, "tp=2").ok and dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_one_deadline_for_all_ranks():
    began = time.monotonic()
    with pytest.raises(HandshakeError, match="ranks-timed-out"):
        verify(lambda: tower(cls=Loop), RULES, "tp=4", timeout_s=1)
    assert time.monotonic() - began < 6
    assert not still_running()
    assert verify(tower, RULES, "tp=2").ok


def test_a_rank_that_fails_ends_the_run_with_its_own_error():
    def body(rank: int) -> None:
        if rank == 1:
            raise ValueError("mine")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="mine"):
        run_ranks(3, body)
    assert run_ranks(2, lambda rank: rank) == [0, 1]


def loop():
    return tower(cls=Loop)


class Sleeper(Tower):
    def forward(self, x):
        if on_a_rank():
            time.sleep(60)
        return super().forward(x)


def sleeper():
    return {**tower(cls=Sleeper), "inputs": tower()["inputs"]}


def test_the_command_ends_cleanly_after_a_timeout(tmp_path):
    began = time.monotonic()
    command = [sys.executable, "-m", "parallelize", "verify", f"{HERE}:sleeper", "--mesh", "dp=2", "--timeout", "1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["error"][0]["slug"] == "ranks-timed-out"
    assert time.monotonic() - began < 50


class Draws(Tower):
    def forward(self, x):
        random.random()
        return super().forward(x) + 0 * torch.rand(()).to(x)


def test_the_callers_generators_stay():
    kept, other = torch.get_rng_state(), random.getstate()
    assert verify(lambda: tower(cls=Draws), RULES, "tp=2").ok
    assert torch.equal(kept, torch.get_rng_state()) and random.getstate() == other


def test_gradients_are_on_whatever_the_caller_has_turned_off():
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert verify(tower, RULES, "tp=2").ok
            assert not torch.is_grad_enabled()


# -- mistakes of what was given -------------------------------------------------------------------------------------------


def says_no():
    raise ValueError("the factory says no")


class Fails(Tower):
    def forward(self, x):
        raise RuntimeError("the forward says no")


class Random(Tower):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5)


class NotANumber(Tower):
    def forward(self, x):
        return super().forward(x) * float("nan")


def frozen():
    made = tower()
    made["model"].requires_grad_(False)
    return made


def time_first():
    made = tower()
    made["inputs"] = lambda b, n: {"x": torch.randn(n, b, 12), "targets": torch.randint(0, 7, (n, b))}
    return made


@pytest.mark.parametrize(
    ("model", "options", "slug", "said"),
    [
        (says_no, {}, "factory-failed", "the factory says no"),
        (lambda: None, {}, "bad-factory", "NoneType"),
        (lambda: tower(cls=Fails), {}, "reference-failed", "the forward says no"),
        (lambda: tower(loss=lambda output, targets: 1 / 0), {}, "reference-failed", "division by zero"),
        (lambda: {**tower(), "inputs": lambda b, n: 1 / 0}, {}, "inputs-failed", "division by zero"),
        (lambda: {**tower(), "inputs": lambda b, n: None}, {}, "inputs-failed", "NoneType"),
        (frozen, {}, "nothing-trains", "gradient"),
        (time_first, {"mesh": "dp=2"}, "bad-inputs", "rows were asked for"),
        (lambda: tower(cls=Random), {}, "not-deterministic", "other numbers each time"),
        (lambda: tower(cls=NotANumber), {}, "not-finite", "not finite"),
        ("llama", {"overrides": {"num_attention_heads": 0}, "plan": None}, "bad-config", "Error"),
        ("llama", {"overrides": {"hidden_size": "wide"}, "plan": None}, "bad-config", "hidden_size"),
        (tower, {"seed": "one"}, "bad-seed", "no seed"),
        (tower, {"timeout_s": 0}, "bad-timeout", "0"),
        (tower, {"microbatches": 0}, "bad-microbatches", "0"),
        (lambda: tower(), {"backend": "gloo"}, "not-picklable", "package.module:function"),
    ],
)
def test_mistakes_are_problems(model, options, slug, said):
    given = {"plan": RULES, "mesh": "tp=2", **options}
    with pytest.raises(ModelError) as error:
        verify(model, **given)
    assert error.value.slugs == (slug,) and said in str(error.value) and "Traceback" not in str(error.value)
    if slug == "factory-failed":
        assert f"{pathlib.Path(__file__).name}:" in str(error.value)


def test_other_ways_to_give_a_model(tmp_path):
    assert verify(functools.partial(tower, 12), RULES, "tp=2").model == "tower"
    plain = nn.Sequential()
    plain.add_module("emb", nn.Embedding(11, 8))
    plain.add_module("out", nn.Linear(8, 11))
    before = [p.detach().clone() for p in plain.parameters()]
    assert verify(plain, {"emb": "replicate", "out": "replicate"}, "tp=2").ok
    assert all(torch.equal(a, b) for a, b in zip(before, plain.parameters(), strict=True))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1}))
    assert verify(tmp_path, None, "tp=2", sequence_parallel=False).ok
    for wrong in (4, None, [1]):
        with pytest.raises(MeshError, match="bad-mesh"):
            verify(tower, RULES, wrong)


def test_torchrun_without_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeshError, match="no-torchrun"):
        verify(tower, RULES, "tp=2", backend="torchrun")


def test_a_group_that_exists_is_used_and_left(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        for _ in range(2):
            assert verify(tower, RULES, "dp=1", backend="torchrun").ok
        assert dist.is_initialized()
        with pytest.raises(MeshError, match="wrong-world-size"):
            verify(tower, RULES, "tp=2", backend="torchrun")
    finally:
        dist.destroy_process_group()


def test_only_rank_0_prints_json(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert main(["verify", "llama", "--mesh", "tp=banana", "--json"]) == 2
    said = capsys.readouterr()
    assert not said.out and "bad-mesh" in said.err


# -- errors on ranks are differences --------------------------------------------------------------------------------------


def told(found: Verification) -> str:
    assert not found.ok and found.difference is not None
    return str(found.difference)


def test_a_clip_that_fails_on_one_rank_is_a_difference(monkeypatch):
    stock = training.ParallelModel.clip_grad_norm_

    def wrong(self, *given):
        if dist.get_rank() == 1:
            raise ValueError("clipping broke")
        return stock(self, *given)

    monkeypatch.setattr(training.ParallelModel, "clip_grad_norm_", wrong)
    text = told(verify("llama", mesh="tp=2", sequence_parallel=True))
    assert "clip_grad_norm_" in text and "clipping broke" in text


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_gradient_that_is_missing_is_a_difference(monkeypatch, ranks):
    stock = training.ParallelModel.step

    def wrong(self, *args, **kwargs):
        loss = stock(self, *args, **kwargs)
        if dist.get_rank() in ranks:
            self.module.lm_head.weight.grad = None
        return loss

    monkeypatch.setattr(training.ParallelModel, "step", wrong)
    assert "lm_head" in told(verify("llama", mesh="tp=2", sequence_parallel=False))


def test_a_model_that_cannot_be_parallelised_on_one_rank_is_a_difference(monkeypatch):
    from parallelize.verification import run

    stock = run.parallelize_model

    def wrong(*args, **kwargs):
        if dist.get_rank() == 1:
            raise AttributeError("no such thing")
        return stock(*args, **kwargs)

    monkeypatch.setattr(run, "parallelize_model", wrong)
    assert "no such thing" in told(verify("llama", mesh="tp=2", sequence_parallel=False))


@pytest.mark.parametrize(("mesh", "options"), [("dp=2", {}), ("dp=2", {"zero": 2}), ("tp=2", {"microbatches": 2})])
def test_a_model_without_targets(mesh, options):
    def squares():
        made = tower(loss=lambda output, targets: (output**2).sum())
        return {**made, "inputs": lambda batch, sequence: {"x": torch.randn(batch, sequence, 12)}}

    assert_verified(squares, RULES, mesh, **options)


def test_a_loss_that_is_no_sum():
    def mean():
        return tower(loss=lambda output, targets: F.cross_entropy(output.flatten(0, 1), targets.flatten()))

    found = assert_verified(mean, RULES, "tp=2")
    assert any("several microbatches" in text for text in found.unseen)
    with pytest.raises(ModelError, match="loss-no-sum"):
        verify(mean, RULES, "dp=2")


def test_a_right_kind_is_no_error(monkeypatch):
    """Off by more than the bound, and by less than what kinds are told by."""
    stock = training.ParallelModel.step

    def wrong(self, *args, **kwargs):
        loss = stock(self, *args, **kwargs)
        for parameter in self.module.parameters():
            parameter.grad.mul_(1 + 1e-12)
        return loss

    monkeypatch.setattr(training.ParallelModel, "step", wrong)
    found = verify(tower, RULES, "dp=2")
    assert not found.ok and found.difference is not None
    assert found.difference.kind not in ("whole", "shard", "slices")


def test_all_of_these_are_of_one_family():
    assert issubclass(HandshakeError, ParallelizeError)
