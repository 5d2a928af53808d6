"""What each rank does during one overlapped gather, as a figure: which shard it multiplies, when it waits, what is
sent.

    torchrun --nproc-per-node 4 -m benchmarks.timeline --svg timeline.svg
    sudo python -m benchmarks.slow_link --rate 1gbit -- -m benchmarks.timeline --svg slow.svg

X_i is [rows/P, features] and W_i is [features, outs/P]: each rank multiplies every X_j by its own W_i, as X_j arrives.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import svg
from benchmarks.timing import join
from parallelize import all_gather_linear, destroy_groups
from parallelize.comm.groups import Group
from parallelize.ops.matmul.row_chunks import RowGather

Span = tuple[float, float, str, str]


def sent_bytes() -> int | None:
    """The bytes that this rank's network interface has sent so far; None where they are unknown."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    if name == "lo":  # shared by all ranks
        return None
    try:
        return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())
    except OSError:
        return None


class Recorder:
    """Records when each chunk arrives and how long its matmul takes."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.sent: list[tuple[float, int | None]] = []
        self.began = 0.0

    def now(self) -> float:
        return (time.perf_counter() - self.began) * 1e3

    def __enter__(self) -> Recorder:
        self.real = RowGather.arrivals
        recorder = self

        def arrivals(gather: Any) -> Iterator[Any]:
            waiting = recorder.now()
            for rank, box, left in recorder.real(gather):
                came = recorder.now()
                if came - waiting > 0.05:
                    recorder.spans.append((waiting, came, "wait", "waiting for rows"))
                recorder.sent.append((came, sent_bytes()))
                yield rank, box, left
                waiting = recorder.now()
                kind = "own rows" if rank == gather.group.rank else "rows of another rank"
                recorder.spans.append((came, waiting, f"X{rank}", kind))
                recorder.sent.append((waiting, sent_bytes()))

        RowGather.arrivals = arrivals  # type: ignore[method-assign]
        dist.barrier()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        RowGather.arrivals = self.real  # type: ignore[method-assign]

    def sent_in_matmuls(self) -> tuple[int, int] | None:
        """(bytes sent while matmuls ran, bytes sent from first to last)."""
        if not self.sent or self.sent[0][1] is None:
            return None
        sent_during = sum(b[1] - a[1] for a, b in zip(self.sent[::2], self.sent[1::2], strict=True))  # type: ignore[operator]
        return sent_during, self.sent[-1][1] - self.sent[0][1]  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--outs", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--svg", type=Path, default=Path("timeline.svg"))
    options = parser.parse_args()
    join()
    group = Group(dist.group.WORLD)  # type: ignore[arg-type]
    x = torch.randn(options.rows // group.size, options.features)
    weight = torch.randn(options.outs // group.size, options.features)

    def run() -> None:
        all_gather_linear(x, weight, group=group, overlap="chunked", chunks=options.chunks)

    run()
    run()
    with Recorder() as recorder:
        run()
    all_ranks: list[Any] = [None] * group.size
    dist.all_gather_object(all_ranks, (recorder.spans, recorder.sent_in_matmuls()))
    if group.rank == 0:
        title = (
            f"X [{options.rows}, {options.features}] gathered over {group.size} ranks in {options.chunks} chunks a "
            "shard"
        )
        svg.lanes(options.svg, title, [(f"rank {rank}, W{rank}", spans) for rank, (spans, _) in enumerate(all_ranks)])
        for rank, (spans, sent) in enumerate(all_ranks):
            busy = sum(stop - start for start, stop, label, _ in spans if label != "wait")
            line = f"rank {rank}: {spans[-1][1]:.1f} ms, {busy:.1f} of them in matmuls"
            if sent is not None:
                line += f"; {sent[0] / 1e6:.1f} of {sent[1] / 1e6:.1f} MB sent while matmuls ran"
            print(line)
        print(f"written: {options.svg}")
    destroy_groups()


if __name__ == "__main__":
    main()
