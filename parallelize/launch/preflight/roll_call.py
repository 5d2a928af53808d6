"""Every rank says what it is, through the store, before any process group exists: who is missing is named within the
limit.

The first rank compares, and all ranks get the same answer. The store is asked by each rank a few times, whatever the
number of ranks is, and an answer has the names of hosts, not the facts of all ranks, so that it stays short.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelize import __version__
from parallelize.base.agreement import problem_from_json, problems_to_json, ranks_by_value, text_digest
from parallelize.base.errors import LaunchError, Problem, short_list
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.environment.launcher import Launcher

LIMIT_S = 28.0
"""The whole preflight, with what comes after the answer, is to end within 30 s."""
_EVERY_S = 0.05
_READ_S = 3.0
Facts = dict[int, dict[str, str]]


def roll_call(
    store: Any,
    rank: int,
    ranks: int,
    facts: Mapping[str, str],
    *,
    host_of: Callable[[int], str] = lambda rank: "",
    limit_s: float = LIMIT_S,
) -> Facts:
    """The facts of all ranks, once they have been found to agree: on rank 0 all of them, on the others the hosts alone.

    Args:
        store: a store that all ranks see.
        facts: of this rank.
        host_of: the host on which a rank was to start, where the launcher has said so.

    Raises: LaunchError `ranks-missing` with the ranks and hosts that have not answered; `ranks-differ` with the values
        by rank; `device-shared`. The same on every rank; on a rank to which the first one does not answer,
        `head-silent`.
    """
    store.set(f"facts/{rank}", json.dumps(dict(facts)))
    store.add("here", 1)
    if rank:
        answer = _answer(store, limit_s)
        found = dict(enumerate({"host": host} for host, count in answer["hosts"] for _ in range(count)))
    else:
        found, problems = _collect(store, ranks, host_of, limit_s)
        fields = problems_to_json(problems)
        hosts = [fact["host"] for _, fact in sorted(found.items())]
        answer = {"problems": fields, "hosts": [(host, len(list(same))) for host, same in groupby(hosts)]}
        store.set("answer", json.dumps(answer))
        if problems:
            _wait_for_readers(store, len(found) - 1)
    if answer["problems"]:
        raise LaunchError(*(problem_from_json(fields) for fields in answer["problems"]))
    return found


def _collect(store: Any, ranks: int, host_of: Callable[[int], str], limit_s: float) -> tuple[Facts, list[Problem]]:
    """The facts of the ranks that answer, and what is wrong."""
    deadline = time.monotonic() + limit_s
    while store.add("here", 0) < ranks and time.monotonic() < deadline:
        time.sleep(_EVERY_S)
    keys = [f"facts/{rank}" for rank in range(ranks)]
    answered = list(range(ranks))
    if not store.check(keys):  # also where two processes have one rank
        answered = [rank for rank in answered if store.check([keys[rank]])]
    texts = store.multi_get([keys[rank] for rank in answered])
    facts = {rank: json.loads(text) for rank, text in zip(answered, texts, strict=True)}
    missing = sorted(set(range(ranks)) - set(facts))
    return facts, [_missing(missing, facts, host_of, limit_s)] if missing else differences(facts)


def _wait_for_readers(store: Any, num_readers: int) -> None:
    """Live until the other ranks have read what is wrong, or for a while: this process may have the store."""
    deadline = time.monotonic() + _READ_S
    while store.add("read", 0) < num_readers and time.monotonic() < deadline:
        time.sleep(_EVERY_S)


def _missing(missing: list[int], facts: Facts, host_of: Callable[[int], str], limit_s: float) -> Problem:
    hosts = sorted({host_of(rank) for rank in missing} - {""})
    where = f" on {short_list(hosts)}" if hosts else ""
    answered = sorted({fact["host"] for fact in facts.values()})
    what = f"ranks {short_list(list(map(str, missing)))}{where} have not answered within {limit_s:.0f} s"
    fix = "look at that host's log: a firewall, a full disk, a missing package, or a process that did not start"
    return Problem("ranks-missing", what, rows=(("answered", short_list(answered)),), fix=fix)


def _answer(store: Any, limit_s: float) -> dict[str, Any]:
    try:
        store.wait(["answer"], timedelta(seconds=limit_s + 5))
        answer = json.loads(store.get("answer"))
        if answer["problems"]:
            store.add("read", 1)
        return answer
    except RuntimeError as error:
        what = f"rank 0 has not answered within {limit_s + 5:.0f} s: {str(error).splitlines()[0][:120]}"
        raise LaunchError(Problem("head-silent", what, fix="look at the head node's log")) from None


def differences(facts: Facts) -> list[Problem]:
    """What ranks must have alike and have not."""
    problems = []
    for name in MUST_AGREE:
        values = values_by_rank(facts, name)
        if len({value for _, value in values}) > 1:
            fix = "install the same versions, and start every rank with the same files"
            problems.append(
                Problem("ranks-differ", f"ranks have different values of {name}", rows=ranks_by_value(values), fix=fix)
            )
    slots: dict[tuple[str, str], list[int]] = {}
    for rank, fact in sorted(facts.items()):
        slots.setdefault((fact["host"], fact["slot"]), []).append(rank)
    for (host, slot), ranks in slots.items():
        if len(ranks) > 1:
            what = f"ranks {short_list(list(map(str, ranks)))} share {slot} of {host}"
            problems.append(
                Problem("device-shared", what, fix="one rank a GPU: fewer ranks on this node, or LOCAL_RANK of each")
            )
    return problems


def remarks(facts: Facts) -> list[str]:
    """What ranks should have alike and have not: lines of text."""
    lines = []
    for name in SHOULD_AGREE:
        values = values_by_rank(facts, name)
        if len({value for _, value in values}) > 1:
            lines.append(f"{name} differs: " + "; ".join(f"{label} {value}" for label, value in ranks_by_value(values)))
    return lines


# -- rank facts ------------------------------------------------------------------------------------------------------
# What each rank says about itself before the first collective: host, device, versions, hashes of code and
# configuration.


MUST_AGREE = ("torch", "python", "parallelize", "code", "model code", "run", "ranks")
"""Facts that change what ranks compute or send."""
SHOULD_AGREE = ("device", "threads")


def facts_of_rank(config: RunConfig, device: str) -> dict[str, str]:
    """Facts by name, as text. device: of this rank, such as cuda:3."""
    return {
        "host": socket.gethostname(),
        "slot": device if device != "cpu" else f"cpu of rank {os.environ.get('RANK', '0')}",
        "device": _device_name(device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "parallelize": __version__,
        "code": digest_of_files(_package_files()),
        "model code": digest_of_files(_user_files(config)),
        "run": text_digest(config.text).hex(),
        "ranks": os.environ.get("WORLD_SIZE", "1"),
    }


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"cpu ({platform.machine()})"
    return torch.cuda.get_device_name(device)


def _package_files() -> list[Path]:
    return sorted(Path(__file__).parents[2].rglob("*.py"))


def _user_files(config: RunConfig) -> Iterator[Path]:
    """The files of modules that the run names, and the plan, where it is a file."""
    for text in (config.model.name, config.data.function, config.optimizer.name):
        module, colon, _ = text.rpartition(":")
        spec = _spec_of(module) if colon else None
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin)
    for text in (config.plan, config.model.name, os.path.join(config.model.name, "config.json")):
        if text and Path(text).is_file():
            yield Path(text)


def _spec_of(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None  # whoever imports it says what is wrong


def digest_of_files(paths: Iterable[Path]) -> str:
    """A short hash of contents."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def values_by_rank(facts: Mapping[int, Mapping[str, str]], name: str) -> list[tuple[int, str]]:
    """(rank, value) of one fact."""
    return [(rank, fact.get(name, "")) for rank, fact in sorted(facts.items())]


# -- rank store ------------------------------------------------------------------------------------------------------
# The store in which ranks find each other, opened without waiting for all of them: who is missing is for the roll
# call to say.


def rank_store(launcher: Launcher, limit_s: float, timeout_s: float) -> Any:
    """The store of all ranks, which rank 0 serves, or the agent of torchrun.

    Args:
        limit_s: how long rank 0 may take to serve it. timeout_s: of later calls of it.

    Raises: LaunchError `head-silent`.
    """
    if dist.is_initialized():  # by Ray
        return private_groups.default_store()
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store: Any = dist.TCPStore(
            launcher.head,
            launcher.port,
            launcher.world_size,
            is_master=launcher.rank == 0 and not by_agent,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=not by_agent,
        )
    except (RuntimeError, ValueError) as error:
        what = f"the head node {launcher.head}:{launcher.port} has not answered within {limit_s:.0f} s"
        rows = (("said", str(error).splitlines()[0][:160]),)
        fix = "is rank 0 running there, and does a firewall let the port through?"
        raise LaunchError(Problem("head-silent", what, rows=rows, fix=fix)) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_agent else "0"
    return dist.PrefixStore(f"run/{attempt}", store)
