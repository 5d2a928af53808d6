"""Reads style text: `word`, or `word(argument, key=value)`, as plans write it.

Torch-free.
"""

from __future__ import annotations

import re

from parallelize.base.errors import PlanError, Problem, did_you_mean
from parallelize.plan.styles import adapter_styles, builtin  # noqa: F401, so that their words are known
from parallelize.plan.styles.style import STYLES, StyleText

_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\(([^()]*)\))?\s*\Z")
_TERM = r"[A-Za-z_]\w*(?:\s*\*\s*(?:[A-Za-z_]\w*|[1-9]\d*))?"
_SIZES = re.compile(rf"\s*{_TERM}(?:\s*\+\s*{_TERM})*\s*\Z")

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
    "moe_tp_experts": "experts",
    "ep_dispatch_experts": "experts",
}
# words of `transformers` for a module of experts: over tp, and over ep. The option `ep` says which of them `experts`
# means
EXPERT_WORDS = ("moe_tp_experts", "ep_dispatch_experts")
# words for the weights of such a module, which the rule for the module covers here: over ep; over tp, as usual or
# transposed
EXPERT_WEIGHT_WORDS = {
    "ep_dispatch_experts": {"gate_up_proj": "grouped_gemm", "down_proj": "grouped_gemm"},
    "experts": {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"},
    "experts(tokens=all)": {"gate_up_proj": "packed_rowwise", "down_proj": "colwise"},
}
# words with the same spelling and meaning in both
_SHARED_WORDS = ("colwise", "rowwise", "embedding_colwise", "replicate")


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
    known = [name for name, style in STYLES.items() if style.in_plans]
    if word not in known:
        raise PlanError(Problem("unknown-style", f"no style is called {word!r}", where, fix=did_you_mean(word, known)))
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in (arguments or "").split(","))):
        key, value = _option(word, part, where)
        if key in options:
            raise PlanError(Problem("bad-style-option", f"{word} has the option {key} twice", where))
        options[key] = value
    return StyleText(word, options)


def is_sum_of_sizes(text: str) -> bool:
    """Whether a text is names of sizes joined by `+`, each of which may have a width, a size or a number:
    `heads*head_dim + groups`."""
    return bool(_SIZES.match(text))


def transformers_word(style: StyleText) -> str | None:
    """The word of `transformers` plans for this style, or None: the inverse of `TRANSFORMERS_WORDS`."""
    text = str(style)
    if text in _SHARED_WORDS:
        return text
    if text in EXPERT_WEIGHT_WORDS:
        return EXPERT_WORDS[0]
    return next((word for word, equivalent in TRANSFORMERS_WORDS.items() if equivalent == text), None)


def _option(word: str, part: str, where: str) -> tuple[str, str]:
    key, equals, value = (text.strip() for text in part.partition("="))
    if not equals:
        key, value = STYLES[word].positional, key
    allowed = STYLES[word].options
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
        fix = "size names joined by +, each alone or `name*width`"
        raise PlanError(Problem("bad-style-option", f"{word}(unit=) is {value!r}", where, fix=fix))
    return key, value
