"""A script on real gloo ranks, as under torchrun, but forked from the server that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path

from tests.support.processes import free_port, server_context


def run_script(script: Path, world_size: int, *arguments: str, timeout_s: float = 60.0) -> str:
    """Run a script with arguments in its folder on every rank; return what rank 0 prints.

    Raises: AssertionError with the output of all ranks, if one of them fails or is still running after `timeout_s`
        seconds.
    """
    context, port = server_context(), free_port()
    outputs = [script.with_name(f"output-of-rank-{rank}") for rank in range(world_size)]
    ranks = [
        context.Process(target=_run, args=(rank, world_size, port, script, outputs[rank], arguments), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout_s
    try:
        for process in ranks:
            process.join(max(deadline - time.monotonic(), 0))
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    texts = [output.read_text() if output.exists() else "" for output in outputs]
    assert codes == [0] * world_size, f"exit codes {codes}\n" + "\n".join(texts)
    return texts[0]


def _run(rank: int, world_size: int, port: int, script: Path, output: Path, arguments: tuple[str, ...]) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start workers,
    multiprocessing.set_start_method("fork", force=True)  # as under torchrun
    os.chdir(script.parent)
    sys.argv, sys.path = [str(script), *arguments], [str(script.parent), *sys.path]
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    runpy.run_path(str(script), run_name="__main__")
