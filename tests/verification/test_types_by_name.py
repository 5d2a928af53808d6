"""Types of `transformers` that a command line names: their inputs, the mesh where none is chosen, and `lint` and `verify`."""

from __future__ import annotations

import pytest
import torch

from parallelize.cli import main
from parallelize.models.model_source import read_model
from parallelize.plan.plan_file import read_plan, shipped_plans
from parallelize.verification.default_mesh import default_mesh

TYPES = sorted({model_type for path in shipped_plans().values() for model_type in read_plan(path).model_types})
OF_SEVERAL_INPUTS = ("bart", "mbart", "marian", "pegasus", "t5", "mt5", "umt5", "whisper", "vit")


@pytest.mark.parametrize(("model_type", "size"), [("gpt2", 4), ("whisper", 3), ("jais2", 2), ("falcon", 4)])
def test_the_mesh_where_none_is_chosen_divides_the_heads_where_one_can(model_type, size):
    assert default_mesh(read_model(model_type), None).ranks("tp") == size


@pytest.mark.parametrize(
    ("model_type", "inputs", "targets"),
    [
        ("vit", {"pixel_values": (4, 3, 224, 224)}, (4,)),
        ("t5", {"input_ids": (4, 6), "decoder_input_ids": (4, 6)}, (4, 6)),
        ("whisper", {"input_features": (4, 80, 3000), "decoder_input_ids": (4, 6)}, (4, 6)),
        ("gpt2", {"input_ids": (4, 6)}, (4, 6)),
    ],
)
def test_a_step_gets_what_the_forward_reads(model_type, inputs, targets):
    source = read_model(model_type)
    with torch.device("meta"):
        values = source.inputs(source.build("meta"), 4, 6)
    shapes = {name: tuple(value.shape) for name, value in values.items() if isinstance(value, torch.Tensor)}
    assert shapes == {**inputs, "targets": targets}


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", (*OF_SEVERAL_INPUTS, "gpt2", "bert", "jais2"))
def test_types_pass_by_their_name(model_type):
    assert main(["verify", model_type]) == 0


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", (*OF_SEVERAL_INPUTS, "gpt2", "bert"))
def test_a_model_of_a_type_passes_lint_with_its_default_dropout(model_type):
    assert main(["lint", "--model", model_type]) == 0


def test_the_plan_of_every_type_passes_lint_by_its_name():
    assert main(["lint", *TYPES]) == 0
