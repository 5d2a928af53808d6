"""Pipeline schedules: known bubbles, known memory, no deadlock, and needs that are checked before anything is built."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from parallelize.axes.pipeline import schedule_chart as gantt
from parallelize.axes.pipeline.schedule_chart import describe_schedule, draw, table
from parallelize.axes.pipeline.schedules import Action, Schedule, build_schedule, check_schedule
from parallelize.axes.pipeline.timeline import Costs, Receive, Send, Timeline, simulate, with_messages
from parallelize.base.errors import MeshError, ParallelizeError, PlanError
from parallelize.plan.stage_ranks import SCHEDULES, schedule_name

SINGLE = ["gpipe", "1f1b"]
MULTI = [name for name in SCHEDULES if name not in SINGLE]
COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16]


def every_schedule(ranks):
    """Every schedule that can be built on so many ranks."""
    for name in SCHEDULES:
        for stages in (1, 2, 3):
            for count in COUNTS:
                try:
                    yield build_schedule(name, ranks, count, stages)
                except PlanError as error:
                    assert "bad-schedule" not in error.slugs, (name, ranks, count, stages, error)


# what is run


@pytest.mark.variants(every=7)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_each_stage_runs_each_microbatch_there_and_back_on_its_rank(ranks):
    built = list(every_schedule(ranks))
    assert {schedule.name for schedule in built} == set(SCHEDULES)
    for schedule in built:
        kinds = {}
        for rank, order in enumerate(schedule.orders):
            for action in order:
                assert schedule.stage_ranks[action.stage] == rank
                kinds.setdefault((action.stage, action.microbatch), []).append(action.kind)
        assert len(kinds) == schedule.num_stages * schedule.num_microbatches
        assert {"".join(order) for order in kinds.values()} <= {"FB", "FIW"}


def test_stages_are_assigned_round_robin_or_in_a_v():
    assert build_schedule("looped_bfs", 3, 4).stage_ranks == (0, 1, 2, 0, 1, 2)
    assert build_schedule("zbv", 3, 6).stage_ranks == (0, 1, 2, 2, 1, 0)
    assert build_schedule("dualpipe_v", 2, 4).stage_ranks == (0, 1, 1, 0)
    assert build_schedule("interleaved_1f1b", 2, 4, 3).stage_ranks == (0, 1) * 3


def test_orders_written_by_hand_are_those_of_the_papers():
    gpipe, one_forward_one_backward = build_schedule("gpipe", 2, 3), build_schedule("1f1b", 2, 3)
    assert " ".join(map(str, gpipe.orders[1])) == "1F0 1F1 1F2 1B0 1B1 1B2"
    assert " ".join(map(str, one_forward_one_backward.orders[0])) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert " ".join(map(str, one_forward_one_backward.orders[1])) == "1F0 1B0 1F1 1B1 1F2 1B2"


def test_fewer_microbatches_than_ranks_will_do_for_1f1b():
    assert simulate(build_schedule("1f1b", 4, 2)).makespan == pytest.approx(3 * (4 - 1 + 2))


def test_one_rank_alone_runs_every_schedule_without_a_bubble():
    for name in SCHEDULES:
        for count in (1, 2, 5):
            schedule = build_schedule(name, 1, count)
            assert simulate(schedule).bubble_fraction == 0, name
            assert not any(isinstance(step, (Send, Receive)) for step in with_messages(schedule)[0])


# names and text


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("interleaved-1f1b", "interleaved_1f1b"),
        ("LoopedBFS", "looped_bfs"),
        ("InterleavedZeroBubble", "interleaved_zero_bubble"),
        ("ZBVZeroBubble", "zbv"),
        ("zbv_zero_bubble", "zbv"),
        ("DualPipeV", "dualpipe_v"),
        ("dualpipev", "dualpipe_v"),
    ],
)
def test_names_of_pytorch_are_understood(alias, name):
    assert schedule_name(alias) == name


def test_text_of_an_action_reads_back():
    for schedule in (build_schedule("zbv", 4, 12), build_schedule("1f1b", 2, 11)):
        for order in schedule.orders:
            assert [Action.parse(str(action)) for action in order] == list(order)
    assert Action.parse(" 12W34 ") == Action(12, "W", 34)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0x", "-1F0", "2SEND_F0"])
def test_other_text_is_no_action(text):
    with pytest.raises(PlanError) as error:
        Action.parse(text)
    assert error.value.slugs == ("bad-action",)


@pytest.mark.processes
def test_a_schedule_can_be_looked_at_without_torch():
    code = (
        "import sys; from parallelize.axes.pipeline.schedule_chart import describe_schedule\n"
        "assert 'bubbles 27.3%' in describe_schedule('1f1b', 4, 8) and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# time


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [8, 16])
def test_bubbles_of_the_classics_follow_the_formula(ranks, count):
    for name in SINGLE:
        expected = (ranks - 1) / (count + ranks - 1)
        assert simulate(build_schedule(name, ranks, count)).bubble_fraction == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stages", [2, 3])
def test_bubbles_shrink_with_the_number_of_stages_per_rank(ranks, stages):
    for count in (ranks, 2 * ranks, 4 * ranks):
        expected = (ranks - 1) / (stages * count + ranks - 1)
        for name in ("interleaved_1f1b", "looped_bfs"):
            fraction = simulate(build_schedule(name, ranks, count, stages)).bubble_fraction
            assert fraction == pytest.approx(expected), name


def test_bubbles_of_all_schedules_on_four_ranks_with_eight_microbatches():
    fractions = {name: round(simulate(build_schedule(name, 4, 8)).bubble_fraction, 3) for name in SCHEDULES}
    assert fractions == {
        "gpipe": 0.273,
        "1f1b": 0.273,
        "interleaved_1f1b": 0.158,
        "looped_bfs": 0.158,
        "interleaved_zero_bubble": 0.059,
        "zbv": 0.059,
        "dualpipe_v": 0.059,  # forward and backward of a pair one after the other; .111 if both must be ready to start
    }


def test_microbatches_in_flight():
    assert simulate(build_schedule("1f1b", 4, 8)).in_flight.stages == (4, 3, 2, 1)
    assert simulate(build_schedule("1f1b", 4, 8)).in_flight.ranks == (4, 3, 2, 1)
    assert simulate(build_schedule("gpipe", 4, 8)).in_flight.stages == (8, 8, 8, 8)
    assert simulate(build_schedule("zbv", 4, 8)).in_flight == ((8, 7, 6, 5, 4, 3, 2, 1), (8, 8, 8, 8))
    assert simulate(build_schedule("looped_bfs", 2, 3)).in_flight == ((3, 3, 3, 3), (6, 6))


def test_an_input_gradient_frees_nothing():
    order = tuple(Action.parse(text) for text in ["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"])
    assert simulate(Schedule("split", 1, 1, 2, (0,), (order,))).in_flight.stages == (2,)


def test_costs_per_stage_and_of_messages():
    schedule = build_schedule("gpipe", 2, 1)
    assert simulate(schedule, Costs(forward=[1, 5], backward=(2, 7), send=0.5)).makespan == 1 + 0.5 + 5 + 7 + 0.5 + 2
    spans = simulate(schedule, Costs(forward=[1, 5], send=0.5)).spans
    assert spans[1][0] == (Action(1, "F", 0), 1.5, 6.5)


def test_a_message_within_a_rank_costs_nothing():
    spans = simulate(build_schedule("zbv", 2, 4), Costs(send=100.0)).spans[1]
    stops = {action: stop for action, _, stop in spans}
    assert any(action == Action(2, "F", 0) and start < stops[Action(1, "F", 0)] + 100 for action, start, _ in spans)


def test_costs_of_dgrad_and_wgrad():
    costs = Costs(forward=1, backward=5, input=2)
    assert [costs.of(Action(0, kind, 0)) for kind in "FBIW"] == [1, 5, 2, 3]
    assert [Costs().of(Action(0, kind, 0)) for kind in "FBIW"] == [1, 2, 1, 1]
    assert [Costs(input=0.5, weight=[4]).of(Action(0, kind, 0)) for kind in "IW"] == [0.5, 4]


def test_a_cost_for_each_stage():
    with pytest.raises(PlanError) as error:
        simulate(build_schedule("gpipe", 3, 2), Costs(forward=[1, 1]))
    assert error.value.slugs == ("bad-costs",)


def test_a_measured_run_is_summarized_like_a_simulated_one():
    schedule = build_schedule("interleaved_zero_bubble", 4, 8)
    simulated = simulate(schedule)
    moved = [[(action, start + 1e3, stop + 1e3) for action, start, stop in reversed(rank)] for rank in simulated.spans]
    measured = Timeline.from_measured(moved)
    assert measured.makespan == pytest.approx(simulated.makespan)
    assert measured.bubbles == pytest.approx(simulated.bubbles)
    assert measured.in_flight == simulated.in_flight
    assert Timeline.from_measured([]).bubble_fraction == 0


def test_what_overlaps_counts_once_as_work():
    timeline = Timeline.from_measured(
        [[(Action(0, "F", 0), 0, 4), (Action(0, "F", 1), 1, 2), (Action(0, "B", 0), 3, 6)]]
    )
    assert timeline.bubbles == (0,)


# messages


def run_with_rendezvous(steps):
    """Run each rank's steps one by one; a send waits until its receive is the peer's next step. The steps not run."""
    position, moved = [0] * len(steps), True
    while moved:
        moved = False
        for rank, rank_steps in enumerate(steps):
            while position[rank] < len(rank_steps) and can_run(steps, position, rank):
                if isinstance(rank_steps[position[rank]], Send):
                    position[rank_steps[position[rank]].peer_rank] += 1
                position[rank] += 1
                moved = True
    return [rank_steps[start:] for rank_steps, start in zip(steps, position, strict=True)]


def can_run(steps, position, rank):
    step = steps[rank][position[rank]]
    if isinstance(step, Action):
        return True
    peer_steps = steps[step.peer_rank][position[step.peer_rank] :]
    return isinstance(step, Send) and bool(peer_steps) and peer_steps[0] == receive_of(step, rank)


def receive_of(send, rank):
    stage = send.stage + (1 if send.direction == "F" else -1)
    return Receive(stage, send.microbatch, send.direction, rank)


def run_in_order(schedule, steps):
    """Check that a rank computes only on what it has received, and keeps the schedule's order."""
    for rank, rank_steps in enumerate(steps):
        assert tuple(step for step in rank_steps if isinstance(step, Action)) == schedule.orders[rank]
        done = set()
        for step in rank_steps:
            if isinstance(step, Receive):
                done.add((step.stage, step.direction, step.microbatch))
            elif isinstance(step, Send):
                kinds = "F" if step.direction == "F" else "BI"
                assert any(Action(step.stage, kind, step.microbatch) in done for kind in kinds), step
            else:
                done.add(step)
                before = {"F": step.stage - 1, "B": step.stage + 1, "I": step.stage + 1}.get(step.kind, -1)
                if 0 <= before < schedule.num_stages and schedule.stage_ranks[before] != rank:
                    assert (step.stage, "F" if step.kind == "F" else "B", step.microbatch) in done, step


