"""What is wrong with names in a run's file that torch or `transformers` knows: model, optimizer, tokenizer, heads on
the mesh. No model is built.

`NAME_CHECKS` import no code of the user's, so that a launcher and `--emit` can run them; `IMPORT_CHECKS` are for a
rank. Where a package is missing on this machine nothing is concluded: the ranks may have it, and say so otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import LaunchError, ParallelizeError
from parallelize.base.layout import local_units
from parallelize.launch.config.run_checks import Check, Mistake, mistakes_of, problems_of
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.loop.memory_report import object_of
from parallelize.launch.loop.run_optimizer import optimizer_class
from parallelize.launch.loop.token_files import encoder_of
from parallelize.launch.preflight.base_model import adapters_of
from parallelize.plan.attribute_paths import dotted
from parallelize.plan.choose import shipped_plan_of
from parallelize.plan.models.model_source import ModelSource, read_model
from parallelize.plan.plan_file import load_plan
from parallelize.plan.schema import Plan


def check_names(config: RunConfig) -> None:
    """All checks of this file, on a rank. Raises: LaunchError with all that is wrong."""
    if problems := problems_of(config, (), (*NAME_CHECKS, *IMPORT_CHECKS)):
        raise LaunchError(*problems)


def _mistakes(key: str, work: Callable[[], Any]) -> Iterator[Mistake]:
    """The mistakes of an error that `work` raises."""
    try:
        work()
    except ParallelizeError as error:
        yield from mistakes_of(key, error)


def _is_function(config: RunConfig) -> bool:
    """Whether the model is a function of the user's, which reading it would import."""
    return ":" in config.model.name and not Path(config.model.name).exists()


# -- without code of the user's -----------------------------------------------------------------------------------


def _model(config: RunConfig) -> Iterator[Mistake]:
    if config.model.name and not _is_function(config):
        with suppress(ImportError):
            fields = [f"model.set.{name}" for name in config.model.set]
            key = fields[0] if len(fields) == 1 and not _is_wrong_name(config) else "model.name"
            yield from _mistakes(key, lambda: read_model(config.model.name, config.model.set))


def _is_wrong_name(config: RunConfig) -> bool:
    """Whether the model is unknown already without the values of `model.set`."""
    try:
        read_model(config.model.name)
    except ParallelizeError:
        return True
    return False


def _adapters(config: RunConfig) -> Iterator[Mistake]:
    if find_spec("peft") is not None:
        yield from _mistakes("model.lora", lambda: adapters_of(config.model))


def _tokenizer(config: RunConfig) -> Iterator[Mistake]:
    if config.data.tokenizer:
        with suppress(ImportError):
            yield from _mistakes("data.tokenizer", lambda: encoder_of(config.data.tokenizer))


def _optimizer_class(config: RunConfig) -> Iterator[Mistake]:
    if ":" not in config.optimizer.name:
        yield from _mistakes("optimizer.name", lambda: optimizer_class(config.optimizer))


def _optimizer_arguments(config: RunConfig) -> Iterator[Mistake]:
    """What a class of torch says to its arguments, with a small matrix to optimize."""
    section = config.optimizer
    if ":" in section.name or "lr" in section.args:
        return
    try:
        cls: Any = optimizer_class(section)
        cls([nn.Parameter(torch.zeros(2, 2))], lr=section.lr, **section.args)
    except ParallelizeError:  # the class, which its own check reports
        return
    except (TypeError, ValueError) as error:
        key = "optimizer.args" if section.args else "optimizer"
        yield Mistake(
            key, "bad-optimizer", f"{section.name} refuses its arguments: {error}", "optimizer: {args: {...}}"
        )


