"""Run ranks with a slow network between them on one Linux machine.

    sudo python -m benchmarks.slow_link --rate 1gbit -- -m benchmarks.collective_matmul
    sudo python -m benchmarks.slow_link --rate 4gbit --delay 0.2ms -- my_training_script.py --steps 10
    sudo python -m benchmarks.slow_link --ranks 4 --rate 1gbit -- -m benchmarks.long_context --link 1gbit

Each rank gets a network namespace and a core of its own, and runs as a batch job (SCHED_BATCH), so that the threads
that serve the network do not preempt a matmul at every packet. Two namespaces are connected by a `veth` pair, more of
them by a bridge. Each end is limited to the rate by `tc`'s token bucket (tbf), with an optional delay. RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME are set as under torchrun. Everything is removed at the end,
also after an error or a signal.

Exit status: that of the first rank that failed; 3, with a message, without root or without `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

CANNOT = 3
PORT = 29511
_BURST = "256kb"  # above the 64 KiB that a segmentation offload hands down at once
_QUEUE = "100ms"


class EmulationError(Exception):
    """This machine cannot emulate a link."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slow_link", description=__doc__.split("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="of each direction, as tc writes it: 1gbit, 400mbit, 10gbit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--delay", default="", help="one way, as tc writes it: 0.5ms")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which the ranks are ended")
    parser.add_argument("command", nargs="+", help="after `--`: a script or `-m module`, and its arguments")
    options = parser.parse_args(argv)
    try:
        check()
        with interruptible(), link(options.rate, options.delay, options.ranks) as names:
            return run(names, options.command, options.timeout)
    except EmulationError as reason:
        print(f"slow_link: {reason}", file=sys.stderr)
        return CANNOT


def check() -> None:
    """Raises: EmulationError."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise EmulationError("network namespaces need Linux and root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise EmulationError(f"{' and '.join(missing)} not found (package iproute2)")


@contextlib.contextmanager
def link(rate: str, delay: str = "", ranks: int = 2) -> Iterator[list[str]]:
    """Namespaces, 10.77.0.1 and on, joined at `rate` each way. Yields their names."""
    names = [f"slow{os.getpid()}r{rank}" for rank in range(ranks)]
    bridge = f"slow{os.getpid()}b"
    try:
        for name in [*names, *([bridge] if ranks > 2 else [])]:
            _do("ip", "netns", "add", name)
        if ranks > 2:
            _bridge(bridge, names, rate, delay)
        else:
            _pair(names, ["slow0", "slow0"], rate, delay)
        for rank, name in enumerate(names):
            in_namespace = ("ip", "netns", "exec", name)
            _do(*in_namespace, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "slow0")
            _do(*in_namespace, "ip", "link", "set", "lo", "up")
        yield names
    finally:
        for name in [*names, bridge]:  # takes the veth pairs with it
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


def _pair(names: list[str], devices: list[str], rate: str, delay: str) -> None:
    """A link between two namespaces, with ends named `devices`, each limited in what it sends."""
    ends = [f"sl{os.getpid()}e{end}" for end in (0, 1)]
    _do("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for name, end, device in zip(names, ends, devices, strict=True):
        _do("ip", "link", "set", end, "netns", name)
        in_namespace = ("ip", "netns", "exec", name)
        _do(*in_namespace, "ip", "link", "set", end, "name", device)
        _do(*in_namespace, "ip", "link", "set", device, "up")
        bucket = ("tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE)
        _do(*in_namespace, "tc", "qdisc", "add", "dev", device, "root", "handle", "1:", *bucket)
        if delay:
            beneath = ("parent", "1:1", "handle", "10:", "netem", "delay", delay, "limit", "100000")
            _do(*in_namespace, "tc", "qdisc", "add", "dev", device, *beneath)


def _bridge(bridge: str, names: list[str], rate: str, delay: str) -> None:
    """A switch in a namespace of its own, with a link to the namespace of each rank."""
    in_namespace = ("ip", "netns", "exec", bridge)
    _do(*in_namespace, "ip", "link", "add", "br0", "type", "bridge")
    _do(*in_namespace, "ip", "link", "set", "br0", "up")
    for rank, name in enumerate(names):
        _pair([name, bridge], ["slow0", f"port{rank}"], rate, delay)
        _do(*in_namespace, "ip", "link", "set", f"port{rank}", "master", "br0")


def run(names: list[str], command: list[str], timeout_s: float) -> int:
    """`python command` once in each namespace, a core each. A rank that fails ends the other."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = []
    for rank, name in enumerate(names):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(names)),
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "slow0",
            "OMP_NUM_THREADS": "1",
        }
        full = ["ip", "netns", "exec", name, sys.executable, *command]
        on_core = functools.partial(_use_core, cores[rank % len(cores)])
        ranks.append(subprocess.Popen(full, env=environment, start_new_session=True, preexec_fn=on_core))
    end = time.monotonic() + timeout_s
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = [code for code in codes if code]
            if failed:
                return failed[0]
            if None not in codes:
                return 0
            if time.monotonic() > end:
                print(f"slow_link: still running after {timeout_s:.0f} s", file=sys.stderr)
                return 1
            time.sleep(0.05)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def _use_core(core: int) -> None:
    """In the child: one core, as a batch job. All that it starts inherits both."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A terminating signal becomes an exception, so that everything is removed."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise EmulationError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main())
