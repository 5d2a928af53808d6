"""`parallelize completion`: scripts for bash, zsh and fish, written from the parser itself.

The parser is read into `Place`s, one for each command: what may stand there. Each script first walks the line to find
its place, then offers that place's words; so a new verb is completed without a word about it here. Plan names are those
shipped with the release that wrote the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelize.console import FINE
from parallelize.plan.load import shipped_plans

_FILES = ("SOURCE", "FILE", "DEST", "DIR", "SRC", "DST")


@dataclass(frozen=True)
class Words:
    """What completes one argument: (word, what it means) pairs, and names of files."""

    words: tuple[tuple[str, str], ...] = ()
    files: bool = False


@dataclass(frozen=True)
class Option:
    """One option. `value`: what completes its value, None for a switch."""

    flags: tuple[str, ...]
    about: str
    value: Words | None


@dataclass(frozen=True)
class Place:
    """One command: `path` is its verbs, each after a space, empty at the top."""

    path: str
    verbs: tuple[tuple[str, str], ...]
    arguments: Words
    options: tuple[Option, ...]


def add_commands(verbs: Any) -> None:
    about = "print a script that completes commands in a shell"
    parser = verbs.add_parser("completion", help=about, description=about, epilog=_HOW)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=tuple(_SHELLS))
    parser.set_defaults(run=_completion)


def _completion(options: argparse.Namespace) -> int:
    from parallelize.cli.parser import build_parser

    print(_SHELLS[options.shell](list(places(build_parser()))), end="")
    return FINE


# -- the parser, read -----------------------------------------------------------------------------------------------------


def places(parser: argparse.ArgumentParser, path: str = "") -> Iterator[Place]:
    """Every command of a parser, the parser itself first."""
    verbs: list[tuple[str, str]] = []
    inner: list[Place] = []
    options: list[Option] = []
    words: list[tuple[str, str]] = []
    files = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {one.dest: one.help or "" for one in action._choices_actions}
            verbs += [(name, about.get(name, "")) for name in action.choices]
            inner += [place for name, one in action.choices.items() for place in places(one, f"{path} {name}")]
        elif action.option_strings:
            value = None if action.nargs == 0 else _words(action)
            options.append(Option(tuple(action.option_strings), action.help or "", value))
        else:
            found = _words(action)
            words += found.words
            files = files or found.files
    yield Place(path, tuple(verbs), Words(tuple(dict.fromkeys(words)), files), tuple(options))
    yield from inner


def _words(action: argparse.Action) -> Words:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    known = getattr(action, "completed_with", None) or action.choices or ()
    if metavar == "PLAN":
        return Words(tuple((name, "plan") for name in shipped_plans()), files=True)
    return Words(tuple((str(word), "") for word in known), files=action.type is Path or metavar in _FILES)


# -- the scripts ----------------------------------------------------------------------------------------------------------


def bash(found: list[Place]) -> str:
    return _BASH.format(
        paths=_paths(found),
        values=_cases((keys, _bash_words(words)) for keys, words in _values(found)),
        options=_cases(([p.path], _bash_words(Words(tuple(_flags(p))))) for p in found),
        arguments=_cases(([p.path], _bash_words(Words(p.verbs + p.arguments.words, p.arguments.files))) for p in found),
    )


def _bash_words(words: Words) -> str:
    listed = "$'" + "\\n".join(word for word, _ in words.words) + "'"
    return f"words={listed}" + (" files=1" if words.files else "")


def zsh(found: list[Place]) -> str:
    return _ZSH.format(
        paths=_paths(found),
        values=_cases((keys, f"{_zsh_words(words)}; known=1") for keys, words in _values(found)),
        options=_cases(([p.path], _zsh_words(Words(tuple(_flags(p))))) for p in found),
        arguments=_cases(([p.path], _zsh_words(Words(p.verbs + p.arguments.words, p.arguments.files))) for p in found),
    )


def _zsh_words(words: Words) -> str:
    shown = [f"{word}:{about}" if about else word for word, about in words.words]
    return f"choices=({' '.join(map(_quoted, shown))})" + (" files=1" if words.files else "")


def fish(found: list[Place]) -> str:
    lines = []
    for place in found:
        at = f"complete -c parallelize -n '__parallelize_at \"{place.path}\"'"
        for word, about in place.verbs + place.arguments.words:
            lines.append(f"{at} -a {_quoted(word)}" + (f" -d {_quoted(about)}" if about else ""))
        if place.arguments.files:
            lines.append(f"{at} -F")
        lines += [f"{at} {_fish_option(option)}" for option in place.options]
    return _FISH.format(paths=" ".join(_quoted(place.path) for place in found if place.path), lines="\n".join(lines))


def _fish_option(option: Option) -> str:
    flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
    about = f" -d {_quoted(option.about)}" if option.about else ""
    if option.value is None:
        return flags + about
    words = " ".join(word for word, _ in option.value.words)
    return flags + about + (" -r -F" if option.value.files else " -x") + (f" -a {_quoted(words)}" if words else "")


def _paths(found: list[Place]) -> str:
    return " | ".join(_quoted(place.path) for place in found if place.path)


def _values(found: list[Place]) -> Iterator[tuple[list[str], Words]]:
    """(place and option before the cursor, what completes its value)."""
    for place in found:
        for option in place.options:
            if option.value is not None:
                yield [f"{place.path} {flag}" for flag in option.flags], option.value


def _flags(place: Place) -> Iterator[tuple[str, str]]:
    for option in place.options:
        yield from ((flag, option.about) for flag in option.flags)


def _cases(cases: Any) -> str:
    return "\n".join(f"            {' | '.join(map(_quoted, keys))}) {body} ;;" for keys, body in cases)


def _quoted(text: str) -> str:
    """For bash, zsh and fish alike, which differ on backslashes; no parser says any."""
    return "'" + text.replace("\\", "").replace("'", "'\\''") + "'"


_HOW = """\
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

_SHELLS: dict[str, Callable[[list[Place]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