@pytest.mark.variants(every=13)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("uneven", [False, True])
def test_no_deadlock_with_sends_that_wait_for_their_receive(ranks, uneven):
    for schedule in every_schedule(ranks):
        forward = [1 + stage % 3 for stage in range(schedule.num_stages)]
        costs = Costs(forward=forward, backward=2.5, input=0.7, send=0.3) if uneven else None
        steps = with_messages(schedule, costs)
        run_in_order(schedule, steps)
        assert not any(run_with_rendezvous(steps)), schedule
        sent = sum(isinstance(step, Send) for rank_steps in steps for step in rank_steps)
        cuts = sum(a != b for a, b in zip(schedule.stage_ranks, schedule.stage_ranks[1:], strict=False))
        assert sent == 2 * cuts * schedule.num_microbatches


def test_the_check_for_deadlock_finds_one():
    steps = with_messages(build_schedule("1f1b", 2, 2))
    swapped = [i for i, step in enumerate(steps[1]) if isinstance(step, Receive)][:2]
    steps[1][swapped[0]], steps[1][swapped[1]] = steps[1][swapped[1]], steps[1][swapped[0]]
    assert any(run_with_rendezvous(steps))


def test_text_of_messages():
    steps = with_messages(build_schedule("gpipe", 2, 1))
    assert " ".join(map(str, steps[0])) == "0F0 0SEND_F0 0RECV_B0 0B0"
    assert " ".join(map(str, steps[1])) == "1RECV_F0 1F0 1B0 1SEND_B0"
    assert steps[1][0] == Receive(1, 0, "F", peer_rank=0) and steps[1][3] == Send(1, 0, "B", peer_rank=0)


