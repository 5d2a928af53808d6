"""Proves a derived plan: the outputs, or the loss, and every gradient of a small model on ranks equal the unsharded
ones."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ParallelizeError
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.models.nested_tensors import floating_in
from parallelize.plan.schema import Plan
from parallelize.tools.verification.compare import Verification
from parallelize.tools.verification.verify import verify


@dataclass(frozen=True)
class Proof:
    """The result of one proof.

    Attributes:
        module: the first that differs, or that an error names. slugs: of an error.
        error: the largest relative error of what was compared; infinite where nothing was.
    """

    ok: bool
    text: str
    module: str = ""
    slugs: tuple[str, ...] = ()
    error: float = float("inf")

    def __str__(self) -> str:
        return self.text


_ROUNDING = 1e-9
"""An error below this is of rounding, as a wrong plan is not: numbers of another seed may be better conditioned."""

_ATTEMPTS = ((0, 1.0), (1, 0.5), (2, 0.25))
"""Seeds, with the gain of matrices: where activations grow, or a softmax has one element, gradients are of rounding."""

_NEARLY_RIGHT = 1e-8
"""An error of loss and outputs that a mistake exceeds."""

_ILL_CONDITIONED = 1e-2
"""Where loss and outputs are nearly right, an error of gradients up to this may be of rounding at large weights, and is
tried at smaller ones."""

_OF_THE_MODEL = {"reference-failed", "not-finite", "not-deterministic"}
"""Of errors of the unsharded model, which no other plan mends."""


@dataclass(frozen=True)
class _Evaluated(ModelSource):
    """The same models, in evaluation mode."""

    def build(self, device: str = "meta", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        return super().build(device, seed=seed, dtype=dtype).eval()


def prove_in_evaluation(source: ModelSource, plan: Plan | None, tp: int) -> Proof | None:
    """The same proof of a model in evaluation mode, whose forward may read other attributes, as `prove` in one mode of
    the plan.

    None: the unsharded model cannot be compared with in evaluation, as where it returns other things.
    """
    evaluated = _Evaluated(source.text, source.make, source.config, source.extras)
    try:
        return prove(evaluated, plan, tp, sequence_parallel=False, loss_parallel=False)
    except ParallelizeError:  # of the unsharded model
        return None


def prove(source: ModelSource, plan: Plan | None, tp: int, axis: str = "tp", **options: Any) -> Proof:
    """Compare a training step on `tp` ranks of an axis in this process with the unsharded one, in float64.

    Where the difference is larger than the bound and as small as rounding, the step is repeated with other and smaller
    weights. All of its numbers must then be within the bound. options: of `verify`.

    Raises: ModelError `reference-failed`, `not-finite`, `not-deterministic` where the unsharded model cannot be
        compared with.
    """
    for seed, gain in _ATTEMPTS:
        try:
            result = verify(source, plan, f"{axis}={tp}", full_size=True, seed=seed, gain=gain, trace=False, **options)
        except ParallelizeError as error:
            if _OF_THE_MODEL & set(error.slugs):
                raise
            rows = [value for problem in error.problems for _, value in problem.rows]
            return Proof(False, str(error), rows[0].split(" ")[0] if rows else "", error.slugs)
        largest = max((row.error for row in result.rows), default=0.0)
        if result.ok or not (largest < _ROUNDING or _may_be_rounding(result)):
            break
    if not result.ok:
        difference = result.difference
        if difference is None:
            return Proof(False, str(result), error=largest)
        slugs = (difference.slug,) if difference.slug else ()  # a model that is refused is not computed wrongly
        return Proof(False, str(difference), difference.module, slugs, largest)
    modes = ", ".join(dict.fromkeys(row.mode for row in result.rows))
    text = f"proven on {axis}={tp} ({modes}): loss and every gradient within {largest:.0e} of the unsharded model's"
    return Proof(True, text, error=largest)


def _may_be_rounding(result: Verification) -> bool:
    """Whether the forward is nearly right, and gradients differ by little or are too small to be compared."""
    forward = [row for row in result.rows if row.what in ("loss", "outputs")]
    return all(row.ok or row.error < _NEARLY_RIGHT for row in forward) and all(
        row.error < _ILL_CONDITIONED for row in result.rows
    )


def provable(source: ModelSource, model: nn.Module, example: Mapping[str, Any] | tuple[Any, ...]) -> ModelSource:
    """The source with inputs and a loss that its outputs have: of logits their cross entropy, of others a fixed
    projection."""
    if "inputs" in source.extras and ("loss" in source.extras or source.config is None):
        return source
    inputs = dict(zip(_argument_names(model), example, strict=False)) if isinstance(example, tuple) else dict(example)
    with torch.no_grad():
        logits = _logits(model, inputs, model(**inputs))
    targets = torch.zeros(1) if logits is None else _possible_targets(logits)
    extras: dict[str, Any] = {"inputs": lambda batch, length: {**inputs, "targets": targets}}
    if logits is None:
        extras |= {"loss": projected, "count": lambda targets: 1}
    return replace(source, extras=extras)


def _logits(model: nn.Module, inputs: Mapping[str, Any], output: Any) -> torch.Tensor | None:
    """Of a language model: [batch, length, vocabulary], a score of each token at each position."""
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    vocabulary, floats = getattr(config, "vocab_size", None), list(floating_in(output))
    logits = getattr(output, "logits", output)
    if vocabulary is None and len(floats) == 1:  # of one's own model, also as in `(logits, None)`
        logits = floats[0]
        vocabulary = _rows_of_ids(model, inputs, logits.shape[:2])
    is_language = isinstance(logits, torch.Tensor) and logits.ndim == 3 and logits.shape[-1] == vocabulary
    return logits if is_language and isinstance(logits, torch.Tensor) else None


def _rows_of_ids(model: nn.Module, inputs: Mapping[str, Any], positions: torch.Size) -> int | None:
    """The rows of the largest table of a model that is called with ids at these positions."""
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    ids = [x for x in inputs.values() if isinstance(x, torch.Tensor) and not x.is_floating_point()]
    return max(tables, default=None) if any(x.shape == positions for x in ids) else None


def _possible_targets(logits: torch.Tensor) -> torch.Tensor:
    """Random tokens [batch, length], of those that the model does not rule out: some set logits of image tokens to the
    smallest number, whose cross entropy is infinite."""
    smallest = torch.finfo(logits.dtype).min / 2
    possible = logits.amin((0, 1)).gt(smallest).nonzero()[:, 0]
    if not len(possible):  # whatever it is, the proof says it
        possible = torch.arange(logits.shape[2])
    return possible[torch.randint(0, len(possible), logits.shape[:2])]


def _argument_names(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


def projected(output: Any, targets: Any) -> torch.Tensor:
    """The sum of all floating outputs, each element with a weight of its own, never zero."""
    total: Any = 0
    for out in floating_in(output):
        numbers = torch.arange(1, out.numel() + 1, dtype=torch.float64, device=out.device)  # from 1: the sine of 0 is 0
        weights = numbers.mul_(0.7).sin_().view(out.shape)
        total = total + (out * weights.to(out.dtype)).sum()
    return total
