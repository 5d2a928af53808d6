"""Who is blamed, from what the ranks were doing; and the same from files, by `parallelize diagnose`."""

from __future__ import annotations

import json
import os

import pytest

from parallelize.base.errors import ParallelizeError
from parallelize.cli import main
from parallelize.watchdog.verdict import blame, call_text, crash_file, judge, read_states, write_state
from tests.support.refused import refused


def call(number, op="allreduce", module="layers.0.down", phase="forward", **fields):
    return {
        "number": number,
        "op": op,
        "shape": [2, 3],
        "dtype": "float32",
        "module": module,
        "phase": phase,
        "function": "",
        "peer": None,
        "rule": "rowwise, plan.yaml:3:1",
        "order": number,
        **fields,
    }


def group(ranks, collectives, recent, axis="tp"):
    return {"axis": axis, "ranks": ranks, "collectives": collectives, "messages": 0, "recent": recent}


def state(rank, status="waits", waiting=None, groups=None, size=2, **fields):
    base = {
        "rank": rank,
        "size": size,
        "run": "a",
        "time": 1.0 + rank,
        "waits_s": 3.0,
        "place": f"train.py:{rank} in f: x",
    }
    return {
        **base,
        "status": status,
        "waiting": waiting,
        "groups": groups or {},
        "stack": ["train.py:1 in f: x"],
        **fields,
    }


def waits(rank, key, made, ranks, collectives=None, **fields):
    count = made["number"] + 1 if collectives is None else collectives
    return state(rank, waiting={"group": key, "call": made}, groups={key: group(ranks, count, [made])}, **fields)


def test_a_rank_that_has_not_come_is_named_with_its_place_and_stack():
    states = {0: waits(0, "g", call(4), [0, 1]), 1: state(1, "runs", groups={"g": group([0, 1], 4, [call(3)])})}
    verdict = judge(states, 2, {})
    assert verdict.slug == "rank-missing" and "rank 1" in verdict.what and "train.py:1" in verdict.what
    assert "layers.0.down (rowwise, plan.yaml:3:1), forward, over tp" in str(verdict)


def test_the_end_of_a_chain_of_waiting_ranks_is_blamed():
    """Rank 0 waits for 1, which waits in another group for 2, which runs its own code."""
    states = {
        0: waits(0, "a", call(4), [0, 1], size=3),
        1: waits(1, "b", call(7), [1, 2], size=3),
        2: state(2, "runs", size=3),
    }
    states[1]["groups"]["a"] = group([0, 1], 4, [call(3)])
    assert blame(states) == ([2], False)


def test_ranks_that_wait_for_each_other_are_all_named():
    states = {0: waits(0, "a", call(4), [0, 1]), 1: waits(1, "b", call(4), [0, 1])}
    verdict = judge(states, 2, {})
    assert verdict.slug == "collectives-differ" and "ranks 0, 1" in verdict.what


def test_another_call_with_the_same_number_is_named():
    other = call(4, module="layers.1.down")
    states = {
        0: waits(0, "g", call(4), [0, 1, 2]),
        1: waits(1, "g", other, [0, 1, 2]),
        2: waits(2, "g", call(4), [0, 1, 2]),
    }
    verdict = judge(states, 3, {})
    assert verdict.slug == "collectives-differ" and "rank 1 called" in verdict.what


def test_messages_are_waited_for_by_their_peers():
    made = call(4, op="recv", peer=1, module="", function="Transport.receive")
    states = {0: waits(0, "g", made, [0, 1]), 1: state(1, "runs", groups={"g": group([0, 1], 4, [])})}
    assert blame(states) == ([1], False)
    assert call_text(made) == "recv 4 from rank 1 [2, 3] float32: Transport.receive, forward"


def test_an_error_comes_before_everything_else():
    error = {"text": "ValueError: boom\nmore", "place": "train.py:9 in f: x", "module": "layers.0", "stack": ["a", "b"]}
    states = {0: waits(0, "g", call(4), [0, 1]), 1: state(1, "failed", error=error)}
    verdict = judge(states, 3, {2: "it wrote nothing"})
    assert verdict.slug == "rank-failed" and verdict.what == "rank 1 raised ValueError: boom"
    assert ("in", "layers.0") in verdict.rows and ("at", "train.py:9 in f: x") in verdict.rows


def test_a_gone_rank_and_one_that_left():
    verdict = judge({0: waits(0, "g", call(4), [0, 1])}, 2, {1: "process 7 on node has ended without a word"})
    assert verdict.slug == "rank-gone" and "process 7" in verdict.what
    left = state(1, "left", groups={"g": group([0, 1], 4, [])}, total=9)
    assert judge({0: waits(0, "g", call(4), [0, 1]), 1: left}, 2, {}).slug == "rank-left"


def test_nobody_is_blamed_where_all_have_called_the_same():
    states = {rank: waits(rank, "g", call(4), [0, 1]) for rank in (0, 1)}
    assert judge(states, 2, {}).slug == "ranks-stand-still"


# -- files ------------------------------------------------------------------------------------------------------------


def test_diagnose_merges_the_files_of_the_newest_run(tmp_path, capsys):
    write_state(tmp_path, waits(0, "g", call(4), [0, 1], absent={}))
    write_state(tmp_path, state(1, "runs", groups={"g": group([0, 1], 4, [call(3)])}))
    write_state(tmp_path, state(2, "failed", run="older", time=0.5, size=3))
    crash_file(tmp_path, 1).write_text("Fatal Python error: Segmentation fault\n")
    assert main(["diagnose", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("rank-missing: rank 1") and "Segmentation fault" in text
    assert "allreduce 4 [2, 3] float32: layers.0.down" in text
    assert main(["diagnose", str(tmp_path), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["slug"] == "rank-missing" and set(data["states"]) == {"0", "1"} and set(data["crashes"]) == {"1"}


def test_ranks_without_a_file_are_known_by_the_others(tmp_path, capsys):
    left = state(1, "left", groups={"g": group([0, 1], 4, [])}, total=9)
    write_state(tmp_path, waits(0, "g", call(4), [0, 1], absent={}, left={"1": left}))
    assert main(["diagnose", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("rank-left")
    write_state(tmp_path, waits(0, "g", call(4), [0, 1], absent={"1": "process 7 is stopped"}))
    assert main(["diagnose", str(tmp_path)]) == 1
    assert "process 7 is stopped" in capsys.readouterr().out


def test_a_folder_without_files_and_a_file_that_is_no_report(tmp_path):
    with refused(ParallelizeError, "no-reports"):
        read_states(tmp_path)
    for content in ("[]", "{", '{"rank": 0}', "[" * 100_000):
        (tmp_path / "rank-0.json").write_text(content)
        with pytest.raises(ParallelizeError, match="bad-report"):
            read_states(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": "0"},
        {"rank": 2},
        {"size": 10**12},
        {"size": True},
        {"time": None},
        {"groups": {"g": 1}},
        {"groups": None},
        {"stack": 3},
    ],
    ids=str,
)
def test_a_report_with_a_value_of_another_kind_is_refused(tmp_path, capsys, changes):
    (tmp_path / "rank-0.json").write_text(json.dumps({**state(0, "runs"), "size": 2, **changes}))
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "bad-report: not a report of a rank: " in capsys.readouterr().err


def test_a_pipe_in_the_place_of_a_report_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rank-0.json")
    with pytest.raises(ParallelizeError, match=r"bad-report: .*no regular file"):
        read_states(tmp_path)
