"""What a benchmark writes: its result with the facts of the machine, as JSON under `benchmarks/results/`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def write_record(path: Path | None, result: Any) -> None:
    """Write what was measured, on which machine, when, and by which command. None: nothing is written.

    Args:
        result: any value of JSON.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    record = {"command": _command(), "day": day, "machine": machine_facts(), "result": result}
    path.write_text(json.dumps(record, indent=1) + "\n")


def read_record(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The record of one run; `result` is what its script measured.

    Raises: FileNotFoundError where it has not run.
    """
    return json.loads((folder / f"{name}.json").read_text())


def machine_facts() -> dict[str, Any]:
    """What a figure depends on, without a name of the machine or its user."""
    facts = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": _memory_gb(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _command() -> str:
    """This process's module and arguments, without the path that the result is written to; of a file elsewhere on the
    machine its name."""
    module = Path(sys.argv[0]).stem
    arguments = sys.argv[1:]
    while "--json" in arguments:
        index = arguments.index("--json")
        del arguments[index : index + 2]
    named = [Path(text).name if Path(text).is_absolute() else text for text in arguments]
    return " ".join([f"-m benchmarks.{module}", *named])
