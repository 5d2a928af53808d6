"""The setting that is analyzed: a mesh, options, and the batch of each rank. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod
from typing import Any

from parallelize.errors import MeshError, ModelError, Problem, did_you_mean
from parallelize.mesh import AXES, DATA_AXES, SAMPLE_AXES, MeshSpec, axis_order
from parallelize.pipeline.schedules import Schedule, build_schedule
from parallelize.pipeline.timeline import Step, with_messages
from parallelize.styles.contract import OVERLAPS

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
STATE_BYTES = {"adamw": 8, "adam": 8, "sgd": 0, "sgd_momentum": 4, "adafactor": 0, "lion": 4}
"""Bytes of optimizer state per element, in float32."""


@dataclass(frozen=True)
class Setting:
    """One way to train a model. Options that are not listed here are as `parallelize_model` takes them.

    Attributes:
        batch: sequences per data rank and step (ranks of cp share them). sequence: tokens of a sequence.
        dtype: of compute; None: `weights_dtype`. Stored weights have `weights_dtype`.
        optimizer: a key of STATE_BYTES.
        transport: "nccl" or "gloo", which use different ops for some collectives.
    """

    mesh: MeshSpec
    batch: int = 1
    sequence: int = 2048
    num_microbatches: int | None = None
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    zero: int = 0
    defer: bool = False
    sequence_parallel: bool | None = None
    loss_parallel: bool | None = None
    fuse_loss: bool | None = None
    overlap: str = "off"
    ulysses: int = 1
    recompute: str = "off"
    recompute_every: int = 1
    recompute_save: tuple[str, ...] | None = None
    weights_dtype: str = "float32"
    dtype: str | None = None
    optimizer: str = "adamw"
    transport: str = "nccl"

    def size(self, *axes: str) -> int:
        """Ranks along the product of axes. Axes that the mesh does not have count 1."""
        sizes = dict(self.mesh.axes)
        return prod(sizes.get(axis, 1) for axis in axes)

    @property
    def shard_axis(self) -> str:
        return "dp_shard" if "dp_shard" in self.mesh.names else "dp"

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Data axes that have more than one rank, in mesh order."""
        return tuple(axis for axis in DATA_AXES if self.size(axis) > 1)

    def group_name(self, axes: Sequence[str]) -> str:
        """The name of a group along several axes: "dp*tp", without axes of size 1; "world" if it contains all ranks."""
        names = [axis for axis in axes if self.size(axis) > 1]
        is_world = len(names) > 1 and self.size(*names) == self.mesh.world_size
        return "world" if is_world else "*".join(names)

    @property
    def microbatches(self) -> int:
        return self.num_microbatches or (2 * self.size("pp") if self.size("pp") > 1 else 1)

    @property
    def microbatch_size(self) -> int:
        """Sequences of one microbatch."""
        return self.batch // self.microbatches

    @property
    def mixed_precision(self) -> bool:
        """Whether compute is narrower than 4 bytes, so that float32 copies and sums are stored."""
        return self.dtype is not None and ITEM_BYTES[self.dtype] < 4

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in compute."""
        return ITEM_BYTES[self.dtype or self.weights_dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of a gradient as it is summed and stored."""
        return 4 if self.mixed_precision else self.compute_bytes

    @property
    def uses_reducer(self) -> bool:
        """Whether `zero/reducer.py` stores the gradients in its own buffers."""
        return self.zero < 3 and (bool(self.data_axes) or self.mixed_precision)

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all data ranks."""
        return self.batch * self.sequence * self.size(*SAMPLE_AXES)

    def pipeline(self) -> Schedule:
        """The schedule of the axis pp; with one rank, forward and backward of each microbatch sequentially."""
        return _built(*self._schedule_arguments())

    def steps(self) -> list[list[Step]]:
        """Each pp rank's actions with the messages between them, as the engine runs them."""
        return _with_messages(*self._schedule_arguments())

    def _schedule_arguments(self) -> tuple[str, int, int, int | None]:
        size = self.size("pp")
        name, stages_per_rank = (self.schedule, self.stages_per_rank) if size > 1 else ("1f1b", None)
        return name, size, self.microbatches, stages_per_rank

    def describe(self) -> str:
        """The mesh and the options that matter most, on one line."""
        words = [str(self.mesh), f"zero={self.zero}"]
        if self.size("pp") > 1:
            words.append(f"schedule={self.schedule}")
        words.append(f"microbatches={self.microbatches}")
        words += [name for name in ("sequence_parallel", "loss_parallel", "fuse_loss") if getattr(self, name)]
        if self.recompute != "off":
            words.append(f"recompute={self.recompute}")
        return " ".join(
            [*words, f"batch={self.batch}", f"sequence={self.sequence}", f"dtype={self.dtype or self.weights_dtype}"]
        )


