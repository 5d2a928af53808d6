"""Read a plan of `transformers` from a folder, a config.json, a file of words, or by a model type.

A file with the words needs no package. For a config or a model type the words are those of `transformers`, and the
model is built on the meta device to find out what the words do not say.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelize.base.errors import CheckpointError, ModelError, PlanError, Problem
from parallelize.plan.hf_plans import ATTRIBUTES, ForeignPlan, words_of
from parallelize.plan.models.config_file import config_path, read_object
from parallelize.plan.models.config_limits import config_problems
from parallelize.plan.pattern import generic


def read_source(source: str, base: str | None = None, model_type: str | None = None) -> ForeignPlan:
    """The words of the plan, and what is known about its model.

    Args:
        source: a folder, a file or a model type.
        base: the attribute of the base model ("model" by default), for words in a file.
        model_type: the model type that the plan is for, for words in a file.

    Raises: PlanError `bad-plan-source`, `no-foreign-plan`; ModelError `unknown-model`, `bad-config`; ImportError where
        `transformers` is needed and missing; FileNotFoundError.
    """
    path = config_path(Path(source))
    if path.suffix != ".json" and not path.exists():
        return _plan_of_model(source, source)
    data = _read(path)
    if problems := config_problems(data, str(path)):
        raise ModelError(*problems)
    words = data.get("base_model_tp_plan")
    if words is None and "model_type" in data:
        return _plan_of_model(str(path), str(data["model_type"]))
    if words is None:
        return _plan_of_words(data, str(path), base or "model", model_type or "")
    fields = {key: value for key, value in data.items() if key != "base_model_tp_plan"}
    type_in_file = data.get("model_type", "")
    model_type = model_type or (type_in_file if isinstance(type_in_file, str) else "")
    return _plan_of_words(words, str(path), base or "model", model_type, fields)


def _read(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        data = read_object(path)
    except CheckpointError as error:
        what = f"the file is not JSON that can be read: {error.problems[0].what}"
        raise PlanError(Problem("bad-plan-source", what, str(path), fix=error.problems[0].fix)) from None
    if not data:
        fix = "a config.json, or {pattern: word}"
        raise PlanError(Problem("bad-plan-source", "the file has an empty JSON object", str(path), fix=fix))
    return data


def _plan_of_words(
    words: Any, source: str, base: str, model_type: str, fields: Mapping[str, Any] | None = None
) -> ForeignPlan:
    if not isinstance(words, dict) or not words or not all(isinstance(word, str) for word in words.values()):
        fix = 'write {"layers.*.self_attn.q_proj": "colwise", ...}, or a config.json with its model_type'
        raise PlanError(Problem("bad-plan-source", "a plan is an object of patterns and words", source, fix=fix))
    prefix = f"{base}."
    if any(pattern.startswith(prefix) for pattern in words):  # full names, as in `tp_plan=`
        head = {pattern: word for pattern, word in words.items() if not pattern.startswith(prefix)}
        inside = {pattern.removeprefix(prefix): word for pattern, word in words.items() if pattern not in head}
        return ForeignPlan(inside, source, model_type, base, head, fields or {})
    return ForeignPlan(words, source, model_type, base, fields=fields or {})


def _plan_of_model(text: str, model_type: str) -> ForeignPlan:
    """The plan of the config's class, with facts of the model if the model can be built on the meta device."""
    from transformers import CONFIG_MAPPING

    # `get` of this lazy mapping only finds what was loaded before
    cls = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401
    words = words_of(cls)
    if cls is not None and not words:
        raise PlanError(_no_plan(text, cls))
    try:
        return _plan_of_built_model(text)
    except Exception as error:  # a class of transformers may raise anything for a config of default values
        is_refused = isinstance(error, ModelError) and text != model_type  # the values of a file
        if is_refused or not words:
            raise
        why = f"the model could not be built ({type(error).__name__}: {str(error).partition(chr(10))[0][:90]})"
        return ForeignPlan(words, text, model_type, no_model_reason=why)


def _plan_of_built_model(text: str) -> ForeignPlan:
    from parallelize.plan.models.model_source import read_model

    source = read_model(text)
    config, model = source.config, source.build("meta")
    words = words_of(config)
    if not words:
        raise PlanError(_no_plan(text, type(config)))
    return _plan_with_facts(text, words, config, model)


def expert_layout(model_type: str) -> Mapping[str, bool] | None:
    """How a model type stores the weights of its experts (`EXPERT_FLAGS`): {} for none with flags; None if no model is
    built."""
    from parallelize.plan.model_facts import describe
    from parallelize.plan.models.model_source import read_model

    try:
        model = read_model(model_type).build("meta")
    except Exception:  # a class of transformers may raise anything for a config of default values
        return None
    return next((facts.flags for facts in describe(model).modules.values() if facts.kind == "experts"), {})


def _plan_with_facts(text: str, words: Mapping[str, str], config: Any, model: Any) -> ForeignPlan:
    """The words, with facts of the model that they do not say."""
    base = next((name for name, module in model.named_modules() if module is model.base_model and name), "")
    return ForeignPlan(
        words,
        text,
        config.model_type,
        base,
        head={pattern: word for pattern, word in (model._tp_plan or {}).items() if _is_outside(pattern, base)},
        fields={name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")},
        parameters=tuple(name for name, _ in model.named_parameters(remove_duplicate=False)),
        counts=_counts(model),
    )


def _counts(model: Any) -> dict[str, dict[str, int]]:
    """Integer attributes by module pattern, such as head counts, that all modules of the pattern have."""
    counts: dict[str, dict[str, int]] = {}
    for fqn, module in model.named_modules():
        values = {name: getattr(module, name, None) for name in ATTRIBUTES}
        integers = {name: value for name, value in values.items() if isinstance(value, int)}
        known = counts.setdefault(generic(fqn), integers)
        counts[generic(fqn)] = {name: value for name, value in known.items() if name in integers}
    return counts


def _is_outside(pattern: str, base: str) -> bool:
    """Whether a pattern is the class's own: models merge the plans of their submodules into the same dict."""
    return not base or not pattern.startswith(f"{base}.")


def _no_plan(text: str, cls: Any) -> Problem:
    inner = (getattr(cls, "sub_configs", None) or {}).get("text_config")
    text_type = getattr(inner, "model_type", "")
    fix = (
        f"its text model is a {text_type}: import that one"
        if text_type
        else "`parallelize plans` lists the plans shipped here"
    )
    return Problem("no-foreign-plan", f"transformers has no tensor-parallel plan for {cls.model_type}", text, fix=fix)
