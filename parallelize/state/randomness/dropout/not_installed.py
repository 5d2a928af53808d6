"""Refuses to train a model whose dropout still draws from PyTorch's generator, while the model is sharded over `tp` or `cp`.

Ranks that are seeded alike drop the same elements of different shards; ranks that are seeded apart drop different elements of
the same activation, or, over `cp`, of attention to keys that other ranks have. Neither is the model of one process, and nothing
else notices.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from parallelize.base.errors import ModelError, Problem, short_list
from parallelize.state.randomness.dropout.install import dropout_clock, modules_that_drop, unknown_layouts
from parallelize.state.records import applied, resolution_of


def require_installed_dropout(module: nn.Module) -> None:
    """Refuse forwards of a planned model in training, until its dropout draws global masks or its rates are zero.

    A model that has no dropout at a rate above zero when it is planned gets no hook, and no model gets two.
    """
    hooked = _refuse_uninstalled in module._forward_pre_hooks.values()
    if not hooked and modules_that_drop(module):
        module.register_forward_pre_hook(_refuse_uninstalled)


def refuse_early_dropout(module: nn.Module) -> None:
    """Refuse to shard a model whose dropout draws masks of full activations already.

    Raises: ModelError `early-dropout`.
    """
    if dropout_clock(module) is not None:
        what = "install_dropout was called before the model is sharded, so its masks are those of full activations"
        raise ModelError(Problem("early-dropout", what, fix="shard the model, then install_dropout(model, seed)"))


def _refuse_uninstalled(module: nn.Module, _: Any) -> None:
    if not module.training or dropout_clock(module) is not None:
        return
    dropping = modules_that_drop(module).items()
    names = [fqn for fqn, inner in dropping if inner.training and applied(inner).dropout is None]
    if names and (unplaceable := unknown_layouts(resolution_of(module))):  # for which install_dropout is refused
        raise ModelError(*unplaceable)
    if names:
        what = f"{short_list([name or 'the model' for name in names], 3)} would draw masks from PyTorch's generator, which knows nothing of shards"
        fix = "call install_dropout(model, seed) after parallelize_module; or use parallelize_model, or rates of 0"
        raise ModelError(Problem("dropout-not-installed", what, fix=fix))
