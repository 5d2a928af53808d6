"""Hardware profiles: constants of a device and its links, with their sources, from YAML. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isfinite, log2
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from parallelize.base.errors import PlanError, Problem, did_you_mean
from parallelize.base.mesh import MeshSpec
from parallelize.tools.analysis.record.constants import constant, constants
from parallelize.tools.analysis.record.kernel_sets import KernelSet
from parallelize.tools.analysis.record.trace_data import Message, Totals

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Link:
    """What connects a device to others, in one direction.

    Attributes:
        bytes_per_s: bandwidth of the data sheet. efficiency: the fraction of it that is reached.
        latency_us: the start-up of one collective of two ranks, in microseconds.
        rank_us: what each further rank adds to it: messages go around a ring.
    """

    bytes_per_s: float
    latency_us: float
    efficiency: float
    rank_us: float = 0.0

    @property
    def reached(self) -> float:
        """Bytes per second that large messages reach."""
        return self.bytes_per_s * self.efficiency


class Placement(NamedTuple):
    """A group on nodes: ranks in all, and the most on one node."""

    ranks: int
    in_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.in_node)


@dataclass(frozen=True)
class Machine:
    """One device of a cluster.

    Attributes:
        memory_bytes: size. memory_bytes_per_s: bandwidth of the data sheet.
        peak_flops: dtype -> operations per second.
        matmul_efficiency, memory_efficiency: the fraction of `peak_flops` and of `memory_bytes_per_s` that is reached.
        kernel_us: the time that the host takes to launch an op, in microseconds.
        flash_2: the rate of FlashAttention 2 over that of attention kernels written for the device.
        node_ranks: devices of a node. `inside` connects them; `between` connects nodes.
        sources: constant -> where its value comes from. constants: constant -> value.
        not_scored: why no estimate for this device was compared with measurements; empty where some were.
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
    flash_2: float = 1.0
    not_scored: str = ""

    def device_s(self, totals: Totals, dtype: str, kernels: KernelSet, narrow: str = "") -> float:
        """Seconds that the device takes for ops. narrow: the dtype of linears, where it is another than `dtype`.

        A matmul computes, and before and after that it moves its operands: so small and narrow ones, which have more
        bytes for each operation, are slower.
        """
        rate = self.peak_flops[dtype] * self.matmul_efficiency
        gain = self.peak_flops.get(narrow, 0.0) / self.peak_flops[dtype] * constant("narrow") if narrow else 1.0
        linear_flops = totals.linear_flops / max(gain, 1.0)  # a device without such units computes in `dtype`
        moved = totals.matmul_bytes * constant("matmul_bytes") + totals.moved_bytes * kernels.elements
        return linear_flops / rate + self.attention_s(totals, dtype, kernels) + self.moved_s(moved)

    def attention_s(self, totals: Totals, dtype: str, kernels: KernelSet) -> float:
        """Seconds of the operations of attention."""
        forward, backward = kernels.attention
        rate = self.peak_flops[dtype] * self.matmul_efficiency * (self.flash_2 if kernels.flash_2 else 1.0)
        return (totals.forward_flops / forward + totals.backward_flops / backward) / rate

    def moved_s(self, size: float) -> float:
        """Seconds in which the device's memory moves bytes."""
        return size / (self.memory_bytes_per_s * self.memory_efficiency)

    def host_s(self, totals: Totals, kernels: KernelSet) -> float:
        """Seconds that the host takes to launch ops."""
        return totals.launches * kernels.host * self.kernel_us * 1e-6

    def placement(self, spec: MeshSpec, axis: str) -> Placement:
        """Where the ranks along an axis ("a*b", "world") are. Ranks of a node are consecutive."""
        return _placement(spec, axis, self.node_ranks)

    def reached(self, op: str, placement: Placement) -> float:
        """Bytes per second that a rank of a group sends in a large collective.

        In a node all links work in parallel. Between nodes, rings or trees use the cards of all ranks that the group
        has in a node, so that each byte that a rank receives has crossed a card once for all of them.
        """
        if placement.nodes == 1:
            return self.inside.reached
        cards = 1 if op in ("send", "all_to_all") else placement.in_node
        return min(self.inside.reached, cards * self.between.reached)

    def contention(self, placement: Placement) -> float:
        """What messages of a group that run behind compute take from it, over the time that they take: multiprocessors,
        and the more memory bandwidth the faster their link is."""
        return constant(f"contention.{'inside' if placement.nodes == 1 else 'between'}")

    def message_s(self, message: Message, spec: MeshSpec) -> float:
        """Seconds of a message. A receive is counted at its sender."""
        if message.op == "recv":
            return 0.0
        return self.messages_s(message.op, self.placement(spec, message.axis), message.sent_bytes, 1)

    def messages_s(self, op: str, placement: Placement, sent: float, times: float) -> float:
        """Seconds of equal messages one after another: the start-up of each, and all bytes at the rate that the group
        reaches. sent: bytes that a rank sends in all of them."""
        link = self.inside if placement.nodes == 1 else self.between
        if op == "send":  # to the next rank along the axis
            return link.latency_us * 1e-6 * times + sent / link.reached
        hops = placement.ranks - 2 if op != "all_reduce" else 2 * log2(placement.ranks) - 2  # rings, and trees
        start_up_s = (link.latency_us + link.rank_us * max(0.0, hops)) * 1e-6 * times
        if op == "all_to_all" and placement.nodes > 1:
            leaving = sent * (placement.ranks - placement.in_node) / (placement.ranks - 1)
            return start_up_s + max(leaving / self.between.reached, (sent - leaving) / self.inside.reached)
        return start_up_s + sent / self.reached(op, placement)


