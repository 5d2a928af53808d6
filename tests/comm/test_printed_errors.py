"""An error that ends a rank: the caller's lines and the message, also in torchrun's last block. All lines are in the
debug log."""

from __future__ import annotations

import json
import logging
import sys
import traceback

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

from parallelize import MeshError, build_mesh, mesh_spec, parallelize_module
from parallelize.comm import uncaught_errors
from parallelize.watchdog import watching
from tests.support.refused import RULES, Block, small_mesh


@pytest.fixture
def error_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    uncaught_errors.publish_uncaught_errors.__wrapped__()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path / "error.json"


def a_mistake(**options):
    with small_mesh(dp=2) as mesh:
        parallelize_module(Block(), mesh, RULES, **options)


def uncaught(call) -> BaseException:
    """The error of a call that a script does not catch."""
    try:
        call()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return error
    raise AssertionError


def last_block(path) -> str:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    return str(ChildFailedError("first.py", {0: failure}))


def test_an_error_of_the_package_names_the_lines_of_the_caller(error_file, capsys, caplog):
    caplog.set_level(logging.DEBUG, "parallelize")
    uncaught(a_mistake)
    text = capsys.readouterr().err
    assert "parallelize_module(Block(), mesh, RULES, **options)" in text and "MeshError: no-tp-axis" in text
    assert "parallelize/training/apply_plan.py" not in text and "/torch/" not in text
    assert len(text.splitlines()) < 16, text
    assert "parallelize/training/apply_plan.py" in caplog.text
    block = last_block(error_file)
    assert all(line.removeprefix("[rank0]: ") in block for line in text.splitlines()), block  # a prefix of torch's hook


def test_other_errors_keep_their_lines(error_file, capsys):
    uncaught(lambda: mesh_spec(None))
    text = capsys.readouterr().err
    assert "parallelize/comm/meshes.py" in text and "AttributeError" in text
    assert all(line in last_block(error_file) for line in text.splitlines())


def test_what_led_to_an_error_is_shown(error_file, capsys):
    def fails():
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("outer") from error

    def wraps():
        try:
            fails()
        except RuntimeError as error:
            raise MeshError(*mistake.problems) from error

    mistake = uncaught(a_mistake)
    capsys.readouterr()
    uncaught(wraps)
    text = capsys.readouterr().err
    assert "json/decoder.py" in text and "outer" in text and "no-tp-axis" in text


def test_the_file_of_record_stays(error_file):
    uncaught(record(lambda: build_mesh("cpu")))
    assert "no-axes" in last_block(error_file) and "parallelize/comm/meshes.py" in error_file.read_text()
    assert [path.name for path in error_file.parent.iterdir()] == ["error.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("full")])
def test_without_a_place_for_it_the_error_is_printed_all_the_same(error, error_file, monkeypatch, capsys):
    if isinstance(error, OSError):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file.parent / "gone" / "error.json"))

    def fails():
        raise error

    uncaught(fails)
    assert traceback.format_exception_only(error)[-1].strip() in capsys.readouterr().err
    assert not error_file.exists()


def test_the_watch_reads_all_lines_before_they_are_left_out(monkeypatch):
    hooks = []
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(watching, "publish_uncaught_errors", lambda: hooks.append(sys.excepthook))
    watching.Watch(None, 1.0, None)._catch_uncaught()
    assert hooks == [sys.__excepthook__] and sys.excepthook is not sys.__excepthook__
