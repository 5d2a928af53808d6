"""`verify` runs every kind of configuration, so that no wrong result passes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import Options, overlap_report, verify
from parallelize.base.mesh import MeshSpec
from parallelize.ops import collectives
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.verification.configuration import Request, build_configurations
from parallelize.tools.verification.runner import VerificationRun
from tests.tools.verification.towers import RULES, Tower, tower


class Tiny(Tower):
    """What is sharded changes the output by nearly nothing, so that its gradients are nearly zero."""

    def forward(self, x):
        return self.head(x + 1e-16 * self.down(torch.tanh(self.up(self.norm(x)))))


def test_gradients_that_are_too_small_prove_nothing():
    rules = ", ".join(f"{name}: {style}" for name, style in RULES.items())
    plan = parse_plan(f"schema_version: 1\ntensor_parallel: {{{rules}}}")
    result = verify(lambda: tower(cls=Tiny), plan, "tp=2")
    assert not result.ok and all(row.ok for row in result.rows)
    assert result.difference.slug == "gradients-too-small" and "down.weight" in result.difference.explanation
    result = verify(lambda: tower(), plan, "tp=2")
    assert result.ok and not any("too small" in text for text in result.unseen)


@pytest.mark.sweep
def test_sequences_that_tp_divides_are_run(monkeypatch):
    stock = collectives.reduce_scatter_dim

    def wrong(x, group, dim):
        out = stock(x, group, dim)
        return out * 0 if dim == 1 and x.ndim == 3 and x.shape[1] % group.size == 0 else out

    monkeypatch.setattr(collectives, "reduce_scatter_dim", wrong)
    assert not verify("llama", mesh="tp=2", sequence_parallel=True).ok
    assert not verify("llama", mesh="tp=2").ok


def test_lengths_vocabularies_masks_and_microbatches_are_all_covered():
    request = Request("llama-3-8b", mesh=MeshSpec(tp=4))
    variants = build_configurations(request)
    assert {configuration.length % 4 == 0 for configurations in variants for configuration in configurations} == {
        True,
        False,
    }
    assert {configurations[0].model.config.vocab_size % 4 == 0 for configurations in variants} == {True, False}
    masks = [
        configuration.inputs.get("attention_mask") for configurations in variants for configuration in configurations
    ]
    assert any(mask is not None and (mask == 0).any() for mask in masks) and any(mask is None for mask in masks)
    comparisons = VerificationRun(request, "cpu").comparisons
    assert {comparison.mode.microbatches for comparison in comparisons} == {1, 2}
    assert {str(comparison.mode) for comparison in comparisons} == {
        "plain",
        "sequence parallel",
        "loss parallel",
        "sequence + loss parallel",
    }
    alone = VerificationRun(
        Request("llama", mesh=MeshSpec(tp=2), options=Options(sequence_parallel=True)), "cpu"
    ).comparisons
    assert {comparison.mode.microbatches for comparison in alone} == {1, 2}
    assert {comparison.configurations[0].model.config.vocab_size % 2 for comparison in alone} == {0, 1}


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,tp=2", "pp=4,dp=2", "dp=2"])
def test_every_microbatch_has_rows(mesh):
    request = Request("llama", mesh=MeshSpec.parse(mesh))
    configuration = build_configurations(request)[0][0]
    assert configuration.rows // (request.data_ranks * request.num_microbatches) >= 2


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
    from parallelize.tools.verification import mesh_step as run

    models, stock = [], run.apply
    monkeypatch.setattr(run, "apply", lambda *args: (models.append(args[2]), stock(*args))[1])
    result = verify("llama", mesh="tp=2", overlap="auto", sequence_parallel=True)
    assert result.ok and any("overlap=auto" in text for text in result.unseen)
    assert "chunked" in str(overlap_report(models[0]))


@pytest.mark.sweep
@pytest.mark.processes
def test_the_helper_raises_without_assert(monkeypatch):
    code = (
        "import parallelize.tools.verification.verify as api\n"
        "api.verify = lambda *a, **k: type('F', (), {'ok': False})()\n"
        "try:\n    api.assert_verified(None)\nexcept AssertionError:\n    print('raised')"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60)
    assert "raised" in done.stdout


def test_small_scales_are_seen_in_float32(monkeypatch):
    stock = collectives.reduce_owned
    monkeypatch.setattr(collectives, "reduce_owned", lambda x, group: stock(x, group) * (1 + 5e-5))
    assert not verify("llama", mesh="tp=2", dtype="float32", sequence_parallel=False).ok
