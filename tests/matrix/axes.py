"""The columns of the matrix: meshes of one to eight ranks, each with the options that make it what it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any


@dataclass(frozen=True)
class Axis:
    """A mesh with options.

    Attributes:
        sizes: of `build_mesh`.
        options: of `parallelize_model`.
        mixture: only for models with experts.
        deep: only with four layers, one for each stage.
    """

    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    mixture: bool = False
    deep: bool = False

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    def ranks(self, *names: str) -> int:
        return prod(self.sizes.get(name, 1) for name in names)

    @property
    def data_ranks(self) -> int:
        return self.ranks("dp_replicate", "dp")


SEQUENCE = {"sequence_parallel": True}
SHARDED = {"sequence_parallel": True, "loss_parallel": True}

AXES: dict[str, Axis] = {
    "one": Axis({"dp": 1}),
    "dp-zero0": Axis({"dp": 2}, {"zero": 0}),
    "dp-zero1": Axis({"dp": 2}, {"zero": 1}),
    "dp-zero2": Axis({"dp": 2}, {"zero": 2}),
    "dp-zero3": Axis({"dp": 2}, {"zero": 3}),
    "hsdp-zero1": Axis({"dp_replicate": 2, "dp": 2}, {"zero": 1}),
    "hsdp-zero2": Axis({"dp_replicate": 2, "dp": 2}, {"zero": 2}),
    "hsdp-zero3": Axis({"dp_replicate": 2, "dp": 2}, {"zero": 3}),
    "tp": Axis({"tp": 2}),
    "tp-sp": Axis({"tp": 2}, SEQUENCE),
    "tp-lp": Axis({"tp": 2}, {"loss_parallel": True}),
    "tp-sp-lp": Axis({"tp": 2}, SHARDED),
    "tp4": Axis({"tp": 4}, SHARDED),
    "cp-ring": Axis({"cp": 2}),
    "cp-ulysses": Axis({"cp": 2}, {"ulysses": 2}),
    "cp4": Axis({"cp": 4}, {"ulysses": 2}),
    "cp4-ring": Axis({"cp": 4}),
    "pp-gpipe": Axis({"pp": 2}, {"schedule": "gpipe"}),
    "pp-1f1b": Axis({"pp": 2}, {"schedule": "1f1b"}),
    "pp-zbv": Axis({"pp": 2}, {"schedule": "zbv"}, deep=True),
    "ep": Axis({"dp": 2}, {"ep": 2}, mixture=True),
    "ep-zero3": Axis({"dp": 2}, {"ep": 2, "zero": 3}, mixture=True),
    "ep-tp": Axis({"tp": 2}, {"ep": 2}, mixture=True),
    "ep-etp": Axis({"dp": 2, "tp": 2}, {"ep": 2, "etp": 2, "zero": 1}, mixture=True),
    "ep-replicas": Axis({"dp": 4}, {"ep": 2, "zero": 2}, mixture=True),
    "ep-cp": Axis({"cp": 2}, {"ep": 2}, mixture=True),
    "ep-pp-dp": Axis({"pp": 2, "dp": 2}, {"ep": 2, "zero": 1}, mixture=True),
    "dp-tp-zero1": Axis({"dp": 2, "tp": 2}, {"zero": 1, **SHARDED}),
    "dp-tp-zero3": Axis({"dp": 2, "tp": 2}, {"zero": 3, **SEQUENCE}),
    "dp-cp-zero1": Axis({"dp": 2, "cp": 2}, {"zero": 1}),
    "dp-cp-zero3": Axis({"dp": 2, "cp": 2}, {"zero": 3}),
    "pp-dp-zero1": Axis({"pp": 2, "dp": 2}, {"zero": 1, "schedule": "interleaved_1f1b"}, deep=True),
    "pp-dp-zero2": Axis({"pp": 2, "dp": 2}, {"zero": 2}),
    "pp-tp": Axis({"pp": 2, "tp": 2}, SHARDED),
    "pp-cp": Axis({"pp": 2, "cp": 2}),
    "cp-tp": Axis({"cp": 2, "tp": 2}, SHARDED),
    "pp-dp-tp": Axis({"pp": 2, "dp": 2, "tp": 2}, {"zero": 1, **SHARDED}),
    "dp-cp-tp": Axis({"dp": 2, "cp": 2, "tp": 2}, {"zero": 3, **SHARDED}),
}
