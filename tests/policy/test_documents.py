"""The documents are tested: links and anchors resolve, tables render, examples run, plans lint, public names are
listed.

A code block whose first line is a comment with a file name (`# first.py`) is a file of an example; the test writes it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

import parallelize
from parallelize.cli import main
from parallelize.launch.config.resumed_keys import document_rows
from tests.support.scripts import run_script

ROOT = Path(__file__).parents[2]
DOCUMENTS = {
    str(path.relative_to(ROOT)): path for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
}
MAX_README_LINES = 140
EXAMPLE_TIMEOUT_S = 120

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
FILE_NAME = re.compile(r"# (\S+\.(?:py|yaml))\n")
PATH = re.compile(r"`([a-z_][\w./-]*/(?:[\w.-]+\.(?:py|md|yaml|json))?)`")
SEPARATOR_CELL = re.compile(r":?-+:?\Z")


def prose_of(text: str) -> str:
    """The text without its code blocks; their lines stay, empty, so that line numbers are those of the file."""
    return FENCE.sub(lambda block: "\n" * block.group(0).count("\n"), text)


def blocks_of(document: str, language: str) -> list[str]:
    return [body for word, body in FENCE.findall(DOCUMENTS[document].read_text()) if word == language]


def all_blocks(language: str) -> list[tuple[str, int, str]]:
    return [(name, number, body) for name in DOCUMENTS for number, body in enumerate(blocks_of(name, language))]


def example_files(document: str) -> dict[str, str]:
    """File name to content of the blocks that name a file."""
    bodies = blocks_of(document, "python") + blocks_of(document, "yaml")
    return {name.group(1): body for body in bodies if (name := FILE_NAME.match(body))}


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives to headings; a repeated heading gets a number."""
    seen: Counter[str] = Counter()
    anchors = set()
    for title in re.findall(r"^#{1,6} +(.*?) *#*$", prose_of(text), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        anchors.add(f"{plain}-{seen[plain]}" if seen[plain] else plain)
        seen[plain] += 1
    return anchors


def cells_of(row: str) -> list[str]:
    """The cells of a table row. A pipe separates cells inside code too, unless a backslash escapes it."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def tables_of(text: str) -> list[tuple[int, list[str]]]:
    """(number of its first line, its rows) of every run of lines that start with a pipe."""
    tables: list[tuple[int, list[str]]] = []
    previous = -1
    for number, line in enumerate(prose_of(text).splitlines(), start=1):
        if line.lstrip().startswith("|"):
            if previous != number - 1:
                tables.append((number, []))
            tables[-1][1].append(line)
            previous = number
    return tables


def table_problems(text: str) -> list[str]:
    problems = []
    for number, rows in tables_of(text):
        width = len(cells_of(rows[0]))
        if len(rows) < 2 or not all(SEPARATOR_CELL.match(cell) for cell in cells_of(rows[1])):
            problems.append(f"line {number}: rows without a header and separator (a blank line inside a table?)")
            continue
        problems += [
            f"line {number + offset}: {len(cells_of(row))} cells under a header of {width}"
            for offset, row in enumerate(rows)
            if len(cells_of(row)) != width or not row.rstrip().endswith("|")
        ]
    return problems


def link_problems(path: Path) -> list[str]:
    problems = []
    text = prose_of(path.read_text())
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists() or ROOT not in linked.parents:
            problems.append(f"{target}: no such file")
        elif anchor and anchor not in anchors_of(linked.read_text()):
            problems.append(f"{target}: no such heading")
    return problems


def absent_paths(text: str) -> list[str]:
    """Files and folders in code that are nowhere here. A name in capitals stands for any name; rooms are named by their
    last part."""
    paths = [path for path in PATH.findall(prose_of(text)) if not re.search(r"\b[A-Z]+\b", path)]
    places_of = {path: (ROOT / path, ROOT / "parallelize" / path) for path in paths}
    rooms = {f"{folder.name}/" for folder in (ROOT / "parallelize").rglob("*") if folder.is_dir()}
    return [
        path for path, places in places_of.items() if path not in rooms and not any(place.exists() for place in places)
    ]


def completed_plan(body: str) -> str:
    """A block of YAML as a full plan: the documents also show single keys."""
    missing = {"schema_version": "schema_version: 1\n", "tensor_parallel": "tensor_parallel: {module: replicate}\n"}
    keys = {key.value for key, _ in yaml.compose(body).value}
    return body + "".join(line for key, line in missing.items() if key not in keys)


def run(command: list[str], folder: Path) -> str:
    """Run Python in `folder` with this checkout; return what it prints. Raises: AssertionError with its output."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=EXAMPLE_TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run_on_two_ranks(script: str, folder: Path) -> str:
    return run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script], folder)


