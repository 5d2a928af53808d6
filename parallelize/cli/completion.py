"""`parallelize completion`: scripts for bash, zsh and fish, generated from the parser.

The parser is read into one `Command` for each command, with what completes its arguments and options. A script finds
the command of the line, then offers the words of that command. So new commands need no change here. Plan names are
those shipped with the release that generated the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelize.base.terminal.console import FINE
from parallelize.plan.plan_file import shipped_plans

_FILES = ("SOURCE", "FILE", "DEST", "DIR", "SRC", "DST")


@dataclass(frozen=True)
class Words:
    """What completes one argument: (word, description) pairs, and whether names of files do."""

    words: tuple[tuple[str, str], ...] = ()
    files: bool = False


@dataclass(frozen=True)
class Option:
    """One option. `value`: what completes its value, None for an option without a value."""

    flags: tuple[str, ...]
    description: str
    value: Words | None


@dataclass(frozen=True)
class Command:
    """One command. `path`: its words, each after a space; empty for the program itself."""

    path: str
    subcommands: tuple[tuple[str, str], ...]
    arguments: Words
    options: tuple[Option, ...]


def add_commands(verbs: Any) -> None:
    description = "print a script that completes commands in a shell"
    parser = verbs.add_parser("completion", help=description, description=description, epilog=_INSTALLATION)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=tuple(_SHELLS))
    parser.set_defaults(run=_completion)


def _completion(options: argparse.Namespace) -> int:
    print(_SHELLS[options.shell](list(walk_commands(options.build_parser()))), end="")
    return FINE


# -- reading the parser ------------------------------------------------------------------------------------------------


def walk_commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[Command]:
    """Every command of a parser, the parser itself first."""
    subcommands: list[tuple[str, str]] = []
    inner: list[Command] = []
    options: list[Option] = []
    words: list[tuple[str, str]] = []
    files = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            descriptions = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, subparser in action.choices.items():
                subcommands.append((name, descriptions.get(name, "")))
                inner += walk_commands(subparser, f"{path} {name}")
        elif action.option_strings:
            value = None if action.nargs == 0 else _words(action)
            options.append(Option(tuple(action.option_strings), action.help or "", value))
        else:
            argument = _words(action)
            words += argument.words
            files = files or argument.files
    yield Command(path, tuple(subcommands), Words(tuple(dict.fromkeys(words)), files), tuple(options))
    yield from inner


def _words(action: argparse.Action) -> Words:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    choices = getattr(action, "completed_with", None) or action.choices or ()
    if metavar == "PLAN":
        return Words(tuple((name, "plan") for name in shipped_plans()), files=True)
    return Words(tuple((str(word), "") for word in choices), files=action.type is Path or metavar in _FILES)


# -- the scripts -------------------------------------------------------------------------------------------------------


def bash(commands: list[Command]) -> str:
    return _BASH.format(
        paths=_paths(commands),
        values=_cases((keys, _bash_words(words)) for keys, words in _values(commands)),
        options=_cases(([command.path], _bash_words(_flags(command))) for command in commands),
        arguments=_cases(([command.path], _bash_words(_arguments(command))) for command in commands),
    )


def _bash_words(words: Words) -> str:
    listed = "$'" + "\\n".join(word for word, _ in words.words) + "'"
    return f"words={listed}" + (" files=1" if words.files else "")


def zsh(commands: list[Command]) -> str:
    return _ZSH.format(
        paths=_paths(commands),
        values=_cases((keys, f"{_zsh_words(words)}; known=1") for keys, words in _values(commands)),
        options=_cases(([command.path], _zsh_words(_flags(command))) for command in commands),
        arguments=_cases(([command.path], _zsh_words(_arguments(command))) for command in commands),
    )


def _zsh_words(words: Words) -> str:
    shown = [f"{word}:{description}" if description else word for word, description in words.words]
    return f"choices=({' '.join(map(_quoted, shown))})" + (" files=1" if words.files else "")


def fish(commands: list[Command]) -> str:
    lines = []
    for command in commands:
        complete = f"complete -c parallelize -n '__parallelize_at \"{command.path}\"'"
        for word, description in _arguments(command).words:
            lines.append(f"{complete} -a {_quoted(word)}" + (f" -d {_quoted(description)}" if description else ""))
        if command.arguments.files:
            lines.append(f"{complete} -F")
        lines += [f"{complete} {_fish_option(option)}" for option in command.options]
    paths = " ".join(_quoted(command.path) for command in commands if command.path)
    return _FISH.format(paths=paths, lines="\n".join(lines))


def _fish_option(option: Option) -> str:
    flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
    description = f" -d {_quoted(option.description)}" if option.description else ""
    if option.value is None:
        return flags + description
    words = " ".join(word for word, _ in option.value.words)
    return (
        flags + description + (" -r -F" if option.value.files else " -x") + (f" -a {_quoted(words)}" if words else "")
    )


def _paths(commands: list[Command]) -> str:
    return " | ".join(_quoted(command.path) for command in commands if command.path)


def _values(commands: list[Command]) -> Iterator[tuple[list[str], Words]]:
    """(command and option before the cursor, what completes the option's value)."""
    for command in commands:
        for option in command.options:
            if option.value is not None:
                yield [f"{command.path} {flag}" for flag in option.flags], option.value


def _flags(command: Command) -> Words:
    return Words(tuple((flag, option.description) for option in command.options for flag in option.flags))


def _arguments(command: Command) -> Words:
    return Words(command.subcommands + command.arguments.words, command.arguments.files)


def _cases(cases: Any) -> str:
    return "\n".join(f"            {' | '.join(map(_quoted, keys))}) {body} ;;" for keys, body in cases)


def _quoted(text: str) -> str:
    """Quote for bash, zsh and fish. They treat backslashes differently, so backslashes are removed; no parser has
    any."""
    return "'" + text.replace("\\", "").replace("'", "'\\''") + "'"


_INSTALLATION = """\
bash  eval "$(parallelize completion bash)"                in ~/.bashrc
zsh   eval "$(parallelize completion zsh)"                 in ~/.zshrc, after compinit
fish  parallelize completion fish > ~/.config/fish/completions/parallelize.fish"""

_BASH = """\
# completion of parallelize for bash: eval "$(parallelize completion bash)"
_parallelize() {{
    local IFS=$'\\n' cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} at= words= files= known=1 i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$at ${{COMP_WORDS[i]}}" in
            {paths}) at="$at ${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$at $prev" in  # the value of an option
{values}
            *) known= ;;
    esac
    if [[ -z $known && $cur == -* ]]; then
        case "$at" in
{options}
        esac
    elif [[ -z $known ]]; then
        case "$at" in
{arguments}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ -n $files ]]; then
        compopt -o filenames 2>/dev/null
        COMPREPLY+=($(compgen -f -- "$cur"))
    fi
}}
complete -F _parallelize parallelize
"""

_ZSH = """\
#compdef parallelize
# completion of parallelize for zsh: eval "$(parallelize completion zsh)"
_parallelize() {{
    local at= files= known= i
    local -a choices
    for ((i = 2; i < CURRENT; i++)); do
        case "$at ${{words[i]}}" in
            {paths}) at="$at ${{words[i]}}" ;;
        esac
    done
    case "$at ${{words[CURRENT-1]}}" in  # the value of an option
{values}
    esac
    if [[ -z $known && ${{words[CURRENT]}} == -* ]]; then
        case "$at" in
{options}
        esac
        _describe -o option choices
        return
    elif [[ -z $known ]]; then
        case "$at" in
{arguments}
        esac
    fi
    if [[ -n $files ]]; then _files; fi
    if (( $#choices )); then _describe value choices; fi
}}
if [[ $funcstack[1] == _parallelize ]]; then _parallelize "$@"; else compdef _parallelize parallelize; fi
"""

_FISH = """\
# completion of parallelize for fish: parallelize completion fish > ~/.config/fish/completions/parallelize.fish
function __parallelize_at
    set -l at ''
    for word in (commandline -opc)[2..]
        if contains -- "$at $word" {paths}
            set at "$at $word"
        end
    end
    test "$at" = "$argv[1]"
end
complete -c parallelize -f
{lines}
"""

_SHELLS: dict[str, Callable[[list[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
