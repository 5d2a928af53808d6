"""What `make versions` writes: counts of a report, one entry a version, and the table of the documents."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.versions import DOCUMENT, RESULTS, SERVED, node_id, save, summary, table

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
    results, document = tmp_path / "versions.json", tmp_path / "limits.md"
    document.write_text("before\n\n| torch | passed | old |\n| --- | --- | --- |\n| 2 | 3 | 4 |\n\nafter\n")
    save("2.13.0", {**result, "failed": [], "date": "2026-01-02"}, results, document)
    save("2.11.0", {**result, "date": "2026-01-01"}, results, document)
    save("2.13.0", {**result, "passed": 4321, "failed": [], "date": "2026-01-03"}, results, document)
    assert list(json.loads(results.read_text())) == ["2.11.0", "2.13.0"]
    rows = [
        "| torch | passed | skipped | failed | day |",
        "| --- | --- | --- | --- | --- |",
        "| 2.11.0 | 1 | 1 | 2: `tests/a.py` | 2026-01-01 |",
        "| 2.13.0 | 4,321 | 1 | 0 | 2026-01-03 |",
    ]
    assert table(results).splitlines() == rows
    assert document.read_text() == "\n".join(["before", "", *rows, "", "after", ""])


def test_failed_tests_are_named_as_pytest_names_them():
    assert (
        node_id("tests.axes.zero.test_zero.test_it[a.b-{'pp': 2}]@ranks")
        == "tests/axes/zero/test_zero.py::test_it[a.b-{'pp': 2}]"
    )
    assert node_id("tests.a.test_b.test_c") == "tests/a/test_b.py::test_c"


def test_the_documents_have_the_table_of_what_ran():
    assert table() in DOCUMENT.read_text()
    assert set(json.loads(RESULTS.read_text())) == set(SERVED)
