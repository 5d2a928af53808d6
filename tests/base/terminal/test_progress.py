"""Progress is one line of a terminal, or whole lines on a pipe, shown by one rank."""

from __future__ import annotations

import argparse
import io

import pytest

from parallelize.base.terminal.console import Progress, shows_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_line_that_is_cleared_after_an_error(monkeypatch):
    monkeypatch.setattr("parallelize.base.terminal.console._EVERY_S", 0)
    stream = Terminal()
    with Progress("trying", total=2, unit="configurations", stream=stream) as progress:
        progress()
        progress()
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n") and "trying 100%: 2 configurations of 2" in text
    assert text.count("\r\x1b[K") == 3  # each over the one before
    stream = Terminal()
    with pytest.raises(ValueError), Progress("trying", total=2, stream=stream) as progress:
        progress()
        raise ValueError
    assert stream.getvalue().endswith("\r\x1b[K")


def test_progress_on_a_pipe_is_whole_lines_of_long_work_alone(monkeypatch):
    short, long = io.StringIO(), io.StringIO()
    with Progress("trying", total=2, unit="configurations", stream=short) as progress:
        progress()
    assert short.getvalue() == ""
    monkeypatch.setattr("parallelize.base.terminal.console._EVERY_S_IN_LINES", 0)
    with Progress("trying", total=2, unit="configurations", stream=long) as progress:
        progress()
        progress()
    lines = long.getvalue().splitlines()
    assert "\x1b" not in long.getvalue() and len(lines) == 3
    assert lines[0].startswith("trying  50%: 1 configurations of 2")
    with pytest.raises(ValueError), Progress("trying", stream=long) as progress:
        raise ValueError
    assert long.getvalue().splitlines() == lines


def test_progress_is_for_one_rank_and_not_with_json(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert shows_progress(argparse.Namespace(json=False, quiet=False)) and shows_progress(argparse.Namespace())
    assert not shows_progress(argparse.Namespace(json=True)) and not shows_progress(argparse.Namespace(quiet=True))
    monkeypatch.setenv("RANK", "1")
    assert not shows_progress(argparse.Namespace())
