"""Rules that are tests: private names of torch stand in one file, commands stay torch-free, public names have
docstrings.

Floors, cycles and lazy imports: test_imports.py. Errors and their tests: test_slugs.py.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

import parallelize
from tests.policy.sources import PATHS, module_name, nodes_of, tree_of

pytestmark = pytest.mark.xdist_group("sources")
PRIVATE_ATTRIBUTES = {"_local_tensor", "_spec", "_C", "_execution_engine", "_op_dispatcher"}
TORCH_FREE = re.compile(r"__init__|__main__|cli\b|base\.(?!torch_private)|plan\.(?!models|dims)")


def imports(path: Path) -> list[str]:
    tree = tree_of(path)
    checked = [node for node in nodes_of(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {id(node) for block in checked for node in ast.walk(block)}
    names = []
    for node in nodes_of(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            if node.module == "parallelize":
                names += [f"parallelize.{alias.name}" for alias in node.names]
    return names


def test_tests_of_a_group_are_kept_together(request):
    """Pools and namespaces are shared by the tests of a group: scattered over workers, they disturb each other."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not under --dist loadgroup")
    grouped = [item for item in request.session.items if item.get_closest_marker("xdist_group")]
    scattered = [item.nodeid for item in grouped if "@" not in item.nodeid]
    assert grouped and not scattered, f"pytest and pytest-xdist do not go together: {scattered[:3]}"


def test_words_styles_and_plans_do_not_import_torch():
    torch_free = {file: path for file, path in PATHS.items() if TORCH_FREE.match(module_name(file))}
    assert len(torch_free) > 30
    assert not [file for file, path in torch_free.items() if "torch" in {name.split(".")[0] for name in imports(path)}]


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and private names of torch."""
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if part.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES:
            yield node.lineno, node.attr


def test_private_names_of_torch_stand_in_one_room():
    others = {file: path for file, path in PATHS.items() if not file.startswith("base/torch_private/")}
    assert not [f"{file}:{line} {name}" for file, path in others.items() for line, name in private_names(tree_of(path))]


def test_private_names_of_torch_are_noticed():
    source = "from torch._x import y\nfrom torch.z import _w, v\na.b._spec\na._other"
    assert list(private_names(ast.parse(source))) == [(1, "_x"), (2, "_w"), (3, "_spec")]


def test_forwards_of_modules_are_set_in_one_file():
    setters = {file for file, path in PATHS.items() if '["forward"] = ' in path.read_text(encoding="utf-8")}
    assert setters == {"state/forward_steps.py", "training/trainers/sft.py"}  # the latter undoes what TRL sets


def test_public_names():
    for name in parallelize.__all__:
        assert getattr(parallelize, name) is not None
    assert set(parallelize._HOME) <= set(dir(parallelize))


def test_no_public_name_is_also_a_module():
    """Importing the module would replace the name."""
    assert not set(parallelize._HOME) & {file.split("/")[0].removesuffix(".py") for file in PATHS}


def test_the_map_of_public_names_is_the_imports_that_type_checkers_see():
    imports = [node for node in nodes_of(tree_of(PATHS["__init__.py"])) if isinstance(node, ast.ImportFrom)]
    seen = {
        alias.asname: node.module
        for node in imports
        for alias in node.names
        if alias.asname and not alias.asname.startswith("_")
    }
    assert seen == parallelize._HOME
    assert all(
        f"{alias.asname}".lstrip("_") in ("None", alias.name.lower(), alias.name)
        for node in imports
        for alias in node.names
    )


def test_public_functions_have_docstrings():
    for name in parallelize.__all__:
        value = getattr(parallelize, name)
        assert name.startswith("__") or (value.__doc__ and value.__doc__.strip()), name


PUBLIC = {name: getattr(parallelize, name) for name in parallelize._HOME}


def without_docstring_check(value):
    """The parameters of an enum or an exception are Python's."""
    return inspect.isclass(value) and issubclass(value, (enum.Enum, Exception))


def public_methods(owner):
    """(name, function) of each public method and property that the class itself defines."""
    for name, member in vars(owner).items():
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        if not name.startswith("_") and inspect.isfunction(function):
            yield f"{owner.__name__}.{name}", function


def unnamed_parameters(function, doc):
    """The parameters that the docstring does not name."""
    named = set(re.findall(r"\w+", doc)) | {"self", "cls"}
    return [name for name in inspect.signature(function).parameters if name not in named]