@lru_cache(maxsize=4096)
def _placement(spec: MeshSpec, axis: str, node_ranks: int) -> Placement:
    names = [name for name in (spec.names if axis == "world" else axis.split("*")) if name in spec.names]
    ranks = spec.group_of(0, *names)
    nodes = {rank // node_ranks for rank in ranks}
    return Placement(len(ranks), -(-len(ranks) // len(nodes)))


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
        raw = _parsed(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        what = f"cannot read it: {str(error).splitlines()[0]}"
        raise PlanError(Problem("bad-hardware", what, str(path))) from error
    values, sources, invalid = {}, {}, []
    for key in _constant_names():
        value, source = _constant(raw, key)
        if value is None and key in _DEFAULTS:
            value, source = _DEFAULTS[key], "none: the profile does not state it"
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
        is_number = is_number and (value > 0 or (value == 0 and key in _DEFAULTS))
        if not is_number or (key == "node_ranks" and value != int(value)):
            invalid.append((key, repr(value)))
        values[key], sources[key] = value, source
    if invalid:
        examples = ", ".join(known_machines())
        fix = f'write each as {{value: 1.0e+9, source: "..."}}; shipped profiles are examples: {examples}'
        what = f"{len(invalid)} constants are not positive numbers"
        raise PlanError(Problem("bad-hardware", what, str(path), tuple(invalid), fix))
    machine = _machine(str(raw["name"]) if "name" in raw else path.stem, values, sources)
    return replace(
        machine, not_scored=str(raw.get("not_scored", "a profile of your own" if path.parent != PROFILES else ""))
    )


@lru_cache(maxsize=32)
def _parsed(text: str) -> Any:
    return yaml.safe_load(text)


_DTYPES = ("bfloat16", "float16", "float32", "float64")
_NARROW = ("float8", "float4")
_LINK = ("bytes_per_s", "latency_us", "efficiency", "rank_us")
_DEFAULTS = {
    "flash_2": 1.0,
    "inside.rank_us": 0.0,
    "between.rank_us": 0.0,
    **{f"peak_flops.{name}": 0.0 for name in _NARROW},
}


def _constant_names() -> Iterator[str]:
    yield from (
        "memory_bytes",
        "memory_bytes_per_s",
        "matmul_efficiency",
        "memory_efficiency",
        "kernel_us",
        "flash_2",
        "node_ranks",
    )
    yield from (f"peak_flops.{dtype}" for dtype in (*_DTYPES, *_NARROW))
    yield from (f"{link}.{key}" for link in ("inside", "between") for key in _LINK)


def _constant(raw: Any, key: str) -> tuple[Any, str]:
    """(value, source) of a constant. key: its keys in the file, joined by dots."""
    for part in key.split("."):
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    if not isinstance(raw, Mapping):
        return raw, ""
    if "fitted" not in raw:
        return raw.get("value"), str(raw.get("source", ""))
    name, times = str(raw["fitted"]), float(raw.get("times", 1.0))
    fixed_by = constants()[name].fixed_by
    return constant(name) * times, f"fitted: {fixed_by}" + (f", times {times}" if times != 1.0 else "")


def _machine(name: str, values: dict[str, Any], sources: dict[str, str]) -> Machine:
    def link(which: str) -> Link:
        return Link(**{key: float(values[f"{which}.{key}"]) for key in _LINK})

    return Machine(
        name=name,
        memory_bytes=float(values["memory_bytes"]),
        memory_bytes_per_s=float(values["memory_bytes_per_s"]),
        peak_flops={dtype: float(values[f"peak_flops.{dtype}"]) for dtype in (*_DTYPES, *_NARROW)},
        matmul_efficiency=float(values["matmul_efficiency"]),
        memory_efficiency=float(values["memory_efficiency"]),
        kernel_us=float(values["kernel_us"]),
        flash_2=float(values["flash_2"]),
        node_ranks=int(values["node_ranks"]),
        inside=link("inside"),
        between=link("between"),
        sources=sources,
        constants=values,
    )
