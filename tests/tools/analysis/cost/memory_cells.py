"""Drawn runs whose peak of live bytes is compared with what `explain` says: a kind of model on a mesh with options.

    python -m tests.tools.analysis.cost.memory_cells [NUMBER ...] [--cells 200]

prints each cell with both numbers, and the cells that differ by more than `WITHIN`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parallelize.base.errors import ParallelizeError
from parallelize.plan.options import Options
from tests.tools.analysis.cost.explain_jobs import peak_of_step, source_of

WITHIN = 0.02
CELLS = 200
_SCORES = "PyTorch's attention on CPUs writes the scores of heads of two widths, in bfloat16 twice"
_TIES = "gradients of a tied weight on two stages"
_SCATTER = "gloo copies the input of a reduce-scatter"
_UNITS = "under ZeRO 3 with stages, or with a fused loss and recompute, what is gathered or on its way at the peak"
_V = "schedules whose ranks have the first and the last stage, with recompute: what waits between its two halves"
APART = {
    12: _SCORES, 106: _SCORES, 143: _SCORES, 151: _SCORES, 182: _SCORES, 21: _TIES, 119: _TIES, 186: _TIES,
    166: _TIES, 52: _SCATTER, 96: _SCATTER, 107: _UNITS, 130: _UNITS, 171: _UNITS, 121: _V, 147: _V,
}  # fmt: skip
"""Cells that differ by more, each with the reason as far as it is known."""
_KINDS = ("llama", "gpt2", "gemma3", "phi3", "opt", "bert", "mixtral", "deepseek_v3", "qwen3_moe")
_EXPERTS = ("mixtral", "deepseek_v3", "qwen3_moe")
_MESHES = (
    "tp=2", "dp=2", "pp=2", "cp=2", "dp=2,tp=2", "pp=2,tp=2", "pp=2,dp=2", "dp=4", "tp=4", "dp=2,cp=2", "pp=4",
    "dp_replicate=2,dp_shard=2", "cp=2,tp=2", "pp=2,cp=2",
)  # fmt: skip
_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v")
_LOSSES: tuple[dict[str, bool], ...] = ({}, {"loss_parallel": True}, {"fuse_loss": True})
ROWS, LENGTH, LAYERS = 8, 64, 8


@dataclass(frozen=True)
class MemoryCell:
    """One drawn run. options: of `parallelize_model`. optimizer: a name of `explain`'s."""

    number: int
    kind: str
    mesh: str
    options: dict[str, Any]
    optimizer: str

    @property
    def sizes(self) -> dict[str, int]:
        return {name: int(size) for name, size in (part.split("=") for part in self.mesh.split(","))}

    @property
    def ranks(self) -> int:
        ranks = 1
        for size in self.sizes.values():
            ranks *= size
        return ranks

    @property
    def model(self) -> dict[str, Any]:
        """Config fields that differ from those of the tiny model."""
        return {"num_hidden_layers": LAYERS, "vocab_size": 384}

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.number}: {self.kind} {self.mesh} {options} {self.optimizer}"


def drawn(number: int) -> MemoryCell:
    """The cell of a number: the same in every process. One that the options themselves refuse is drawn again."""
    draw = random.Random(number)
    while True:
        cell = _drawn(number, draw)
        try:
            Options(**cell.options)
            predicted_peaks(cell, quick=True)
        except ParallelizeError:
            continue
        return cell


def _drawn(number: int, draw: random.Random) -> MemoryCell:
    kind, mesh = draw.choice(_KINDS), draw.choice(_MESHES)
    options: dict[str, Any] = dict(draw.choice(_LOSSES))
    options["recompute"] = draw.choice(("off", "off", "selective", "full"))
    options["zero"] = draw.choice((0, 1, 2, 3)) if "dp" in mesh or "cp" in mesh else 0
    options["num_microbatches"] = draw.choice((2, 4, 8) if "pp" in mesh else (1, 1, 2, 4))
    if "tp" in mesh:
        options["sequence_parallel"] = draw.random() < 0.5
    if "pp" in mesh:
        options["schedule"] = draw.choice(_SCHEDULES)
    if kind in _EXPERTS and "pp" not in mesh and draw.random() < 0.5:
        options["ep"] = 2
    if options["zero"] > 1:
        options["defer"] = draw.random() < 0.3
    if draw.random() < 0.3:
        options["dtype"] = "bfloat16"
    return MemoryCell(number, kind, mesh, options, draw.choice(("adamw", "adamw", "sgd", "muon")))


def predicted_peaks(cell: MemoryCell, quick: bool = False) -> dict[int, int]:
    """The predicted peak of each pp rank, in bytes. quick: check the cell alone."""
    from parallelize.tools.analysis.cost.memory import memory_of
    from parallelize.tools.analysis.cost.setting import make_setting
    from parallelize.tools.analysis.subject import Subject, check

    options = {**cell.options, "batch": ROWS, "sequence": LENGTH, "transport": "gloo", "optimizer": cell.optimizer}
    subject = Subject(source_of(cell.kind, cell.model))
    setting = subject.complete(make_setting(cell.mesh, options))
    check(subject, setting)
    if quick:
        return {}
    schedule = setting.pipeline()
    return {rank: memory_of(subject.rank_step(setting, schedule, rank)).peak for rank in range(setting.size("pp"))}


def compared(cell: MemoryCell, pool: Any) -> list[tuple[int, int, int]]:
    """(pp rank, predicted, counted) of the first rank of each stage; others may have smaller shards."""
    predicted = predicted_peaks(cell)
    counted = pool.run(peak_of_step, cell.kind, cell.sizes, ROWS, LENGTH, cell.optimizer, cell.options, cell.model)
    return [(pp_rank, predicted[pp_rank], peak) for pp_rank, is_first, peak in counted if is_first]


def worst(rows: Iterable[tuple[int, int, int]]) -> float:
    """The largest relative error, with its sign: above 0, more is predicted than is counted."""
    return max((predicted / peak - 1 for _, predicted, peak in rows), key=abs)


def main() -> int:
    from tests.support.processes import Pool

    parser = argparse.ArgumentParser(prog="python -m tests.tools.analysis.cost.memory_cells", description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--cells", type=int, default=CELLS)
    arguments = parser.parse_args()
    pools, errors, failed = {size: Pool(size) for size in (2, 4)}, [], []
    for number in arguments.numbers or range(arguments.cells):
        cell = drawn(number)
        try:
            rows = compared(cell, pools[cell.ranks])
        except (AssertionError, ParallelizeError) as error:
            failed.append(cell)
            print(f"FAIL   {cell}\n  {str(error)[-600:]}", flush=True)
            continue
        errors.append(error := worst(rows))
        shown = "; ".join(f"pp {rank}: {said:,} said, {peak:,} counted" for rank, said, peak in rows)
        print(f"{error:+7.2%} {cell}: {shown}", flush=True)
        if abs(error) > WITHIN:
            failed.append(cell)
    sizes = sorted(map(abs, errors))
    print(f"{len(errors)} cells; error {statistics.median(sizes):.2%} in the median, at most {sizes[-1]:.2%}")
    print(f"{len(failed)} beyond {WITHIN:.0%}: {' '.join(str(cell.number) for cell in failed)}")
    for pool in pools.values():
        pool.close()
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
