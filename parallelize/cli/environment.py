"""`parallelize env`: what a bug report needs to say about a machine. Every part may be missing.

A variable whose name looks secret is printed without its value, and a URL without its user and password.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path
from typing import Any

from parallelize import __version__
from parallelize.base.patches.active import active
from parallelize.base.patches.table import TABLE
from parallelize.base.terminal.console import FINE, add_json, print_json

PACKAGES = ("torch", "transformers", "safetensors", "blake3", "pyyaml", "numpy", "huggingface_hub", "triton")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("NCCL_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "GLOO_", "CUDA_", "OMP_", "PARALLELIZE_")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL|COOKIE", re.I)
_IN_URL = re.compile(r"://[^/\s@]*@")


def add_commands(verbs: Any) -> None:
    description = "versions, devices and settings, for a bug report"
    parser = verbs.add_parser("env", help=description, description=description)
    add_json(parser)
    parser.set_defaults(run=_env)


def _env(options: argparse.Namespace) -> int:
    data = environment()
    if options.json:
        print_json(data)
        return FINE
    rows = list(_rows(data))
    width = max(len(label) for label, _ in rows)
    print("\n".join(f"{label:<{width}}  {text}".rstrip() for label, text in rows))
    return FINE


def environment() -> dict[str, Any]:
    """Versions, hardware, torch's features and environment variables, as `env --json` prints them."""
    torch = _torch()
    packages = {name: _version(name) for name in PACKAGES}
    # with its build (`+cu130`), which the package's version may lack
    packages["torch"] = torch.get("version", packages.get("torch"))
    return {
        "parallelize": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": packages,
        "system": _system(),
        "torch": torch,
        "gpus": _gpus(),
        "patches": known_patches(),
        "variables": _variables(os.environ),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _system() -> dict[str, Any]:
    pages = {name: os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_PAGE_SIZE") if name in os.sysconf_names}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "os": platform.platform(),
        "cpus": os.cpu_count(),
        "usable_cpus": usable,
        "memory_bytes": pages.get("SC_PHYS_PAGES", 0) * pages.get("SC_PAGE_SIZE", 0),
    }


def known_patches() -> list[dict[str, Any]]:
    """What planned models change in other libraries, and what of it is changed in this process now."""
    begun = {row for _, row in active()}
    return [{**asdict(row), "active": row in begun} for row in TABLE]


# -- torch -------------------------------------------------------------------------------------------------------------


def _torch() -> dict[str, Any]:
    """What torch reports; only `error` if it cannot be imported."""
    try:
        torch = importlib.import_module("torch")
        dist = importlib.import_module("torch.distributed")
    except Exception as error:  # a broken installation raises anything
        return {"error": f"{type(error).__name__}: {error}"}
    has_dist = dist.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl(torch) if has_dist and dist.is_nccl_available() else None,
        "backends": [
            name for name in ("gloo", "nccl", "mpi", "ucc") if has_dist and getattr(dist, f"is_{name}_available")()
        ],
        "visible_gpus": torch.cuda.device_count(),
        "absent": [{"feature": feature, "name": name} for feature, name in absent_features()],
    }


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # a build with the backend and without its version
        return None


def absent_features() -> Iterator[tuple[str, str]]:
    """(feature, private name of torch that it needs and that is absent), read from the two files that use such names.

    Each function of these files is one feature, named in its docstring. The imports at the top are needed for
    everything.
    """
    specs = [util.find_spec(f"parallelize.base.torch_private.{file}") for file in ("torch_tensors", "torch_groups")]
    origins = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    for node in [node for origin in origins for node in ast.parse(origin.read_text(encoding="utf-8")).body]:
        feature = "everything"
        if isinstance(node, ast.FunctionDef):
            feature = f"{node.name}: {(ast.get_docstring(node) or '').partition(chr(10))[0]}".rstrip(": ")
        elif isinstance(node, ast.Try):
            feature = "simulation of all ranks in one process"
        for name in dict.fromkeys(_names_of_torch(node)):
            if not _exists(name):
                yield feature, name


def _names_of_torch(node: ast.AST) -> Iterator[str]:
    """Names that the code imports from torch, and attributes of `torch._C` that it reads."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom) and (inner.module or "").partition(".")[0] == "torch":
            yield from (f"{inner.module}.{alias.name}" for alias in inner.names)
        elif isinstance(inner, ast.Attribute) and ast.unparse(inner).startswith("torch._C."):
            yield ast.unparse(inner)


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


# -- devices and settings ----------------------------------------------------------------------------------------------


def _gpus() -> list[dict[str, str]]:
    """The GPUs that the driver lists. This works without torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    keys = ("name", "memory.total", "driver_version")
    try:
        command = [tool, f"--query-gpu={','.join(keys)}", "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    return [dict(zip(("name", "memory", "driver"), row, strict=True)) for row in rows if len(row) == len(keys)]


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    shown = {name: environ[name] for name in sorted(environ) if name in _NAMES or name.startswith(_PREFIXES)}
    return {name: "(set, not shown)" if _SECRET.search(name) else _masked(value) for name, value in shown.items()}


def _masked(value: str) -> str:
    return _IN_URL.sub("://...@", value)


# -- as text -----------------------------------------------------------------------------------------------------------


def _rows(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    system = data["system"]
    yield "parallelize", data["parallelize"]
    yield "python", data["python"]
    yield from ((name, version or "not installed") for name, version in data["packages"].items())
    yield "system", system["os"]
    yield "cpus", f"{system['cpus']}, {system['usable_cpus']} of them for this process"
    yield "memory", f"{system['memory_bytes'] / 2**30:.1f} GiB"
    yield from _torch_rows(data["torch"])
    for number, gpu in enumerate(data["gpus"]):
        yield f"gpu {number}", f"{gpu['name']}, {gpu['memory']}, driver {gpu['driver']}"
    yield from _patch_rows(data["patches"])
    yield from data["variables"].items()


def _patch_rows(patches: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    active = [patch for patch in patches if patch["active"]]
    if not active:
        yield (
            "patches",
            f"none in this process; {len(patches)} are known, each undone with the last planned model: --json",
        )
    for patch in active:
        yield "patched", f"{patch['target']}: {patch['why']}, until {patch['ends']}"


def _torch_rows(torch: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "error" in torch:
        yield "torch is absent", torch["error"]
        return
    kind = f"CUDA {torch['cuda']}" if torch["cuda"] else f"HIP {torch['hip']}" if torch["hip"] else "CPU alone"
    yield "torch is for", f"{kind}, NCCL {torch['nccl'] or 'none'}, sees {torch['visible_gpus']} GPUs"
    yield "backends", ", ".join(torch["backends"]) or "none"
    if not torch["absent"]:
        yield "private torch", "all names exist"
    for absent in torch["absent"]:
        yield "absent in torch", f"{absent['name']}, so not: {absent['feature']}"
