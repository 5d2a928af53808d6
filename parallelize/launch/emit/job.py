"""What every launch file needs: the command, the map of ranks, the time that a signal leaves for a save. Torch-free."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelize.base.errors import CheckpointError, LaunchError, Problem
from parallelize.base.files.paths import read_small
from parallelize.base.files.strict_json import read_json
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.environment.rank_map import RankMap, rank_map

SAVE_TIME = "save-time.json"
LEAST_LEAD_S, STEPS_S = 60, 30
_MOST_SAVE_S = 24 * 3600.0


@dataclass(frozen=True)
class Job:
    """A run as a launch file starts it.

    Attributes:
        name: of letters, digits and dashes. command: what each task runs. ranks: of nodes.
        lead_s: seconds before the end at which the signal is sent; save_s: what a save took, 0 where it is not known.
        gpus: whether ranks compute on GPUs. restarts: after failures.
    """

    name: str
    command: tuple[str, ...]
    ranks: RankMap
    lead_s: int
    save_s: float
    gpus: bool
    restarts: int

    @property
    def shell(self) -> str:
        return shlex.join(self.command)

    def remarks(self) -> list[str]:
        """Lines for the comments of the file."""
        how = f"the last save took {self.save_s:.1f} s" if self.save_s else "no save was measured yet"
        return [
            f"mesh {self.ranks.mesh}: {self.ranks.mesh.world_size} ranks, {self.ranks.ranks_per_node} on each of {self.ranks.nodes} nodes",
            *self.ranks.lines()[:16],
            f"signal {self.lead_s} s before the end: twice the save and {STEPS_S} s for a step ({how})",
            "exit status 75: stopped by a signal and saved; start it again",
        ]


def job_of(config: RunConfig, overrides: Sequence[str], ranks_per_node: int, restarts: int) -> Job:
    """The job of a run. Raises: LaunchError `no-mesh` without a mesh, and as `rank_map`."""
    if config.mesh is None:
        fix = "mesh: dp=2,tp=4; `parallelize fit` finds one"
        raise LaunchError(
            Problem("no-mesh", "a launch file needs a mesh, and the run has none", config.place("mesh"), fix=fix)
        )
    save_s = measured_save_s(config)
    restart = ("--restarts", str(restarts)) if restarts else ()
    return Job(
        name=re.sub(r"[^a-z0-9]+", "-", Path(config.source).stem.lower()).strip("-") or "run",
        command=("parallelize", "run", config.source, *overrides, *restart),
        ranks=rank_map(config.mesh, config.options.complete().expert_ranks, ranks_per_node),
        lead_s=max(LEAST_LEAD_S, config.grace_s, round(2 * save_s) + STEPS_S),
        save_s=save_s,
        gpus=config.device != "cpu",
        restarts=restarts,
    )


def save_time_file(config: RunConfig) -> Path:
    return Path(config.checkpoints.folder or ".") / "reports" / SAVE_TIME


def measured_save_s(config: RunConfig) -> float:
    """Seconds of the last save of this run; 0 where there was none, or a file that says something that no save took."""
    path = save_time_file(config)
    try:
        seconds = float(read_json(read_small(path.parent, path.name, 1 << 10), str(path))["save_s"])
    except (CheckpointError, ValueError, KeyError, TypeError, OverflowError):
        return 0.0
    return seconds if 0.0 <= seconds <= _MOST_SAVE_S else 0.0
