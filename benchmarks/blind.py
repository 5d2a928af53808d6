"""The planner's score on rows that others measured: time, order of layouts, memory verdicts, intervals.

    python -m benchmarks.blind ROWS.csv [--source TEXT] [--json FILE] [--picture FILE.svg]

| column | what |
|---|---|
| median, p90, bias | of the logarithm of estimated over measured step time: of its size, and of itself |
| tau | Kendall's, of the layouts of one model on as many GPUs with one batch and sequence: 1 is the same order |
| regret | how much longer the layout takes that is ranked first than the best one that was measured: median and most |
| ran -> out | of rows that ran, those that are said not to fit; out -> out: of rows that ran out of memory |
| peak | median of the logarithm's size of estimated over measured memory |
| covered | rows whose measured time is in the interval that 90% should be in |

Rows are as in `calibration.csv`, the file that constants were fitted on; others score what was not. A figure stands
with its 90% bootstrap interval in the JSON. Mixtures and 8-bit rows are scored apart.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.blind_rows import Case, cases, read_rows
from benchmarks.blind_score import Predicted, by_source, score
from benchmarks.record import write_record
from parallelize.tools.analysis.cost.intervals import interval_of
from parallelize.tools.analysis.cost.memory import device_bytes
from parallelize.tools.analysis.measure import measure
from parallelize.tools.analysis.outline.decoder import Decoder
from parallelize.tools.analysis.outline.outlined import OutlinedSubject


def predictions(every: Sequence[tuple[dict[str, str], Case | str]]) -> Iterator[Predicted]:
    """Of the rows that are not left out, one after another."""
    subjects: dict[Decoder, OutlinedSubject] = {}
    for _, case in every:
        if isinstance(case, str):
            continue
        began = time.process_time()
        first = case.decoder not in subjects
        subject = subjects.setdefault(case.decoder, OutlinedSubject(case.decoder))
        _, memories, step = measure(subject, case.setting, case.machine, by_segment=False, walks=False)
        tensors = max(memory.peak for memory in memories)
        memory = case.machine.memory_bytes
        peak, least = (device_bytes(tensors, case.setting, memory, at_limit=at_limit) for at_limit in (False, True))
        interval = interval_of(step.step_s, case.setting, case.machine, has_experts=bool(case.decoder.experts))
        fits = least <= memory
        yield Predicted(case, step.step_s, tuple(interval), peak, fits, time.process_time() - began, first)


def _line(name: str, n_out: int, figures: dict[str, Any]) -> str:
    def of(key: str, form: str = "{:.1%}") -> str:
        figure = figures[key]
        return form.format(figure["value"]) if figure is not None else "-"

    regret = f"{of('regret_median')} {of('regret_most')}" if figures["regret_median"] is not None else "-"
    columns = (
        f"{figures['rows']}", f"{n_out}", of("median"), of("p90"), of("bias", "{:+.1%}"), of("tau", "{:.2f}"), regret,
        of("ran_said_out"), of("out_said_out"), of("peak_median"), of("coverage"),
    )  # fmt: skip
    return f"{name[:44]:<44} " + " ".join(f"{column:>{width}}" for column, width in zip(columns, _WIDTHS, strict=True))


_WIDTHS = (5, 5, 7, 7, 7, 5, 13, 8, 8, 6, 7)
_HEAD = ("rows", "out", "median", "p90", "bias", "tau", "regret", "ran>out", "out>out", "peak", "covered")


def report(rows: Sequence[Predicted], left_out: Counter[str]) -> tuple[list[str], dict[str, Any]]:
    """(lines, data) of all figures. left_out: source -> rows without a fact."""
    head = f"{'':<44} " + " ".join(f"{name:>{width}}" for name, width in zip(_HEAD, _WIDTHS, strict=True))
    lines, data = [head], {}
    for name, of_source in sorted(by_source(rows).items()):
        data[name] = score(of_source)
        lines.append(_line(name, left_out[name], data[name]))
    dense = [row for row in rows if row.case.kind == "dense"]
    for name, some in (("all dense rows of 16 bits", dense), ("all rows", rows)):
        data[name] = score(some)
        lines.append(_line(name, sum(left_out.values()), data[name]))
    timed = sorted(row.row_s for row in rows if not row.first)
    if timed:
        data["row_ms"] = {"median": timed[len(timed) // 2] * 1e3, "most": timed[-1] * 1e3, "n": len(timed)}
        lines += [
            "",
            "a row after the first of its model: {median:.1f} ms, at most {most:.0f} ms".format(**data["row_ms"]),
        ]
    return lines, data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--source", metavar="TEXT", help="only rows whose source contains it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="predicted over measured, as SVG")
    args = parser.parse_args()
    every = list(cases(read_rows(args.rows, args.source)))
    reasons = Counter((row.get("source", ""), why) for row, why in every if isinstance(why, str))
    rows = list(predictions(every))
    left_out = Counter({source: 0 for source, _ in reasons})
    for (source, _), count in reasons.items():
        left_out[source] += count
    lines, data = report(rows, left_out)
    print("\n".join(lines))
    for (source, why), count in reasons.most_common():
        print(f"left out: {count} of {source}: {why}")
    data["left_out"] = [{"source": source, "why": why, "rows": count} for (source, why), count in reasons.items()]
    if args.picture is not None:
        from benchmarks.blind_picture import draw

        draw(args.picture, rows)
    write_record(args.json, data)


if __name__ == "__main__":
    main()
