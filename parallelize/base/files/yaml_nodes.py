"""Strict YAML: nodes with line and column, without the features of YAML that surprise.

Duplicate keys, aliases, anchors, tags, merge keys, and excessive size or depth are errors. The type of a scalar is the
one that its field expects, so that `no`, `010` or `1e-5` are never converted silently. All problems are collected.

Torch-free.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml

from parallelize.base.errors import ParallelizeError, PlanError, Problem, did_you_mean

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
MAX_SCALAR = 1000
MAX_EVENTS = 20_000
_FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml takes a tenth of the time
_FLAG: dict[str, Any] = {"true": True, "false": False}
_OF_PYTHON = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}
_NOTHING = ("", "~", "null", "Null", "NULL", "None")
_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_LEADING_ZERO = re.compile(r"[+-]?0\d")
_SYNTAX = "close quotes and brackets, indent alike, and write `key: value`"


@dataclass
class Reader:
    """Reads nodes of one document and collects problems.

    Attributes:
        origins: id of a node, which the document keeps -> where it is from, if not from the document.
        places: dotted key -> where its value is.
        unread: dotted keys whose values are wrong, so that nothing is to be concluded from them.
    """

    source: str
    problems: list[Problem] = field(default_factory=list)
    origins: dict[int, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)

    def where(self, node: yaml.Node) -> str:
        return self.origins.get(id(node)) or f"{self.source}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def wrong(self, node: yaml.Node, slug: str, what: str, fix: str = "") -> None:
        self.problems.append(Problem(slug, what, self.where(node), fix=fix))

    def in_order(self) -> list[Problem]:
        """The problems, each once, in the order of the file."""
        return sorted(dict.fromkeys(self.problems), key=_position)

    @contextmanager
    def collecting(self, kind: type[ParallelizeError]) -> Iterator[None]:
        """Collects the problems of an error that says itself where it is."""
        try:
            yield
        except kind as error:
            self.problems.extend(error.problems)

    def mapping(self, node: yaml.Node, what: str) -> list[tuple[str, yaml.Node, yaml.Node]]:
        """(key, key node, value node) in file order; a repeated key is reported and skipped."""
        if not isinstance(node, yaml.MappingNode):
            self.wrong(
                node, "wrong-type", f"{what} must be a mapping, this is {_shown(node)}", "write `key: value` lines"
            )
            return []
        first: dict[str, yaml.Node] = {}
        items = []
        for key_node, value in node.value:
            key = self.text(key_node, f"a key of {what}")
            if key is None:
                continue
            if key in first:
                line = first[key].start_mark.line + 1
                self.wrong(key_node, "duplicate-key", f"{key!r} is in line {line} already", "remove one of them")
                continue
            first[key] = key_node
            items.append((key, key_node, value))
        return items

    def known(self, node: yaml.Node, what: str, keys: set[str]) -> dict[str, yaml.Node]:
        """Key to value node of a mapping that may have only these keys."""
        values = {}
        for key, key_node, value in self.mapping(node, what):
            if key in keys:
                values[key] = value
            else:
                self.wrong(key_node, "unknown-key", f"{what} has no key {key!r}", did_you_mean(key, keys))
        return values

    def text(self, node: yaml.Node, what: str) -> str | None:
        """A string, or None after reporting why it is none."""
        if not isinstance(node, yaml.ScalarNode):
            fix = "quote a pattern that begins with `{`" if isinstance(node, yaml.MappingNode) else "write one text"
            self.wrong(node, "wrong-type", f"{what} must be text, this is {_shown(node)}", fix)
        elif node.tag != _TEXT:
            kind = node.tag.rpartition(":")[2]
            self.wrong(node, "wrong-type", f"{what} must be text; YAML reads {node.value[:40]!r} as {kind}", "quote it")
        elif len(node.value) > MAX_SCALAR:
            what = f"{what} has {len(node.value)} characters, at most {MAX_SCALAR} are read"
            self.wrong(node, "too-large", what, "shorten it")
        else:
            return node.value
        return None

    def choice(self, node: yaml.Node, what: str, words: Sequence[str]) -> str | None:
        """One of these words, or None after reporting."""
        text = self.text(node, what)
        if text is None or text in words:
            return text
        fix = " or ".join(words) if len(words) == 2 else "one of: " + ", ".join(words)
        self.wrong(node, "bad-value", f"{what} is {text!r}", fix)
        return None

    def flag(self, node: yaml.Node, what: str) -> bool:
        """`true` or `false`; anything else is reported and False."""
        return bool(self._one_word(node, what, _FLAG))

    def flag_or_auto(self, node: yaml.Node, what: str) -> bool | str:
        """`true`, `false` or `auto`; anything else is reported and False."""
        return self._one_word(node, what, {**_FLAG, "auto": "auto"})

    def _one_word(self, node: yaml.Node, what: str, words: Mapping[str, Any]) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.style is None:
            text: str = node.value
            word = _OF_PYTHON.get(text, text)
            if word in words:
                return words[word]
        *others, last = words
        words_text = f"{', '.join(others)} or {last}"
        self.wrong(node, "wrong-type", f"{what} must be {words_text}, this is {_shown(node)}", f"write {words_text}")
        return False

    def number(self, node: yaml.Node, what: str) -> int | None:
        """A decimal integer that is not negative, or None after reporting."""
        if isinstance(node, yaml.ScalarNode) and node.style is None and is_decimal(node.value):
            return int(node.value)
        what = f"{what} must be an integer of at most 9 digits, without sign and leading zero, this is {_shown(node)}"
        self.wrong(node, "wrong-type", what, "write a number such as 4")
        return None

    def texts(self, node: yaml.Node, what: str) -> tuple[str, ...]:
        """One string, or a list of strings."""
        if not isinstance(node, yaml.SequenceNode):
            text = self.text(node, what)
            return () if text is None else (text,)
        texts = (self.text(item, f"an item of {what}") for item in node.value)
        return tuple(text for text in texts if text is not None)

    def real(self, node: yaml.Node, what: str) -> float | None:
        """A finite decimal number; None after reporting."""
        if isinstance(node, yaml.ScalarNode) and _number(node) is not None and math.isfinite(float(node.value)):
            return float(node.value)
        shown = repr(node.value[:40]) if isinstance(node, yaml.ScalarNode) else "no scalar"
        self.wrong(
            node, "wrong-type", f"{what} must be a finite number, this is {shown}", "write a number such as 0.1 or 3e-4"
        )
        return None

    def free(self, node: yaml.Node, what: str) -> Any:
        """Any plain value: numbers, text, true, false, null, lists, mappings."""
        if isinstance(node, yaml.MappingNode):
            return {name: self.free(value, f"{what}.{name}") for name, _, value in self.mapping(node, what)}
        if isinstance(node, yaml.SequenceNode):
            return [self.free(item, f"an item of {what}") for item in node.value]
        assert isinstance(node, yaml.ScalarNode)
        if is_flag(node):
            return self.flag(node, what)
        is_empty_text = node.value == "" and node.tag == _TEXT  # of an argument `key=`
        if is_nothing(node) and not is_empty_text:
            return None
        if node.style is None and _REAL.fullmatch(node.value):
            number = _number(node)
            if number is None or (isinstance(number, float) and not math.isfinite(number)):
                shown = repr(node.value[:40])
                self.wrong(
                    node, "wrong-type", f"{what} is no number that can be read: {shown}", "quote it, if it is text"
                )
            return number
        return self.text(node, what)


def _position(problem: Problem) -> tuple[int, ...]:
    return tuple(int(part) for part in problem.where.split(":")[-2:] if part.isdigit())


def as_scalar(text: str, inside_braces: bool = False) -> str:
    """A text as a scalar of YAML that `Reader.text` reads as the same text: bare where it may be, else in double
    quotes.

    inside_braces: whether it is written between `{` and `}`, where commas and braces separate.
    """
    is_bare = (_BARE_INSIDE if inside_braces else _BARE).match(text) and _tag_of(text) == _TEXT and text not in _NOTHING
    return text if is_bare else json.dumps(text, ensure_ascii=not text.isprintable())


_BARE = re.compile(r"[A-Za-z0-9_](?:[\w.,*{}()=+/?-]| (?!\Z|#))*\Z")
_BARE_INSIDE = re.compile(r"[A-Za-z0-9_](?:[\w.*()=+/?-]| (?!\Z|#))*\Z")
_TEXT = "tag:yaml.org,2002:str"


def _tag_of(text: str) -> str:
    """What YAML takes a bare scalar for."""
    known = yaml.SafeLoader.yaml_implicit_resolvers
    tags = (tag for first in (text[:1], None) for tag, expression in known.get(first, ()) if expression.match(text))
    return next(tags, _TEXT)


def _number(node: yaml.Node) -> int | float | None:
    """The number of a plain scalar; None of anything else, and of numbers with leading zeros, which YAML reads as
    octal."""
    if not isinstance(node, yaml.ScalarNode) or node.style is not None or len(node.value) > MAX_SCALAR:
        return None
    if not _REAL.fullmatch(node.value) or _LEADING_ZERO.match(node.value):
        return None
    try:
        return int(node.value)
    except ValueError:
        return float(node.value)


def is_flag(node: yaml.ScalarNode) -> bool:
    """Whether a bare scalar is true or false, as YAML or Python writes it."""
    return node.style is None and _OF_PYTHON.get(node.value, node.value) in _FLAG


def is_nothing(node: yaml.Node) -> bool:
    """Whether a bare scalar says that there is no value, as YAML or Python writes it."""
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NOTHING


def is_decimal(text: str) -> bool:
    """Whether the text is an integer of at most 9 digits without sign and leading zero."""
    return text.isascii() and text.isdigit() and len(text) <= 9 and (text == "0" or text[0] != "0")


def compose(text: str, source: str) -> yaml.Node:
    """The document's root node.

    Raises: PlanError `too-large`, `too-deep`, `bad-yaml`, `no-aliases`, `no-tags`, `empty-plan`.
    """
    if len(text) > MAX_BYTES:
        raise PlanError(
            Problem("too-large", f"{len(text)} characters, at most {MAX_BYTES} are read", source, fix="shorten it")
        )
    try:
        node = _composed(text, source, _FAST_LOADER)
    except (yaml.YAMLError, ValueError):
        node = _composed_slowly(text, source)
    if node is None:
        raise PlanError(Problem("empty-plan", "the file has no content", source, fix="write `key: value` lines"))
    return node


def _composed_slowly(text: str, source: str) -> yaml.Node | None:
    """By PyYAML's own parser, whose messages about wrong YAML do not depend on libyaml. Raises: PlanError, as
    `compose`."""
    try:
        return _composed(text, source, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise PlanError(_syntax_problem(error, source, text)) from None
    except ValueError as error:  # a character that YAML does not know
        raise PlanError(Problem("bad-yaml", str(error), source, fix="write it as text in UTF-8")) from None


def _composed(text: str, source: str, loader: Any) -> yaml.Node | None:
    _check_events(text, source, loader)
    root = yaml.compose(text, Loader=loader)
    for node in _scalars(root):
        node.style = node.style or None  # libyaml calls a bare scalar's style ""
    return root


def _scalars(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.CollectionNode):
        for item in node.value:
            for child in item if isinstance(item, tuple) else (item,):
                yield from _scalars(child)


def _check_events(text: str, source: str, loader: Any) -> None:
    """Refuse what a plan never needs before nodes are built, so that alias bombs and deep nesting cost nothing."""
    depth = 0
    problems: list[Problem] = []
    for count, event in enumerate(yaml.parse(text, Loader=loader)):
        mark = event.start_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        if count > MAX_EVENTS:
            raise PlanError(Problem("too-large", f"more than {MAX_EVENTS} YAML items", where, fix="shorten it"))
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise PlanError(
                *problems, Problem("too-deep", f"nested more than {MAX_DEPTH} deep", where, fix="write it flatter")
            )
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent) or anchor:
            fix = "write it out; quote a pattern that begins with `*`"
            problems.append(Problem("no-aliases", f"YAML anchor or alias {anchor!r}", where, fix=fix))
        if tag:
            problems.append(Problem("no-tags", f"YAML tag {tag!r}", where, fix="remove it"))
        if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and not event.style:
            problems.append(Problem("no-aliases", "merge key `<<`", where, fix="write it out"))
    if problems:
        raise PlanError(*problems)


def _syntax_problem(error: yaml.YAMLError, source: str, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
    line = text.splitlines()[mark.line].strip() if mark and mark.line < len(text.splitlines()) else ""
    fix = f"quote a pattern that begins with `{line[0]}`" if line[:1] in ("*", "{", "[", "&", "!") else _SYNTAX
    what = ", ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))) or str(error)
    return Problem("bad-yaml", what, where, fix=fix)


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value[:40]) if node.value else "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
