"""One rank of a run: rendezvous, roll call, mesh, links, and the loop. Whatever fails ends the process with a status.

The order of the text is the order of the work; `explain` and `fit` need a process without groups, so they come first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from parallelize.base.agreement import problem_from_json, problems_to_json, text_digest
from parallelize.base.errors import (
    CheckpointError,
    DataError,
    GradientError,
    LaunchError,
    MeshError,
    ModelError,
    ParallelizeError,
    PipelineError,
    PlanError,
    Problem,
    ShapeError,
    printable,
)
from parallelize.base.terminal.console import ENVIRONMENT, FINE, MISTAKE, status_of
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import destroy_groups
from parallelize.comm.mesh_view import MeshView
from parallelize.comm.meshes import build_mesh
from parallelize.comm.uncaught_errors import write_error_file
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.environment.head_node import resolve_head
from parallelize.launch.environment.launcher import Launcher, set_torch_variables
from parallelize.launch.loop.build_run import RunEnvironment, build_run, note_peaks, report_folder
from parallelize.launch.loop.memory_report import is_out_of_memory, write_memory_report
from parallelize.launch.name_checks import check_names
from parallelize.launch.preflight.mesh_choice import ChosenMesh, choose_mesh
from parallelize.launch.preflight.prediction import Summary, machine_of, placement_warnings, predict, subject_of
from parallelize.launch.preflight.roll_call import LIMIT_S, Facts, facts_of_rank, rank_store, remarks, roll_call
from parallelize.launch.preflight.timed_links import timed_links
from parallelize.launch.start.supervisor import FAILED, PEER_LOST
from parallelize.watchdog.watching import watch

MISTAKES = (LaunchError, PlanError, MeshError, ModelError, ShapeError, DataError, GradientError)
"""Errors that another attempt would meet again. Others are failures: of a peer, a disk, a device."""
PASSING = {"rank-lost", "write-failed", "failed", "folder-in-use"}
"""Errors of checkpoints that another attempt may not meet."""
LOST_PEERS = {"ranks-missing", "head-silent", "link-silent", "rank-failed"}
"""Errors that say of other ranks alone that they did not answer, while ranks start: one may have been killed."""
_OF_PEERS = ("rank-lost", "peer-lost", "by peer", "Timed out", "ncclRemoteError", "Broken pipe")
_CHOICE_S = 600  # `fit` and `explain` of a large model, on rank 0


@dataclass
class _Rank:
    """What this rank knows so far, for messages."""

    config: RunConfig
    launcher: Launcher
    device: str
    store: Any = None
    predicted: Summary | None = None
    pp_rank: int = 0

    @property
    def rank(self) -> int:
        return self.launcher.rank or 0

    def tell(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.rank == 0:
            print(printable(text), flush=True)


def run_rank(config: RunConfig, launcher: Launcher, *, other_mesh: bool, dry_run: bool) -> int:
    """Run this process as one rank, to its end.

    Args:
        other_mesh: whether the mesh may be another one than the file's, where there are other numbers of ranks.
        dry_run: end after the preflight.

    Returns: the exit status. After an error the process ends here, because threads of other ranks may never answer.
    """
    this = _Rank(config, launcher, _device(config, launcher))
    try:
        status = _run(this, other_mesh, dry_run)
    except BaseException as error:
        _end(this, error)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the launcher ends the others as soon as the first rank has ended
    with suppress(RuntimeError):
        dist.barrier(device_ids=[launcher.local_rank] if this.device.startswith("cuda") else None)
    destroy_groups()
    sys.stdout.flush()
    sys.stderr.flush()
    if status != FINE:
        os._exit(status)  # the command line would let rank 0 print first, which it has
    return status


def _device(config: RunConfig, launcher: Launcher) -> str:
    """Raises: LaunchError `no-gpu`."""
    device_type = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(launcher.local_world_size, 1)))
        return "cpu"
    if torch.cuda.device_count() <= launcher.local_rank:
        what = (
            f"rank {launcher.rank} needs GPU {launcher.local_rank}, and this process sees {torch.cuda.device_count()}"
        )
        raise LaunchError(Problem("no-gpu", what, config.source, fix="device: cpu, or fewer ranks on this node"))
    torch.cuda.set_device(launcher.local_rank)
    private.record_memory_history(max_entries=100_000)
    return f"cuda:{launcher.local_rank}"


def _run(this: _Rank, other_mesh: bool, dry_run: bool) -> int:
    config, launcher = this.config, this.launcher
    resolve_head(launcher, LIMIT_S if launcher.kind == "kubernetes" else 0.0)
    set_torch_variables(launcher, os.environ)
    this.store = rank_store(launcher, LIMIT_S, _CHOICE_S)
    facts = roll_call(
        dist.PrefixStore("roll", this.store),
        this.rank,
        launcher.world_size,
        facts_of_rank(config, this.device),
        host_of=launcher.host_of,
    )
    chosen = _choose(this, facts, other_mesh)
    _init_groups(this)
    mesh = build_mesh(this.device.partition(":")[0], **dict(chosen.mesh.axes))
    this.pp_rank = MeshView(mesh).index("pp")
    hosts = {rank: fact["host"] for rank, fact in facts.items()}
    for link in timed_links(
        mesh, machine_of(config, this.device), dist.PrefixStore("links", this.store), hosts, LIMIT_S
    ):
        this.tell(f"link: {link.line()}")
    if dry_run:
        this.tell("dry run: the preflight is done")
        return FINE
    with ExitStack() as stack:
        around = RunEnvironment(chosen, mesh, this.device, this.predicted, this.tell)
        loop = build_run(config, around, stack)
        if config.watch_s:
            loop.watching = partial(watch, mesh, timeout_s=config.watch_s, folder=config.watch_folder)
        status = loop.run()
        note_peaks(loop, around)
    return status


def _choose(this: _Rank, facts: Facts, other_mesh: bool) -> ChosenMesh:
    """The mesh, on every rank: rank 0 checks what the file names, chooses, predicts and warns; the others wait for its
    answer.

    Raises: its errors, on every rank.
    """
    if this.rank == 0:
        try:
            check_names(this.config)
            answer: dict[str, Any] = {"chosen": _choose_here(this, facts, other_mesh).as_data(), "problems": []}
        except ParallelizeError as error:
            answer = {"problems": problems_to_json(error.problems)}
        except Exception as error:
            lines = traceback.format_exception_only(error)
            what = f"the mesh could not be chosen: {lines[-1].strip()[:300]}"
            answer = {"problems": problems_to_json([Problem("failed", what)])}
            traceback.print_exc()
        this.store.set("predicted", this.predicted.as_json() if this.predicted is not None else "")
        this.store.set("chosen", json.dumps(answer))
    answer = json.loads(this.store.get("chosen"))
    if answer["problems"]:
        raise LaunchError(*(problem_from_json(fields) for fields in answer["problems"]))
    if summary := this.store.get("predicted"):
        this.predicted = Summary.from_json(summary)
    return ChosenMesh.from_data(answer["chosen"])


def _choose_here(this: _Rank, facts: Facts, other_mesh: bool) -> ChosenMesh:
    config, subject, machine = this.config, subject_of(this.config), machine_of(this.config, this.device)
    hosts = {rank: fact["host"] for rank, fact in facts.items()}
    names = sorted(set(hosts.values()))
    this.tell(
        f"hosts: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}; {facts[0]['device']}; torch "
        f"{facts[0]['torch']}"
    )
    chosen = choose_mesh(config, this.launcher.world_size, subject, machine, other=other_mesh or config.mesh is None)
    for line in (*([chosen.why] if chosen.why else []), *(f"warning: {remark}" for remark in remarks(facts))):
        this.tell(line)
    if not config.metrics.predict:
        return chosen
    predicted = predict(config, chosen, subject, machine, this.device)
    this.predicted = predicted.summary()
    if predicted.explanation is None:
        this.tell(f"no prediction: {predicted.why_not}")
        return chosen
    peak = max(parts["peak"] for parts in this.predicted.memory.values())
    this.tell(
        f"predicted: peak {peak / 1e6:,.0f} MB of tensors on a rank, {predicted.flops_per_step / 1e9:,.2f} GFLOP a step"
    )
    for warning in placement_warnings(predicted, machine, hosts):
        this.tell(f"warning: {warning}")
    return chosen


def _init_groups(this: _Rank) -> None:
    if dist.is_initialized():
        return
    if this.device == "cpu" and this.launcher.world_size == this.launcher.local_world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group(
        "gloo" if this.device == "cpu" else "nccl",
        store=dist.PrefixStore("groups", this.store),
        rank=this.rank,
        world_size=this.launcher.world_size,
        timeout=timedelta(seconds=this.config.timeout_s),
    )


# -- the end after an error ---------------------------------------------------------------------------------------


def _end(this: _Rank, error: BaseException) -> None:
    """Print an error that no other rank has printed, and end the process."""
    status = _status_of(error)
    with suppress(Exception):
        if is_out_of_memory(error):
            path = write_memory_report(report_folder(this.config), this.rank, this.device, this.predicted, this.pp_rank)
            print(
                f"rank {this.rank}: out of memory; {path} has what was stored and what was predicted", file=sys.stderr
            )
    write_error_file(error)
    text = str(error) if isinstance(error, ParallelizeError) else "".join(traceback.format_exception(error))
    with suppress(Exception):
        if _is_first(this, text):
            print(f"rank {this.rank}: {text.rstrip()}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status_of(error: BaseException) -> int:
    """What the launcher is told: a mistake, which another attempt would meet again; a lost peer; or any other
    failure."""
    if isinstance(error, ParallelizeError) and set(error.slugs) <= LOST_PEERS:
        return PEER_LOST
    if isinstance(error, MISTAKES):
        return status_of(error.problems)
    if isinstance(error, CheckpointError) and not set(error.slugs) & PASSING:
        return status_of(error.problems)
    if isinstance(error, PipelineError) and _is_of_a_mistake(error):
        return MISTAKE
    if isinstance(error, ImportError) or (isinstance(error, ParallelizeError) and "missing-extra" in error.slugs):
        return ENVIRONMENT
    return PEER_LOST if any(text in str(error) for text in _OF_PEERS) else FAILED


def _is_of_a_mistake(error: PipelineError) -> bool:
    """Whether a step has failed by a mistake, of this rank or of another one, whose error the rows have as text."""
    names = tuple(f"{cls.__module__}.{cls.__name__}: " for cls in MISTAKES)
    return any(text.startswith(names) for problem in error.problems for label, text in problem.rows if label == "error")


def _is_first(this: _Rank, text: str) -> bool:
    """Whether no other rank has printed this text. A store that is gone answers yes."""
    try:
        this.store.set_timeout(timedelta(seconds=2))
        return this.store.add(f"printed/{text_digest(text).hex()}", 1) == 1
    except Exception:
        return True
