"""Muon with its matrices whole: each is orthogonalized on one rank, whatever the mesh shards, and stepped as shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.layout_tensor.layout_dtensor import wrap_like
from parallelize.state.optimizers.matrices import (
    COEFFICIENTS,
    LEARNING_RATES,
    SPLITS,
    adjusted_lr,
    cost_of_matrix,
    matrices_of,
    matrix_names,
    matrix_shape_of,
    orthogonalized,
)
from parallelize.state.optimizers.owners import OwnerExchange, assign_owners, boxes_by_rank, stage_group
from parallelize.state.stored_slices import StoredSlices

T = torch.Tensor
SENT = torch.bfloat16
"""The first thing that the orthogonalization does is to round to it, and it is the dtype of its result: nothing is
lost."""
MATRICES, ELEMENTS = "matrices", "elements"


class Muon(Optimizer):
    """Muon for the hidden matrices of a model, and AdamW for everything else, in one optimizer.

    Build it by `build_optimizer(model, Muon, ...)`, or `optimizer(Muon, ...)` of what `parallelize_model` returns. Each
    parameter group becomes two: its matrices, and its other parameters. Steps equal those of `torch.optim.Muon` on the
    unsharded matrices, and of `torch.optim.AdamW`, bit by bit where matmuls of one shape are.

    Args:
        params: parameters or groups; `build_optimizer` passes them.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as of `torch.optim.Muon`.
        adamw_lr, adamw_weight_decay: of the other parameters. None: as of the matrices.
        adamw_betas, adamw_eps: of the other parameters.
        matrices: name -> whether it is orthogonalized. None: weights of linears and of stacked experts, each expert a
            matrix, but not embeddings and heads.
        split: pattern of names -> "chunks" or "heads": packed weights whose chunks (q, k, v) or heads are matrices by
            themselves.

    Raises: ModelError `bad-muon-option`; when built, `no-chunks`, `matrix-not-covered`; in a step, `unbound-optimizer`.
    Cost: per step one all-to-all to the owners of the matrices and one back, in bfloat16, and an all-reduce of a number
        for each parameter. Each rank orthogonalizes its part of the matrices, by cost. State: one momentum of a
        matrix's shard.
    Source: Keller Jordan's Muon; arXiv:2502.16982.
    """

    saved_as = ("parallelize.optimizers.muon", "Muon")
    """Its module and name in checkpoints, wherever it stands."""
    gathers_itself = True
    """`build_optimizer` gives it shards: it does not need full parameters, although its update of an element needs
    others."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        matrices: Callable[[str], bool] | None = None,
        split: Mapping[str, str] | None = None,
    ):
        _check(lr, momentum, adjust_lr_fn, split or {})
        self._is_matrix, self._split = matrices, dict(split or {})
        self._exchange: OwnerExchange | None = None
        self._names: dict[int, str] = {}
        adam = {"betas": tuple(adamw_betas), "adamw_eps": adamw_eps}
        adam |= {"adamw_lr": adamw_lr, "adamw_weight_decay": adamw_weight_decay}
        matrix = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": tuple(ns_coefficients), "eps": eps}
        matrix |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "kind": "", **matrix, **adam})

    def bind_model(self, module: nn.Module, names_of: Mapping[int, tuple[str, ...]]) -> None:
        """Find out which rank orthogonalizes which matrix. A collective over the ranks of a pipeline stage.

        Args:
            module: the model.
            names_of: id of a parameter of this optimizer -> its names in the model.
        """
        where = StoredSlices(module)
        stored = {id(p): where.of(names_of[id(p)], p) for group in self.param_groups for p in group["params"]}
        self._names = {key: tensor.fqn for key, tensor in stored.items()}
        shapes = {tensor.fqn: tensor.shape for tensor in stored.values()}
        chosen = {name for name in shapes if self._is_matrix(name)} if self._is_matrix else matrix_names(module, shapes)
        self._divide_groups(chosen)
        chosen = {self._names[id(p)] for g in self.param_groups if g["kind"] == MATRICES for p in g["params"]}
        pairs = {tensor.fqn: tensor.slices for tensor in stored.values() if tensor.fqn in chosen}
        group = stage_group(module)
        units = [(name, box) for name in sorted(chosen) for box in matrices_of(module, name, shapes[name], self._split)]
        cost = partial(cost_of_matrix, num_steps=self.defaults["ns_steps"])
        self._exchange = OwnerExchange(assign_owners(units, boxes_by_rank(pairs, group), cost), pairs, group)

    def _divide_groups(self, matrices: set[str]) -> None:
        """Two groups of each: matrices, and others. Groups that were divided before, as in a checkpoint, stay."""
        divided = []
        for group in self.param_groups:
            if group["kind"]:
                divided.append(group)
                continue
            rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            is_matrix = [self._names[id(p)] in matrices for p in group["params"]]
            for kind in (MATRICES, ELEMENTS):
                params = [p for p, m in zip(group["params"], is_matrix, strict=True) if m == (kind == MATRICES)]
                own = rest | {"kind": kind, "params": params}
                if kind == ELEMENTS:
                    own["lr"] = rest["lr"] if rest["adamw_lr"] is None else rest["adamw_lr"]
                    decay = rest["adamw_weight_decay"]
                    own["weight_decay"] = rest["weight_decay"] if decay is None else decay
                divided.append(own)
        self.param_groups[:] = divided

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all groups. A collective over the ranks of a pipeline stage.

        Args:
            closure: called once, before the step.

        Returns: what the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._exchange is None:
            what = "this Muon does not know the model whose parameters it steps"
            fix = "build_optimizer(model, Muon, ...), or optimizer(Muon, ...) of what parallelize_model returns"
            raise ModelError(Problem("unbound-optimizer", what, fix=fix))
        self._step_matrices(self._exchange)
        for group in self.param_groups:
            if group["kind"] == ELEMENTS:
                self._step_elements(group)
        return loss

    def _step_matrices(self, exchange: OwnerExchange) -> None:
        members = [(g, p) for g in self.param_groups if g["kind"] == MATRICES for p in g["params"]]
        if not members:
            return
        device = private.plain_local(members[0][1]).device
        flags = exchange.any_rank([p.grad is not None for _, p in members], device)
        stepped = {self._names[id(p)]: (g, p) for (g, p), has in zip(members, flags, strict=True) if has}
        if not stepped:
            return
        updates = {name: self._momentum(group, p) for name, (group, p) in stepped.items()}
        results = []
        for matrix, full in zip(exchange.owned, exchange.gather(updates, SENT, device), strict=True):
            group = stepped[matrix.name][0] if matrix.name in stepped else None
            result = full if group is None else self._orthogonalized(group, full)
            results.append(result)
        del updates
        parts = exchange.scatter(results, SENT, device)
        for group, p in stepped.values():
            private.plain_local(p).mul_(1 - _number(group["lr"]) * group["weight_decay"])
        for (matrix, pair), part in zip(exchange.stored_here, parts, strict=True):
            if matrix.name in stepped:
                group, p = stepped[matrix.name]
                lr = adjusted_lr(_number(group["lr"]), group["adjust_lr_fn"], matrix_shape_of(matrix.box))
                private.plain_local(p)[pair.local].add_(part, alpha=-lr)

    @staticmethod
    def _orthogonalized(group: dict[str, Any], full: T) -> T:
        matrix = full.view(full.shape[-2:])
        return orthogonalized(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]).view_as(full)

    def _momentum(self, group: dict[str, Any], param: Any) -> T:
        """The update before the orthogonalization: element by element, on this rank's shard."""
        local = private.plain_local(param).detach()
        gradient = torch.zeros_like(local) if param.grad is None else private.plain_local(param.grad)
        buffer = private.plain_local(self._state(param, "momentum_buffer"))
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _state(self, param: Any, key: str) -> Any:
        """A state that is laid out as the parameter, zeros at first."""
        state = self.state[param]
        if key not in state:
            zeros = torch.zeros_like(private.plain_local(param).detach())
            state[key] = wrap_like(param, zeros) if isinstance(param, DTensor) else zeros
        return state[key]

    def _step_elements(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if "step" not in self.state[p]:
                self.state[p]["step"] = torch.tensor(0.0, dtype=torch.float32)
        beta1, beta2 = group["betas"]
        adamw(
            [private.plain_local(p) for p in params],
            [private.plain_local(p.grad) for p in params],
            [private.plain_local(self._state(p, "exp_avg")) for p in params],
            [private.plain_local(self._state(p, "exp_avg_sq")) for p in params],
            [],
            [self.state[p]["step"] for p in params],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )

    @property
    def sent_bytes(self) -> int:
        """What this rank sends to others in a step, both ways together."""
        return 0 if self._exchange is None else 2 * self._exchange.sent_elements


def _number(lr: Any) -> float:
    return float(lr)


def _check(lr: Any, momentum: float, adjust: str | None, split: Mapping[str, str]) -> None:
    wrong = [f"lr={lr}"] if not lr >= 0 else []
    wrong += [f"momentum={momentum}"] if not momentum >= 0 else []
    wrong += [f"adjust_lr_fn={adjust!r}"] if adjust not in (None, *LEARNING_RATES) else []
    wrong += [f"split={by!r} of {pattern}" for pattern, by in split.items() if by not in SPLITS]
    if wrong:
        fix = f"lr and momentum from 0, adjust_lr_fn of {LEARNING_RATES}, and {SPLITS} in split"
        raise ModelError(Problem("bad-muon-option", f"Muon does not take {', '.join(wrong)}", fix=fix))
