"""Each error of the package occurs in a test, by its slug: as a word of its own in a string, not in a docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.policy.sources import PATHS, nodes_of, tree_of

pytestmark = pytest.mark.xdist_group("sources")
TESTS = Path(__file__).parents[1]
SLUG = re.compile(r"(?<![a-z0-9-])[a-z0-9]+(?:-[a-z0-9]+)*(?![a-z0-9-])")

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Helpers = dict[str, tuple[int, ast.expr | None]]  # name to (position of its argument `slug`, that argument's default)


def strings_of(value: ast.expr | None) -> Iterator[str]:
    """The strings that an expression may be: it is a literal, or a choice between literals."""
    if isinstance(value, ast.IfExp):
        yield from strings_of(value.body)
        yield from strings_of(value.orelse)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value


def helpers_of(tree: ast.AST) -> Helpers:
    """The functions that take an argument `slug`, which they pass to a Problem."""
    positions: Helpers = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args]
            if "slug" in names:
                defaults = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
                positions[node.name] = names.index("slug") - (names[0] == "self"), defaults.get("slug")
    return positions


def slugs_of_call(call: ast.Call, helpers: Helpers) -> Iterator[str]:
    name = getattr(call.func, "id", None) or getattr(call.func, "attr", "")
    if name not in helpers:
        return
    position, default = helpers[name]
    named = [keyword.value for keyword in call.keywords if keyword.arg == "slug"]
    yield from strings_of(call.args[position] if position < len(call.args) else named[0] if named else default)


def slugs_of(trees: Iterable[ast.AST]) -> set[str]:
    """Of every `Problem(slug, ...)`, of calls that pass one to a helper, and of variables named `slug`."""
    trees = list(trees)
    public = {name: slug for tree in trees for name, slug in helpers_of(tree).items() if not name.startswith("_")}
    slugs_of_files: set[str] = set()
    for tree in trees:
        helpers = {**public, **helpers_of(tree), "Problem": (0, None)}
        for node in nodes_of(tree):
            if isinstance(node, ast.Call):
                slugs_of_files.update(slugs_of_call(node, helpers))
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "slug":
                slugs_of_files.update(strings_of(node.value))
    return slugs_of_files


def slugs() -> set[str]:
    return slugs_of(map(tree_of, PATHS.values()))


def words_of(tree: ast.AST) -> set[str]:
    """The words in the string literals of a test, docstrings left out, each as far as letters, digits and hyphens
    go."""
    nodes = list(ast.walk(tree))
    documented = (node.body[0] for node in nodes if isinstance(node, _DOCUMENTED) and node.body)
    docstrings = {id(first.value) for first in documented if isinstance(first, ast.Expr)}
    return {
        word
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        for word in SLUG.findall(node.value)
    }


def words_of_tests() -> set[str]:
    files = [path for path in sorted(TESTS.rglob("*.py")) if path.parent != Path(__file__).parent]
    return set().union(*(words_of(ast.parse(path.read_text())) for path in files))


def test_each_error_occurs_in_a_test():
    known_slugs = slugs()
    assert len(known_slugs) > 280
    assert not known_slugs - words_of_tests()


def test_every_way_to_name_an_error_is_found():
    source = """
class Reader:
    def wrong(self, node, slug, what): ...
def _reading(what, slug="by-default"): ...
def f(reader, node, c):
    Problem("direct", "...")
    Problem("if-true" if c else "if-false", "...")
    reader.wrong(node, "of-a-method", "...")
    with _reading("..."), _reading("...", slug="by-name"):
        slug = "first-variable" if c else "second-variable"
"""
    direct = {"direct", "if-true", "if-false", "of-a-method"}
    assert slugs_of([ast.parse(source)]) == direct | {"by-default", "by-name", "first-variable", "second-variable"}


def test_a_longer_slug_a_docstring_and_a_comment_are_no_test_of_an_error():
    source = '''
def test_it():
    """Also bad-plan."""
    with refused("bad-plan-source", f"no {x} of-a-text: "):  # bad-plan
        pass
'''
    assert words_of(ast.parse(source)) == {"bad-plan-source", "no", "of-a-text"}
