"""Predicted memory peaks of pipelines, deferred reductions and ZeRO 3."""

from __future__ import annotations

import pytest

from parallelize import explain
from parallelize.base.mesh import MeshSpec
from parallelize.plan.models.model_source import ModelSource
from parallelize.tools.analysis.cost.memory import memory_of
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.subject import Subject
from tests.support.models import tiny_model
from tests.tools.analysis.numbered_models import Numbered


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bert", "gemma2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_peak_of_a_pipeline_does_not_grow_with_its_microbatches(family, schedule):
    """What is in flight under 1F1B and ZB-V is bounded by the stages; each microbatch leaves its loss and little
    else."""
    source = ModelSource(family, lambda _: tiny_model(family, num_hidden_layers=4))
    subject, peaks = Subject(source), []
    for count in (16, 64):
        setting = Setting(
            MeshSpec(pp=2), batch=count, sequence=17, num_microbatches=count, schedule=schedule
        ).complete()
        peaks.append([memory_of(subject.rank_step(setting, setting.pipeline(), rank)).activations for rank in (0, 1)])
    assert all(few <= many <= few * 1.03 for few, many in zip(*peaks, strict=True)), peaks


def test_deferred_reductions_keep_full_gradients():
    highest = []
    for defer in (False, True):
        explanation = explain(Numbered, None, "dp=4", sequence=4, batch=2, num_microbatches=2, zero=2, defer=defer)
        highest.append(max(moment.peak for moment in explanation.ranks[0].memory.moments))
    assert highest[1] > highest[0]


def test_one_group_of_zero_3_is_gathered_at_the_end_of_backward():
    """Without units the whole model is gathered, beside its whole gradients and what is scattered of them."""
    explanation = explain(Numbered, None, "dp=4", sequence=4, zero=3)
    whole = 4 * sum(p.numel() for p in Numbered().parameters())
    assert explanation.peak_bytes > 3 * whole
