"""Rules of the house that are tests: imports point down, private names stand in one file, commands stay torch-free."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import parallelize
from parallelize.cli.completion import places
from parallelize.cli.parser import build_parser

ROOT = Path(parallelize.__file__).parent
FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
FLOORS = {
    0: {"errors", "mesh", "layout", "_torch_private", "__init__"},
    1: {"styles"},
    2: {"plan"},
    4: {"analysis", "checkpoint", "training", "verification"},
    5: {"cli", "__main__"},
}
TORCH_FREE = {"errors", "mesh", "layout", "console", "progress_line", "styles", "plan", "cli", "__main__", "__init__"}


def floor(module: str) -> int:
    head = module.split(".")[0]
    return next((number for number, names in FLOORS.items() if head in names), 3)


def imports(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    checked = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {id(node) for block in checked for node in ast.walk(block)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
            if node.module == "parallelize":
                found += [f"parallelize.{alias.name}" for alias in node.names]
    return found


def name_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


@pytest.mark.parametrize("file", FILES)
def test_imports_point_down(file):
    here = floor(name_of(file))
    for name in imports(FILES[file]):
        if name.startswith("parallelize."):
            target = name.removeprefix("parallelize.")
            if target.split(".")[0] in {path.split("/")[0].removesuffix(".py") for path in FILES}:
                assert floor(target) <= here, f"{file} (floor {here}) imports {name} (floor {floor(target)})"


@pytest.mark.parametrize("file", [file for file in FILES if name_of(file).split(".")[0] in TORCH_FREE])
def test_words_styles_and_plans_do_not_import_torch(file):
    assert not [name for name in imports(FILES[file]) if name.split(".")[0] == "torch"]


@pytest.mark.parametrize("file", [file for file in FILES if file != "_torch_private.py"])
def test_private_names_of_torch_stand_in_one_file(file):
    tree = ast.parse(FILES[file].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            private = [part for part in (node.module or "").split(".") if part.startswith("_")]
            private += [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"{file}:{node.lineno} imports {private}"
        if isinstance(node, ast.Attribute) and node.attr in (
            "_local_tensor",
            "_spec",
            "_C",
            "_execution_engine",
            "_op_dispatcher",
        ):
            raise AssertionError(f"{file}:{node.lineno} uses {node.attr}")


def test_public_names():
    for name in parallelize.__all__:
        assert getattr(parallelize, name) is not None
    assert set(parallelize._HOME) <= set(dir(parallelize))


def test_no_public_name_is_also_a_module():
    """Importing the module would replace the name."""
    assert not set(parallelize._HOME) & {file.split("/")[0].removesuffix(".py") for file in FILES}


def test_public_functions_have_docstrings():
    for name in parallelize.__all__:
        value = getattr(parallelize, name)
        assert name.startswith("__") or (value.__doc__ and value.__doc__.strip()), name


@pytest.mark.torch_free
def test_lint_answers_at_once_without_torch():
    code = (
        "import sys, time; began = time.perf_counter()\n"
        "from parallelize.cli import main\n"
        "status = main(['lint', *sys.argv[1:]])\n"
        "assert status == 0 and 'torch' not in sys.modules\n"
        "print(time.perf_counter() - began)"
    )
    plans = [str(path) for path in parallelize.shipped_plans().values()]
    took = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code, *plans], check=True, capture_output=True, timeout=60)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.25, took


COMMANDS = [place.path.split() for place in places(build_parser())]


@pytest.mark.torch_free
@pytest.mark.parametrize("verbs", COMMANDS, ids=" ".join)
def test_help_answers_at_once_without_torch(verbs):
    code = (
        "import sys\nfrom parallelize.cli import main\n"
        "try:\n    main([*sys.argv[1:], '--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0 and 'torch' not in sys.modules"
    )
    took = []
    for _ in range(3):  # the fastest counts: other work may stand in the way of one
        began = time.perf_counter()
        command = [sys.executable, "-c", code, *verbs]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        assert said.startswith("usage: parallelize " + " ".join(verbs))
        took.append(time.perf_counter() - began)
        if took[-1] < 0.4:
            break
    assert min(took) < 0.4, took


def test_functions_and_files_stay_small():
    for file, path in FILES.items():
        text = path.read_text()
        assert text.count("\n") <= 460, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                documented = ast.get_docstring(node) is not None
                first = node.body[1 if documented and len(node.body) > 1 else 0]
                assert node.end_lineno - first.lineno <= 55, f"{file}:{node.lineno} {node.name}"


def test_every_test_is_tracked():
    """An ignored folder of tests would pass here and be absent everywhere else."""
    tests = Path(__file__).parent.parent
    listed = subprocess.run(["git", "ls-files", "."], cwd=tests, capture_output=True, text=True)
    if listed.returncode == 0:
        found = {str(path.relative_to(tests)) for path in tests.rglob("*.py")}
        ignored = subprocess.run(
            ["git", "check-ignore", "--stdin"],
            cwd=tests,
            capture_output=True,
            text=True,
            input="\n".join(sorted(found)),
        )
        assert not ignored.stdout, ignored.stdout
