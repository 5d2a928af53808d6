"""Runs the tests in an environment of each version of torch that is served, and writes what ran when.

    make versions                        # all of them, one after the other
    python -m benchmarks.versions 2.15.0 # one of them
    python -m benchmarks.versions --failed 2.15.0  # the tests that failed the last time, after a mend

Each environment is a folder `.versions/VERSION`, made by the Makefile, and stays there for the next run. The results
are written to `benchmarks/results/versions.json`, and into the table of docs/limits.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
DOCUMENT = ROOT / "docs" / "limits.md"
_TABLE = re.compile(r"\| torch \| passed \|.*\n(?:\|.*\n)*")
SERVED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions", nargs="*", default=list(SERVED), help=f"versions of torch (default: {' '.join(SERVED)})"
    )
    parser.add_argument("--failed", action="store_true", help="run only the tests that failed the last time")
    options = parser.parse_args(arguments)
    failed = []
    for version in options.versions:
        result = mended(version) if options.failed else tested(version)
        save(version, result)
        print(f"torch {version}: {json.dumps(result)}", flush=True)
        if result["failed"] or not result["passed"]:
            failed.append(version)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


def tested(version: str, only: Sequence[str] = ()) -> dict[str, Any]:
    """Runs `make test` with a version of torch, or `only` these tests of it.

    Returns: what `summary` does; zeros where no environment could be made.
    """
    report = ROOT / ".versions" / f"{version}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    chosen = " ".join([f"--junitxml={report}", *map(shlex.quote, only)])
    command = ["make", "test", f"VENV=.versions/{version}", f"TORCH=torch=={version}", f"PYTEST_OPTIONS={chosen}"]
    subprocess.run(command, cwd=ROOT, check=False)
    return summary(report) if report.exists() else {"passed": 0, "failed": [], "skipped": 0, "date": _today()}


def mended(version: str) -> dict[str, Any]:
    """The last result of a version, after its failed tests have run again."""
    last = json.loads(RESULTS.read_text())[version]
    if not last["failed"]:
        return last
    chosen = sorted(set(map(node_id, last["failed"])))
    again = tested(version, chosen)
    if again["passed"] + again["skipped"] + len(again["failed"]) != len(chosen):
        return last  # the run itself ended early
    return {**again, "passed": last["passed"] + again["passed"], "skipped": last["skipped"] + again["skipped"]}


def node_id(name: str) -> str:
    """What pytest calls a test of a report, without the group that pytest-xdist appends."""
    head, bracket, parameters = name.partition("[")
    module, _, test = head.rpartition(".")
    return f"{module.replace('.', '/')}.py::{test}{bracket}{parameters}".partition("@")[0]


def summary(report: Path) -> dict[str, Any]:
    """The number of tests that passed and were skipped, the names of those that failed, and the day, of a JUnit
    report."""
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "failed": sorted(failed), "skipped": skipped, "date": _today()}


def save(version: str, result: dict[str, Any], results: Path = RESULTS, document: Path = DOCUMENT) -> None:
    """Replace one version's result, and the table in the document."""
    every = json.loads(results.read_text()) if results.exists() else {}
    every[version] = result
    results.write_text(json.dumps(dict(sorted(every.items())), indent=2) + "\n")
    document.write_text(_TABLE.sub(lambda _: table(results) + "\n", document.read_text()))


def table(results: Path = RESULTS) -> str:
    """The results as the Markdown table of docs/limits.md."""
    rows = ["| torch | passed | skipped | failed | day |", "| --- | --- | --- | --- | --- |"]
    for version, result in json.loads(results.read_text()).items():
        files = sorted({node_id(name).partition("::")[0] for name in result["failed"]})
        failed = f"{len(result['failed'])}: {', '.join(f'`{name}`' for name in files)}" if files else "0"
        rows.append(f"| {version} | {result['passed']:,} | {result['skipped']} | {failed} | {result['date']} |")
    return "\n".join(rows)


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


if __name__ == "__main__":
    sys.exit(main())
