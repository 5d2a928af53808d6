"""Mistakes in the options of `explain`, `fit` and machine profiles are errors with a name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize import explain
from parallelize.base.errors import MeshError, ModelError, ParallelizeError, PlanError
from parallelize.cli import main
from parallelize.plan.models.model_source import source_of
from parallelize.tools.analysis.cost.machine import load_machine
from tests.tools.analysis.numbered_models import PLAN, Numbered


@pytest.mark.parametrize(
    ("mesh", "options", "slug"),
    [
        ("tp=2,dp=2", {"zero": 1}, "axis-order"),
        ("dp=2,dp_replicate=2", {"zero": 3}, "axis-order"),
        ("tp=2", {"overlap": "foo"}, "bad-option"),
        ("tp=2", {"transport": "foo"}, "bad-option"),
        ("tp=2", {"batch": 0}, "bad-option"),
        ("tp=2", {"sequence": 0}, "bad-option"),
        ("tp=2", {"sequence": "8"}, "bad-option"),
        ("tp=2", {"zero": "2"}, "bad-zero-stage"),
        ("tp=2", {"recompute_every": 0, "recompute": "full"}, "bad-option"),
        ("tp=2", {"wrong": 1}, "unknown-option"),
        ("", {}, "no-axes"),
        (4, {}, "bad-mesh"),
    ],
)
def test_mistakes_have_names(mesh, options, slug):
    with pytest.raises(ParallelizeError) as caught:
        explain(Numbered, None if mesh == "" else PLAN, mesh, **{"sequence": 8, **options})
    assert slug in caught.value.slugs


def test_dtypes_of_torch_are_understood():
    explanation = explain(Numbered, PLAN, "tp=2", sequence=8, dtype=torch.bfloat16)
    assert explanation.options["dtype"] == "bfloat16"


class Scalar(Numbered):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids):
        return super().forward(ids) * self.scale


def test_a_scalar_under_zero_3_is_refused_as_it_is_in_a_run():
    with pytest.raises(ModelError) as caught:
        explain(Scalar, None, "dp=2", sequence=8, zero=3)
    assert caught.value.slugs == ("scalar-parameter",)


@pytest.mark.parametrize("text", ["node_ranks: .nan", "node_ranks: .inf", "node_ranks: 0.5", "node_ranks: -8"])
def test_constants_that_are_no_numbers(tmp_path, text):
    right = (load_machine.__globals__["PROFILES"] / "cpu.yaml").read_text(encoding="utf-8")
    lines = [text if line.startswith("node_ranks") else line for line in right.splitlines()]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(PlanError) as caught:
        load_machine(path)
    assert "node_ranks" in str(caught.value)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError):
        load_machine(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "gpt2", "--gpus", "2", "--dtype", "foo"],
        ["fit", "gpt2", "--gpus", "2", "--show", "0"],
        ["fit", "gpt2", "--gpus", "2", "--global-batch", "0"],
        ["fit", "gpt2", "--gpus", "2", "--optimizer", "foo"],
        ["explain", "gpt2", "--mesh", "tp=2", "--recompute", "full", "--recompute-every", "0"],
        ["explain", "gpt2", "--mesh", "tp=2", "--microbatches", "0"],
        ["explain", "gpt2", "--mesh", ""],
    ],
)
def test_the_command_line_names_mistakes(arguments, capsys):
    assert main(arguments) == 2
    assert "fix" in capsys.readouterr().err


def test_parallelize_model_refuses_the_order_too(tmp_path):
    import torch.distributed as dist

    from parallelize import build_mesh, parallelize_model

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(MeshError) as caught:
            parallelize_model(source_of(Numbered).build("cpu"), build_mesh("cpu", tp=1, dp=1), PLAN, zero=1)
        assert caught.value.slugs == ("axis-order",)
    finally:
        dist.destroy_process_group()
