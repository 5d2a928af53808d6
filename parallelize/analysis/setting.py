"""What is asked about: a mesh, what is switched on, and what each rank is fed. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from parallelize.errors import MeshError, ModelError, Problem, did_you_mean
from parallelize.mesh import AXES, DATA_AXES, SAMPLE_AXES, MeshSpec, axis_order
from parallelize.pipeline.schedules import Schedule, build_schedule
from parallelize.pipeline.timeline import Step, with_messages
from parallelize.styles.contract import OVERLAPS

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
STATE_BYTES = {"adamw": 8, "adam": 8, "sgd": 0, "sgd_momentum": 4, "adafactor": 0, "lion": 4}
"""Bytes an element of optimiser state, in float32."""


@dataclass(frozen=True)
class Setting:
    """One way to train a model, as `parallelize_model` takes it.

    Attributes:
        batch: sequences a data rank and step (ranks of cp share them). sequence: their length. dtype: of compute; weights stay `weights_dtype`.
        optimizer: a key of STATE_BYTES. transport: "nccl" or "gloo", which send some collectives by other ops.
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
        """Ranks along the product of axes; axes that the mesh lacks count 1."""
        found = 1
        for axis in axes:
            found *= dict(self.mesh.axes).get(axis, 1)
        return found

    @property
    def shard_axis(self) -> str:
        return "dp_shard" if "dp_shard" in self.mesh.names else "dp"

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Data axes that have more than one rank, in mesh order."""
        return tuple(axis for axis in DATA_AXES if self.size(axis) > 1)

    def product(self, axes: Sequence[str]) -> str:
        """The name of a group along several axes: axes of one rank are left out, and all of them are the "world"."""
        wide = [axis for axis in axes if self.size(axis) > 1]
        everyone = len(wide) > 1 and self.size(*wide) == self.mesh.world_size
        return "world" if everyone else "*".join(wide)

    @property
    def microbatches(self) -> int:
        return self.num_microbatches or (2 * self.size("pp") if self.size("pp") > 1 else 1)

    @property
    def rows(self) -> int:
        """Sequences of one microbatch."""
        return self.batch // self.microbatches

    @property
    def narrow(self) -> bool:
        """Whether compute is narrower than 4 bytes, so that float32 copies and sums are kept."""
        return self.dtype is not None and ITEM_BYTES[self.dtype] < 4

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element as computed with."""
        return ITEM_BYTES[self.dtype or self.weights_dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of a gradient as it is summed and kept."""
        return 4 if self.narrow else self.compute_bytes

    @property
    def reduces(self) -> bool:
        """Whether a reducer keeps gradients in its own buffers."""
        return self.zero < 3 and (bool(self.data_axes) or self.narrow)

    @property
    def tokens(self) -> int:
        """Of a step, over all data ranks."""
        return self.batch * self.sequence * self.size(*SAMPLE_AXES)

    def pipeline(self) -> Schedule:
        """Of the pp axis; one rank in turn where there is none."""
        size = self.size("pp")
        name, each = (self.schedule, self.stages_per_rank) if size > 1 else ("1f1b", None)
        return _built(name, size, self.microbatches, each)

    def steps(self) -> list[list[Step]]:
        """Each pp rank's actions with the messages between them, as the engine runs them."""
        size = self.size("pp")
        name, each = (self.schedule, self.stages_per_rank) if size > 1 else ("1f1b", None)
        return _with_messages(name, size, self.microbatches, each)

    def describe(self) -> str:
        """One line: what `--mesh` and the options would say."""
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
def _built(name: str, ranks: int, microbatches: int, each: int | None) -> Schedule:
    return build_schedule(name, ranks, microbatches, each)


@lru_cache(maxsize=64)
def _with_messages(name: str, ranks: int, microbatches: int, each: int | None) -> list[list[Step]]:
    return with_messages(_built(name, ranks, microbatches, each))


_WORDS: dict[str, Sequence[Any]] = {
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
    for name, known in _WORDS.items():
        value = getattr(setting, name)
        if value not in known:
            words = ", ".join(str(word) for word in known if word is not None)
            problems.append(Problem("bad-option", f"{name} is {value!r}", fix=f"one of: {words}"))
    for name in _COUNTS:
        value = getattr(setting, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(Problem("bad-option", f"{name} is {value!r}", fix="a whole number, 1 or more"))
    if problems:
        raise ModelError(*problems)


def make_setting(mesh: str | MeshSpec, options: dict[str, Any]) -> Setting:
    """A setting of options as a caller gives them; dtypes may be torch's.

    Raises: ModelError `unknown-option`; MeshError.
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
    """Raises: MeshError, ModelError, PlanError naming every mistake that can be known from the setting alone."""
    _check_values(setting)
    problems: list[Problem] = axis_order(setting.mesh, setting.zero)
    names = setting.mesh.names
    if not names:
        problems.append(Problem("no-axes", "a mesh needs named axes", fix="--mesh tp=8"))
    for axis in names:
        if axis not in AXES or axis == "ep":
            fix = "name axes pp, dp_replicate, dp (or dp_shard), cp and tp"
            problems.append(Problem("unknown-axis", f"nothing is known of axis {axis!r}", fix=fix))
    if {"dp", "dp_shard"} <= set(names):
        problems.append(Problem("unknown-axis", "dp and dp_shard are two names of one axis", fix="use one of them"))
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
        what = f"a batch of {setting.batch} sequences a data rank cannot be cut into {count} microbatches"
        raise ModelError(Problem("indivisible-batch", what, fix=f"use a batch of {count}, {2 * count}, ..."))
