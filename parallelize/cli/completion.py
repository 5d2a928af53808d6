"""`parallelize completion`: scripts for bash, zsh and fish, which shtab makes from the parser.

Plan names are those shipped with the release that made the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parallelize.base.terminal.console import FINE
from parallelize.plan.plan_file import shipped_plans

_SHELLS = ("bash", "zsh", "fish")
_FILES = ("SOURCE", "FILE", "DEST", "DIR", "SRC", "DST")

_INSTALLATION = """\
bash  eval "$(parallelize completion bash)"                in ~/.bashrc
zsh   eval "$(parallelize completion zsh)"                 in ~/.zshrc, after compinit
fish  parallelize completion fish > ~/.config/fish/completions/parallelize.fish"""


def add_commands(verbs: Any) -> None:
    description = "print a script that completes commands in a shell"
    parser = verbs.add_parser("completion", help=description, description=description, epilog=_INSTALLATION)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=_completion)


def _completion(options: argparse.Namespace) -> int:
    import shtab

    parser = options.build_parser()
    for _, command in walk_commands(parser):
        for action in command._actions:
            _complete(action, shtab.FILE)
    print(shtab.complete(parser, options.shell), end="")
    return FINE


def walk_commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command of a parser, itself first. path: its words, each after a space."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from walk_commands(inner, f"{path} {name}")


def _complete(action: Any, files: Mapping[str, Any]) -> None:
    """Tell shtab what completes an argument beside its choices. files: what it calls names of files."""
    if action.metavar == "PLAN":
        action.complete = _plans(files)
    elif action.type is Path or action.metavar in _FILES:
        action.complete = files
    elif spellings := getattr(action, "completed_with", None):
        action.choices = list(spellings)


def _plans(files: Mapping[str, Any]) -> dict[str, Any]:
    """Shipped plans, and files."""
    names = " ".join(shipped_plans())
    return {
        "bash": "_parallelize_plans",
        "zsh": "_parallelize_plans",
        "fish": f"(printf '%s\\n' {names}) {files['fish']}",
        "preamble": {
            "bash": f'_parallelize_plans() {{ compgen -W "{names}" -- "$1"; {files["bash"]} "$1"; }}',
            "zsh": f"_parallelize_plans() {{ _alternative 'plans:plan:({names})' 'files:file:_files' }}",
        },
    }
