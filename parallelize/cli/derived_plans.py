"""`parallelize plans derive`: a plan for a model that has none, from its own forward."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from parallelize.base.errors import MeshError, ModelError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.base.terminal.console import quiet_libraries, shows_progress
from parallelize.plan.models.model_source import parse_overrides
from parallelize.tools.derivation.derive import Derived, derive_plan
from parallelize.tools.derivation.plan_text import layer_page, layer_text


def derived(options: argparse.Namespace) -> Derived:
    """What the arguments of `plans derive` ask for."""
    with quiet_libraries():
        return derive_plan(
            options.model,
            _inputs(options.inputs) if options.inputs else None,
            overrides=parse_overrides(options.set),
            tp=_tp(options.mesh),
            verified=options.verify,
            tell=_progress_printer(shows_progress(options)),
        )


def picture(result: Derived, options: argparse.Namespace) -> str:
    """A layer of each kind as text: what is sharded, and what is full."""
    return layer_text(result.model, result.plan, _tp(options.mesh))


def page(result: Derived, options: argparse.Namespace) -> str:
    """The same as a page of pictures."""
    return layer_page(result.model, result.plan, _tp(options.mesh))


def _tp(mesh: str) -> int:
    spec = MeshSpec.parse(mesh)
    if spec.names != ("tp",):
        fix = "the plan serves the other axes too: `parallelize verify MODEL --plan FILE --mesh pp=2,tp=2`"
        raise MeshError(Problem("bad-mesh", f"a plan is derived for tp, and {mesh} has other axes", fix=fix))
    return spec.sizes[0]


def _inputs(text: str) -> Any:
    """What `package.module:function` returns: keyword arguments of the forward, or positional ones."""
    module, colon, name = text.partition(":")
    try:
        function = getattr(import_module(module), name) if colon else None
    except (ImportError, AttributeError) as error:
        raise ModelError(
            Problem("no-such-factory", f"--inputs {text}: {error}", fix="package.module:function")
        ) from None
    if not callable(function):
        raise ModelError(Problem("no-such-factory", f"--inputs {text} is no function", fix="package.module:function"))
    fix = "return a dict of keyword arguments of the forward, or a tuple"
    try:
        inputs = function()
    except Exception as error:  # of the user's code
        what = f"--inputs {text} failed: {type(error).__name__}: {error}"
        raise ModelError(Problem("bad-inputs", what, fix=fix)) from error
    if not isinstance(inputs, (dict, tuple)):
        raise ModelError(Problem("bad-inputs", f"--inputs {text} returned: {type(inputs).__name__}", fix=fix))
    return inputs


def _progress_printer(shown: bool) -> Callable[[str], None]:
    if not (shown and sys.stderr.isatty()):
        return lambda text: None
    return lambda text: print(f"deriving: {text}", file=sys.stderr, flush=True)
