"""Sharded weights whose gradients are too small beside the others to be compared: a wrong one would pass.

The error of a gradient is relative to its largest element, or to a thousandth of the largest gradient of the model where that is more.
A gradient that is smaller than the bound times that floor could be zero, or anything of its size, and no comparison would tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from parallelize.base.errors import ParallelizeError
from parallelize.plan.model_facts import describe
from parallelize.plan.resolve import resolve
from parallelize.tools.verification.compare import ReferenceValues
from parallelize.tools.verification.mode_choice import Comparison

SLUG = "gradients-too-small"
_SEEN = 1e-2
"""The part of a gradient that a mistake changes at least, so that it must be told from rounding."""

_MOST = 0.5


@dataclass(frozen=True)
class HiddenGradients:
    """Attributes: names: of weights. share: their elements, of those of all sharded weights that have a gradient."""

    names: tuple[str, ...] = ()
    share: float = 0.0

    @property
    def is_most(self) -> bool:
        """Whether they are so many that nothing is proven."""
        return self.share > _MOST

    def __str__(self) -> str:
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        return f"gradients of sharded weights that are too small beside the others: {', '.join(self.names[:3])}{more}"


def hidden_gradients(comparison: Comparison, bound: float) -> HiddenGradients:
    """The sharded weights of which no batch has a gradient that can be compared."""
    elements = _sharded_weights(comparison)
    trained = {name for name in elements if any(name in values.gradients for values in comparison.references)}
    hidden = [name for name in trained if not any(_is_seen(values, name, bound) for values in comparison.references)]
    total = sum(elements[name] for name in trained)
    return HiddenGradients(tuple(sorted(hidden)), sum(elements[name] for name in hidden) / max(1, total))


def _is_seen(values: ReferenceValues, name: str, bound: float) -> bool:
    gradient = values.gradients.get(name)
    if gradient is None or not gradient.numel():
        return False
    return _SEEN * float(gradient.abs().max()) > bound * values.floor("gradients", name)


def _sharded_weights(comparison: Comparison) -> dict[str, int]:
    """The elements of each weight that is sharded over `tp`; of none where styles of PyTorch were applied."""
    configuration = comparison.configurations[0]
    request = configuration.request
    if configuration.plan is None or request.size("tp") == 1:
        return {}
    try:
        options = comparison.mode.over(request.options)
        resolved = resolve(configuration.plan, describe(configuration.model), request.mesh.only("tp"), options)
    except ParallelizeError:  # which the ranks name
        return {}
    rows = resolved.parameters.values()
    return {row.fqn: prod(row.fact.shape) for row in rows if row.layout.dim is not None and len(row.fact.shape) > 1}
