"""A watch that finds nothing changes nothing; it knows each collective by module, rule and axis."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from parallelize import ModelError, Problem, watch
from parallelize.watchdog.call_log import CallLog
from parallelize.watchdog.call_patches import recorded
from parallelize.watchdog.rank_state import StandingThread, waiting_call
from parallelize.watchdog.watching import follows_from_another_rank
from tests.support.refused import small_mesh
from tests.watchdog.watch_jobs import (
    calls_and_places,
    differs_in_dtype,
    is_known_at_once,
    redistributes_alone,
    takes_the_maximum,
    trains_as_without,
    waits_at_the_gate,
)


def test_losses_are_those_without_it_and_everything_is_restored(two_processes, tmp_path):
    for losses, restored, hook_restored in two_processes.run(trains_as_without, str(tmp_path / "reports")):
        assert losses[0] == losses[1]
        assert restored and hook_restored
    assert not (tmp_path / "reports").exists()  # nothing went wrong, nothing is left


def test_a_rank_that_ends_at_once_has_opened_a_watch(two_processes, tmp_path):
    assert two_processes.run(is_known_at_once, str(tmp_path)) == [True, True]


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


def test_another_operation_of_a_reduction_is_refused_on_both_ranks(two_processes, tmp_path):
    for texts in two_processes.run(takes_the_maximum, str(tmp_path)):
        (text,) = texts
        assert "collectives-differ" in text and "allreduce max 2" in text and "allreduce 2" in text


def test_a_dtensor_that_one_rank_redistributes_alone_is_named_on_both_ranks(two_processes, tmp_path):
    for text in two_processes.run(redistributes_alone, str(tmp_path)):
        assert "collectives-differ" in text and "allgather_base 0 [3]" in text and "allreduce 0 [5]" in text


def test_time_in_a_comparison_is_time_in_one_call(two_processes, tmp_path):
    """The thread that waits asks the store, sleeps and asks again."""
    stood_s, waited_s = two_processes.run(waits_at_the_gate, str(tmp_path))[0]
    assert stood_s > 0.7 * waited_s > 0.7


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


def add_call(log, pg, op, tensor):
    """Record a collective that is not called."""
    recorded(lambda pg, *arguments: None, op, log)(pg, tensor, tensor)
    return log.groups[pg.group_name]


class _DeviceWork:
    def __init__(self):
        self.finished = False

    def is_completed(self) -> bool:
        return self.finished


def test_a_rank_waits_while_a_device_has_not_finished_its_last_collective():
    """Where the host does not wait in a collective, as with NCCL."""
    with small_mesh(tp=2) as mesh:
        log = CallLog()
        group = add_call(log, mesh.get_group(), "allreduce", torch.ones(2))
        call = group.find(0)
        group.device_work = work = _DeviceWork()
        assert waiting_call(log, StandingThread(log)) == (group, call)
        work.finished = True
        assert waiting_call(log, StandingThread(log)) is None and group.device_work is None


def test_calls_of_a_save_in_the_background_are_not_what_the_others_wait_for():
    with small_mesh(tp=2) as mesh:
        log = CallLog()
        group = add_call(log, mesh.get_group(), "allreduce", torch.ones(2))
        made = group, group.find(0)
        background = threading.Thread(target=add_call, args=(log, mesh.get_group(), "allgather", torch.ones(3)))
        background.start()
        background.join()
        assert log.last == made and log.count == 2 and log.thread == threading.get_ident()
