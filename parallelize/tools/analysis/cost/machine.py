"""Hardware profiles: constants of a device and its links, with their sources, from YAML. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Any

import yaml

from parallelize.base.errors import PlanError, Problem, did_you_mean
from parallelize.base.mesh import MeshSpec
from parallelize.tools.analysis.record.trace_data import Kernel, Message

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Link:
    """What connects a device to others, in one direction.

    Attributes:
        bytes_per_s: bandwidth of the data sheet. efficiency: the fraction of it that is reached.
        latency_us: latency of one message, in microseconds.
    """

    bytes_per_s: float
    latency_us: float
    efficiency: float


@dataclass(frozen=True)
class Machine:
    """One device of a cluster.

    Attributes:
        memory_bytes: size. memory_bytes_per_s: bandwidth of the data sheet.
        peak_flops: dtype -> operations per second.
        matmul_efficiency, memory_efficiency: the fraction of `peak_flops` and of `memory_bytes_per_s` that is reached.
        kernel_us: the least time that any op takes, in microseconds.
        node_ranks: devices of a node. `inside` connects them; `between` connects nodes.
        sources: constant -> where its value comes from. constants: constant -> value.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float]
    matmul_efficiency: float
    memory_efficiency: float
    kernel_us: float
    node_ranks: int
    inside: Link
    between: Link
    sources: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)

    def kernel_s(self, kernel: Kernel, dtype: str) -> float:
        """Seconds of an op: the larger of compute and memory traffic. Source: Williams et al., CACM 52(4), 2009."""
        compute_s = kernel.flops / (self.peak_flops[dtype] * self.matmul_efficiency)
        memory_s = kernel.bytes / (self.memory_bytes_per_s * self.memory_efficiency)
        return max(compute_s, memory_s, self.kernel_us * 1e-6)

    def link(self, spec: MeshSpec, axis: str) -> Link:
        """The slowest link among the ranks along an axis ("a*b", "world"). Ranks of a node are consecutive."""
        axes = [name for name in (spec.names if axis == "world" else axis.split("*")) if name in spec.names]
        strides = {name: prod(spec.sizes[index + 1 :]) for index, name in enumerate(spec.names)}
        distance = sum((spec.size(name) - 1) * strides[name] for name in axes)
        return self.inside if distance < self.node_ranks else self.between

    def message_s(self, message: Message, spec: MeshSpec) -> float:
        """Seconds of a message: latency, and bytes at the link's bandwidth. A receive is counted at its sender."""
        if message.op == "recv":
            return 0.0
        link = self.link(spec, message.axis)
        return link.latency_us * 1e-6 + message.sent_bytes / (link.bytes_per_s * link.efficiency)


def known_machines() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def profile_of(device_name: str) -> str:
    """The shipped profile of a GPU by the name that CUDA gives it ("NVIDIA H200"); of a GPU without one, the H100's."""
    words = re.split(r"\W+", device_name.lower())
    own = (name for name in known_machines() if name.partition("-")[0] in words)
    return next(own, "h100-sxm")


def load_machine(name: str | os.PathLike) -> Machine:
    """A shipped profile by name, or a YAML file of the same form.

    Raises: PlanError `unknown-hardware`; `bad-hardware` with every constant that is missing or is not a positive
        number.
    """
    path = PROFILES / f"{str(name).lower()}.yaml"
    if not path.exists():
        path = Path(name)
    if not path.is_file():
        raise PlanError(
            Problem(
                "unknown-hardware",
                f"there is no hardware profile {str(name)!r}",
                fix=did_you_mean(str(name), known_machines()),
            )
        )
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        what = f"cannot read it: {str(error).splitlines()[0]}"
        raise PlanError(Problem("bad-hardware", what, str(path))) from error
    values, sources, invalid = {}, {}, []
    for key in _constant_names():
        value, source = _constant(raw, key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value > 0
        if not is_number or (key == "node_ranks" and value != int(value)):
            invalid.append((key, repr(value)))
        values[key], sources[key] = value, source
    if invalid:
        examples = ", ".join(known_machines())
        fix = f'write each as {{value: 1.0e+9, source: "..."}}; shipped profiles are examples: {examples}'
        what = f"{len(invalid)} constants are not positive numbers"
        raise PlanError(Problem("bad-hardware", what, str(path), tuple(invalid), fix))
    return _machine(str(raw["name"]) if "name" in raw else path.stem, values, sources)


_DTYPES = ("bfloat16", "float16", "float32", "float64")
_LINK = ("bytes_per_s", "latency_us", "efficiency")


def _constant_names() -> Iterator[str]:
    yield from (
        "memory_bytes",
        "memory_bytes_per_s",
        "matmul_efficiency",
        "memory_efficiency",
        "kernel_us",
        "node_ranks",
    )
    yield from (f"peak_flops.{dtype}" for dtype in _DTYPES)
    yield from (f"{link}.{key}" for link in ("inside", "between") for key in _LINK)


def _constant(raw: Any, key: str) -> tuple[Any, str]:
    """(value, source) of a constant. key: its keys in the file, joined by dots."""
    for part in key.split("."):
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    if isinstance(raw, Mapping):
        return raw.get("value"), str(raw.get("source", ""))
    return raw, ""


def _machine(name: str, values: dict[str, Any], sources: dict[str, str]) -> Machine:
    def link(which: str) -> Link:
        return Link(**{key: float(values[f"{which}.{key}"]) for key in _LINK})

    return Machine(
        name=name,
        memory_bytes=float(values["memory_bytes"]),
        memory_bytes_per_s=float(values["memory_bytes_per_s"]),
        peak_flops={dtype: float(values[f"peak_flops.{dtype}"]) for dtype in _DTYPES},
        matmul_efficiency=float(values["matmul_efficiency"]),
        memory_efficiency=float(values["memory_efficiency"]),
        kernel_us=float(values["kernel_us"]),
        node_ranks=int(values["node_ranks"]),
        inside=link("inside"),
        between=link("between"),
        sources=sources,
        constants=values,
    )
