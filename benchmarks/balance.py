"""How evenly compute is spread over ranks for drawn lengths and routes, before and after rows, stages and experts are
balanced. Arithmetic on one process, no GPU.

    python -m benchmarks.balance [--steps 8]

Lengths are log-normal (median 665 tokens, sigma 1.0, cut at 32,768), as those of public sets for fine-tuning. Tokens of
experts follow Zipf's law with a given exponent, in an order of their own in each layer, and no expert gets more than
one choice of each token. Sources: the thread of NeMo-RL #1248; Zoph et al., ST-MoE, arXiv:2202.08906, for skewed
routes.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

from benchmarks.record import write_record
from parallelize import LoadBalance, LoadRecord
from parallelize.plan.models.model_source import source_of
from parallelize.tools.analysis.cost.setting import make_setting
from parallelize.tools.analysis.recorded_load import load_balance
from parallelize.tools.analysis.subject import Subject

LLAMA, MIXTURE = "llama-3-8b", "qwen3-235b-a22b"
WAYS = {"rows": {}, "joined": {"joined": True}, "lockstep": {"joined": True, "lockstep": True}}


def lengths_of(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [min(32768, max(16, int(math.exp(draw.gauss(6.5, 1.0))))) for _ in range(count)]


def routes_of(layers: int, experts: int, k: int, exponent: float, seed: int) -> list[list[float]]:
    """Fractions of choices by layer and expert."""
    draw, routes = random.Random(seed), []
    for _ in range(layers):
        shares = [(n + 1) ** -exponent for n in range(experts)]
        for _ in range(50):  # no token chooses an expert twice
            total = sum(shares)
            shares = [min(share / total, 1 / k) for share in shares]
        draw.shuffle(shares)
        routes.append([1e6 * share for share in shares])
    return routes


class Table:
    """Rows of one table, printed and recorded."""

    def __init__(self, steps: int):
        self.steps, self.subjects, self.rows = steps, {name: Subject(source_of(name)) for name in (LLAMA, MIXTURE)}, []

    def add(self, model: str, mesh: str, samples: int, way: str, routes=None, **options) -> LoadBalance:
        """samples: of a data rank and step."""
        subject = self.subjects[model]
        setting = subject.complete(make_setting(mesh, {"sequence": 4096, "dtype": "bfloat16", **options}))
        batch = samples * setting.size("dp")
        record = LoadRecord(lengths_of(batch * self.steps, batch), routes, batch, **WAYS[way])
        balance = load_balance(subject, setting, record)
        lines = {
            line.name: (round(line.before, 4), round(line.after, 4), round(line.best, 4)) for line in balance.lines
        }
        bounds = "; ".join(f"{line.name}: {line.bound}" for line in balance.lines if line.bound)
        text = "  ".join(f"{name} {before:.3f} > {after:.3f}" for name, (before, after, _) in lines.items())
        print(f"{model:16} {mesh:14} {samples:3} {way:9} {options.get('ep', 1):3}  {text}  {bounds}", flush=True)
        values = {"samples": samples, "way": way, **{k: v for k, v in options.items() if k != "dtype"}}
        self.rows.append({"model": model, "mesh": mesh, **values, "lines": lines, "bounds": bounds})
        return balance


def measure(steps: int) -> list[dict]:
    table = Table(steps)
    for samples in (16, 64):
        for dp in (4, 16, 64):
            for way in WAYS:
                table.add(LLAMA, f"dp={dp}", samples, way, num_microbatches=4)
    for pp in (2, 4, 8):
        table.add(LLAMA, f"pp={pp},dp=4", 64, "lockstep", num_microbatches=2 * pp)
    for exponent in (0.5, 1.0, 1.5):
        for ep in (4, 8, 16):
            routes = routes_of(94, 128, 8, exponent, ep)
            print(f"Zipf {exponent}, hottest {max(map(max, routes)) / sum(routes[0]):.3f}", end="  ")
            table.add(MIXTURE, f"dp={ep}", 64, "lockstep", routes, ep=ep, num_microbatches=4)
            table.rows[-1]["zipf"] = exponent
    for pp, dp, ep in ((2, 8, 4), (4, 16, 8), (8, 32, 16)):
        routes = routes_of(94, 128, 8, 0.5, pp)
        table.add(MIXTURE, f"pp={pp},dp={dp}", 64, "lockstep", routes, ep=ep, num_microbatches=2 * pp)
        table.rows[-1]["zipf"] = 0.5
    return table.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="global batches that are drawn (8)")
    parser.add_argument("--json", type=Path, help="a file for the record")
    options = parser.parse_args()
    rows = measure(options.steps)
    write_record(options.json, {"steps": options.steps, "rows": rows})


if __name__ == "__main__":
    main()
