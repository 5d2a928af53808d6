"""Style text: `word`, or `word(argument, key=value)`, as plans write it.

Floor 1: torch-free.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from parallelize.errors import PlanError, Problem, did_you_mean
from parallelize.styles.contract import OVERLAPS

_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\(([^()]*)\))?\s*\Z")
_SIZES = re.compile(r"[A-Za-z_]\w*(?:\s*\+\s*[A-Za-z_]\w*)*\Z")

# word -> options that it takes -> values allowed (None: free text)
WORDS: dict[str, dict[str, tuple[str, ...] | None]] = {
    "colwise": {
        "unit": None,
        "chunks": None,
        "input": ("tokens",),
        "output": ("shard", "full", "vocabulary"),
        "overlap": OVERLAPS,
    },
    "rowwise": {"unit": None, "input": ("shard", "full"), "output": ("tokens",), "overlap": OVERLAPS},
    "embedding": {},
    "embedding_colwise": {},
    "sequence": {},
    "replicate": {"gradient": ("full", "partial")},
    "gather": {"argument": None, "overlap": OVERLAPS},
    "ulysses": {"split": None},
    "rms_norm": {"unit": None},
    "shard": {"dim": None, "unit": None, "chunks": None},
}
# word -> the option whose value may be written without its key
POSITIONAL = {
    "colwise": "unit",
    "rowwise": "unit",
    "gather": "argument",
    "ulysses": "split",
    "rms_norm": "unit",
    "shard": "dim",
}

# words of `transformers` plans -> the style here; of two words with one meaning, the current one comes first
TRANSFORMERS_WORDS = {
    "colwise_gather_output": "colwise(output=full)",
    "colwise_rep": "colwise(output=full)",
    "rowwise_split_input": "rowwise(input=full)",
    "rowwise_rep": "rowwise(input=full)",
    "packed_colwise": "colwise(chunks=2)",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "replicate(gradient=partial)",
    "sequence_parallel": "sequence",
}
# words with the same spelling and meaning in both
_SHARED_WORDS = ("colwise", "rowwise", "embedding_colwise", "replicate")


@dataclass(frozen=True)
class StyleText:
    """A style as a plan writes it, checked: the word and its options."""

    word: str
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        options = ", ".join(
            value if POSITIONAL.get(self.word) == key else f"{key}={value}" for key, value in self.options.items()
        )
        return f"{self.word}({options})" if options else self.word

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def unit(self) -> tuple[str, ...]:
        text = self.options.get("unit", "")
        return tuple(part.strip() for part in text.split("+")) if text else ()

    @property
    def chunks(self) -> int:
        return int(self.options.get("chunks", "1"))


def parse_style(text: str, where: str = "") -> StyleText:
    """Parse one style.

    Args:
        text: `word`, `word(value)` or `word(key=value, ...)`, or a word of `transformers`.
        where: file, line and column, for messages.

    Raises:
        PlanError: `bad-style`, `unknown-style`, `unknown-style-option`, `bad-style-option`.
    """
    text = TRANSFORMERS_WORDS.get(text.strip(), text)
    call = _CALL.match(text)
    if not call:
        raise PlanError(
            Problem("bad-style", f"cannot read {text!r}", where, fix="write `word` or `word(argument, key=value)`")
        )
    word, arguments = call.groups()
    if word not in WORDS:
        raise PlanError(Problem("unknown-style", f"no style is called {word!r}", where, fix=did_you_mean(word, WORDS)))
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in (arguments or "").split(","))):
        key, value = _option(word, part, where)
        if key in options:
            raise PlanError(Problem("bad-style-option", f"{word} has the option {key} twice", where))
        options[key] = value
    return StyleText(word, options)


def transformers_word(style: StyleText) -> str | None:
    """The word of `transformers` plans for this style, or None: the inverse of `TRANSFORMERS_WORDS`."""
    text = str(style)
    if text in _SHARED_WORDS:
        return text
    return next((word for word, equivalent in TRANSFORMERS_WORDS.items() if equivalent == text), None)


def _option(word: str, part: str, where: str) -> tuple[str, str]:
    key, equals, value = (text.strip() for text in part.partition("="))
    if not equals:
        key, value = POSITIONAL.get(word, ""), key
    allowed = WORDS[word]
    if key not in allowed:
        raise PlanError(
            Problem(
                "unknown-style-option",
                f"{word} takes no {part!r}",
                where,
                fix=did_you_mean(key or part, allowed) if allowed else f"write `{word}` alone",
            )
        )
    values = allowed[key]
    if values is not None and value not in values:
        raise PlanError(
            Problem("bad-style-option", f"{word}({key}=) is {value!r}", where, fix="one of: " + ", ".join(values))
        )
    if key == "chunks" and not (value.isdigit() and 1 <= int(value) <= 64):
        raise PlanError(Problem("bad-style-option", f"{word}(chunks=) is {value!r}", where, fix="a number, 1 to 64"))
    if key == "dim" and not (value.isdigit() and int(value) < 8):
        raise PlanError(Problem("bad-style-option", f"{word}(dim=) is {value!r}", where, fix="a number, 0 to 7"))
    if key == "unit" and not _SIZES.match(value):
        raise PlanError(Problem("bad-style-option", f"{word}(unit=) is {value!r}", where, fix="size names joined by +"))
    return key, value
