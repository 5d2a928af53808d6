"""`explain` splits backward into dgrad and wgrad where the pipeline does: not where collectives overlap with
matmuls."""

from __future__ import annotations

import copy

import pytest

from parallelize import build_mesh, parallelize_model
from parallelize.axes.pipeline import step_runner
from parallelize.plan.models.model_source import source_of
from parallelize.tools.analysis.cost.setting import make_setting
from parallelize.tools.analysis.subject import Subject
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

OPTIONS = {"schedule": "zbv", "num_microbatches": 2}
SPLIT = {"overlap": "off"}, {"overlap": "chunked"}, {"overlap": "auto"}, {"recompute": "full"}


@pytest.mark.sweep
@pytest.mark.variants(every=4)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("options", SPLIT, ids=str)
def test_backward_is_split_where_explain_says(monkeypatch, tp, options):
    splits: list[object] = []
    run = step_runner.backward_inputs
    monkeypatch.setattr(step_runner, "backward_inputs", lambda *args: splits.append(args) or run(*args))
    model = tiny_model("llama", num_hidden_layers=4)

    def body(rank: int) -> None:
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", pp=2, tp=tp), **OPTIONS, **options)
        ids, labels = tiny_batch(batch=2, length=8)
        parallel.step(input_ids=ids, targets=labels)

    run_ranks(2 * tp, body)
    setting = make_setting(f"pp=2,tp={tp}", {**OPTIONS, **options, "sequence": 8, "batch": 2})
    subject = Subject(source_of(model))
    predicted = subject.rank_step(subject.complete(setting), setting.pipeline(), 0).split_trace is not None
    assert bool(splits) == predicted == ((tp == 1 and "overlap" in options) or options == {"overlap": "off"})
