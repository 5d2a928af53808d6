"""Where a plan of `transformers` may come from: a folder, a config.json, a file of words, or a model type.

A file that holds the words needs nothing. For a config, or a model type, `transformers` is asked, and the model is built
without memory to learn what else it holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelize.errors import PlanError, Problem
from parallelize.plan.exchange import ATTRIBUTES, ForeignPlan
from parallelize.plan.pattern import generic


def read_source(source: str, base: str | None = None, model_type: str | None = None) -> ForeignPlan:
    """The words that `source` names, and what is known of their model.

    Raises: PlanError `bad-plan-source`, `no-foreign-plan`; ModelError `unknown-model`; ImportError where `transformers`
        is needed and missing; OSError.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json" and not path.is_file():
        return _of_model(source, source)
    held = _read(path)
    words = held.get("base_model_tp_plan")
    if words is None and "model_type" in held:
        return _of_model(str(path), str(held["model_type"]))
    if words is None:
        return _of_words(held, str(path), base or "model", model_type or "")
    fields = {key: value for key, value in held.items() if key != "base_model_tp_plan"}
    kind = model_type or held.get("model_type", "")
    return _of_words(words, str(path), base or "model", kind if isinstance(kind, str) else "", fields)


def _read(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PlanError(Problem("bad-plan-source", f"is no JSON: {error}", str(path))) from None
    if not isinstance(held, dict) or not held:
        fix = "a config.json, or {pattern: word}"
        raise PlanError(Problem("bad-plan-source", "holds no JSON object with something in it", str(path), fix=fix))
    return held


def _of_words(
    words: Any, source: str, base: str, model_type: str, fields: Mapping[str, Any] | None = None
) -> ForeignPlan:
    if not isinstance(words, dict) or not words or not all(isinstance(word, str) for word in words.values()):
        fix = 'write {"layers.*.self_attn.q_proj": "colwise", ...}, or a config.json with its model_type'
        raise PlanError(Problem("bad-plan-source", "a plan is an object of patterns and words", source, fix=fix))
    prefix = f"{base}."
    if any(pattern.startswith(prefix) for pattern in words):  # names in full, as `tp_plan=` takes them
        head = {pattern: word for pattern, word in words.items() if not pattern.startswith(prefix)}
        inside = {pattern.removeprefix(prefix): word for pattern, word in words.items() if pattern not in head}
        return ForeignPlan(inside, source, model_type, base, head, fields or {})
    return ForeignPlan(words, source, model_type, base, fields=fields or {})


def _of_model(text: str, model_type: str) -> ForeignPlan:
    """By `transformers`' own class for the config. The model, on the meta device, is asked where it can be built."""
    from transformers import CONFIG_MAPPING

    # a lazy mapping, whose `get` knows only what was asked for before
    cls = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401
    words = getattr(cls, "base_model_tp_plan", None)
    if cls is not None and not words:
        raise PlanError(_no_plan(text, cls))
    try:
        return _looked_at(text)
    except Exception as error:  # whatever a class of theirs throws without its proper settings
        if not words:
            raise
        why = f"the model could not be looked at ({type(error).__name__}: {str(error).partition(chr(10))[0][:90]})"
        return ForeignPlan(words, text, model_type, unasked=why)


def _looked_at(text: str) -> ForeignPlan:
    from parallelize.model_source import read_model

    source = read_model(text)
    config, model = source.config, source.build("meta")
    words = getattr(config, "base_model_tp_plan", None)
    if not words:
        raise PlanError(_no_plan(text, type(config)))
    return _asked(text, words, config, model)


def _asked(text: str, words: Mapping[str, str], config: Any, model: Any) -> ForeignPlan:
    """What the words do not say and the model does."""
    base = next((name for name, module in model.named_modules() if module is model.base_model and name), "")
    return ForeignPlan(
        words,
        text,
        config.model_type,
        base,
        head={pattern: word for pattern, word in (model._tp_plan or {}).items() if _outside(pattern, base)},
        fields={name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")},
        parameters=tuple(name for name, _ in model.named_parameters(remove_duplicate=False)),
        counts=_counts(model),
    )


def _counts(model: Any) -> dict[str, dict[str, int]]:
    """Attributes that every one of a list's modules holds as a whole number."""
    found: dict[str, dict[str, int]] = {}
    for fqn, module in model.named_modules():
        held = {name: getattr(module, name, None) for name in ATTRIBUTES}
        counts = {name: value for name, value in held.items() if isinstance(value, int)}
        before = found.setdefault(generic(fqn), counts)
        found[generic(fqn)] = {name: value for name, value in before.items() if name in counts}
    return found


def _outside(pattern: str, base: str) -> bool:
    """The class's own rules; a model that is planned merges those of its parts into the same dict."""
    return not base or not pattern.startswith(f"{base}.")


def _no_plan(text: str, cls: Any) -> Problem:
    inner = (getattr(cls, "sub_configs", None) or {}).get("text_config")
    kind = getattr(inner, "model_type", "")
    fix = f"its text part is a {kind}: import that one" if kind else "`parallelize plans` lists the plans shipped here"
    return Problem("no-foreign-plan", f"transformers has no tensor-parallel plan for {cls.model_type}", text, fix=fix)
