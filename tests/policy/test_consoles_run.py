"""The console blocks of the documents print what they show.

A page's files are written where it shows them, and its commands run in its order. `...` stands for lines that are left
out. Numbers may differ in the last digits they show, durations and rounding errors in all of them.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

from parallelize.cli import main

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\S+\.(?:py|yaml))\n")
DURATION = re.compile(r"\b[\d.]+ (s|ms)\b")
TINY = re.compile(r"\b\d\.\de-(0[7-9]|[1-9]\d)\b")  # a rounding error
MODELS = {"docs/derive.md": "docs/quick-start.md"}
"""A page whose model is that of another page."""
IN_MINUTES = ("README.md", "docs/plan-reference.md", "docs/quick-start.md")
SLOW = ("docs/check-before-launch.md", "docs/derive.md")
PAGES = [*IN_MINUTES, *(pytest.param(page, marks=pytest.mark.sweep) for page in SLOW)]
MAKES_FILES = ("plans", "copy")


class Command(NamedTuple):
    """A command of a console block, and the lines that it is said to print."""

    arguments: list[str]
    shown: list[str]


def commands_of(block: str) -> Iterator[Command]:
    for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, _, shown = text.replace("\\\n", " ").partition("\n")
        program, *arguments = shlex.split(line, comments=True)
        if program == "parallelize":
            yield Command(arguments, shown.splitlines())
        elif program == "sed":  # edits a file of the page
            yield Command(["sed", line], [])


def edit(line: str) -> None:
    """Do what `sed 's/old/new/' file > other` does."""
    old, new, source, target = re.fullmatch(r"sed 's/(.*)/(.*)/' (\S+) > (\S+)", line).groups()  # type: ignore[union-attr]
    Path(target).write_text(Path(source).read_text().replace(old, new))


def write_files(text: str, folder: Path, names: str = "*") -> None:
    for _, body in FENCE.findall(text):
        if (name := FILE_NAME.match(body)) and fnmatch(name.group(1), names):
            (folder / name.group(1)).write_text(body)


def masked(line: str) -> str:
    return TINY.sub("e", DURATION.sub("t", line.rstrip()))


def missing(shown: list[str], printed: str) -> str:
    """The first shown line that was not printed where it is shown; nothing, where all were."""
    lines, at, skips = list(map(masked, printed.splitlines())), 0, False
    for line in map(masked, shown):
        if line == "...":
            skips = True
            continue
        found = next((number for number in range(at, len(lines)) if lines[number] == line), -1)
        if found < 0 or (found > at and not skips):
            return line
        at, skips = found + 1, False
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_a_page_shows(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    ran = 0
    if page in MODELS:
        write_files((ROOT / MODELS[page]).read_text(), tmp_path, "*_model.py")
    for language, body in FENCE.findall((ROOT / page).read_text()):
        write_files(f"```{language}\n{body}```", tmp_path)
        for command in commands_of(body) if not language else ():
            if command.arguments[0] == "sed":
                edit(command.arguments[1])
            elif command.shown or tuple(command.arguments[:2]) == MAKES_FILES:
                main(command.arguments)
                out = capsys.readouterr()
                printed = out.out + out.err
                line = missing(command.shown, printed)
                assert not line, f"{command.arguments} does not print {line!r}, but:\n{printed}"
                ran += 1
    for name in [name for name in sys.modules if name.startswith("my_model")]:
        del sys.modules[name]
    assert ran >= 1


def test_a_line_that_is_not_printed_is_noticed():
    assert missing(["a", "...", "c"], "a\nb\nc\n") == ""
    assert missing(["a", "c"], "a\nb\nc\n") == "c"
    assert missing(["t 2.1 s", "4.0e-13"], "t 0.3 s\n1.2e-15\n") == ""
    block = "$ parallelize lint a \\\n  b  # c\nx\n$ torchrun y\n"
    assert list(commands_of(block)) == [Command(["lint", "a", "b"], ["x"])]