def _heads(config: RunConfig) -> Iterator[Mistake]:
    """Numbers of heads that the plan of a known model splits, and that `tp` does not divide."""
    tp = config.mesh.ranks("tp") if config.mesh is not None else 1
    if tp == 1 or _is_function(config):
        return
    with suppress(ImportError, ParallelizeError):  # which `_model` and the check of the plan report
        source = read_model(config.model.name, config.model.set)
        plan = _plan_of(config, source)
        if plan is None:
            return
        for name in _split_sizes(plan):
            size = plan.sizes[name]
            count = size.source if isinstance(size.source, int) else dotted(_text_config(source), size.source)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                continue
            if local_units(count, tp, size.replicate_below_tp) is None:
                valid = [n for n in range(1, count + 1) if local_units(count, n, size.replicate_below_tp) is not None]
                what = f"tp={tp} does not divide {name}: {size.source} is {count}"
                fix = f"tp of {', '.join(map(str, valid))}"
                yield Mistake("mesh", "uneven-heads", what, fix, (("plan", f"{plan.name}, {size.where}"),))


def _plan_of(config: RunConfig, source: ModelSource) -> Plan | None:
    return load_plan(config.plan) if config.plan not in ("", "auto") else shipped_plan_of(source.config)


def _text_config(source: ModelSource) -> Any:
    return getattr(source.config, "text_config", None) or source.config


def _split_sizes(plan: Plan) -> list[str]:
    """Sizes that some rule splits in every model of the plan: neither optional, nor of some models, nor in several
    chunks."""
    of_some = {name for case in plan.cases for name in case.sizes}
    rules = (rule for rule in plan.rules if not rule.optional and rule.style.chunks == 1)
    return list(
        dict.fromkeys(name for rule in rules for name in rule.style.unit if name in plan.sizes.keys() - of_some)
    )


NAME_CHECKS: tuple[Check, ...] = (
    (("model.name", "model.set"), _model),
    (("model.lora",), _adapters),
    (("data.tokenizer",), _tokenizer),
    (("optimizer.name",), _optimizer_class),
    (("optimizer",), _optimizer_arguments),
    (("model", "plan", "mesh"), _heads),
)


# -- with code of the user's --------------------------------------------------------------------------------------


def _mistakes_of_import(key: str, slug: str, work: Callable[[], Any]) -> Iterator[Mistake]:
    """`_mistakes`, also of a module that raises any error when it is imported."""
    try:
        yield from _mistakes(key, work)
    except Exception as error:
        what = f"importing its module raises {type(error).__name__}: {str(error)[:200]}"
        yield Mistake(key, slug, what, "`python -c 'import MODULE'` shows the traceback")


def _model_function(config: RunConfig) -> Iterator[Mistake]:
    if _is_function(config):
        read = partial(read_model, config.model.name, config.model.set)
        yield from _mistakes_of_import("model.name", "no-such-factory", read)
        yield from _wrong_arguments("model.name", config.model.name, config.model.set)


def _data_function(config: RunConfig) -> Iterator[Mistake]:
    if config.data.function:
        yield from _mistakes_of_import("data.function", "no-such-object", partial(object_of, config.data.function))
        yield from _wrong_arguments("data.function", config.data.function, config.data.args)


def _own_optimizer(config: RunConfig) -> Iterator[Mistake]:
    if ":" in config.optimizer.name:
        yield from _mistakes_of_import("optimizer.name", "no-such-object", partial(optimizer_class, config.optimizer))


def _wrong_arguments(key: str, text: str, arguments: Mapping[str, Any]) -> Iterator[Mistake]:
    """Keyword arguments that a function does not take; nothing for a function that cannot be found or has no
    signature."""
    try:
        signature = inspect.signature(object_of(text))
    except Exception:  # of its import, which is reported; or of a class without a signature
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        yield Mistake(key, "bad-value", f"{text}{signature}: {error}", "give the arguments that it takes")


IMPORT_CHECKS: tuple[Check, ...] = (
    (("model.name", "model.set"), _model_function),
    (("data.function", "data.args"), _data_function),
    (("optimizer.name",), _own_optimizer),
)