@lru_cache(maxsize=256)
def _built(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> Schedule:
    return build_schedule(name, ranks, microbatches, stages_per_rank)


@lru_cache(maxsize=64)
def _with_messages(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> list[list[Step]]:
    return with_messages(_built(name, ranks, microbatches, stages_per_rank))


_CHOICES: dict[str, Sequence[str | None]] = {
    "dtype": (None, *ITEM_BYTES),
    "weights_dtype": tuple(ITEM_BYTES),
    "optimizer": tuple(STATE_BYTES),
    "overlap": OVERLAPS,
    "recompute": ("off", "selective", "full"),
    "transport": ("nccl", "gloo"),
}
_COUNTS = ("batch", "sequence", "num_microbatches", "stages_per_rank", "recompute_every", "ulysses")


def _check_values(setting: Setting) -> None:
    """Raises: ModelError `bad-zero-stage`, `bad-option`."""
    if setting.zero not in (0, 1, 2, 3) or isinstance(setting.zero, bool):
        raise ModelError(Problem("bad-zero-stage", f"there is no ZeRO stage {setting.zero!r}", fix="0, 1, 2 or 3"))
    problems = []
    for name, choices in _CHOICES.items():
        value = getattr(setting, name)
        if value not in choices:
            names = ", ".join(choice for choice in choices if choice is not None)
            problems.append(Problem("bad-option", f"{name} is {value!r}", fix=f"one of: {names}"))
    for name in _COUNTS:
        value = getattr(setting, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(Problem("bad-option", f"{name} is {value!r}", fix="an integer, 1 or more"))
    if problems:
        raise ModelError(*problems)


def make_setting(mesh: str | MeshSpec, options: dict[str, Any]) -> Setting:
    """A setting from a caller's options. dtypes may be names or torch dtypes.

    Raises: ModelError `unknown-option`; MeshError `bad-mesh`, or as `MeshSpec.parse`.
    """
    if not isinstance(mesh, (str, MeshSpec)):
        raise MeshError(Problem("bad-mesh", f"a mesh cannot be a {type(mesh).__name__}", fix='write "pp=2,dp=4,tp=8"'))
    known = [field.name for field in fields(Setting) if field.name != "mesh"]
    for name in options:
        if name not in known:
            what = f"there is no option {name!r}"
            raise ModelError(Problem("unknown-option", what, fix=did_you_mean(name, known)))
    dtypes = {
        name: str(options[name]).removeprefix("torch.") for name in ("dtype", "weights_dtype") if options.get(name)
    }
    return Setting(MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh, **{**options, **dtypes})


def check_setting(setting: Setting) -> None:
    """Raises: MeshError, ModelError or PlanError with every mistake that the setting alone shows."""
    _check_values(setting)
    problems: list[Problem] = axis_order(setting.mesh, setting.zero)
    names = setting.mesh.names
    if not names:
        problems.append(Problem("no-axes", "a mesh needs named axes", fix="--mesh tp=8"))
    for axis in names:
        if axis not in AXES or axis == "ep":
            fix = "name axes pp, dp_replicate, dp (or dp_shard), cp and tp"
            problems.append(Problem("unknown-axis", f"axis {axis!r} is unknown", fix=fix))
    if {"dp", "dp_shard"} <= set(names):
        problems.append(
            Problem("unknown-axis", "dp and dp_shard are two names of the same axis", fix="use one of them")
        )
    if setting.zero > 0 and not {"dp", "dp_shard"} & set(names):
        what = f"ZeRO {setting.zero} divides state over dp, and the mesh {setting.mesh} has no such axis"
        problems.append(Problem("no-data-axis", what, fix="--mesh dp=4,..., or --zero 0"))
    if setting.size("cp") % setting.ulysses:
        what = f"ulysses is {setting.ulysses}, which does not divide cp (size {setting.size('cp')})"
        problems.append(Problem("bad-ulysses", what, fix="a divisor of cp"))
    if problems:
        raise MeshError(*problems)
    setting.pipeline()
    if setting.batch % setting.microbatches:
        count = setting.microbatches
        what = f"a batch of {setting.batch} sequences per data rank cannot be split into {count} microbatches"
        raise ModelError(Problem("indivisible-batch", what, fix=f"use a batch of {count}, {2 * count}, ..."))
