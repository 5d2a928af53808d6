"""Metrics: one method, many loggers, one wait for the device, and no logger that stops training."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
import threading
import types
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from parallelize.base.errors import ParallelizeError, ShapeError
from parallelize.state.loop.loggers import (
    ConsoleLogger,
    HubLogger,
    JSONLinesLogger,
    Loggers,
    TensorBoardLogger,
    to_numbers,
)

STEP = {"loss": 2.5, "grad_norm": 1.25, "tokens_per_s": 4452.6, "mfu": 0.4127, "memory_gib": 71.3}


class Recording:
    """A custom logger: a class with `log`."""

    def __init__(self):
        self.steps = {}

    def log(self, scalars, step):
        self.steps[step] = dict(scalars)


class Failing(Recording):
    closed = 0

    def log(self, scalars, step):
        raise OSError(28, "No space left on device")

    def close(self):
        self.closed += 1
        raise OSError(28, "No space left on device")


def lines_of(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in Path(path).read_text().splitlines()]


# numbers


def test_numbers_and_tensors_become_floats_in_their_order():
    scalars = {
        "a": 3,
        "b": torch.tensor(0.5, dtype=torch.bfloat16),
        "c": 1.5,
        "d": torch.tensor([7]),
        "e": torch.ones((), requires_grad=True) * 2,
        "tokens": torch.tensor(2**40 + 1),
    }
    logged = to_numbers(scalars)
    assert logged == {"a": 3.0, "b": 0.5, "c": 1.5, "d": 7.0, "e": 2.0, "tokens": float(2**40 + 1)}
    assert list(logged) == list(scalars) and {type(value) for value in logged.values()} == {float}


@pytest.mark.parametrize("value", [torch.zeros(2), torch.zeros(0), "2.5", None, [1.0]])
def test_what_is_no_number_is_an_error_that_names_the_tag(value):
    with pytest.raises(ShapeError) as error:
        to_numbers({"loss": value})
    assert error.value.slugs == ("not-a-scalar",) and "'loss'" in str(error.value)


@pytest.fixture
def reads(monkeypatch):
    """How often a tensor was read: `tolist` reads all in one transfer, `item` and `float` one by one."""
    counts = []
    for name in ("tolist", "item", "__float__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, real=real, name=name: counts.append(name) or real(self))
    return counts


def test_all_loggers_together_read_the_device_once(reads, tmp_path):
    writers = [Recording(), Recording(), JSONLinesLogger(tmp_path / "a.jsonl"), ConsoleLogger(file=io.StringIO())]
    with Loggers([Loggers(writers[:2]), *writers[2:]]) as logger:
        logger.log({tag: torch.tensor(value) for tag, value in STEP.items()}, 0)
    assert reads == ["tolist"]
    assert writers[0].steps[0] == writers[1].steps[0] == pytest.approx(STEP)


def test_nothing_is_read_at_steps_that_no_logger_writes(reads):
    console, plain = ConsoleLogger(every=10, file=io.StringIO()), {"loss": torch.tensor(1.0)}
    for step in range(1, 10):
        Loggers([Loggers([console])]).log(plain, step)
        console.log(plain, step)
    Loggers([Recording()], enabled=False).log(plain, 10)
    assert reads == []
    Loggers([console]).log(plain, 10)
    assert reads == ["tolist"]


def test_a_replicated_dtensor_is_read_and_a_sharded_one_refused():
    from torch.distributed.tensor import Partial, Replicate

    class Fake(torch.Tensor):
        placements = ()

        def to_local(self):
            return self.as_subclass(torch.Tensor)

    value = torch.tensor(3.0).as_subclass(Fake)
    Fake.placements = (Replicate(), Replicate())
    assert to_numbers({"loss": value}) == {"loss": 3.0}
    Fake.placements = (Replicate(), Partial())
    with pytest.raises(ShapeError, match="full_tensor"):
        to_numbers({"loss": value})


# console


def printed(*steps, **options):
    file = io.StringIO()
    logger = ConsoleLogger(file=file, **options)
    for step, scalars in steps:
        logger.log(scalars, step)
    return file.getvalue().splitlines()


def test_console_writes_one_line_in_the_usual_formats():
    assert printed((40, STEP)) == [
        "step    40  loss 2.5000  grad_norm 1.250  tokens_per_s 4,453  mfu 41.3%  memory_gib 71.30"
    ]
    assert printed((1, {"tokens": 131072.0, "temperature": 0.123456789, "bad": math.nan})) == [
        "step     1  tokens 131,072  temperature 0.12346  bad nan"
    ]
    assert printed((1, {"loss": math.inf})) == ["step     1  loss inf"]


def test_console_shows_chosen_tags_in_their_formats():
    lines = printed(
        (1, STEP), (2, {"loss": 9.0}), (3, {"mfu": 0.1}), tags=["grad_norm", "loss"], formats={"loss": ".1f"}
    )
    assert lines == ["step     1  grad_norm 1.250  loss 2.5", "step     2  grad_norm     -  loss 9.0"]


def test_console_columns_stay_aligned():
    lines = printed(
        (1, {"loss": 10.0, "lr": 1e-3}), (100000, {"loss": 9.5, "lr": 1e-3}), (2, {"loss": 1.0, "lr": 1e-3})
    )
    assert lines[1].index("lr") == lines[2].index("lr") and len(lines[1]) == len(lines[2])


def test_console_writes_every_nth_step(capsys):
    logger = ConsoleLogger(every=5)
    for step in range(11):
        logger.log(STEP, step)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["0", "5", "10"]
    with pytest.raises(ParallelizeError) as error:
        ConsoleLogger(every=0)
    assert error.value.slugs == ("bad-every",)


# JSON lines


def test_json_lines_are_valid_appended_and_on_disk_at_once(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    first = JSONLinesLogger(path)
    first.log({"loss": math.nan, "a": math.inf, "b": -math.inf, "c": torch.tensor(0.5)}, 7)
    logged = lines_of(path)[0]  # before it is closed
    assert logged.pop("time_s") > 1.7e9
    assert logged == {"step": 7, "loss": "NaN", "a": "Infinity", "b": "-Infinity", "c": 0.5}
    assert math.isnan(float(logged["loss"])) and float(logged["b"]) == -math.inf
    first.close()
    first.close()
    first.log(STEP, 8)
    with JSONLinesLogger(str(path)) as second:
        second.log(STEP, 9)
    assert [line["step"] for line in lines_of(path)] == [7, 9]


def test_an_incomplete_line_is_not_joined_to_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    with JSONLinesLogger(path) as logger:
        logger.log({"loss": 1.0}, 2)
    assert path.read_text().splitlines()[1] == '{"step": 2, "lo'
    assert json.loads(path.read_text().splitlines()[2])["loss"] == 1.0


@pytest.mark.parametrize("tag", ["step", "time_s"])
def test_tags_of_the_file_itself_are_refused(tag, tmp_path):
    logger = Loggers([JSONLinesLogger(tmp_path / "a.jsonl")])
    with pytest.raises(ParallelizeError) as error:
        logger.log({tag: 1.0}, 0)
    assert error.value.slugs == ("reserved-tag",)


# extras


def test_tensorboard_gets_each_tag(monkeypatch, tmp_path):
    written = []
    writer = types.SimpleNamespace(
        add_scalar=lambda *point: written.append(point), close=lambda: written.append("closed")
    )
    fake = types.SimpleNamespace(SummaryWriter=lambda folder: written.append(folder) or writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    with TensorBoardLogger(tmp_path) as logger:
        logger.log({"loss": torch.tensor(2.0), "mfu": 0.5}, 3)
    logger.log(STEP, 4)
    logger.close()
    assert written == [str(tmp_path), ("loss", 2.0, 3), ("mfu", 0.5, 3), "closed"]


def test_tensorboard_itself(tmp_path):
    pytest.importorskip("tensorboard")
    with TensorBoardLogger(tmp_path) as logger:
        logger.log({"loss": 2.0}, 3)
    assert list(tmp_path.glob("*tfevents*"))


@pytest.mark.parametrize(
    ("package", "build"),
    [
        ("tensorboard", lambda folder: TensorBoardLogger(folder)),
        ("huggingface_hub", lambda folder: HubLogger("me/run", folder)),
    ],
)
def test_an_absent_package_is_named(package, build, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ParallelizeError) as error:
        build(tmp_path)
    assert error.value.slugs == ("missing-extra",)
    assert f"pip install {package}" in str(error.value)


class Scheduler:
    """The part of huggingface_hub's CommitScheduler that is used."""

    made = []
    refusal = None

    def __init__(self, **names):
        if Scheduler.refusal:
            raise Scheduler.refusal
        self.names, self.events, self.lock = names, [], threading.Lock()
        self.outcome = None
        Scheduler.made.append(self)

    def trigger(self):
        self.events.append("trigger")
        self.last_future = Future()
        if self.outcome is None:
            self.last_future.set_result(None)
        else:
            self.last_future.set_exception(self.outcome)
        return self.last_future

    def stop(self):
        self.events.append("stop")


