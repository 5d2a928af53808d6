"""Types of `transformers` that a command line names: their inputs, the mesh where none is chosen, and `lint` and
`verify`."""

from __future__ import annotations

import pytest
import torch

from parallelize.cli import main
from parallelize.plan.models.model_source import read_model
from parallelize.plan.plan_file import read_plan, shipped_plans
from parallelize.tools.analysis.default_mesh import default_mesh
from parallelize.tools.verification.scaled_source import scaled_source

TYPES = sorted({model_type for path in shipped_plans().values() for model_type in read_plan(path).model_types})
WITHOUT_A_MODEL = {
    "dbrx": "unbuildable-model: transformers cannot build a DbrxForCausalLM",
    "deepseek_v2": "reference-failed: deepseek_v2 fails unsharded",
    "dots1": "unbuildable-model: transformers cannot build a Dots1ForCausalLM",
    "hunyuan_v1_moe": "transformers cannot build a HunYuanMoEV1ForCausalLM",
    "nemotron": "unbuildable-model: transformers cannot build a NemotronForCausalLM",
    "lfm2_moe": "unbuildable-model: transformers cannot build a Lfm2MoeForCausalLM",
}
"""Types whose default config their own class does not run."""

REFUSED = {"falcon": "uneven-heads", "gemma4_text": "replicated-in-region"}
"""Types whose default config a plan does not serve: 71 heads, which no small mesh divides; sequence parallelism beside
inputs of layers."""

RUN = sorted({*TYPES} - {*WITHOUT_A_MODEL, *REFUSED})
SLOW = "rwkv"
"""It has widths without heads, which are not scaled down: minutes on two cores."""

UNCHECKED = ("gemma3n_text",)
"""Types whose forward does not run on tensors without values, as lint says."""


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


@pytest.mark.parametrize(
    ("model_type", "shapes"),
    [
        ("clip", {"input_ids": (6, 11), "pixel_values": (6, 3, 128, 128)}),
        ("swin", {"pixel_values": (6, 3, 96, 96), "targets": (6,)}),
        ("llava", {"input_ids": (6, 27), "pixel_values": (6, 3, 56, 56), "targets": (6, 27)}),
        ("qwen2_vl", {"input_ids": (6, 15), "pixel_values": (6, 16, 96), "image_grid_thw": (6, 3), "targets": (6, 15)}),
    ],
)
def test_images_are_among_the_inputs_of_small_models(model_type, shapes):
    source = scaled_source(read_model(model_type), 3 if model_type == "swin" else 4)
    values = source.inputs(source.build("cpu"), 6, 11)
    seen = {name: tuple(value.shape) for name, value in values.items() if isinstance(value, torch.Tensor)}
    assert {name: seen.get(name) for name in shapes} == shapes


def test_a_type_with_two_towers_is_verified_with_both():
    assert main(["verify", "clip"]) == 0


@pytest.mark.parametrize("verb", [["verify"], ["lint", "--model"]])
def test_defaults_that_transformers_cannot_build_are_refused_with_its_reason_and_a_way_out(verb, capsys):
    assert main([*verb, "dbrx"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert WITHOUT_A_MODEL["dbrx"] in said and "config.json of a published dbrx" in said


@pytest.mark.sweep
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.full if name == SLOW else ()) for name in RUN]
)
def test_types_pass_by_their_name(model_type):
    assert main(["verify", model_type]) == 0


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", WITHOUT_A_MODEL)
def test_a_type_whose_defaults_do_not_run_says_so(model_type, capsys):
    assert main(["verify", model_type]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert WITHOUT_A_MODEL[model_type] in said and f"config.json of a published {model_type}" in said


@pytest.mark.sweep
@pytest.mark.parametrize(("model_type", "slug"), REFUSED.items())
def test_a_type_whose_defaults_a_plan_does_not_serve_is_refused(model_type, slug, capsys):
    assert main(["verify", model_type]) == 2
    assert slug in capsys.readouterr().err


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", sorted({*RUN} - {*UNCHECKED}))
def test_a_model_of_a_type_passes_lint_with_its_default_dropout(model_type):
    assert main(["lint", "--model", model_type]) == 0


def test_the_plan_of_every_type_passes_lint_by_its_name():
    assert main(["lint", *TYPES]) == 0
