"""An outlined model in settings: the same interface as `Subject`, whose recordings it has computed instead. Torch-free.

`measure` takes either: what a step costs is computed by the same functions, from segments, parameters and messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from parallelize.axes.pipeline.schedules import Schedule
from parallelize.base.mesh import folded
from parallelize.plan.parameter_shards import ParameterShard, Splits
from parallelize.plan.schema import Cuts
from parallelize.plan.stages import Stages
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.cost.training_step import RankStep
from parallelize.tools.analysis.outline.decoder import Decoder, Weight
from parallelize.tools.analysis.outline.parts import DecoderParts, Work, segment
from parallelize.tools.analysis.record.trace_data import (
    LAYERS,
    LOSS,
    MicrobatchSegments,
    MicrobatchTrace,
    Segment,
    StageBoundary,
)

SPLIT = ("zbv", "zb1p", "interleaved_zb", "dualpipe_v")  # schedules in which dgrad and wgrad run apart
FIRST, LAST = "embedding", "head"


@dataclass
class OutlinedSubject:
    """A decoder. Traces and parameters are kept for the next setting."""

    decoder: Decoder
    _traces: dict[tuple, MicrobatchTrace] = field(default_factory=dict)

    def rank_step(
        self, setting: Setting, schedule: Schedule, pp_rank: int, every_layer: bool = False, to_one_rank: bool = False
    ) -> RankStep:
        """The step of one pp rank. every_layer, to_one_rank: as of `Subject`; layers are equal, and tokens even."""
        stages = self.stages(schedule)
        shards = list(self._shards(setting, schedule, pp_rank, stages))
        trace = self.trace(setting)
        return RankStep(
            trace, stages, setting, schedule, pp_rank, shards=shards, split_trace=self._split(trace, setting, schedule)
        )

    def model_flops(self, setting: Setting) -> float:
        """Operations of one step, without recompute."""
        sequences = setting.batch * setting.size("dp_replicate", "dp", "dp_shard")
        return 3.0 * self.decoder.forward_flops(setting.sequence) * sequences

    # -- stages -------------------------------------------------------------------------------------------------------

    @property
    def units(self) -> tuple[str, ...]:
        return (FIRST, *(f"{LAYERS}.{index}" for index in range(self.decoder.layers)), LAST)

    def stages(self, schedule: Schedule) -> Stages:
        """Layers are divided evenly; where they cannot be, the first and the last stage, which have the ends, get
        fewer."""
        count, layers = schedule.num_stages, self.decoder.layers
        sizes = [layers // count] * count
        more = layers - sum(sizes)
        for index in [*range(1, count - 1), 0, count - 1][:more] if count > 1 else []:
            sizes[index] += 1
        starts, at = [0], 1
        for size in sizes[:-1]:
            at += size
            starts.append(at)
        return Stages(self.units, tuple(starts), 1, Cuts(layers=LAYERS))

    # -- traces -------------------------------------------------------------------------------------------------------

    def trace(self, setting: Setting) -> MicrobatchTrace:
        """One microbatch of all parts."""
        key = (
            setting.size("tp"), setting.size("cp"), setting.microbatch_size, setting.sequence, setting.kernels,
            setting.system, setting.matmul_dtype, setting.ulysses, setting.gathers_keys, setting.matmuls_again,
            setting.sequence_parallel, setting.loss_parallel, setting.recompute, setting.recompute_every, setting.ep,
            setting.etp, setting.gradient_bytes, setting.attention_again,
        )  # fmt: skip
        if key not in self._traces:
            self._traces[key] = self._trace(setting)
        return self._traces[key]

    def _trace(self, setting: Setting) -> MicrobatchTrace:
        parts = DecoderParts(self.decoder, setting)
        kinds = {f"{LAYERS}.{index}": self._kind(index, setting) for index in range(self.decoder.layers)}
        representatives: dict[str, str] = {FIRST: FIRST, LAST: LAST}
        first_of: dict[tuple[bool, bool], str] = {}
        for unit, kind in kinds.items():
            representatives[unit] = first_of.setdefault(kind, unit)
        forward = [segment(FIRST, parts.first_forward(), (parts.boundary_bytes,))]
        backward = [
            segment(LOSS, Work(), ()),
            segment(LAST, parts.last_backward(), (parts.last_peak, -parts.last_peak, -parts.last_kept)),
        ]
        for (recomputed, dense), unit in first_of.items():
            before, after = _layer(parts, unit, recomputed, dense, setting)
            forward.append(before)
            backward.append(after)
        forward.append(segment(LAST, parts.last_forward(), (parts.last_kept,)))
        backward.append(segment(FIRST, parts.first_backward(), (-parts.boundary_bytes,)))
        segments = MicrobatchSegments(tuple(forward), tuple(backward))
        boundary = StageBoundary(((parts.boundary_bytes, True),))
        return MicrobatchTrace(segments, segments, dict.fromkeys(self.units[1:], boundary), representatives)

    def _split(self, trace: MicrobatchTrace, setting: Setting, schedule: Schedule) -> MicrobatchTrace | None:
        """The trace in which dgrad and wgrad run apart, where the schedule does that, as `Pipeline` decides."""
        if setting.schedule not in SPLIT or setting.recompute != "off" or setting.zero == 3 or setting.size("pp") == 1:
            return None
        halves = [_halves(each) for each in trace.later.backward]
        first, second = (tuple(half[index] for half in halves) for index in (0, 1))
        segments = MicrobatchSegments(trace.later.forward, first, second)
        return replace(trace, first=segments, later=segments)

    def _kind(self, index: int, setting: Setting) -> tuple[bool, bool]:
        """(whether a layer is recomputed, whether a layer of a mixture has no experts)."""
        recomputed = setting.recompute != "off" and index % setting.recompute_every == 0
        return recomputed, index < self.decoder.dense_layers

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _shards(self, setting: Setting, schedule: Schedule, pp_rank: int, stages: Stages) -> Iterator[ParameterShard]:
        decoder = self.decoder
        tied = decoder.tied and setting.size("pp") == 1
        for stage in (stage for stage, rank in enumerate(schedule.stage_ranks) if rank == pp_rank):
            for unit in stages.units_of(stage):
                weights = {FIRST: decoder.first_weights, LAST: decoder.last_weights}.get(unit, decoder.layer_weights)()
                dense = unit.startswith(LAYERS) and int(unit.rpartition(".")[2]) < decoder.dense_layers
                for weight in weights:
                    if not (tied and weight.name == "head") and not (dense and weight.name == "router"):
                        yield _shard(self._dense(weight) if dense else weight, unit, stage, setting, decoder)

    def _dense(self, weight: Weight) -> Weight:
        """The weight of a layer without experts in the place of that of an expert."""
        if not weight.is_expert:
            return weight
        own = self.decoder
        width = own.dense_ffn or own.ffn
        shape = (own.gates * width, own.hidden) if weight.name.endswith("fc1") else (own.hidden, width)
        return Weight(weight.name, shape, weight.tp_dim)


def _halves(whole: Segment) -> tuple[Segment, Segment]:
    """(dgrad, wgrad) of a backward: of each linear's two matmuls one in each; all else is dgrad's."""
    linears = [kernel for kernel in whole.kernels if kernel.is_matmul and not kernel.attention]
    others = [kernel for kernel in whole.kernels if not kernel.is_matmul or kernel.attention]
    dgrad = replace(whole, kernels=[*others, *linears[::2]], launches=whole.launches / 2)
    return dgrad, Segment(whole.unit, kernels=linears[1::2], launches=whole.launches / 2)


def _layer(parts: DecoderParts, unit: str, recomputed: bool, dense: bool, setting: Setting) -> tuple[Segment, Segment]:
    """(forward, backward) of a layer."""
    forward, backward = parts.layer_forward(dense), parts.layer_backward(dense)
    kept, peak = parts.layer_kept(dense), parts.layer_peak(dense)
    if not recomputed:
        if not setting.attention_again:
            return segment(unit, forward, (kept,)), segment(unit, backward, (peak, -peak, -kept))
        again, less = parts.attention_again()
    elif setting.recompute == "selective":
        again, less = parts.elements_again(dense)
    else:
        again, less = forward, kept - parts.boundary_bytes
    return (
        segment(unit, forward, (kept, -less)),
        segment(unit, again + backward, (less + peak, -less - peak, less - kept)),
    )


def _shard(weight: Weight, unit: str, stage: int, setting: Setting, decoder: Decoder) -> ParameterShard:
    tp, is_expert = setting.size("tp"), weight.is_expert
    folds = is_expert and setting.ep > 1
    split = max(setting.etp, 1) if folds else tp
    shape = tuple(-(-size // split) if dim == weight.tp_dim else size for dim, size in enumerate(weight.shape))
    mesh = setting.mesh
    if is_expert:
        shape = (decoder.experts // (setting.ep if folds else 1) * shape[0], *shape[1:])
    if folds:
        mesh = folded(setting.mesh, setting.expert_ranks)
    ranks = mesh.ranks("edp") if folds else setting.shard_ranks
    zero = setting.zero
    splits = Splits(ranks if zero == 3 else 1, ranks if zero >= 2 else 1, ranks if zero >= 1 else 1)
    name = f"{unit}.{weight.name}"
    return ParameterShard(
        name, (name,), shape, True, stage, False, splits, (), (), unit if unit not in (FIRST, LAST) else "",
        axis="ep" if folds else "tp",
    )  # fmt: skip
