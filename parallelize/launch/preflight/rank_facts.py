"""What each rank says about itself before the first collective: host, device, versions, hashes of code and configuration."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from parallelize import __version__
from parallelize.launch.config.run_config import RunConfig

MUST_AGREE = ("torch", "python", "parallelize", "code", "model code", "run", "ranks")
"""Facts that change what ranks compute or send."""
SHOULD_AGREE = ("device", "threads")


def facts_of_rank(config: RunConfig, device: str) -> dict[str, str]:
    """Facts by name, as text. device: of this rank, such as cuda:3."""
    return {
        "host": socket.gethostname(),
        "slot": device if device != "cpu" else f"cpu of rank {os.environ.get('RANK', '0')}",
        "device": _device_name(device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "parallelize": __version__,
        "code": digest_of_files(_package_files()),
        "model code": digest_of_files(_user_files(config)),
        "run": hashlib.blake2b(config.text.encode(), digest_size=8).hexdigest(),
        "ranks": os.environ.get("WORLD_SIZE", "1"),
    }


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"cpu ({platform.machine()})"
    return torch.cuda.get_device_name(device)


def _package_files() -> list[Path]:
    return sorted(Path(__file__).parents[2].rglob("*.py"))


def _user_files(config: RunConfig) -> Iterator[Path]:
    """The files of modules that the run names, and the plan, where it is a file."""
    for text in (config.model.name, config.data.function, config.optimizer.name):
        module, colon, _ = text.rpartition(":")
        spec = _spec_of(module) if colon else None
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin)
    for text in (config.plan, config.model.name, os.path.join(config.model.name, "config.json")):
        if text and Path(text).is_file():
            yield Path(text)


def _spec_of(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None  # whoever imports it says what is wrong


def digest_of_files(paths: Iterable[Path]) -> str:
    """A short hash of contents."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def values_by_rank(facts: Mapping[int, Mapping[str, str]], name: str) -> list[tuple[int, str]]:
    """(rank, value) of one fact."""
    return [(rank, fact.get(name, "")) for rank, fact in sorted(facts.items())]