def write_example(document: str, folder: Path) -> None:
    for name, body in example_files(document).items():
        (folder / name).write_text(body)


def losses_in(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step +\d+ +loss ([\d.]+)$", printed, re.MULTILINE)]


def printed_losses(document: str) -> list[float]:
    """The losses that the document says its example prints."""
    return [value for block in blocks_of(document, "") if "torchrun" in block for value in losses_in(block)]


@pytest.mark.torch_free
def test_readme_is_a_front_page():
    assert len(DOCUMENTS["README.md"].read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.torch_free
@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_resolve(name):
    assert not link_problems(DOCUMENTS[name])


@pytest.mark.torch_free
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "CHANGELOG.md"])  # which names what is gone
def test_paths_exist(name):
    assert not absent_paths(DOCUMENTS[name].read_text())


@pytest.mark.torch_free
def test_every_room_is_in_the_tree():
    rooms = {path.name for path in (ROOT / "parallelize").iterdir() if (path / "__init__.py").exists()}
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## Read it", 1)[0]
    assert not [room for room in sorted(rooms) if f"`{room}/`" not in tree]


@pytest.mark.torch_free
@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_render(name):
    assert not table_problems(DOCUMENTS[name].read_text())


@pytest.mark.torch_free
@pytest.mark.parametrize("name", DOCUMENTS)
def test_code_fences_are_closed(name):
    assert DOCUMENTS[name].read_text().count("```") == 2 * len(FENCE.findall(DOCUMENTS[name].read_text()))


@pytest.mark.torch_free
@pytest.mark.parametrize(
    "broken",
    [
        "| a | b |\n| --- | --- |\n| 1 | 2 |\n\n| 3 | 4 |\n",
        "| a | b |\n| --- | --- |\n| 1 |\n",
        "| a | b |\n| 1 | 2 |\n",
        "| a | b |\n| --- |\n| 1 | 2 |\n",
    ],
    ids=["blank line", "missing cell", "no separator", "short separator"],
)
def test_a_broken_table_is_noticed(broken):
    assert table_problems(broken)


