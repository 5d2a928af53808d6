"""Runs the tests in an environment of each version of torch that is served, and writes what ran when.

    make versions                        # all of them, one after the other
    python -m benchmarks.versions 2.15.0 # one of them

Each environment is a folder `.versions/VERSION`, made by the Makefile, and stays there for the next run. The results are in
`benchmarks/results/versions.json`; the table of docs/limits.md has the same.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
SERVED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions", nargs="*", default=list(SERVED), help=f"versions of torch (default: {' '.join(SERVED)})"
    )
    failed = []
    for version in parser.parse_args(arguments).versions:
        result = tested(version)
        save(version, result)
        print(f"torch {version}: {json.dumps(result)}", flush=True)
        if result["failed"] or not result["passed"]:
            failed.append(version)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


def tested(version: str) -> dict[str, Any]:
    """Runs `make test` with a version of torch. Returns what `summary` does; zeros where no environment could be made."""
    report = ROOT / ".versions" / f"{version}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    command = [
        "make",
        "test",
        f"VENV=.versions/{version}",
        f"TORCH=torch=={version}",
        f"PYTEST_OPTIONS=--junitxml={report}",
    ]
    subprocess.run(command, cwd=ROOT, check=False)
    return summary(report) if report.exists() else {"passed": 0, "failed": [], "skipped": 0, "date": _today()}


def summary(report: Path) -> dict[str, Any]:
    """The number of tests that passed and were skipped, the names of those that failed, and the day, of a JUnit report."""
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


def save(version: str, result: dict[str, Any], results: Path = RESULTS) -> None:
    """Replace one version's result."""
    every = json.loads(results.read_text()) if results.exists() else {}
    every[version] = result
    results.write_text(json.dumps(dict(sorted(every.items())), indent=2) + "\n")


def table(results: Path = RESULTS) -> str:
    """The results as the Markdown table of docs/limits.md."""
    rows = ["| torch | passed | skipped | failed | day |", "| --- | --- | --- | --- | --- |"]
    for version, result in json.loads(results.read_text()).items():
        files = sorted({name.rpartition(".")[0] for name in result["failed"]})
        failed = f"{len(result['failed'])}: {', '.join(f'`{name}`' for name in files)}" if files else "0"
        rows.append(f"| {version} | {result['passed']:,} | {result['skipped']} | {failed} | {result['date']} |")
    return "\n".join(rows)


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


if __name__ == "__main__":
    sys.exit(main())