# errors


@pytest.mark.parametrize(
    ("arguments", "slugs", "fix"),
    [
        (("gpip", 2, 2), ("unknown-schedule",), "`gpipe`"),
        (("nothing-like-it", 2, 2), ("unknown-schedule",), "known: 1f1b, dualpipe_v"),
        (("1f1b", 0, 2), ("bad-num-ranks",), "1 or more"),
        (("1f1b", 1.5, 2), ("bad-num-ranks",), "1 or more"),
        (("1f1b", 2, 0), ("too-few-microbatches",), "1 or more"),
        (("zbv", 2, -1), ("too-few-microbatches",), "1 or more"),
        (("dualpipe_v", 4, 7), ("too-few-microbatches",), "8 or more"),
        (("interleaved_1f1b", 4, 9), ("uneven-microbatches",), "8 or 10 microbatches, or any multiple of 4"),
        (("InterleavedZeroBubble", 2, 7), ("uneven-microbatches",), "6 or 8"),
        (("1f1b", 2, 4, 2), ("bad-stages-per-rank",), "use 1, or a schedule that takes 2: interleaved_1f1b"),
        (("zbv", 2, 4, 3), ("bad-stages-per-rank",), "use 2, or a schedule that takes 3: interleaved_1f1b"),
        (("looped_bfs", 2, 4, 1), ("bad-stages-per-rank",), "use 2 or more, or a schedule that takes 1: gpipe, 1f1b"),
        (("looped_bfs", 2, 4, 0), ("bad-stages-per-rank",), "use 2 or more"),
        (("dualpipe_v", 4, 3, 1), ("bad-stages-per-rank", "too-few-microbatches"), "8 or more"),
    ],
)
def test_needs_are_checked_before_anything_is_built(arguments, slugs, fix, monkeypatch):
    monkeypatch.setattr(
        "parallelize.base.torch_private.torch_tensors.schedule_orders", lambda *_: pytest.fail("PyTorch was asked")
    )
    with pytest.raises(ParallelizeError) as error:
        build_schedule(*arguments)
    assert error.value.slugs == slugs
    assert fix in str(error.value)
    assert isinstance(error.value, MeshError if "bad-num-ranks" in slugs else PlanError)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("name", MULTI)