@pytest.mark.torch_free
def test_a_broken_link_is_noticed(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("# One heading\n[file](absent.md) [heading](#absent)\n")
    assert len(link_problems(document)) == 2
    assert anchors_of("# Mine: `a` and b\n## Mine: a and b\n") == {"mine-a-and-b", "mine-a-and-b-1"}


@pytest.mark.torch_free
def test_an_absent_path_is_noticed():
    assert absent_paths("`docs/absent.md`, `plan/plan_file.py`, `show/`, `nowhere/`, `tp_plans/NAME.yaml`") == [
        "docs/absent.md",
        "nowhere/",
    ]


@pytest.mark.torch_free
def test_every_document_is_in_the_index():
    pages = {name.removeprefix("docs/") for name in DOCUMENTS if name.startswith("docs/")} - {"README.md"}
    assert pages <= set(LINK.findall((ROOT / "docs" / "README.md").read_text()))


@pytest.mark.torch_free
def test_tools_read_the_same_index():
    """`llms.txt` has each page with the text that the index has of it."""
    rows = [cells_of(row) for _, table in tables_of((ROOT / "docs" / "README.md").read_text()) for row in table[2:]]
    listed = re.findall(r"^- \[([\w.-]+)\]\(docs/\1\): (.*)$", (ROOT / "llms.txt").read_text(), re.MULTILINE)
    assert listed == [(LINK.findall(link)[0], text) for link, text in rows]


@pytest.mark.torch_free
def test_every_public_name_is_in_the_api_table():
    rows = [cells_of(row)[0] for _, table in tables_of((ROOT / "docs" / "api.md").read_text()) for row in table]
    listed = Counter(name for cell in rows if cell.startswith("`") for name in re.findall(r"`(\w+)`", cell))
    assert set(listed) == set(parallelize.__all__)
    assert not [name for name, times in listed.items() if times > 1]


@pytest.mark.torch_free
def test_what_keys_do_to_a_run_that_goes_on_is_what_the_run_reads():
    text = (ROOT / "docs" / "run.md").read_text()
    table = text[text.index("| key | in a run that goes on") :].partition("\n\n")[0]
    assert table.splitlines()[2:] == list(document_rows())


@pytest.mark.torch_free
@pytest.mark.parametrize("name, number, body", all_blocks("python"), ids=lambda value: str(value)[:24])
def test_python_blocks_compile(name, number, body):
    compile(body, f"{name}, block {number}", "exec")


@pytest.mark.torch_free
@pytest.mark.parametrize("name, number, body", all_blocks("yaml"), ids=lambda value: str(value)[:24])
def test_plans_lint(name, number, body, tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text(completed_plan(body))
    assert main(["lint", str(path)]) == 0, capsys.readouterr().err


@pytest.mark.torch_free
def test_the_llama_plan_is_the_shipped_one():
    shipped = yaml.safe_load((ROOT / "tp_plans" / "llama.yaml").read_text())
    assert shipped in [yaml.safe_load(body) for body in blocks_of("docs/plan-reference.md", "yaml")]
    (shown,) = (yaml.safe_load(body) for body in blocks_of("README.md", "yaml"))
    assert is_part_of(shown, shipped)


def is_part_of(shown: object, whole: object) -> bool:
    """Whether a plan has what is shown of it, and maybe more keys."""
    if isinstance(shown, dict) and isinstance(whole, dict):
        return all(key in whole and is_part_of(value, whole[key]) for key, value in shown.items())
    return shown == whole


EXAMPLES = [("README.md", "first.py"), ("docs/quick-start.md", "train.py")]


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("document", "script"), EXAMPLES, ids=["first example", "quick start"])
def test_examples_print_the_losses_that_documents_show(document, script, tmp_path):
    write_example(document, tmp_path)
    losses = losses_in(run_script(tmp_path / script, 2))
    assert losses == pytest.approx(printed_losses(document), rel=0.02)


@pytest.mark.processes
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("body", "text"), [("raise SystemExit(3)", r"exit codes \[3, 3\]"), ("1 / 0", "ZeroDivisionError")]
)
def test_an_example_that_fails_is_noticed(body, text, tmp_path):
    (tmp_path / "fails.py").write_text(body)
    with pytest.raises(AssertionError, match=text):
        run_script(tmp_path / "fails.py", 2)


@pytest.mark.sweep
@pytest.mark.processes
def test_the_first_example_runs_under_torchrun(tmp_path):
    write_example("README.md", tmp_path)
    losses = losses_in(run_on_two_ranks("first.py", tmp_path))
    assert losses == pytest.approx(printed_losses("README.md"), rel=0.02)


@pytest.mark.sweep
@pytest.mark.processes
def test_the_quick_start_runs_under_torchrun(tmp_path):
    write_example("docs/quick-start.md", tmp_path)
    losses = losses_in(run_on_two_ranks("train.py", tmp_path))
    assert losses == pytest.approx(printed_losses("docs/quick-start.md"), rel=0.02)
    assert (tmp_path / "model.pt").exists()


@pytest.mark.sweep
@pytest.mark.processes
def test_the_quick_start_is_verified(tmp_path):
    write_example("docs/quick-start.md", tmp_path)
    command = ["-m", "parallelize", "verify", "my_model:build", "--plan", "my_plan.yaml", "--mesh", "tp=2", "--json"]
    assert json.loads(run(command, tmp_path))["ok"] is True
