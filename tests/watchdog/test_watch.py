"""A watch that finds nothing changes nothing; it knows each collective by module, rule and axis."""

from __future__ import annotations

import os

import pytest
import torch

from parallelize import ModelError, Problem, watch
from parallelize.watchdog.watching import follows_from_another_rank
from tests.watchdog.watch_jobs import calls_and_places, differs_in_dtype, trains_as_without


def test_losses_are_those_without_it_and_everything_is_restored(two_processes, tmp_path):
    for losses, restored, hook_restored in two_processes.run(trains_as_without, str(tmp_path / "reports")):
        assert losses[0] == losses[1]
        assert restored and hook_restored
    assert not (tmp_path / "reports").exists()  # nothing went wrong, nothing is left


def test_collectives_are_known_by_module_rule_and_axis(two_processes, tmp_path):
    for known in two_processes.run(calls_and_places, str(tmp_path)):
        assert known["axis"] == "tp (ranks 0, 1)"
        text = "\n".join(known["recent"])
        assert "model.layers.1.mlp (gather, tp_plans/llama.yaml:18:5), backward" in text
        assert "model.embed_tokens" not in known["recent"][-1] and known["recent"][-1].endswith("the script")
        assert known["total"] > len(known["recent"])


def test_a_collective_of_two_dtypes_is_refused_on_both_ranks(two_processes, tmp_path):
    for text in two_processes.run(differs_in_dtype, str(tmp_path)):
        assert "collectives-differ" in text and "float64" in text and "float32" in text


def test_without_processes_it_does_nothing_and_one_is_open_at_a_time(tmp_path):
    with watch(folder=tmp_path / "reports") as open_watch:
        with pytest.raises(ModelError, match="watch-open"):
            watch()
        open_watch.add(torch.nn.Linear(2, 2))
        assert open_watch.watched is None and open_watch.thread is None
    watch(folder=tmp_path / "reports").close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4"), True),
        (RuntimeError("Timed out waiting 6000ms for recv operation to complete"), True),
        (torch.distributed.DistNetworkError("lost"), True),
        (ModelError(Problem("rank-lost", "a rank did not answer")), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_errors_that_only_follow_from_another_rank(error, follows):
    assert follows_from_another_rank(error) is follows
