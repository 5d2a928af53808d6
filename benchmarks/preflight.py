"""How long the preflight of `parallelize run` takes: on emulated hosts, with one that does not answer, and its roll
call of many ranks.

    sudo python -m benchmarks.preflight
    sudo python -m benchmarks.preflight --hosts 4 --ranks 16 --silent --rate 100mbit

A host is a network namespace with a hostname of its own, behind a link of limited rate (see `slow_link`). Its ranks are
forked from a process that has imported everything, with the variables of srun, so that the seconds are those of the
preflight: from the start of all ranks to the end of the last one under `--dry-run`. A silent host starts no ranks. The
roll call of many ranks has a connection to a TCP store for each of them, in threads of one process.

Needs Linux, root, `ip`, `tc` and `unshare`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from benchmarks.record import write_record
from benchmarks.slow_link import CANNOT, EmulationError, check, interruptible, link

PORT_OF_JOB = "77"
ENDS_WITHIN_S = 120.0
RUN: dict[str, Any] = {
    "model": {
        "name": "llama",
        "set": {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
    },
    "data": {"function": "benchmarks.documentation:documents", "sequence": 32, "global_batch": 64},
    "device": "cpu",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hosts", type=int, default=0, help="of one trial (default: several trials, and the roll call)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="of all hosts")
    parser.add_argument("--silent", action="store_true", help="the last host does not answer")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay", default="", help="one way, such as 0.5ms; needs netem in the kernel")
    parser.add_argument("--clients", type=int, nargs="*", default=[100, 1000], help="ranks of the roll calls")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--roll-call", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.roll_call:
        print(json.dumps(roll_call_of(options.roll_call)))
        return 0
    if options.host is not None:
        return run_host(options.host, options.hosts, options.ranks, options.file)
    trials = [(options.hosts, options.ranks, options.silent)] if options.hosts else TRIALS
    try:
        check()
        with interruptible():
            results = [trial(*one, options.rate, options.delay) for one in trials]
    except EmulationError as reason:
        print(f"preflight: {reason}", file=sys.stderr)
        return CANNOT
    calls = [] if options.hosts else [roll_call_alone(clients) for clients in options.clients]
    settings = {"rate": options.rate, "delay": options.delay}
    write_record(options.json, {"trials": results, "roll_calls": calls, "settings": settings})
    return 0


TRIALS = [(2, 2, False), (2, 4, False), (4, 8, False), (4, 16, False), (4, 32, False), (4, 16, True)]
"""Hosts, ranks of all of them, whether the last host is silent."""


def trial(hosts: int, ranks: int, silent: bool, rate: str, delay: str) -> dict[str, Any]:
    """One preflight. Returns: its seconds, exit statuses, and what rank 0 printed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump({**RUN, "mesh": f"dp={ranks // 2},tp=2" if ranks > 2 else "dp=2"}))
        names = stack.enter_context(link(rate, delay, hosts))
        started = [host_process(name, host, hosts, ranks, file) for host, name in enumerate(names)]
        for process in started:
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        began = time.monotonic()
        answering = started[:-1] if silent else started
        for process in answering:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        lines = [json.loads(process.communicate(timeout=ENDS_WITHIN_S)[0]) for process in answering]
        seconds = time.monotonic() - began
        texts = [path.read_text() for path in sorted(folder.glob("rank-*.txt"))]
    statuses = sorted({status for line in lines for status in line})
    text = "\n".join(texts)
    result = {"hosts": hosts, "ranks": ranks, "silent": silent, "seconds": round(seconds, 2), "statuses": statuses}
    if silent:
        result["names the host"] = f"10.77.0.{hosts}" in text and "ranks-missing" in text
    else:
        result["ended"] = "dry run: the preflight is done" in text
    print(json.dumps(result), flush=True)
    for line in text.splitlines():
        if (
            line.startswith(("link:", "warning:", "rank 0:"))
            or "ranks-missing" in line
            or (statuses != [0] and not silent)
        ):
            print(f"    {line}", flush=True)
    return result


def host_process(name: str, host: int, hosts: int, ranks: int, file: Path) -> subprocess.Popen[str]:
    """A process in the namespace, with a hostname of its own, that has imported everything when it prints "ready"."""
    arguments = ["--host", str(host), "--hosts", str(hosts), "--ranks", str(ranks), "--file", str(file)]
    command = [sys.executable, "-m", "benchmarks.preflight", *arguments]
    named = ["sh", "-c", f'hostname node{host} && exec "$@"', "sh", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "slow0"}
    return subprocess.Popen(
        ["ip", "netns", "exec", name, "unshare", "--uts", *named],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_host(host: int, hosts: int, ranks: int, file: str) -> int:
    """Fork the ranks of a host when told to, and print their exit statuses."""
    import parallelize.launch.run_rank  # noqa: F401 - what the ranks need

    print("ready", flush=True)
    if not sys.stdin.readline():
        return 0
    here = ranks // hosts
    children = [fork_rank(host, local, hosts, here, file) for local in range(here)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(statuses), flush=True)
    return 0


def fork_rank(host: int, local: int, hosts: int, here: int, file: str) -> int:
    """The process id of a rank, which runs the preflight as a task of srun and writes what it prints beside the
    file."""
    child = os.fork()
    if child:
        return child
    rank = host * here + local
    output = os.open(str(Path(file).with_name(f"rank-{rank:03}.txt")), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "SLURM_JOB_ID": PORT_OF_JOB,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(host),
        "SLURM_STEP_NUM_TASKS": str(hosts * here),
        "SLURM_GPUS_ON_NODE": "1",  # with one task a node, it would start the ranks of the node
        "SLURM_STEP_NODELIST": ",".join(f"10.77.0.{number + 1}" for number in range(hosts)),
    }
    status = 1
    try:
        from parallelize.cli import main as command

        status = command(["run", file, "--dry-run"])
    finally:
        sys.stdout.flush()
        os._exit(status)


def roll_call_alone(clients: int) -> dict[str, Any]:
    """`roll_call_of` in a process with a loopback device of its own, whose bytes are counted."""
    own = [sys.executable, "-m", "benchmarks.preflight", "--roll-call", str(clients)]
    command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *own]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=True)
    print(done.stdout, end="", flush=True)
    return json.loads(done.stdout)


def roll_call_of(clients: int) -> dict[str, Any]:
    """Seconds of a roll call, and bytes on the loopback device, of so many ranks that are there at once."""
    import torch.distributed as dist

    from parallelize.launch.preflight.roll_call import roll_call

    facts = dict.fromkeys(
        ("device", "threads", "torch", "python", "parallelize", "code", "model code", "run", "ranks"), "x" * 16
    )
    server = dist.TCPStore("127.0.0.1", 0, clients, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", server.port, clients, wait_for_workers=False) for _ in range(clients)]

    def rank_of(rank: int) -> None:
        own = {**facts, "host": f"node{rank // 8}", "slot": f"cuda:{rank % 8}"}
        roll_call(stores[rank], rank, clients, own)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(clients)]
    sent, began = loopback_bytes(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, sent = time.perf_counter() - began, loopback_bytes() - sent
    return {"ranks": clients, "seconds": round(seconds, 3), "bytes_per_rank": round(sent / clients)}


def loopback_bytes() -> int:
    """Bytes that the loopback device has received."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


if __name__ == "__main__":
    sys.exit(main())