def test_counts_that_are_advised_work(name):
    for count in range(1, 20):
        try:
            build_schedule(name, 4, count)
        except PlanError as error:
            for advised in re.findall(r"\d+", str(error).split("fix")[1]):
                build_schedule(name, 4, int(advised))


def test_a_torch_without_the_schedule_is_an_error(monkeypatch):
    monkeypatch.setattr("parallelize.base.torch_private.torch_tensors.schedule_orders", lambda *_: None)
    with pytest.raises(PlanError) as error:
        build_schedule("zbv", 2, 4)
    assert error.value.slugs == ("unknown-schedule",)


def schedule_of(*orders, stage_ranks=(0, 1)):
    actions = tuple(tuple(Action.parse(text) for text in order.split()) for order in orders)
    return Schedule("mine", len(orders), len(stage_ranks), 2, stage_ranks, actions)


@pytest.mark.parametrize(
    ("orders", "text"),
    [
        (("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), "stage 0  microbatch 1 has F"),
        (("0F0 0F1 0B0 0B1 0W1", "1F0 1B0 1F1 1B1"), "microbatch 1 has F B W"),
        (("0F0 0F1 0B0 0B1 0B1", "1F0 1B0 1F1 1B1"), "microbatch 1 has F B B"),
        (("0F0 0F1 0B0 0I1", "1F0 1B0 1F1 1B1"), "microbatch 1 has F I"),
        (("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"), "rank 0  1F0 belongs to rank 1"),
        (("0F0 0F1 0B0 0B1 2F0", "1F0 1B0 1F1 1B1"), "rank 0  2F0 is of no stage"),
        (("0F0 0F1 0B0 0B1 0F2", "1F0 1B0 1F1 1B1"), "0F2 is of no stage or no microbatch"),
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), "rank 0  0B0 waits for 1B0 or 1I0\n  rank 1  1F1 waits for 0F1"),
        (("0F0 0B0 0F1 0B1", "1F0 1W0 1I0 1F1 1B1"), "1W0 waits for 1I0"),
    ],
)
def test_a_bad_schedule_is_named_by_its_first_wrong_or_stuck_actions(orders, text):
    with pytest.raises(PlanError) as error:
        check_schedule(schedule_of(*orders))
    assert error.value.slugs == ("bad-schedule",)
    assert text in str(error.value)


