"""What a device and its links can do: constants with their sources, from YAML. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Any

import yaml

from parallelize.analysis.records import Kernel, Message
from parallelize.errors import PlanError, Problem, did_you_mean
from parallelize.mesh import MeshSpec

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Link:
    """One direction of what connects a device to others. bytes_per_s: a data sheet's; efficiency: of it."""

    bytes_per_s: float
    latency_us: float
    efficiency: float


@dataclass(frozen=True)
class Machine:
    """One device of a cluster.

    Attributes:
        peak_flops: operations a second by dtype. node_ranks: devices that `inside` connects; others go by `between`.
        kernel_us: the least time that any op takes. sources: constant -> where it comes from; constants: the same as numbers.
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
        """The roofline's larger side. Source: Williams et al., CACM 52(4), 2009."""
        compute = kernel.flops / (self.peak_flops[dtype] * self.matmul_efficiency)
        move = kernel.bytes / (self.memory_bytes_per_s * self.memory_efficiency)
        return max(compute, move, self.kernel_us * 1e-6)

    def link(self, spec: MeshSpec, axis: str) -> Link:
        """The slowest link among the ranks along an axis ("a*b", "world"), ranks of a node being neighbours."""
        axes = [name for name in (spec.names if axis == "world" else axis.split("*")) if name in spec.names]
        strides = {name: prod(spec.sizes[at + 1 :]) for at, name in enumerate(spec.names)}
        farthest = sum((spec.size(name) - 1) * strides[name] for name in axes)
        return self.inside if farthest < self.node_ranks else self.between

    def message_s(self, message: Message, spec: MeshSpec) -> float:
        """Latency, and bytes at the link's speed."""
        if message.op == "recv":  # its sender pays
            return 0.0
        link = self.link(spec, message.axis)
        return link.latency_us * 1e-6 + message.sent_bytes / (link.bytes_per_s * link.efficiency)


def known_machines() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load_machine(name: str | os.PathLike) -> Machine:
    """A shipped profile by name, or a YAML file of the same form.

    Raises: PlanError `unknown-hardware`, `bad-hardware` naming every constant that is missing or no number.
    """
    path = PROFILES / f"{str(name).lower()}.yaml"
    if not path.exists():
        path = Path(name)
    if not path.is_file():
        raise PlanError(
            Problem(
                "unknown-hardware",
                f"no hardware is called {str(name)!r}",
                fix=did_you_mean(str(name), known_machines()),
            )
        )
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        what = f"cannot read it: {str(error).splitlines()[0]}"
        raise PlanError(Problem("bad-hardware", what, str(path))) from error
    values, sources, wrong = {}, {}, []
    for key in _expected():
        value, source = _constant(raw, key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value > 0
        if not number or (key == "node_ranks" and value != int(value)):
            wrong.append((key, repr(value)))
        values[key], sources[key] = value, source
    if wrong:
        fix = (
            f'write each as {{value: 1.0e+9, source: "..."}}; shipped ones are examples: {", ".join(known_machines())}'
        )
        raise PlanError(
            Problem("bad-hardware", f"{len(wrong)} constants are no positive numbers", str(path), tuple(wrong), fix)
        )
    return _machine(str(raw["name"]) if "name" in raw else path.stem, values, sources)


_DTYPES = ("bfloat16", "float16", "float32", "float64")
_LINK = ("bytes_per_s", "latency_us", "efficiency")


def _expected() -> Iterator[str]:
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
    for part in key.split("."):
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    if isinstance(raw, Mapping):
        return raw.get("value"), str(raw.get("source", ""))
    return raw, ""


def _machine(name: str, values: dict[str, Any], sources: dict[str, str]) -> Machine:
    def link(which: str) -> Link:
        return Link(*(float(values[f"{which}.{key}"]) for key in _LINK))

    return Machine(
        name,
        float(values["memory_bytes"]),
        float(values["memory_bytes_per_s"]),
        {dtype: float(values[f"peak_flops.{dtype}"]) for dtype in _DTYPES},
        float(values["matmul_efficiency"]),
        float(values["memory_efficiency"]),
        float(values["kernel_us"]),
        int(values["node_ranks"]),
        link("inside"),
        link("between"),
        sources,
        values,
    )
