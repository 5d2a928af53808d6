"""`python -m tests.matrix run FEATURE KIND AXIS`: see the package."""

from __future__ import annotations

import sys
import time

from tests.matrix.cells import cells_of, run_cell
from tests.matrix.feature import load_features
from tests.matrix.kinds import KINDS


def main() -> None:
    import torch

    torch.set_num_threads(1)
    _, feature, *rest = sys.argv[1:]
    kinds = rest[:1] if rest and rest[0] != "all" else list(KINDS)
    for kind in kinds:
        for axis in rest[1:] or cells_of(load_features()[feature], kind):
            began = time.perf_counter()
            verdict = run_cell(feature, kind, axis)
            print(f"{feature:20} {kind:12} {axis:12} {time.perf_counter() - began:5.1f} s  {verdict}", flush=True)
            if rest[1:]:
                print(verdict.trace)


if __name__ == "__main__":
    main()
