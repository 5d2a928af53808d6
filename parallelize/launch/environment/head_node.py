"""The address of the head node. A name that does not resolve is an error: no rank ever waits on its own machine
instead."""

from __future__ import annotations

import ipaddress
import socket
import time

from parallelize.base.errors import LaunchError, Problem
from parallelize.launch.environment.launcher import Launcher

_EVERY_S = 1.0


def resolve_head(launcher: Launcher, patience_s: float = 0.0) -> str:
    """The address of the head node; "" where the launcher has none.

    Args:
        patience_s: how long a name may take to appear, as those of Kubernetes' services do.

    Raises: LaunchError `head-unresolved`; `head-is-loopback` where ranks of other nodes could not reach it.
    """
    if not launcher.head:
        return ""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            addresses = socket.getaddrinfo(launcher.head, launcher.port or None, type=socket.SOCK_STREAM)
            break
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                what = f"the head node {launcher.head!r} has no address on this machine: {error}"
                fix = "name a host that every node resolves (MASTER_ADDR); `getent hosts NAME` on each node shows it"
                raise LaunchError(
                    Problem("head-unresolved", what, (f"{launcher.kind}, {launcher.by}"), fix=fix)
                ) from None
        time.sleep(min(_EVERY_S, max(deadline - time.monotonic(), 0.0)))
    address = str(addresses[0][4][0])
    spans_nodes = launcher.nodes > 1 or launcher.world_size > launcher.local_world_size
    if spans_nodes and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        what = f"the head node {launcher.head!r} is {address}, this machine alone, and the run has several nodes"
        raise LaunchError(Problem("head-is-loopback", what, fix="set MASTER_ADDR to the first node's name or address"))
    return address


def own_address(head: str, port: int) -> str:
    """The address of this machine in the direction of the head node, which other nodes can reach. Nothing is sent.

    Raises: OSError where there is no route.
    """
    family, _, _, _, target = socket.getaddrinfo(head, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a datagram socket: the route is chosen, and no packet leaves
        return str(probe.getsockname()[0])