def test_what_pytorch_answers_is_checked_too(monkeypatch):
    orders = [[(0, "F", 0), (0, "B", 0), (1, "F", 0), (1, "B", 0)]]
    monkeypatch.setattr("parallelize.base.torch_private.torch_tensors.schedule_orders", lambda *_: orders)
    with pytest.raises(PlanError) as error:
        build_schedule("looped_bfs", 1, 1)
    assert error.value.slugs == ("bad-schedule",)


def test_sizes_must_agree():
    good = schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    check_schedule(good)
    for bad in (replace(good, num_ranks=3), replace(good, stage_ranks=(0,))):
        with pytest.raises(PlanError) as error:
            check_schedule(bad)
        assert error.value.slugs == ("bad-schedule",)


def test_a_backward_may_be_split_anywhere():
    check_schedule(schedule_of("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1W0 1B1"))


# charts and descriptions


def test_example_of_the_table():
    assert doctest.testmod(gantt).failed == 0 and doctest.testmod(gantt).attempted > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_column_of_the_table_is_one_unit(name):
    schedule = build_schedule(name, 4, 12)
    lines = table(schedule).splitlines()
    width = 1 + max(len(str(action)) for order in schedule.orders for action in order)
    for line, spans in zip(lines, simulate(schedule).spans, strict=True):
        for action, start, _ in spans:
            assert line[8 + width * int(start) :].startswith(str(action)), (action, line)


def test_description_says_bubbles_and_memory():
    text = describe_schedule("1F1B", 4, 8)
    assert "1f1b: 4 ranks, 4 stages, 8 microbatches" in text and "bubbles 27.3%" in text
    assert "0F1: stage 0, forward, microbatch 1. F: forward, B: backward, .: idle" in text
    assert "I: input gradient, W: weight gradient" in describe_schedule("zbv", 2, 4)
    assert text.splitlines()[-1].split()[-4:] == ["4", "3", "2", "1"]
    assert "makespan 99" in describe_schedule("1F1B", 4, 8, costs=Costs(forward=3, backward=6))


@pytest.mark.parametrize("name", SCHEDULES)
def test_picture_has_a_box_for_each_action_within_the_frame(name, tmp_path):
    schedule = build_schedule(name, 4, 8)
    draw(simulate(schedule), tmp_path / "chart.svg", "a <b> & c", unit="ms")
    root = ElementTree.parse(tmp_path / "chart.svg").getroot()
    boxes = [element for element in root.iter() if element.get("class", "").startswith("action ")]
    named = {box[0].text.split(":")[0] for box in boxes}
    assert len(boxes) == sum(map(len, schedule.orders))
    assert named == {str(action) for order in schedule.orders for action in order}
    assert all(float(box.get("x")) + float(box.get("width")) <= float(root.get("width")) for box in boxes)
    assert len({box.get("class").removesuffix(" frame") for box in boxes}) == len(
        {(action.kind, schedule.num_ranks <= action.stage) for order in schedule.orders for action in order}
    )
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "a <b> & c" in texts and "time, ms" in texts and "bubble" in texts
    assert any(f"bubbles {simulate(schedule).bubble_fraction:.1%}" in text for text in texts)


def test_seconds_are_drawn_as_milliseconds(tmp_path):
    timeline = Timeline.from_measured([[(Action(0, "F", 0), 5.0, 5.25)]])
    draw(timeline, str(tmp_path / "chart.svg"), "one", unit="ms")
    assert "0F0: 0 to 250" in (tmp_path / "chart.svg").read_text()


def test_nothing_measured_is_still_a_picture(tmp_path):
    draw(Timeline.from_measured([[], []]), tmp_path / "chart.svg", "none")
    ElementTree.parse(tmp_path / "chart.svg")


def test_the_command_line_shows_a_schedule(tmp_path, capsys):
    from parallelize.cli import main

    assert main(["schedule", "1f1b", "--ranks", "2", "--microbatches", "4", "--svg", str(tmp_path / "a.svg")]) == 0
    assert "bubble" in capsys.readouterr().out and (tmp_path / "a.svg").exists()
    assert main(["schedule", "1f2b", "--ranks", "2", "--microbatches", "4"]) == 2
    assert "unknown-schedule" in capsys.readouterr().err
