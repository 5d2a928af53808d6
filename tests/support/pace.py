"""How fast this machine is now, for tests of promises in seconds: what it takes to import what every such command needs."""

from __future__ import annotations

import subprocess
import sys
import time


def seconds_of_imports() -> float:
    """Of `torch` and a model class of `transformers`, in a process of its own."""
    began = time.perf_counter()
    command = [sys.executable, "-c", "from transformers import LlamaForCausalLM"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began
