"""What each rank does in the test of handshakes of computations that take turns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import torch
import torch.distributed as dist

from parallelize.base.errors import ParallelizeError, Problem
from parallelize.comm.groups import Group
from parallelize.comm.turns import run_in_turns
from parallelize.ops.matmul import op_handshake

CPU = torch.device("cpu")


def after_a_disagreement(rank: int, reports: bool) -> list[str]:
    """What lines end with: a first one that ranks share, one in which the second rank differs or fails, and two good
    ones."""
    group = Group(dist.group.WORLD)  # type: ignore[arg-type]
    outcomes = []

    def compare(line: str) -> None:
        try:
            if line == "bad" and rank and reports:
                op_handshake.report_failure(group, CPU, Problem("out-of-memory", "this rank"))
                outcomes.append("reported")
                return
            op_handshake.agree(group, CPU, f"{line} {rank}" if line == "bad" else line)
            outcomes.append("ok")
        except ParallelizeError as error:
            outcomes.append(error.slugs[0])

    with ThreadPoolExecutor(1) as worker, patch.object(op_handshake, "_STORE_TIMEOUT_S", 3.0):
        run_in_turns(lambda: [compare(line) for line in ("a", "bad", "a", "b")], lambda: None, worker)
    return outcomes