FUNCTIONS = [name for name, value in PUBLIC.items() if inspect.isfunction(value) and not without_docstring_check(value)]
CLASSES = [name for name, value in PUBLIC.items() if inspect.isclass(value) and not without_docstring_check(value)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_of_functions_name_parameters_and_result(name):
    function = PUBLIC[name]
    doc = inspect.getdoc(function)
    assert not unnamed_parameters(function, doc)
    annotation = inspect.signature(function).return_annotation
    if annotation not in (None, "None", inspect.Signature.empty):
        assert re.search(r"^Returns:", doc, re.MULTILINE), f"returns {annotation}"


@pytest.mark.parametrize("name", CLASSES)
def test_docstrings_of_classes_and_methods_name_parameters(name):
    """The docstring of a class names the parameters of its `__init__`, which are the fields of a dataclass."""
    owner = PUBLIC[name]
    if "__init__" in vars(owner) and not getattr(owner, "_is_protocol", False):
        assert not unnamed_parameters(owner.__init__, inspect.getdoc(owner))
    for method, function in public_methods(owner):
        assert function.__doc__, method
        doc = inspect.getdoc(function)
        assert not unnamed_parameters(function, doc), method


@pytest.mark.processes
@pytest.mark.torch_free
def test_lint_runs_without_torch():
    """How fast it answers: python -m benchmarks.predictions."""
    code = (
        "import sys\nfrom parallelize.cli import main\n"
        "status = main(['lint', *sys.argv[1:]])\n"
        "assert status == 0 and 'torch' not in sys.modules"
    )
    plans = [str(path) for path in parallelize.shipped_plans().values()]
    subprocess.run([sys.executable, "-c", code, *plans], check=True, capture_output=True, timeout=60)


@pytest.mark.processes
@pytest.mark.torch_free
def test_help_runs_without_torch():
    code = (
        "import contextlib, io, sys\nfrom parallelize.cli import main\n"
        "from parallelize.cli.completion import walk_commands\nfrom parallelize.cli.parser import build_parser\n"
        "for path, _ in [*walk_commands(build_parser())]:\n"
        "    text = io.StringIO()\n"
        "    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):\n"
        "        main([*path.split(), '--help'])\n"
        "    assert text.getvalue().startswith(f'usage: parallelize{path}'), path\n"
        "    assert 'torch' not in sys.modules, path\n"
        "    print(path)"
    )
    command = [sys.executable, "-c", code]
    helped = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert len(helped.splitlines()) > 20


def test_functions_and_files_stay_small():
    for file, path in PATHS.items():
        text = path.read_text()
        assert text.count("\n") <= 480, file
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                documented = ast.get_docstring(node) is not None
                first = node.body[1 if documented and len(node.body) > 1 else 0]
                assert node.end_lineno - first.lineno <= 55, f"{file}:{node.lineno} {node.name}"


def test_no_folder_of_tests_is_skipped(pytestconfig):
    """pytest skips some folders by name, `dist` and `build` among them, without a word."""
    tests = Path(__file__).parent.parent
    skipped = pytestconfig.getini("norecursedirs")
    for path in tests.rglob("test_*.py"):
        for folder in path.relative_to(tests).parts[:-1]:
            assert not any(fnmatch(folder, pattern) for pattern in skipped), path


@pytest.mark.processes
def test_every_test_is_tracked():
    """An ignored folder of tests would pass here and be absent everywhere else."""
    tests = Path(__file__).parent.parent
    listed = subprocess.run(["git", "ls-files", "."], cwd=tests, capture_output=True, text=True)
    if listed.returncode == 0:
        names = {str(path.relative_to(tests)) for path in tests.rglob("*.py")}
        ignored = subprocess.run(
            ["git", "check-ignore", "--stdin"],
            cwd=tests,
            capture_output=True,
            text=True,
            input="\n".join(sorted(names)),
        )
        assert not ignored.stdout, ignored.stdout


SAME_BASENAME = {
    "__init__.py": "what a room is for",
    "commands.py": "the commands of the room on the command line",
}


def test_files_share_a_name_only_where_it_means_the_same():
    homes: dict[str, list[str]] = {}
    for file, path in PATHS.items():
        homes.setdefault(path.name, []).append(file)
    assert {name for name, files in homes.items() if len(files) > 1} == set(SAME_BASENAME)


def test_every_class_has_a_name_of_its_own():
    homes: dict[str, list[str]] = {}
    for file, path in PATHS.items():
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(file)
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_comments_stand_before_what_they_explain():
    """The formatter breaks a line for a comment at its end; `]  # why` says it where nobody reads it."""
    closing = re.compile(r"^\s*[)\]}][^#'\"]*\s{2}# (?!type:|noqa|pragma|fmt:)")
    late = [
        f"{file}:{number}"
        for file, path in PATHS.items()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if closing.match(line)
    ]
    assert not late
