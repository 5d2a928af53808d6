"""What `explain` predicts of the run's own step: memory of each pp rank, operations, messages by axis."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from parallelize.base.errors import ParallelizeError
from parallelize.base.mesh import SAMPLE_AXES
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.environment.rank_map import crossing_groups
from parallelize.launch.preflight.base_model import source_of_run
from parallelize.launch.preflight.mesh_choice import OPTIMIZERS, ChosenMesh
from parallelize.plan.options import Options
from parallelize.tools.analysis.cost.machine import Machine, load_machine, profile_of
from parallelize.tools.analysis.cost.memory import RankMemory
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.explain import explain_subject
from parallelize.tools.analysis.measure import model_flops
from parallelize.tools.analysis.show.explanation import Explanation
from parallelize.tools.analysis.subject import Subject


@dataclass(frozen=True)
class Predicted:
    """A prediction. explanation is None where the model's forward cannot run on tensors without values: `why_not` says
    why."""

    subject: Subject
    setting: Setting
    explanation: Explanation | None
    flops_per_step: float
    why_not: str = ""

    def summary(self) -> Summary:
        """What other ranks need of it."""
        reports = self.explanation.ranks if self.explanation is not None else ()
        message_s: dict[str, float] = {}
        for report in reports:
            for total in report.totals:
                message_s[total.axis] = max(message_s.get(total.axis, 0.0), total.seconds)
        memory = {report.pp_rank: _parts(report.memory) for report in reports}
        return Summary(self.setting.describe(), self.flops_per_step, memory, message_s, self.why_not)


@dataclass(frozen=True)
class Summary:
    """Figures of a prediction: plain values.

    Attributes:
        memory: of the analyzed pp ranks, bytes by part, with `peak`. message_s: seconds of messages by axis; estimates.
    """

    setting: str
    flops_per_step: float
    memory: dict[int, dict[str, int]]
    message_s: dict[str, float]
    why_not: str = ""

    def memory_of(self, pp_rank: int) -> dict[str, int]:
        """Of a rank of the pipeline; those between the analyzed ones count as the first. Empty where nothing is
        known."""
        return self.memory.get(pp_rank) or next(iter(self.memory.values()), {})

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Summary:
        data = json.loads(text)
        data["memory"] = {int(rank): parts for rank, parts in data["memory"].items()}
        return Summary(**data)


def _parts(memory: RankMemory) -> dict[str, int]:
    """Bytes by part, and the peak."""
    parts = {name: getattr(memory, name) for name in ("parameters", "gradients", "optimizer", "activations", "buffers")}
    return {"peak": memory.peak, **parts}


def subject_of(config: RunConfig) -> Subject:
    return Subject(source_of_run(config.model), config.plan or None)


def machine_of(config: RunConfig, device: str) -> Machine:
    """The profile that the file names, else that of this process's device. A process that uses no GPU assumes an
    H100."""
    if config.hardware or not device.startswith("cuda"):
        return load_machine(config.hardware or "cpu")
    return load_machine(profile_of(torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""))


def setting_of(config: RunConfig, chosen: ChosenMesh, device: str) -> Setting:
    options: dict[str, Any] = chosen.options.explicit()
    return Setting(
        chosen.mesh,
        batch=config.data.global_batch // chosen.mesh.ranks(*SAMPLE_AXES),
        sequence=config.data.sequence,
        optimizer=OPTIMIZERS.get(config.optimizer.name, "adamw"),
        transport="nccl" if device.startswith("cuda") else "gloo",
        **{field.name: options[field.name] for field in fields(Options) if field.name in options},
    )


def predict(config: RunConfig, chosen: ChosenMesh, subject: Subject, machine: Machine, device: str) -> Predicted:
    """Cost: a recording of one microbatch on tensors without values, on one rank."""
    setting = subject.complete(setting_of(config, chosen, device))
    try:
        explanation = explain_subject(subject, setting, machine)
        return Predicted(subject, setting, explanation, model_flops(subject, setting))
    except Exception as error:  # any model may fail on meta tensors; the run itself does not depend on it
        first = str(error).strip().splitlines()[:1]
        return Predicted(subject, setting, None, 0.0, f"{type(error).__name__}: {''.join(first)[:200]}")


# -- placement -------------------------------------------------------------------------------------------------------
# Which groups of ranks cross nodes: those of tp and of experts should not, and what it costs by `explain` where they
# do.


def placement_warnings(predicted: Predicted, machine: Machine, host_of: Mapping[int, str]) -> list[str]:
    """One line for each axis whose groups cross nodes."""
    mesh, options = predicted.setting.mesh, predicted.setting
    crossing = crossing_groups(mesh, options.expert_ranks, host_of)
    if not crossing:
        return []
    cost = _cost(predicted, machine, Counter(host_of.values()).most_common(1)[0][1])
    return [
        f"{len(groups)} groups of {axis} cross nodes, such as ranks {list(groups[0])}{cost}: order hosts so that "
        f"{axis} stays inside a node, or make it smaller"
        for axis, groups in crossing.items()
    ]


def _cost(predicted: Predicted, machine: Machine, ranks_per_host: int) -> str:
    """How much longer a step takes than with all ranks on one node, by `explain`."""
    try:
        here = explain_subject(
            predicted.subject, predicted.setting, replace(machine, node_ranks=ranks_per_host)
        ).time.in_turn_s
        inside = replace(machine, node_ranks=predicted.setting.mesh.world_size)
        best = explain_subject(predicted.subject, predicted.setting, inside).time.in_turn_s
    except ParallelizeError:
        return ""
    return f"; a step takes about {here * 1e3:,.1f} ms instead of {best * 1e3:,.1f} ms (estimate)"