@pytest.fixture
def hub(monkeypatch):
    Scheduler.made, Scheduler.refusal = [], None
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(CommitScheduler=Scheduler))
    return Scheduler


def test_hub_uploads_a_folder_of_lines(hub, tmp_path):
    with HubLogger("me/run", tmp_path, every_minutes=2) as logger:
        logger.log({"loss": 2.0}, 3)
        assert lines_of(tmp_path / "metrics.jsonl")[0]["loss"] == 2.0
    logger.log(STEP, 4)
    logger.close()
    (scheduler,) = hub.made
    assert scheduler.events == ["trigger", "stop"]
    assert (
        scheduler.names["repo_id"] == "me/run" and scheduler.names["every"] == 2 and scheduler.names["private"] is True
    )
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 1


def test_hub_writes_no_line_while_an_upload_reads(hub, tmp_path):
    logger = HubLogger("me/run", tmp_path)
    with hub.made[0].lock:
        thread = threading.Thread(target=logger.log, args=(STEP, 0), daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and not (tmp_path / "metrics.jsonl").read_text()
    thread.join(10)
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 1


def test_a_failed_upload_warns_once_and_keeps_the_lines(hub, tmp_path, caplog):
    with HubLogger("me/run", tmp_path) as logger:
        hub.made[0].outcome = ConnectionError("no network\nAuthorization: Bearer secret")
        hub.made[0].trigger()
        for step in range(3):
            logger.log(STEP, step)
    assert [record.getMessage() for record in caplog.records] == [
        "metrics were not uploaded to me/run, but are kept on disk: ConnectionError: no network"
    ]
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 3 and hub.made[0].events[-1] == "stop"


def test_a_hub_that_refuses_is_an_error_at_the_start(hub, tmp_path):
    hub.refusal = PermissionError("401")
    with pytest.raises(ParallelizeError) as error:
        HubLogger("me/run", tmp_path)
    assert error.value.slugs == ("hub-refused",) and "hf auth login" in str(error.value)


def test_the_real_scheduler_uploads_metrics_and_nothing_else(monkeypatch, tmp_path):
    scheduler = pytest.importorskip("huggingface_hub._commit_scheduler")
    uploaded, upload_lock = {}, threading.Lock()  # as in the real API, whose uploads run on one thread

    class Api:
        def __init__(self, **_):
            pass

        def create_repo(self, repo_id, **_):
            return types.SimpleNamespace(repo_id=repo_id)

        def run_as_future(self, function):
            future = Future()
            with upload_lock:
                future.set_result(function())
            return future

        def create_commit(self, operations, **_):
            uploaded.update({each.path_in_repo: each.path_or_fileobj.read() for each in operations})

    monkeypatch.setattr(scheduler, "HfApi", Api)
    (tmp_path / "tb").mkdir()
    for name in ("secret.env", "tb/events.out.tfevents.1"):
        (tmp_path / name).write_text("kept")
    with HubLogger("me/run", tmp_path) as logger:
        logger.log({"loss": 2.0}, 3)
    assert set(uploaded) == {"logs/metrics.jsonl", "logs/tb/events.out.tfevents.1"}
    assert json.loads(uploaded["logs/metrics.jsonl"])["loss"] == 2.0


# many at once, and on one rank


def test_one_logger_that_fails_stops_neither_training_nor_the_others(caplog):
    recording, failing = Recording(), Failing()
    with caplog.at_level(logging.WARNING, "parallelize"), Loggers([failing, recording]) as logger:
        for step in range(5):
            logger.log(STEP, step)
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 1 and "Failing could not write step 0" in messages[0] and "No space left" in messages[0]
    assert set(recording.steps) == set(range(5)) and failing.closed == 1
    messages = [record.getMessage() for record in caplog.records][1:]
    assert messages[0] == "Failing lost 5 steps" and "could not be closed" in messages[1] and len(messages) == 2


def test_a_full_disk(tmp_path, caplog):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with Loggers([JSONLinesLogger("/dev/full")]) as logger:
        logger.log(STEP, 0)
        logger.log(STEP, 1)
    assert "lost 2 steps" in caplog.text and caplog.text.count("could not write") == 1


def test_an_error_in_the_values_is_raised():
    with pytest.raises(ShapeError):
        Loggers([Recording()]).log({"loss": "much"}, 0)


def test_a_rank_that_should_not_write_opens_and_imports_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    recording = Recording()
    writers = [
        ConsoleLogger(enabled=False),
        JSONLinesLogger(tmp_path / "a" / "b.jsonl", enabled=False),
        TensorBoardLogger(tmp_path / "tb", enabled=False),
        HubLogger("me/run", tmp_path / "hub", enabled=False),
        Loggers([recording], enabled=False),
    ]
    for writer in writers:
        with writer:
            writer.log(STEP, 0)
    assert not list(tmp_path.iterdir()) and not recording.steps and not capsys.readouterr().out
