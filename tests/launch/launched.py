"""Runs of `parallelize run` as real processes, in a folder of their own, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0

OWN_MODEL = '''
import os
import signal

import torch
from torch import nn


class Small(nn.Module):
    """Ids to logits, without any library beside torch."""

    def __init__(self, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(256, hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 256)

    def forward(self, input_ids):
        return self.head(torch.relu(self.middle(self.embed(input_ids))))


def small(hidden=32):
    return Small(hidden)


class Fails(Small):
    """Rank 1 kills itself in a call of the forward: on a mesh of `world` ranks, and only once where there is a `marker`."""

    def __init__(self, world, call, marker):
        super().__init__()
        self.world, self.call, self.marker, self.calls = str(world), call, marker, 0

    def forward(self, input_ids):
        self.calls += 1
        here = os.environ.get("RANK") == "1" and os.environ.get("WORLD_SIZE") == self.world
        if here and self.calls == self.call and not (self.marker and os.path.exists(self.marker)):
            if self.marker:
                open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(input_ids)


def fails(world=2, call=3, marker=""):
    return Fails(world, call, marker)


class Poisoned(Small):
    """The output of `middle` on rank 1 is NaN in one call of the forward."""

    def __init__(self, call):
        super().__init__()
        self.call, self.calls = call, 0
        self.middle = Middle(self, self.middle)

    def forward(self, input_ids):
        self.calls += 1
        return super().forward(input_ids)


class Middle(nn.Module):
    def __init__(self, outer, linear):
        super().__init__()
        self.outer, self.linear = [outer], linear

    def forward(self, x):
        outer = self.outer[0]
        poisoned = os.environ.get("RANK") == "1" and outer.calls in (outer.call, outer.call + 1)
        return self.linear(x) * float("nan") if poisoned else self.linear(x)


def poisoned(call=4):
    return Poisoned(call)


class Huge(Small):
    def forward(self, input_ids):
        torch.empty(2**50, dtype=torch.uint8)
        return super().forward(input_ids)


def huge():
    return Huge()
'''  # noqa: E501

LLAMA = {
    "name": "llama",
    "set": {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
}


def write_run(folder: Path, **values: object) -> Path:
    """A run of a small model on a few numbers as text; `values` replace its keys."""
    (folder / "own_models.py").write_text(OWN_MODEL)
    (folder / "squares.txt").write_text(" ".join(str(number * number) for number in range(1500)))
    run = {
        "model": {"name": "own_models:small"},
        "data": {"text": ["squares.txt"], "sequence": 16, "global_batch": 8},
        "mesh": "dp=2",
        "device": "cpu",
        "optimizer": {"lr": 0.01, "clip": 1.0},
        "steps": 12,
        "checkpoints": {"folder": str(folder / "checkpoints"), "every": 3, "asynchronous": False},
        "metrics": {"jsonl": str(folder / "metrics.jsonl"), "predict": False, "profile_every": 0},
        "timeout_s": 30,
        "grace_s": 20,
        **values,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def start(path: Path, *arguments: str, **variables: str) -> subprocess.Popen:
    """Start `parallelize run` in the folder of the file; output goes to `output.txt` there."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(path.parent)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **variables,
    }
    with open(path.parent / "output.txt", "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "parallelize", "run", path.name, *arguments],
            cwd=path.parent,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def output_of(path: Path) -> str:
    return (path.parent / "output.txt").read_text()


@contextlib.contextmanager
def started(path: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen]:
    """`start`, and at the end no process of the folder is left, whatever happened."""
    process = start(path, *arguments, **variables)
    try:
        yield process
    finally:
        for pid in processes_of(path.parent):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(20)


def finish(process: subprocess.Popen, path: Path, wait_s: float = WAIT_S) -> int:
    """The exit status. Raises: AssertionError with the output where it takes too long."""
    try:
        return process.wait(wait_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not ended after {wait_s} s:\n{output_of(path)[-4000:]}") from None


def run(path: Path, *arguments: str, **variables: str) -> int:
    with started(path, *arguments, **variables) as process:
        return finish(process, path)


def all_losses(path: Path) -> dict[int, set[float]]:
    """Step to all losses that were logged for it, of all attempts."""
    values: dict[int, set[float]] = {}
    for line in (path.parent / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            values.setdefault(json.loads(line)["step"], set()).add(json.loads(line)["loss"])
    return values


def losses(path: Path) -> dict[int, float]:
    """Step to the loss that was logged last."""
    file = path.parent / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return {line["step"]: line["loss"] for line in lines}


def processes_of(folder: Path) -> list[int]:
    """Processes that work in a folder."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.readlink(entry / "cwd") == str(folder) and b"parallelize" in (entry / "cmdline").read_bytes():
                    pids.append(int(entry.name))
    return pids


def ranks_of(process: subprocess.Popen, folder: Path) -> list[int]:
    """Process ids of the ranks, without the launcher."""
    return sorted(pid for pid in processes_of(folder) if pid != process.pid)


def wait_until(condition, wait_s: float = WAIT_S, every_s: float = 0.02) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(every_s)
