"""`parallelize run`: a training recipe from a file, on whatever started the processes. Torch-free until it runs."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parallelize.base.errors import LaunchError, Problem
from parallelize.base.terminal.console import FINE, REQUEUE, say
from parallelize.launch.config.run_checks import Check
from parallelize.launch.config.run_config import FILE, RunConfig
from parallelize.launch.config.run_config_file import read_run_config
from parallelize.launch.emit.launch_files import EMITTERS, job_of
from parallelize.launch.environment.launcher import SUPERVISOR, Launcher, find_launcher
from parallelize.launch.start.early_signals import EarlySignals
from parallelize.launch.start.end_with_parent import end_with_parent

_ABOUT = """\
Train a model by a recipe: model, data, mesh, plan, options, optimizer, checkpoints, metrics, in one YAML file. The same
command works alone, where it starts the ranks itself, under torchrun, srun, Kubernetes (PyTorchJob, TrainJob) and Ray;
its first line says which. A run that finds checkpoints in its folder goes on from the newest, on any mesh. SIGTERM,
SIGUSR1 and Ctrl-C save at the next step and end with status 75; a second one ends at once."""


def add_commands(verbs: Any) -> None:
    """Add `run` to a parser's subparsers."""
    parser = verbs.add_parser(
        "run",
        help="train by a recipe in a file",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="the YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as steps=100 or optimizer.lr=3e-4")
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="N", help="start again after a failure, on a mesh that fits"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of this machine (default: the mesh's, or the GPUs)"
    )
    parser.add_argument("--dry-run", action="store_true", help="end after the preflight")
    parser.add_argument("--emit", choices=sorted(EMITTERS), help="print a launch file for the mesh, and start nothing")
    parser.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="with --emit (default: 8)")
    parser.add_argument(
        "--requeue-status",
        type=int,
        default=REQUEUE,
        metavar="N",
        help=f"end a run that a signal has stopped with N (default: {REQUEUE}), where it starts the ranks",
    )
    parser.add_argument("--schema", action="store_true", help="print where the JSON schema of CONFIG is")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if SUPERVISOR in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(int(os.environ[SUPERVISOR]))
    if options.schema:
        print(FILE)
        return FINE
    # the profiler says nothing of its own, as long as torch is not imported
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    _check_arguments(options)
    launcher = None if options.emit else find_launcher(os.environ)
    checks = _checks_of_names() if launcher is None or launcher.starts_ranks else ()  # of ranks, rank 0 has them
    absent: list[Problem] | None = [] if options.emit else None
    config = read_run_config(options.config, options.overrides, checks, absent)
    if launcher is None:
        for problem in absent or ():
            say(f"{problem.where}: {problem.what} on this machine; those of the run look for it")
        job = job_of(config, options.overrides, options.ranks_per_node, options.restarts)
        print(EMITTERS[options.emit](job), end="")
        return FINE
    if launcher.starts_ranks:
        status = _start(options, config, launcher)
        return options.requeue_status if status == REQUEUE else status
    if SUPERVISOR not in os.environ:
        end_with_parent()
        EarlySignals()
        if launcher.rank == 0:
            print(launcher.sentence(launcher.world_size), flush=True)
    from parallelize.launch.run_rank import run_rank

    return run_rank(config, launcher, other_mesh=_may_change_mesh(options), dry_run=options.dry_run)


def _checks_of_names() -> tuple[Check, ...]:
    """Of names that torch and `transformers` know; none where a launch file is written on a machine without torch."""
    if find_spec("torch") is None:
        return ()
    from parallelize.launch.name_checks import NAME_CHECKS

    return NAME_CHECKS


def _may_change_mesh(options: argparse.Namespace) -> bool:
    return options.restarts > 0 or options.ranks is not None


def _check_arguments(options: argparse.Namespace) -> None:
    """Raises: LaunchError `bad-option`."""
    if options.config is None:
        raise LaunchError(Problem("bad-option", "no file of a run was given", fix="parallelize run CONFIG.yaml"))
    least = {"restarts": 0, "ranks_per_node": 1, "ranks": 1}
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            what = f"--{name.replace('_', '-')} {value}"
            raise LaunchError(Problem("bad-option", what, fix=f"give {smallest} or more"))
    if not 1 <= options.requeue_status <= 255:
        what = f"--requeue-status {options.requeue_status}"
        raise LaunchError(Problem("bad-option", what, fix="give an exit status, 1 to 255"))


def _start(options: argparse.Namespace, config: RunConfig, launcher: Launcher) -> int:
    """Start the ranks of this machine."""
    from parallelize.launch.environment.head_node import resolve_head
    from parallelize.launch.local_ranks import count_ranks, fewer_ranks
    from parallelize.launch.start.supervisor import Supervised, supervise

    resolve_head(launcher, 60.0 if launcher.kind == "kubernetes" else 0.0)
    ranks = count_ranks(config, launcher, options.ranks)
    if launcher.node_rank == 0:
        print(launcher.sentence(ranks), flush=True)
    arguments = ["run", str(options.config), *options.overrides]
    arguments += ["--restarts", str(options.restarts)] if options.restarts else []
    arguments += ["--ranks", str(options.ranks)] if options.ranks is not None else []
    arguments += ["--dry-run"] if options.dry_run else []
    return supervise(
        Supervised(config, launcher, ranks, arguments, options.restarts, lambda count: fewer_ranks(config, count), say)
    )
