"""Derived plans shown: a layer of each kind as text and as a page, and the picture of the document."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.derivation_picture import IMAGE, draw
from parallelize import derive_plan
from parallelize.cli import main
from parallelize.tools.derivation.plan_text import layer_page, layer_text
from tests.tools.derivation import own_models as models


@pytest.fixture(scope="module")
def gpt():
    return derive_plan(models.TinyGpt(), models.ids())


def test_the_document_shows_what_is_derived_now():
    """If this fails after a change of rules or of the drawing: python -m benchmarks.derivation_picture."""
    svg = draw()
    assert IMAGE.read_text() == svg
    ElementTree.fromstring(svg)


def test_a_layer_as_text(gpt):
    assert (
        layer_text(gpt.model, gpt.plan, 2)
        == """\
transformer.h.*
  module       input              weight        output
  norm1        full on each rank                full on each rank
  norm2        full on each rank                full on each rank
  attn         full on each rank                full on each rank
  attn.c_attn  full on each rank  [96/tp, 32]   features sharded
  attn.c_proj  features sharded   [32, 32/tp]   full on each rank
  mlp          full on each rank                full on each rank
  mlp.up       full on each rank  [128/tp, 32]  features sharded
  mlp.down     features sharded   [32, 128/tp]  full on each rank"""
    )


def test_a_page_has_a_picture_for_each_mode(gpt):
    page = layer_page(gpt.model, gpt.plan, 2)
    assert page.count("<svg") == 2 and "transformer.h.*, sequence parallel" in page
    assert page.count(">reduce-scatter<") == 2 and page.count(">all-reduce<") == 2


def test_layers_of_several_kinds_are_shown():
    mixer = derive_plan(models.Mixer(), models.patches(), verified=False)
    text = layer_text(mixer.model, mixer.plan, 2)
    assert [line for line in text.splitlines() if not line.startswith(" ") and line] == ["tokens.*", "channels.*"]


def build():
    return models.Mixer()


def test_the_command_writes_plan_and_page(tmp_path, capsys):
    plan, page = tmp_path / "plan.yaml", tmp_path / "page.html"
    here, inputs = f"{__name__}:build", f"{models.__name__}:patches"
    assert main(["plans", "derive", here, "--inputs", inputs, "-o", str(plan), "--html", str(page), "--no-verify"]) == 0
    printed = capsys.readouterr()
    assert f"{plan}: derived from {here}" in printed.out and "up      full on each rank  [26/tp, 14]" in printed.err
    assert plan.read_text() == derive_plan(build(), models.patches(), verified=False).text
    assert page.read_text().startswith("<!DOCTYPE html>") and "Mixer" in page.read_text()


def test_the_command_as_json(capsys):
    assert main(["plans", "derive", f"{__name__}:build", "--inputs", f"{models.__name__}:patches", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["file"] is None and data["proof"].startswith("proven on tp=2 (plain)") and data["share"] > 0.8
    assert data["whole"] == {"enter": "a norm over it in norms.0", "head": "an output of the model"}
    assert data["plan"].startswith("# derived from one forward of Mixer")
