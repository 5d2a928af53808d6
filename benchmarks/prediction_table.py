"""What `fit` recommends for published models: a page whose table a browser sorts.

    python -m benchmarks.prediction_table [--html docs/images/predictions.html] [--models 3] [--gpus h100-sxm a100]

For each model, GPU and count: the mesh that `fit` ranks first, its step, MFU and memory, and between which values 90%
of such steps are. 4.2 million tokens a step, in sequences of 4,096; kernels as `--kernels` says. Pipelines are
interleaved: a schedule that `fit` must simulate would take minutes a row.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.record import write_record
from parallelize.base.errors import ParallelizeError
from parallelize.plan.models.model_source import read_model
from parallelize.tools.analysis.cost.intervals import memory_interval
from parallelize.tools.analysis.cost.machine import load_machine
from parallelize.tools.analysis.fit import fit
from parallelize.tools.analysis.subject import Subject

SEQUENCE, BATCH = 4096, 1024
SCHEDULE = "interleaved_1f1b"


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int) -> dict[str, int]:
    return dict(
        hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocab, max_position_embeddings=8192,
    )  # fmt: skip


MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "Llama 3.2 1B": ("llama", _sizes(2048, 8192, 16, 32, 8, 128256)),
    "Llama 3.2 3B": ("llama", _sizes(3072, 8192, 28, 24, 8, 128256)),
    "Llama 2 7B": ("llama", _sizes(4096, 11008, 32, 32, 32, 32000)),
    "Mistral 7B": ("llama", _sizes(4096, 14336, 32, 32, 8, 32000)),
    "Llama 3 8B": ("llama-3-8b", {}),
    "Llama 2 13B": ("llama", _sizes(5120, 13824, 40, 40, 40, 32000)),
    "Qwen 2.5 14B": ("llama", _sizes(5120, 13824, 48, 40, 8, 152064)),
    "Qwen 2.5 32B": ("llama", _sizes(5120, 27648, 64, 40, 8, 152064)),
    "LLaMA 33B": ("llama", _sizes(6656, 17920, 60, 52, 52, 32000)),
    "LLaMA 65B": ("llama", _sizes(8192, 22016, 80, 64, 64, 32000)),
    "Llama 3 70B": ("llama-3-70b", {}),
    "Llama 3.1 405B": ("llama-3.1-405b", {}),
}
"""Sizes as published in the models' config.json; Qwen 2.5 without its biases."""


def row(name: str, subject: Subject, gpu: str, count: int, kernels: str) -> dict[str, Any] | None:
    """The best setting; None where nothing fits."""
    machine = load_machine(gpu)
    options = {"global_batch": BATCH, "sequence": SEQUENCE, "kernels": kernels, "most": 1, "schedule": SCHEDULE}
    try:
        best = fit(subject, count, machine, **options).best[0]
    except ParallelizeError:
        return None
    setting, memory = best.setting, memory_interval(best.device_bytes)
    return {
        "model": name,
        "GPU": machine.name,
        "GPUs": count,
        "mesh": str(setting.mesh),
        "zero": setting.zero,
        "recompute": setting.recompute,
        "step s": round(best.step_s, 2),
        "90% from s": round(best.low_s, 2),
        "to s": round(best.high_s, 2),
        "MFU %": round(100 * best.mfu, 1),
        "from %": round(100 * best.mfu * best.step_s / best.high_s, 1),
        "to %": round(100 * best.mfu * best.step_s / best.low_s, 1),
        "memory GB": round(best.device_bytes / 1e9, 1),
        "from GB": round(memory.low / 1e9, 1),
        "to GB": round(memory.high / 1e9, 1),
        "scored": "not scored" if machine.not_scored else "yes",
    }


_SORT = """<script>
document.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
  const body = document.querySelector("tbody"), down = head.dataset.down = head.dataset.down ? "" : "1";
  const value = row => { const text = row.cells[column].textContent; return isNaN(text) ? text : Number(text); };
  [...body.rows].sort((a, b) => (value(a) > value(b) ? 1 : -1) * (down ? 1 : -1)).forEach(row => body.append(row));
}));
</script>"""


def page(rows: list[dict[str, Any]]) -> str:
    """HTML with one table, sorted by a click on a column's head."""
    heads = "".join(f"<th style='cursor:pointer'>{escape(name)}</th>" for name in rows[0])
    lines = ("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in each.values()) + "</tr>" for each in rows)
    return (
        "<!doctype html><meta charset='utf-8'><title>What fit recommends</title>\n"
        f"<h1>What fit recommends</h1>\n<p>{BATCH} sequences of {SEQUENCE} tokens a step. Estimates; a click on a head "
        f"sorts.</p>\n<table><thead><tr>{heads}</tr></thead>\n<tbody>\n"
        + "\n".join(lines)
        + f"\n</tbody></table>\n{_SORT}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", type=int, default=len(MODELS), metavar="N", help="the first N")
    parser.add_argument("--gpus", nargs="*", default=["h100-sxm", "a100", "h200", "b200"], metavar="PROFILE")
    parser.add_argument("--counts", nargs="*", type=int, default=[8, 64, 512], metavar="N")
    parser.add_argument("--kernels", default="compiled")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (source, sizes) in list(MODELS.items())[: args.models]:
        subject = Subject(read_model(source, sizes), None)
        for gpu in args.gpus:
            for count in args.counts:
                found = row(name, subject, gpu, count, args.kernels)
                print(found or f"{name} does not fit on {count} x {gpu}", file=sys.stderr, flush=True)
                rows += [found] if found is not None else []
                if args.html is not None and rows:
                    args.html.write_text(page(rows), encoding="utf-8")
    write_record(args.json, rows)


if __name__ == "__main__":
    main()
