"""What `make versions` writes: counts of a report, one entry a version, and the table of the documents."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.versions import RESULTS, ROOT, SERVED, save, summary, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="right"/>
<testcase classname="tests.a" name="wrong"><failure message="no">text</failure></testcase>
<testcase classname="tests.a" name="broken"><error message="no">text</error></testcase>
<testcase classname="tests.b" name="skipped"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted_and_kept_by_version(tmp_path: Path):
    (tmp_path / "report.xml").write_text(REPORT)
    result = summary(tmp_path / "report.xml")
    assert (result["passed"], result["skipped"], result["failed"]) == (1, 1, ["tests.a.broken", "tests.a.wrong"])
    results = tmp_path / "versions.json"
    save("2.13.0", {**result, "failed": [], "date": "2026-01-02"}, results)
    save("2.11.0", {**result, "date": "2026-01-01"}, results)
    save("2.13.0", {**result, "passed": 4321, "failed": [], "date": "2026-01-03"}, results)
    assert list(json.loads(results.read_text())) == ["2.11.0", "2.13.0"]
    assert table(results).splitlines()[2:] == [
        "| 2.11.0 | 1 | 1 | 2: `tests.a` | 2026-01-01 |",
        "| 2.13.0 | 4,321 | 1 | 0 | 2026-01-03 |",
    ]


def test_the_documents_have_the_table_of_what_ran():
    assert table() in (ROOT / "docs" / "limits.md").read_text(), (
        "docs/limits.md: the output of benchmarks.versions.table()"
    )
    assert set(json.loads(RESULTS.read_text())) == set(SERVED)
