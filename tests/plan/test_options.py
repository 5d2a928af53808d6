"""One class of options: the same names, checks and defaults wherever options are taken."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from parallelize import (
    ModelError,
    Options,
    ParallelizeError,
    explain,
    load_plan,
    parallelize_model,
    parallelize_module,
    verify,
)
from parallelize.axes.context.forward_state import context_of
from parallelize.base.mesh import MeshSpec
from parallelize.cli.parser import build_parser
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.option_keywords import OptionKeywords
from parallelize.plan.options import NAMES, STANDARD, options_of
from parallelize.plan.plan_file import parse_plan
from parallelize.state.records import record_of
from parallelize.tools.analysis.cost.machine import load_machine
from parallelize.tools.analysis.fit import fit
from parallelize.tools.analysis.record.shapes import fake_mesh
from parallelize.tools.analysis.subject import Subject
from parallelize.tools.verification import commands, precision
from parallelize.tools.verification.configuration import Request, checked
from tests.support.models import tiny_model


def test_keywords_for_type_checkers_are_the_fields():
    assert set(OptionKeywords.__annotations__) == set(NAMES) == {field.name for field in fields(Options)}


def test_what_is_given_wins_over_the_plan_and_the_plan_over_the_package():
    plan = Options(zero=1, recompute="full", num_microbatches=4)
    options = options_of(Options(zero=2, schedule="zbv"), {"zero": 3, "recompute": None}).complete(plan)
    expected = replace(STANDARD, zero=3, schedule="zbv", recompute="full", num_microbatches=4)
    assert options == expected
    assert options.microbatches(MeshSpec(pp=4)) == 4 and STANDARD.microbatches(MeshSpec(pp=4)) == 8


def test_dtypes_are_names_or_torch_dtypes():
    assert Options(dtype=torch.bfloat16) == Options(dtype="bfloat16")
    assert Options(recompute_save="matmul").recompute_save == ("matmul",)


@pytest.mark.parametrize(
    ("wrong", "slug"),
    [
        ({"zero": 4}, "bad-zero-stage"),
        ({"zero": True}, "bad-zero-stage"),
        ({"overlap": "fast"}, "bad-option"),
        ({"recompute": "some"}, "bad-option"),
        ({"dtype": "float12"}, "bad-option"),
        ({"ulysses": 0}, "bad-option"),
        ({"num_microbatches": 2.0}, "bad-option"),
        ({"defer": "no"}, "bad-option"),
        ({"schedule": 1}, "bad-option"),
        ({"sequence_paralel": True}, "unknown-option"),
    ],
)
def test_every_mistake_has_one_name_wherever_it_is_made(wrong, slug):
    calls = [
        lambda: options_of(None, wrong),
        lambda: explain("gpt2", None, "tp=2", **wrong),
        lambda: verify("gpt2", None, "tp=2", **wrong),
        lambda: parallelize_model(tiny_model("gpt2", torch.float32), mesh, **wrong),
    ]
    with fake_mesh(MeshSpec(tp=2)) as mesh:
        for call in calls:
            with pytest.raises(ModelError) as caught:
                call()
            assert caught.value.slugs == (slug,)


def test_options_of_another_type_are_refused():
    with pytest.raises(ModelError, match="bad-option"):
        options_of({"zero": 1}, {})


@pytest.mark.parametrize("command", ["explain", "lint", "fit", "verify"])
def test_every_command_has_a_flag_for_every_option(command):
    (verbs,) = (action for action in build_parser()._actions if hasattr(action, "choices") and action.choices)
    flags = {flag for action in verbs.choices[command]._actions for flag in action.option_strings}
    assert {f"--{name.replace('_', '-')}" for name in NAMES} <= flags


DEFAULTS = """\
schema_version: 1
model_type: llama
defaults: {zero: 1, overlap: off, recompute: full, num_microbatches: 4, recompute_save: [matmul], dtype: bfloat16}
tensor_parallel: {a: colwise}
"""


def test_a_plan_file_may_hold_any_option():
    expected = Options(
        zero=1, overlap="off", recompute="full", num_microbatches=4, recompute_save=("matmul",), dtype="bfloat16"
    )
    assert parse_plan(DEFAULTS).options == expected


@pytest.mark.sweep
def test_defaults_of_a_plan_hold_for_explain_verify_and_training():
    defaults = Options(recompute="full", num_microbatches=4, overlap="chunked", sequence_parallel=True)
    plan = replace(load_plan("llama"), options=defaults)
    source = ModelSource("llama", lambda _: tiny_model("llama"))
    explained = explain(source, plan, "dp=1,tp=2", sequence=16).options
    assert (explained["recompute"], explained["num_microbatches"], explained["overlap"]) == ("full", 4, "chunked")
    assert explained["sequence_parallel"] and explained["batch"] == 4
    assert explain(source, plan, "dp=1,tp=2", sequence=16, recompute="off").options["recompute"] == "off"
    options = checked(Request("llama", plan, MeshSpec(tp=2))).options
    assert (options.recompute, options.num_microbatches, options.overlap) == ("full", 4, "chunked")
    assert options.sequence_parallel is None  # both modes are run
    with fake_mesh(MeshSpec(dp=1, tp=2)) as mesh:
        parallel = parallelize_model(tiny_model("llama", torch.float32), mesh, plan)
        assert parallel.pipeline.schedule.num_microbatches == 4


@pytest.mark.parametrize("model", ["cohere", "starcoder2"])
def test_models_without_a_shipped_plan_can_be_verified(model):
    """Their own plans are translated, and have no defaults."""
    assert checked(Request(model, None, MeshSpec(tp=2))).options.zero == 0


def test_what_a_prediction_leaves_out_is_refused():
    source = ModelSource("llama", lambda _: tiny_model("llama"))
    with pytest.raises(ModelError, match="bad-option: reduce_dtype"):
        explain(source, None, "dp=2", sequence=16, dtype="bfloat16", reduce_dtype="bfloat16")
    explain(source, None, "dp=2", sequence=16, dtype="bfloat16", reduce_dtype="float32")
    with pytest.raises(ModelError, match="bad-option: batch"):
        fit(Subject(source), 2, load_machine("cpu"), batch=2)


def test_verify_is_exact_whatever_dtype_a_plan_trains_in():
    plan = replace(load_plan("llama"), options=Options(dtype="bfloat16"))
    assert verify("llama", plan, "dp=1,tp=2", sequence_parallel=False, loss_parallel=False).ok


def test_defaults_hold_for_parallelize_module_too():
    plan = replace(load_plan("llama"), options=Options(ulysses=2, sequence_parallel=True))
    sizes = {}
    for ulysses in (None, 1):
        with fake_mesh(MeshSpec(cp=2, tp=2)) as mesh:
            model = parallelize_module(
                tiny_model("llama", torch.float32), mesh, plan, src_data_rank=None, ulysses=ulysses
            )
            sizes[ulysses] = context_of(model).ulysses.size
            assert record_of(model).region is not None
    assert sizes == {None: 2, 1: 1}


@pytest.mark.parametrize(
    ("line", "slug"), [("zero: 7", "bad-value"), ("zero: two", "wrong-type"), ("zeros: 1", "unknown-key")]
)
def test_mistakes_in_defaults_have_a_place(line, slug):
    text = DEFAULTS.replace("zero: 1", line)
    with pytest.raises(Exception, match=rf":3:\d+: {slug}"):
        parse_plan(text, "my.yaml")


def test_verify_offers_the_dtypes_that_it_compares_in():
    assert tuple(precision.DTYPES) == commands._DTYPES
    assert build_parser().parse_args(["explain", "llama", "--dtype", "float16"]).dtype == "float16"
    assert build_parser().parse_args(["verify", "llama", "--dtype", "bfloat16"]).dtype == "bfloat16"
    with pytest.raises(ParallelizeError, match="did you mean `bfloat16`"):
        build_parser().parse_args(["verify", "llama", "--dtype", "float16"])
