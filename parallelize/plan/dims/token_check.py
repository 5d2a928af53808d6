"""Checks the sequence-parallel region of a plan: inside, a rank has some of the tokens, and no operation may need all of them."""

from __future__ import annotations

from collections.abc import Iterator

from parallelize.base.errors import Problem
from parallelize.plan.dims.classes import Classes
from parallelize.plan.dims.factors import Dim, Factor, leaves
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ResolvedPlan

_FIX = "a `gather` rule for the module that needs all tokens, or sequence_parallel=False"


def token_problems(classes: Classes, tokens: set[Factor], resolved: ResolvedPlan) -> Iterator[Problem]:
    """Operations, by name, module and line, that need all tokens; else what the shards of tokens are combined with.

    Args:
        classes: of a forward that was recorded with the boundaries of the plan.
        tokens: the factors of tokens of which a rank has a part.
        resolved: the plan, with sequence parallelism.
    """
    if not tokens:
        return
    operations = list(dict.fromkeys(_operations(classes, tokens)))
    layers = tuple(f"{region.enter.rpartition('.')[0]}." for region in resolved.regions)
    inside = [operation for operation in operations if operation[1].startswith(layers)]
    for what, module, line in inside or operations or _combined(classes, tokens):
        place = f" ({line})" if line else ""
        text = f"{what} in {generic(module) or 'the model'}{place} needs all tokens, and a rank has a part of each sequence in the sequence-parallel region"
        yield Problem("mixed-sequence", text, _where(resolved, module), fix=_FIX)


def _operations(classes: Classes, tokens: set[Factor]) -> Iterator[tuple[str, str, str]]:
    record = classes.record
    for mix in record.mixes:
        if mix.operation != "a slice" and _has(mix.dim, tokens) and classes.counts(mix.module, mix.is_known):
            yield mix.operation, mix.module, mix.line
    for cut in record.slices:
        is_of_tokens = _has(cut.dim, tokens) or _has(cut.part, tokens)  # of tokens, or as many rows of a table
        if is_of_tokens and classes.counts(cut.module, True):
            yield "a slice", cut.module, cut.line
    for contraction in record.contractions:
        if _has(contraction.dim, tokens) and classes.counts(contraction.module, True):
            yield "a matmul over it", contraction.module, contraction.line


def _combined(classes: Classes, tokens: set[Factor]) -> Iterator[tuple[str, str, str]]:
    """What has all tokens and is combined with shards of them: parameters, constants, inputs. A model may return logits of routers."""
    for name, dims in classes.record.parameters.items():
        if any(_has(dim, tokens) for dim in dims):
            yield f"the parameter {generic(name)}", name.rpartition(".")[0], ""
    for dim, what in classes.record.fixed:
        if what != "an output of the model" and _has(dim, tokens):
            yield what, "", ""


def _has(dim: Dim, factors: set[Factor]) -> bool:
    return not factors.isdisjoint(leaves(dim))


def _where(resolved: ResolvedPlan, module: str) -> str:
    """The place in the plan of the rule of a module, or of the nearest module above it."""
    while module and module not in resolved.modules:
        module = module.rpartition(".")[0]
    return resolved.modules[module].rule.where if module in resolved.modules else resolved.plan.source
