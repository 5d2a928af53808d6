"""A run that stops on a signal: all ranks at one step, saved, with a status that schedulers requeue; a second signal
ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from parallelize import Checkpointer, CheckpointError
from parallelize.base.terminal.console import REQUEUE
from parallelize.checkpoint.run import stop_signals
from parallelize.checkpoint.run import stopping as stop_agreement
from parallelize.checkpoint.run.save import expected_save_s, state_bytes
from parallelize.checkpoint.run.stopping import StopAgreement, Stopping
from tests.checkpoint.run.stopping_jobs import agreed_steps


def small():
    model = nn.Linear(4, 4)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def test_a_loop_of_three_lines_stops_and_saves(tmp_path):
    model, optimizer = small()
    with Checkpointer(tmp_path / "run", model, optimizer=optimizer) as checkpoints:
        checkpoints.stop_on_signals(grace_s=60)
        for step in range(checkpoints.resume(), 10):
            if step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
                wait_for(checkpoints._stopping.signals)
            if checkpoints.stops(step + 1):
                break
        assert step == 3 and checkpoints.exit_status == REQUEUE == 75
    with Checkpointer(tmp_path / "run", model, optimizer=optimizer) as checkpoints:
        assert checkpoints.resume() == 4 and checkpoints.exit_status == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def wait_for(signals, wait_s=5.0):
    deadline = time.monotonic() + wait_s
    while not signals.received:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.xdist_group("ranks")
def test_all_ranks_stop_at_one_step(four_processes):
    for waits in (False, True):  # short steps answer one step later, long ones at once
        steps = four_processes.run(agreed_steps, 2, 5, waits)
        assert steps == [5 if waits else 6] * 4


def test_one_process_answers_at_once():
    agreement = StopAgreement(None, 10, extras=1)
    assert not agreement.stops(False, [3.0]) and agreement.largest == [3.0]
    assert agreement.stops(True, [2.0])


SECOND = """
import os, signal, sys, threading, time
from parallelize.checkpoint.run import stop_signals
stop_signals.SAME_REQUEST_S = 0.2
signals = stop_signals.StopSignals()
print("ready", flush=True)
threading.Event().wait()  # as in a collective: no Python handler would run in the main thread
"""


@pytest.mark.processes
def test_a_second_signal_ends_a_process_that_waits_for_ever():
    with subprocess.Popen(
        [sys.executable, "-c", SECOND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)  # at once: the same request
            time.sleep(0.4)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 128 + signal.SIGTERM
            assert "SIGTERM again" in process.stderr.read()
        finally:
            process.kill()


def test_a_save_that_takes_longer_than_the_grace_period_is_warned_of(tmp_path, monkeypatch, caplog):
    model, optimizer = small()
    run = Checkpointer(tmp_path / "run", model, optimizer=optimizer).run
    assert state_bytes(run) == 3 * 20 * 4  # two states of Adam that are not made yet
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert 3 * 20 * 4 <= state_bytes(run) <= 3 * 20 * 4 + 16
    assert 0 < expected_save_s(tmp_path / "speed", run) < 10
    stopping = Stopping(None, 30.0, 10.0)
    try:
        assert stopping.compare(20.0, "measured") == "" and "about 40 s" in stopping.compare(40.0, "measured")
        assert stopping.compare(41.0, "measured") == ""  # known already
        assert "a save takes about 40 s (measured), and a signal leaves 30 s" in caplog.text
    finally:
        stopping.close()


def test_refusals(tmp_path):
    model, optimizer = small()
    with Checkpointer(tmp_path / "run", model, optimizer=optimizer) as checkpoints:
        with pytest.raises(CheckpointError, match="no-signals"):
            checkpoints.stops(1)
        raised = []

        def elsewhere():
            try:
                stop_signals.StopSignals()
            except CheckpointError as error:
                raised.append(error.slugs)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert raised == [("not-main-thread",)]
    assert stop_agreement.WAITS_ABOVE_S < 1.0
