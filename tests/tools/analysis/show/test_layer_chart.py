"""Pictures of a layer: what the plan says of each module, and the pictures of the documents."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch

from benchmarks.layer_pictures import IMAGES, pictures
from parallelize.base.mesh import MeshSpec
from parallelize.plan.choose import plan_of
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.resolve import resolve
from parallelize.tools.analysis.show.layer_chart import (
    FEATURES,
    FULL,
    SUMMANDS,
    TOKENS,
    draw_layer,
    draw_lines,
    layer_steps,
)
from tests.support.models import tiny_model

LAYERS = {"llama": "model.layers.0", "gpt2": "transformer.h.0"}


def resolved(family: str, sequence_parallel: bool):
    with torch.device("meta"):
        model = tiny_model(family, num_hidden_layers=1)
    options = Options(sequence_parallel=sequence_parallel)
    return resolve(plan_of(model, None), describe(model), MeshSpec([("tp", 4)]), options)


def test_the_documents_show_what_the_plan_says_now():
    """If this fails after a change of a plan or of the drawing: python -m benchmarks.layer_pictures."""
    for name, svg in pictures().items():
        assert (IMAGES / f"{name}.svg").read_text() == svg, name
        ElementTree.fromstring(svg)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", LAYERS)
def test_each_module_reads_what_the_one_before_wrote(family, sequence_parallel):
    steps = {
        s.row.fqn.removeprefix(LAYERS[family] + "."): s
        for s in layer_steps(resolved(family, sequence_parallel), LAYERS[family])
    }
    between = TOKENS if sequence_parallel else FULL
    attention, mlp = ("self_attn", "mlp") if family == "llama" else ("attn", "mlp")
    inner = {"llama": ("q_proj", "o_proj", "up_proj", "down_proj"), "gpt2": ("c_attn", "c_proj", "c_fc", "c_proj")}[
        family
    ]
    for block, first, last in ((attention, *inner[:2]), (mlp, *inner[2:])):
        assert (steps[block].reads, steps[block].writes) == (between, FULL)
        assert (steps[f"{block}.{first}"].reads, steps[f"{block}.{first}"].writes) == (FULL, FEATURES)
        assert (steps[f"{block}.{last}"].reads, steps[f"{block}.{last}"].writes) == (FEATURES, between)
    columns, rows = steps[f"{mlp}.{inner[2]}"].weight.layout.dim, steps[f"{mlp}.{inner[3]}"].weight.layout.dim
    assert {columns, rows} == {0, 1} and columns == (0 if family == "llama" else 1)
    norm = steps["input_layernorm" if family == "llama" else "ln_1"]
    assert norm.reads == norm.writes == between and norm.weight is None
    assert SUMMANDS not in {step.writes for step in steps.values()}


def test_a_picture_names_what_is_sent():
    svg = draw_layer(resolved("llama", True), "model.layers.0", "a <layer>")
    assert svg.count(">all-gather<") == svg.count(">reduce-scatter<") == 2 and "a &lt;layer&gt;" in svg
    assert draw_layer(resolved("llama", False), "model.layers.0", "").count(">all-reduce<") == 2


def test_the_lines_of_a_block_show_each_ranks_part_of_its_weights():
    svg = draw_lines(resolved("llama", True), "model.layers.0", "mlp", "lines")
    texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text")]
    modules = [text.partition(":")[0] for text in texts if text.startswith("mlp")]
    assert modules == ["mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert svg.count('class="outline"') == 3 * 4  # three weights on four ranks
    assert "input: all-gather / reduce-scatter" in texts and "output: reduce-scatter / all-gather" in texts
