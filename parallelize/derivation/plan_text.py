"""A derived plan as a file that a person would write.

Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parallelize.derivation.patterns import nested, pattern_rules
from parallelize.plan.pattern import generic
from parallelize.plan.schema import SCHEMA_VERSION


@dataclass(frozen=True)
class Heading:
    """What a file says of itself.

    Attributes:
        about: lines of comments at the top.
        model_type, class_name: what the plan serves; one of them is empty.
        base: the name of the base model inside the model; empty: none.
    """

    about: tuple[str, ...]
    model_type: str = ""
    class_name: str = ""
    base: str = ""


@dataclass(frozen=True)
class Sections:
    """The content of a plan file, by names of modules. `whole`: why linears are not sharded. `gathered`: or not in a pair."""

    styles: Mapping[str, str]
    sizes: Mapping[str, str | int]
    replicated_below_tp: Sequence[str]
    local: Mapping[str, Mapping[str, str]]
    whole: Mapping[str, str]
    regions: Sequence[Mapping[str, str]] = ()
    allow: str = ""
    default: str = "replicate"
    gathered: Mapping[str, str] = field(default_factory=dict)


def plan_text(heading: Heading, sections: Sections, names: Sequence[str]) -> str:
    """The file. `names`: of all modules and parameters, in the model's order."""
    lines = [f"# {line}" for line in heading.about]
    lines.append(f"schema_version: {SCHEMA_VERSION}")
    if heading.model_type:
        lines.append(f"model_type: {heading.model_type}")
    elif heading.class_name:
        lines.append(f"classes: {heading.class_name}")
    if heading.base:
        lines.append(f"base: {heading.base}")
    if sections.sizes:
        lines.append("sizes:")
        lines += [f"  {name}: {_size(name, sections)}" for name in sections.sizes]
    regions = ["{" + ", ".join(f"{key}: {value}" for key, value in region.items()) + "}" for region in sections.regions]
    if len(regions) > 1:
        lines += ["sequence_parallel:", *(f"  - {region}" for region in regions)]
    else:
        lines += [f"sequence_parallel: {region}" for region in regions]
    lines.append("tensor_parallel:")
    lines += _rules(sections, names)
    lines += _local(sections, names)
    lines += (
        [f"allow: {sections.allow}  # such a line is not reached, or what it reads was proven"]
        if sections.allow
        else []
    )
    return "\n".join(lines) + "\n"


def _size(name: str, sections: Sections) -> str:
    source = sections.sizes[name]
    return f"{{from: {source}, below_tp: replicate}}" if name in sections.replicated_below_tp else str(source)


def _rules(sections: Sections, names: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for pattern, style in nested(pattern_rules(sections.styles, names)).items():
        if isinstance(style, str):
            lines.append(f"  {_key(pattern)}: {style}")
        else:
            lines.append(f"  {_key(pattern)}:")
            lines += [f"    {_key(inner)}: {text}" for inner, text in style.items()]
    for word, reasons in (("gathered", sections.gathered), ("whole", sections.whole)):
        lines += [f"  # {word}: {', '.join(patterns)}: {reason}" for reason, patterns in _reasons(reasons).items()]
    if sections.default:
        lines.append(f'  "**": {sections.default}')
    return lines


def _reasons(whole: Mapping[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in whole.items():
        pattern, text = generic(name), " ".join(generic(word) if "." in word else word for word in reason.split(" "))
        if pattern not in reasons[text]:
            reasons[text].append(pattern)
    return reasons


def _local(sections: Sections, names: Sequence[str]) -> list[str]:
    texts = {
        module: "{" + ", ".join(f"{key}: {size}" for key, size in sorted(sizes.items())) + "}"
        for module, sizes in sections.local.items()
    }
    rules = pattern_rules(texts, names)
    return ["local:", *(f"  {_key(pattern)}: {text}" for pattern, text in rules.items())] if rules else []


def _key(pattern: str) -> str:
    """Braces at the beginning of a key are a mapping of YAML, and digits alone are a number."""
    return f'"{pattern}"' if pattern.startswith(("{", "*")) or pattern.isdigit() else pattern
