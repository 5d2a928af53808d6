"""The table of docs/when-a-run-stops.md: on which mesh which fault of the last rank is named by what. `python -m
tests.watchdog.scenarios [--timeout SECONDS] [WORD ...]` runs those with all of the words, and prints the table with the
seconds between the fault and the end of the last other rank.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import NamedTuple

from tests.support.failing_ranks import GROUP_TIMEOUT_S, Ended, run_ranks
from tests.watchdog.faults import MESHES, TIMEOUT_S, job


class Scenario(NamedTuple):
    """named: what the message of every other rank has, besides the number of the faulty rank. "or" separates what is as
    right."""

    mesh: str
    fault: str
    slug: str
    named: str = ""

    def __str__(self) -> str:
        return f"{self.mesh}: {self.fault}"


_PARTS = ("the forward", "the backward", "the loader", "a hook")
_STEPS = ("tp", "pp", "zero2", "zero3", "cp", "ep", "dp x tp")


def _raises(mesh: str, part: str) -> Scenario:
    handled = mesh == "pp" and part != "the loader"
    return Scenario(
        mesh, f"raises in {part}", "stage-failed" if handled else "rank-failed", f"ValueError: boom in {part}"
    )


SCENARIOS = [
    *(_raises(mesh, part) for mesh in _STEPS for part in _PARTS),
    *(
        Scenario(mesh, f"sleeps in {part}", "rank-missing", "time.sleep(60)")
        for mesh in _STEPS
        for part in ("the forward", "the backward", "the loader")
    ),
    Scenario("tp", "deadlocks in the loader", "rank-missing", "lock.acquire()"),
    Scenario("tp", "keeps Python's lock in the loader", "rank-gone", "it may hold Python's lock"),
    *(Scenario(mesh, "is stopped in the forward", "rank-gone", "SIGSTOP") for mesh in _STEPS),
    *(Scenario(mesh, "is killed in the backward", "rank-gone", "has ended without a word") for mesh in _STEPS),
    Scenario("tp", "crashes in the forward", "rank-gone", "has ended without a word"),
    Scenario("zero3", "exits in the loader", "rank-gone", "has ended without a word"),
    *(Scenario(mesh, "leaves the loop", "rank-left", "left the loop") for mesh in _STEPS),
    *(Scenario(mesh, "skips a step", "rank-left", "left the loop") for mesh in ("tp", "zero2", "zero3")),
    *(
        Scenario("tp", f"another {what}", "collectives-differ", "model.embed_tokens")
        for what in ("batch size", "length")
    ),
    Scenario("tp", "autocast", "collectives-differ", "bfloat16"),
    Scenario("dp x tp", "another length", "collectives-differ", "model.embed_tokens"),
    *(Scenario(mesh, "another length", "ranks-diverged", "input_ids") for mesh in ("cp", "pp")),
    Scenario("tp", "evaluates alone", "collectives-differ", "evaluation"),
    Scenario("zero3", "evaluates alone", "collectives-differ", "model.layers"),
    Scenario("pp", "evaluates alone", "ranks-diverged", "evaluate"),
    *(Scenario(mesh, "saves alone", "rank-missing", "Checkpointer") for mesh in ("tp", "zero3")),
    Scenario("tp", "clips alone", "collectives-differ", "clip_grad_norm_"),
    Scenario("tp", "a collective alone", "collectives-differ", "the script"),
    Scenario("zero3", "a collective alone", "collectives-differ", "the script"),
    *(Scenario(mesh, "raises before planning", "rank-failed", "boom before planning") for mesh in ("tp", "dp x tp")),
    Scenario("tp", "hangs before planning", "rank-missing", "time.sleep(60)"),
    Scenario("tp", "no such plan", "ranks-disagree", "no-such-plan"),
    *(Scenario(mesh, "another mesh", "ranks-disagree", "mesh") for mesh in ("tp", "dp")),
    *(Scenario(mesh, "another size", "ranks-disagree", "mlp") for mesh in ("tp", "dp", "zero2", "zero3", "cp")),
    *(Scenario(mesh, "frozen", "ranks-disagree", "parameter") for mesh in ("tp", "dp", "zero3")),
    *(Scenario(mesh, "another stage", "ranks-disagree", "zero") for mesh in ("zero2", "dp x tp")),
    *(Scenario(mesh, "another dtype", "ranks-disagree", "dtype") for mesh in ("tp", "zero2")),
]


_START_S = 38.0
"""What ranks may take besides the watch's timeout, on a busy machine, before they are killed."""


def run(scenario: Scenario, folder: Path, timeout_s: float = TIMEOUT_S) -> list[Ended]:
    """How each rank ended under a watch with this timeout, in seconds; the faulty one is the last."""
    size = prod(MESHES[scenario.mesh][0].values())
    times = {"timeout_s": timeout_s + _START_S, "group_timeout_s": max(GROUP_TIMEOUT_S, 3 * timeout_s)}
    return run_ranks(size, folder, job, scenario.mesh, scenario.fault, folder, timeout_s, **times)


def wrong_with(scenario: Scenario, ended: list[Ended]) -> list[str]:
    """What is not as promised: a rank that hangs, aborts or ends in silence, or whose message does not name who and
    what."""
    problems = []
    for rank, end in enumerate(ended[:-1]):
        if end.status not in (1, 70):
            problems.append(f"rank {rank} ended with {end.status}")
        expected = [scenario.slug, scenario.named]
        if scenario.slug.startswith(("rank-", "stage-")):
            expected.append(f"rank {len(ended) - 1}")
        problems += [f"rank {rank} does not say {word!r}" for word in expected if word not in end.text]
        if "terminate called" in end.text:
            problems.append(f"rank {rank} is aborted")
    return problems


def seconds_of(ended: list[Ended], folder: Path) -> float | None:
    """From the fault to the end of the last other rank; None where the fault stands in the rank's arguments."""
    fault = folder / "fault"
    return max(end.at for end in ended[:-1]) - float(fault.read_text()) if fault.exists() else None


def main(arguments: list[str]) -> int:
    """Run the scenarios whose name has all of the words, and print the table; 1 where one is late or does not name the
    rank."""
    parser = argparse.ArgumentParser(prog="python -m tests.watchdog.scenarios", description=__doc__)
    parser.add_argument("words", nargs="*", help="words of the name of a scenario, such as zero3 sleeps")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, help="of the watch, in seconds (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    failed = 0
    print("| mesh | the last rank | the others say | after |\n| --- | --- | --- | --- |")
    for scenario in SCENARIOS:
        if not all(word in str(scenario) for word in given.words):
            continue
        with tempfile.TemporaryDirectory() as name:
            ended = run(scenario, Path(name), given.timeout)
            seconds = seconds_of(ended, Path(name))
        after = "at start" if seconds is None else f"{seconds:.1f} s"
        late = seconds is not None and seconds > given.timeout + 5
        print(f"| {scenario.mesh} | {scenario.fault} | `{scenario.slug}` {scenario.named} | {after} |", flush=True)
        if problems := [*wrong_with(scenario, ended), *(["late"] if late else [])]:
            failed += 1
            print(
                "\n".join([*problems, *(f"{end.status}: {end.text[-3000:]}" for end in ended)]),
                file=sys.stderr,
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
