"""Resumed runs: bit-equal on the same mesh; with the same data, dropout and streams on any other."""

from __future__ import annotations

import pytest

from tests.checkpoint.run import resume_jobs as jobs

pytestmark = pytest.mark.processes
SAME = [
    ({"dp": 2, "tp": 2}, {"zero": 1}, False),
    ({"dp": 2, "tp": 2}, {"zero": 3}, True),
    ({"pp": 2, "dp": 2}, {"zero": 2}, True),
    ({"tp": 4}, {}, False),
]


@pytest.mark.variants(every=4)
@pytest.mark.parametrize(("axes", "options", "asynchronous"), SAME)
def test_a_resumed_run_is_bit_equal_on_the_same_mesh(four_processes, tmp_path, axes, options, asynchronous):
    for wrong in four_processes.run(jobs.resume_on_same_mesh, axes, options, str(tmp_path / "run"), asynchronous):
        assert not wrong


def test_a_run_resumed_on_another_mesh_has_the_same_batches_dropout_and_streams(
    two_processes, four_processes, tmp_path
):
    root = str(tmp_path / "run")
    expected = four_processes.run(jobs.run_and_save, {"dp": 2, "tp": 2}, {"zero": 1}, root)
    for pool, axes, options in [
        (two_processes, {"pp": 2}, {}),
        (four_processes, {"pp": 2, "tp": 2}, {}),
        (four_processes, {"dp": 4}, {"zero": 3}),
    ]:
        actual = pool.run(jobs.resume_elsewhere, axes, options, root)
        for resumed, original in zip(actual[0], expected[0], strict=True):
            assert abs(resumed[0] - original[0]) < 2e-6 * original[0] and resumed[1] == original[1]
            assert resumed[4:6] == original[4:6]  # a stream that is the same on all ranks
            if "dp" in axes:  # the stream of the first data rank goes on
                assert resumed[2:4] == original[2:4]
        if "dp" in axes:  # generators: data ranks draw different numbers
            assert len({tuple(rank[0][6:8]) for rank in actual}) == 4
    losses = [number for step in expected[0][:1] for number in step[:2]]
    for rebuilt in four_processes.run(jobs.rebuilt_run, {"tp": 4}, {}, root):
        assert rebuilt[1::2] == [step[1] for step in expected[0]][: len(rebuilt) // 2]
        assert abs(rebuilt[0] - losses[0]) < 2e-6 * losses[0]


@pytest.mark.sweep
def test_float32_copies_of_bfloat16_weights_are_saved(two_processes, tmp_path):
    for wrong in two_processes.run(jobs.masters, str(tmp_path)):
        assert not wrong


def test_a_save_in_the_background(two_processes, tmp_path):
    for wrong in two_processes.run(jobs.in_the_background, str(tmp_path / "run")):
        assert not wrong


def test_every_data_rank_has_its_position(two_processes, tmp_path):
    observed = two_processes.run(jobs.positions_by_rank, str(tmp_path / "run"))
    assert observed == [[10, "data-position"], [11, "data-position"]]


def test_an_axis_of_another_name(two_processes, tmp_path):
    assert two_processes.run(jobs.axis_of_another_name, str(tmp_path / "run")) == [True, True]


def test_a_stage_without_a_groups_parameters_has_its_options(two_processes, tmp_path):
    assert two_processes.run(jobs.groups_of_stages, str(tmp_path / "run")) == [[0.1, 0.2], [0.1, 0.2]]


def test_a_save_sends_no_tensor(four_processes, tmp_path):
    for sent, written in four_processes.run(jobs.bytes_sent, str(tmp_path / "run")):
        assert 0 < sent < written / 4, (sent, written)


def test_the_content_of_a_folder(two_processes, tmp_path):
    for observed in two_processes.run(jobs.folder_rules, str(tmp_path / "run")):
        assert observed == [
            ["latest", "step-00000040", "step-00000070", "step-00000080"],
            "step-00000080",
            "already-saved",
            "folder-in-use",
            "newer-checkpoints",
            "no-checkpoint",
            (80, 80.0),
            (40, 40.0),
            ("step-00000040", 40),
            "not-shared",
            "missing-tensor",
        ]
