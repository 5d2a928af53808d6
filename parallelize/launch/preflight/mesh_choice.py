"""The mesh of the ranks that there are: the file's where their number is the same, else what `fit` finds fastest.

The global batch stays: fewer data ranks compute more microbatches of the same size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from parallelize.base.errors import LaunchError, ParallelizeError, Problem
from parallelize.base.mesh import SAMPLE_AXES, MeshSpec
from parallelize.launch.config.run_config import RunConfig
from parallelize.plan.options import NAMES, Options
from parallelize.tools.analysis.cost.machine import Machine
from parallelize.tools.analysis.fit import fit
from parallelize.tools.analysis.subject import Subject

_OVER_TP = ("sequence_parallel", "loss_parallel")
_SEARCHED = ("num_microbatches",)
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Adafactor": "adafactor", "Lion": "lion"}


@dataclass(frozen=True)
class ChosenMesh:
    """A mesh with the options that it needs. why: one line, empty for the file's own mesh."""

    mesh: MeshSpec
    options: Options
    why: str = ""

    def as_data(self) -> dict[str, Any]:
        """Plain values, which ranks send."""
        return {"mesh": list(self.mesh.axes), "options": self.options.explicit(), "why": self.why}

    @staticmethod
    def from_data(data: dict[str, Any]) -> ChosenMesh:
        mesh = MeshSpec([(str(name), int(size)) for name, size in data["mesh"]])
        return ChosenMesh(mesh, Options(**data["options"]), data["why"])


def choose_mesh(config: RunConfig, ranks: int, subject: Subject, machine: Machine, *, other: bool) -> ChosenMesh:
    """The mesh for a number of ranks.

    Args:
        other: whether the mesh may be another one than the file's, as it may after a failure and with `mesh: auto`.

    Raises: LaunchError `wrong-world-size`, `no-mesh-fits`.
    Cost: seconds of `fit`, where the file's mesh has another number of ranks.
    """
    if config.mesh is not None and config.mesh.world_size == ranks:
        return ChosenMesh(config.mesh, config.options_on(config.mesh))
    if config.mesh is not None and not other:
        what = f"the mesh {config.mesh} has {config.mesh.world_size} ranks, and there are {ranks}"
        fix = f"start {config.mesh.world_size} ranks; or `mesh: auto`, or --restarts N, which choose a mesh that fits"
        raise LaunchError(Problem("wrong-world-size", what, config.source, fix=fix))
    return _fitted(config, ranks, subject, machine)


def _fitted(config: RunConfig, ranks: int, subject: Subject, machine: Machine) -> ChosenMesh:
    """The fastest mesh by `fit`; of more ranks than can share the batch, `fit` names the reasons."""
    explicit = {name: value for name, value in config.options.explicit().items() if name not in _SEARCHED}
    for name in _OVER_TP:
        explicit.pop(name, None)  # `fit` sets them where there is a tp to set them for
    if config.data.microbatch is not None:
        explicit["num_microbatches"] = None
    try:
        best = fit(
            subject,
            ranks,
            machine,
            global_batch=config.data.global_batch,
            sequence=config.data.sequence,
            optimizer=OPTIMIZERS.get(config.optimizer.name, "adamw"),
            dtype=explicit.pop("dtype", None),
            most=1,
            **{name: value for name, value in explicit.items() if value is not None},
        ).best[0]
    except ParallelizeError as error:
        if _lacks_plan(error) and config.data.global_batch % ranks == 0:
            mesh = MeshSpec(dp=ranks)
            options = _with_choices_of(config, config.options, mesh)
            return ChosenMesh(mesh, options, f"{ranks} ranks: mesh {mesh}, as the model has no plan for other axes")
        what = f"no mesh of {ranks} ranks trains this run: {error.problems[0].what}"
        raise LaunchError(
            Problem("no-mesh-fits", what, config.source, error.problems[0].rows, error.problems[0].fix)
        ) from error
    setting = best.setting
    mesh = MeshSpec([(axis, size) for axis, size in setting.mesh.axes if size > 1 or axis == "dp"])
    options = Options(**{name: getattr(setting, name) for name in NAMES if getattr(setting, name) is not None})
    options = _with_choices_of(config, options, mesh)
    was = f"the file's mesh {config.mesh} has {config.mesh.world_size}" if config.mesh is not None else "mesh: auto"
    return ChosenMesh(mesh, options, f"{ranks} ranks: mesh {mesh} by `fit` ({was})")


def _lacks_plan(error: ParallelizeError) -> bool:
    """Whether `fit` has rejected meshes because the model has no plan, so that its data axes alone can be used."""
    texts = [problem.slug for problem in error.problems] + [
        text for problem in error.problems for _, text in problem.rows
    ]
    return any("no-plan-for-model" in text for text in texts)


def _with_choices_of(config: RunConfig, options: Options, mesh: MeshSpec) -> Options:
    """What the file chooses about tp, where there is one, and microbatches of its size."""
    changes: dict[str, Any] = {}
    for name in _OVER_TP:
        value = getattr(config.options, name)
        changes[name] = (options.explicit().get(name) if value is None else value) if mesh.ranks("tp") > 1 else None
    batch = config.data.global_batch // mesh.ranks(*SAMPLE_AXES)
    if (size := _microbatch(config)) is not None:
        changes["num_microbatches"] = batch // math.gcd(batch, size)
    return replace(options, **changes)


def _microbatch(config: RunConfig) -> int | None:
    """Rows of a microbatch as the file has them, on its own mesh."""
    if config.data.microbatch is not None or config.mesh is None:
        return config.data.microbatch
    return max(1, config.batch_of(config.mesh) // config.options.complete().microbatches(config.mesh))
