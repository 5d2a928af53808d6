"""The setting that is analyzed: a mesh, options, and the batch of each rank. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from parallelize.axes.pipeline.schedules import Schedule, build_schedule
from parallelize.axes.pipeline.timeline import Step, with_messages
from parallelize.base.errors import MeshError, ModelError, Problem
from parallelize.base.mesh import EXPERT_AXES, SAMPLE_AXES, MeshSpec, folded
from parallelize.plan.options import DTYPES, Options, refuse_unknown, wrong_choices, wrong_counts
from parallelize.plan.stage_ranks import ranks_of_stages
from parallelize.tools.analysis.cost.in_flight import has_closed_form
from parallelize.tools.analysis.cost.systems import OWN, System, known_systems, system
from parallelize.tools.analysis.record.kernel_sets import known_kernels

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
STATE_BYTES = {"adamw": 8, "adam": 8, "sgd": 0, "sgd_momentum": 4, "adafactor": 0, "lion": 4, "muon": 8}
"""Bytes of optimizer state per element, in float32; of Muon those of the elements that AdamW steps (see
`owner_steps`)."""

RECORDED = "eager"
"""The kernels that stock models of PyTorch call: those that a recording of the model's code shows."""

_ONE_PER_MICROBATCH: Any = None


@dataclass(frozen=True, kw_only=True)
class Setting(Options):
    """One way to train a model: the options of a run, the mesh, and the batch.

    Attributes:
        batch: sequences per data rank and step (ranks of cp share them). Default: one per microbatch.
        sequence: tokens of a sequence.
        weights_dtype: the dtype of stored weights; compute has `dtype`, which is the same by default.
        optimizer: a key of STATE_BYTES.
        offload_state: whether optimizer state is in host memory between steps, as `build_optimizer(offload_state=True)`
            has it.
        transport: "nccl" or "gloo", which use different ops for some collectives.
        kernels: a name of `kernel_sets.yaml`: what computes norms, activations, attention and the loss.
        system: a name of `systems.yaml`: what 16 bits mean for gradients and sums, and what is hidden behind compute.
        matmuls_again: whether recompute "selective" computes every second matmul again, as torchtitan's op-level policy
            does, and not only what is between matmuls.
        attention_again: whether attention alone runs once more in backward, as Megatron's selective recompute has it.
        gathers_keys: whether ranks of cp gather keys and values before attention, and do not pass them around a ring.
        matmul_dtype: of the layers' linears where it is narrower than `dtype`: "float8", "mxfp8" or "float4".
    """

    mesh: MeshSpec = field(kw_only=False)
    batch: int = _ONE_PER_MICROBATCH
    sequence: int = 2048
    weights_dtype: str = "float32"
    optimizer: str = "adamw"
    offload_state: bool = False
    transport: str = "nccl"
    kernels: str = RECORDED
    system: str = OWN
    attention_again: bool = False
    matmuls_again: bool = False
    gathers_keys: bool = False
    matmul_dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights_dtype", str(self.weights_dtype).removeprefix("torch."))
        super().__post_init__()
        if problems := [*wrong_choices(self, _CHOICES), *wrong_counts(self, ("batch", "sequence"))]:
            raise ModelError(*problems)

    def complete(self, defaults: Options | None = None) -> Setting:
        setting = super().complete(defaults)
        if setting.expert_ranks > 1 and "tp" not in setting.mesh.names:  # as `parallelize_model` does
            setting = replace(setting, mesh=MeshSpec([*setting.mesh.axes, ("tp", 1)]))
        return setting if setting.batch is not None else replace(setting, batch=setting.step_microbatches)

    def size(self, *axes: str) -> int:
        """Ranks along the product of axes. Axes that the mesh does not have count 1."""
        return self.mesh.ranks(*axes)

    @property
    def shard_axis(self) -> str:
        """The axis over which ZeRO shards."""
        return self.mesh.shard_axis

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """The axes over whose ranks together ZeRO shards: the shard axis, and in systems that do so those of cp. (This
        package's code does not.)"""
        over_cp = self.kernels != RECORDED and self.training_system.over_cp and self.size("cp") > 1
        return (self.shard_axis, "cp") if over_cp else (self.shard_axis,)

    @property
    def shard_ranks(self) -> int:
        """The ranks over which ZeRO shards."""
        return self.size(*self.zero_axes)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The data axes with more than one rank."""
        return self.mesh.data_axes

    @property
    def folds(self) -> bool:
        """Whether experts are divided over more ranks than those of tp."""
        return self.expert_ranks > self.size("tp")

    def mesh_of(self, axis: str) -> MeshSpec:
        """The mesh that has an axis, or a product of axes: experts have one of their own."""
        return folded(self.mesh, self.expert_ranks) if set(axis.split("*")) & set(EXPERT_AXES) else self.mesh

    def group_name(self, axes: Sequence[str]) -> str:
        """The name of a group along several axes: "dp*tp", without axes of size 1; "world" if it contains all ranks."""
        names = [axis for axis in axes if self.size(axis) > 1]
        is_world = len(names) > 1 and self.size(*names) == self.mesh.world_size
        return "world" if is_world else "*".join(names)

    @property
    def step_microbatches(self) -> int:
        """Microbatches of a step."""
        return self.microbatches(self.mesh)

    @property
    def microbatch_size(self) -> int:
        """Sequences of one microbatch."""
        return self.batch // self.step_microbatches

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in compute."""
        return ITEM_BYTES[self.dtype or self.weights_dtype]

    @property
    def stepped_bytes(self) -> int:
        """Bytes of an element of what an optimizer steps, and of a state that has its dtype."""
        in_float32 = self.low_precision or self.zero == 3
        return max(4, self.compute_bytes) if in_float32 else self.compute_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of a gradient as it is stored."""
        return int(self.training_system.gradients) if self.low_precision else self.compute_bytes

    @property
    def reduced_bytes(self) -> int:
        """Bytes of an element of a gradient as it is summed over ranks."""
        return int(self.training_system.reduced) if self.low_precision else self.compute_bytes

    @property
    def training_system(self) -> System:
        return system(self.system)

    @property
    def uses_reducer(self) -> bool:
        """Whether `axes/zero/reducer.py` stores the gradients in its own buffers."""
        return self.zero < 3 and (bool(self.data_axes) or self.low_precision)

    @property
    def splits_gradients(self) -> bool:
        """Whether a data rank keeps only its rows of most gradients, so that each backward reduces them."""
        return self.zero >= 2 and self.shard_ranks > 1

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all data ranks."""
        return self.batch * self.sequence * self.size(*SAMPLE_AXES)

    def pipeline(self, listed: bool = True) -> Schedule:
        """The schedule of the axis pp; with one rank, forward and backward of each microbatch sequentially.

        listed: with its actions; else, where the schedule has a closed form, without.
        """
        arguments = self._schedule_arguments()
        return _built(*arguments) if listed or not has_closed_form(arguments[0]) else _unlisted(*arguments)

    def steps(self) -> list[list[Step]]:
        """Each pp rank's actions with the messages between them, as the engine runs them."""
        return _with_messages(*self._schedule_arguments())

    def _schedule_arguments(self) -> tuple[str, int, int, int | None]:
        size = self.size("pp")
        name, stages_per_rank = (self.schedule, self.stages_per_rank) if size > 1 else ("1f1b", None)
        return name, size, self.step_microbatches, stages_per_rank

    def with_tokens_of(self, other: Setting) -> Setting:
        """With the sequences that a step of `other` (complete) has over all ranks, in microbatches of its size where
        they can be. Raises: ModelError `indivisible-batch`."""
        sequences, ranks = other.batch * other.size(*SAMPLE_AXES), self.size(*SAMPLE_AXES)
        batch, rest = divmod(sequences, ranks)
        if rest or not batch:
            what = f"{sequences} sequences of a step cannot be divided over {ranks} data ranks"
            raise ModelError(Problem("indivisible-batch", what, fix=f"a batch of {ranks}, {2 * ranks}, ... in all"))
        size = other.microbatch_size if batch % other.microbatch_size == 0 else 1
        return replace(self, batch=batch, num_microbatches=batch // size)

    def describe(self) -> str:
        """The mesh and the options that matter most, on one line."""
        words = [str(self.mesh), f"zero={self.zero}"]
        if self.size("pp") > 1:
            words.append(f"schedule={self.schedule}")
        words.append(f"microbatches={self.step_microbatches}")
        words += [name for name in ("sequence_parallel", "loss_parallel", "fuse_loss") if getattr(self, name)]
        words += [f"{name}={size}" for name in ("ep", "etp") if (size := getattr(self, name)) not in (None, 1)]
        if self.recompute != "off":
            words.append(f"recompute={self.recompute}")
        return " ".join(
            [*words, f"batch={self.batch}", f"sequence={self.sequence}", f"dtype={self.dtype or self.weights_dtype}"]
        )


@lru_cache(maxsize=256)
def _built(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> Schedule:
    return build_schedule(name, ranks, microbatches, stages_per_rank)


@lru_cache(maxsize=256)
def _unlisted(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> Schedule:
    """As `build_schedule`, without the order of actions."""
    stages = ranks_of_stages(name, ranks, stages_per_rank)
    return Schedule(name, ranks, len(stages), microbatches, stages, ())


@lru_cache(maxsize=64)
def _with_messages(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> list[list[Step]]:
    return with_messages(_built(name, ranks, microbatches, stages_per_rank))


NARROW_DTYPES = ("float8", "mxfp8", "float4")
_CHOICES = {
    "weights_dtype": DTYPES,
    "optimizer": tuple(STATE_BYTES),
    "transport": ("nccl", "gloo"),
    "kernels": known_kernels(),
    "system": known_systems(),
    "matmul_dtype": NARROW_DTYPES,
}


def make_setting(mesh: str | MeshSpec, options: dict[str, Any]) -> Setting:
    """A setting from a caller's options. dtypes may be names or torch dtypes.

    Raises: ModelError `unknown-option`, `bad-option`, `bad-zero-stage`; MeshError `bad-mesh`, or as `MeshSpec.parse`.
    """
    if not isinstance(mesh, (str, MeshSpec)):
        raise MeshError(Problem("bad-mesh", f"a mesh cannot be a {type(mesh).__name__}", fix='write "pp=2,dp=4,tp=8"'))
    refuse_unknown(options, tuple(field.name for field in fields(Setting) if field.name != "mesh"))
    return Setting(MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh, **options)


def check_setting(setting: Setting) -> None:
    """Raises: MeshError, ModelError or PlanError with every mistake that the setting alone shows."""
    problems = [] if setting.mesh.names else [Problem("no-axes", "a mesh needs named axes", fix="--mesh tp=8")]
    if setting.reduce_dtype is not None and ITEM_BYTES[setting.reduce_dtype] != setting.gradient_bytes:
        what = (
            f"sums of gradients in {setting.reduce_dtype} are not predicted, only those of {setting.gradient_bytes} "
            "bytes"
        )
        raise ModelError(Problem("bad-option", f"reduce_dtype: {what}", fix="leave reduce_dtype out"))
    if problems := problems + setting.check_on(setting.mesh):
        raise MeshError(*problems)
    setting.pipeline()
    if setting.batch % setting.step_microbatches:
        count = setting.step_microbatches
        what = f"a batch of {setting.batch} sequences per data rank cannot be split into {count} microbatches"
        raise ModelError(Problem("indivisible-batch", what, fix=f"use a batch of {count}, {2 * count}, ..."))
