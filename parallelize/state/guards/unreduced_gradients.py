"""Gradients that nobody sums over the data ranks: a backward that reaches such a parameter is refused.

There are two ways to such a gradient: a model on a mesh with data axes that was given to no reducer, and a deep copy of
a model whose reducer knows the original parameters only. The guard is a hook on each parameter, so that it costs
nothing until a backward reaches one. It ends with the parameter: `fully_shard` replaces parameters, and reduces those
that it makes.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, NoReturn

from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.comm.mesh_view import MeshView
from parallelize.state.records import applied, mark_applied

_FIX = "shard_data(model, mesh) before the first backward"
NOT_REDUCED = Problem(
    "unreduced-gradients",
    "the mesh has data axes, and nothing sums this model's gradients over their ranks",
    fix=f"{_FIX}, or fully_shard; own_reduction=True of what applied the plan, if the loop does it",
)
COPIED = Problem(
    "unreduced-gradients",
    "this is a deep copy of a model whose gradients are summed over data ranks; those of the copy are not",
    fix=f"{_FIX}, with the copy; or copy.requires_grad_(False), if it is not trained",
)


class GradientGuard:
    """On a module that has parameters, and on the root of the model.

    Args:
        owner: the module. mesh: that of the model, which a copy has too.
        problem: why gradients of its parameters are not reduced; None: they are, and only those of deep copies are not.
    """

    def __init__(self, owner: nn.Module, mesh: MeshView, problem: Problem | None):
        self.owner, self.mesh, self.problem = weakref.ref(owner), mesh, problem
        self._handles: list[Any] = []

    def watch(self, parameters: list[Any]) -> None:
        """Refuse backwards that reach these parameters, and no longer those that were watched before."""
        self.release()
        if self.problem is not None:
            self._handles = [_refuse_backward(parameter, self.problem) for parameter in parameters if parameter.is_leaf]

    def release(self) -> None:
        """Refuse nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __deepcopy__(self, memo: dict) -> GradientGuard | None:
        owner = self.owner()
        if owner is None or id(owner) not in memo:  # a copy of the record alone
            return None
        guard = GradientGuard(memo[id(owner)], self.mesh, self.problem or COPIED)
        guard.watch([copy.deepcopy(parameter, memo) for parameter in _parameters(owner)])
        return guard


def guard_gradients(root: nn.Module, mesh: MeshView, problem: Problem | None) -> None:
    """Guard every parameter of a model: see `GradientGuard`. An earlier guard ends."""
    for owner in root.modules():
        earlier = applied(owner).gradient_guard
        if earlier is not None:
            earlier.release()
        if owner is root or any(True for _ in _parameters(owner)):
            guard = GradientGuard(owner, mesh, problem)
            guard.watch(_parameters(owner))
            mark_applied(owner, gradient_guard=guard)
            if earlier is None:
                owner.register_load_state_dict_post_hook(_watch_again)


def _watch_again(owner: nn.Module, _: Any) -> None:
    """Parameters were loaded, and may be new ones."""
    guard = applied(owner).gradient_guard
    if guard is not None:
        guard.watch(_parameters(owner))


def _parameters(owner: nn.Module) -> list[Any]:
    return [parameter for parameter in owner._parameters.values() if parameter is not None]


def _refuse_backward(parameter: Any, problem: Problem) -> Any:
    trains = parameter.requires_grad
    if not trains and not (parameter.is_floating_point() or parameter.is_complex()):
        return _NothingToRemove()

    def refuse(reached: Any) -> NoReturn:
        reached.grad = None
        raise ModelError(problem)

    parameter.requires_grad_()  # a frozen one may be unfrozen later, and takes no hook before
    handle = parameter.register_post_accumulate_grad_hook(refuse)
    parameter.requires_grad_(trains)
    return handle


class _NothingToRemove:
    """The handle of a parameter that can have no gradient."""

    def remove(self) -> None:
        """Nothing."""
