"""`ParallelModel`: what `parallelize_model` returns."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from parallelize.axes.pipeline.engine import Pipeline
from parallelize.axes.pipeline.ties import ties_of
from parallelize.axes.zero.optimizer import build_optimizer
from parallelize.axes.zero.weight_penalty import Penalty, add_penalty
from parallelize.base.errors import ModelError, Problem
from parallelize.state.loop.clip import clip_grad_norm_

T = torch.Tensor


class NoSuchAttributeError(ModelError, AttributeError):
    """An attribute that a ParallelModel does not have; an AttributeError, as `hasattr` expects."""


class ParallelModel:
    """A model on a mesh, with the operations of a training loop. What takes a planned model (`describe_plan`,
    `full_state_dict`, `generate`, ...) takes this too.

    Args:
        module: this rank's part of the model.
        mesh: the mesh with all axes.
        pipeline: runs steps, also where `pp` is 1 or absent.

    Attributes:
        module, mesh, pipeline: the arguments.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, pipeline: Pipeline):
        self.module, self.mesh, self.pipeline = module, mesh, pipeline

    def __deepcopy__(self, memo: dict) -> NoReturn:
        """Raises: ModelError `not-copyable`: the copy would have no part in the steps of the other ranks' pipelines."""
        what = "a ParallelModel has hooks and messages of the model it was made with, which a copy cannot have"
        raise ModelError(Problem("not-copyable", what, fix="copy.deepcopy(parallel.module)"))

    def __getattr__(self, name: str) -> NoReturn:
        """Raises: ModelError `no-such-attribute`, which says where a module's own attribute is."""
        own = ", ".join(key for key in vars(ParallelModel) if not key.startswith("_"))
        in_module = hasattr(vars(self).get("module"), name)
        fix = f"parallel.module.{name}: of this rank's part of the model" if in_module else f"one of {own}"
        if name in ("parameters", "named_parameters"):
            fix = f"parallel.optimizer(torch.optim.AdamW, lr=...) steps what this rank stores; {fix}"
        raise NoSuchAttributeError(Problem("no-such-attribute", f"a ParallelModel has no {name!r}", fix=fix))

    def step(self, *args: Any, targets: Any = None, labels: Any = None, **kwargs: Any) -> T:
        """Forward and backward of this data rank's batch. See `Pipeline.step`.

        Args:
            args, kwargs: inputs of the full model; tensors [batch, ...] of this data rank, the same on its other ranks.
            targets: the targets of the loss. Of the default loss token ids [batch, sequence], -100 for none, at the
                positions of the logits: those of `next_tokens(ids)`. Nothing is shifted.
            labels: instead of targets: token ids [batch, sequence] as the stock model takes them, which shifts them.

        Returns: the mean loss over all data ranks, a scalar, the same on every rank.
        Raises: ShapeError, ModelError, HandshakeError and PipelineError as `Pipeline.step`.
        Cost: as `Pipeline.step`.
        """
        return self.pipeline.step(*args, targets=targets, labels=labels, **kwargs)

    def evaluate(self, *args: Any, targets: Any = None, labels: Any = None, **kwargs: Any) -> T:
        """The mean loss over all data ranks, without gradients. See `Pipeline.evaluate`.

        Args:
            args, kwargs, targets, labels: as in `step`.

        Returns: the mean loss over all data ranks, a scalar, the same on every rank.
        Raises: as `Pipeline.evaluate`.
        Cost: as `Pipeline.evaluate`.
        """
        return self.pipeline.evaluate(*args, targets=targets, labels=labels, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The model's output for each microbatch, without gradients. See `Pipeline.forward`.

        Args:
            args, kwargs: as in `step`.

        Returns: outputs by microbatch on the ranks of the last stage, an empty list on the others.
        Raises: as `Pipeline.forward`.
        Cost: as `Pipeline.forward`.
        """
        return self.pipeline.forward(*args, **kwargs)

    def optimizer(self, cls: type[Optimizer], params: Any = None, **options: Any) -> Optimizer:
        """An optimizer whose state is sharded as the ZeRO stage requires. See `build_optimizer`.

        Args:
            cls: an optimizer class of `torch.optim`, or one with the same interface.
            params: parameters or parameter groups; None means all parameters that require a gradient.
            options: keyword arguments of `cls`, and `elementwise`, `by_parameter` and `offload_state` of
                `build_optimizer`.

        Returns: an instance of `cls`.
        Raises: ModelError `not-elementwise`, `foreign-parameter`, as `build_optimizer`.
        Cost: as `build_optimizer`.
        """
        built = build_optimizer(self.module, cls, params, **options)
        self.pipeline.check.watch(built)
        return built

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> T:
        """Clip the gradients by the norm over the full model and all axes. See `parallelize.clip_grad_norm_`.

        Args:
            max_norm: gradients are scaled to at most this norm.
            norm_type: p of the p-norm; `inf` for the largest magnitude.
            error_if_nonfinite: raise an error if the norm is NaN or infinite.

        Returns: the norm before clipping, a scalar, the same on every rank.
        Raises: GradientError `nonfinite-gradients`, with `error_if_nonfinite`.
        Cost: as `parallelize.clip_grad_norm_`.
        """
        return clip_grad_norm_(self.module, max_norm, norm_type, error_if_nonfinite)

    def add_penalty(self, penalty: Penalty) -> T:
        """Add the gradient of a penalty on weights, counted once on every mesh. See `parallelize.add_penalty`.

        Args:
            penalty: (name, weight) -> a scalar, or None where this weight has no penalty.

        Returns: the sum over all parameters of the model, a scalar, the same on every rank.
        Raises: ModelError `bad-penalty`.
        Cost: as `parallelize.add_penalty`.
        """
        return add_penalty(self.module, penalty)

    def check_ties(self) -> None:
        """Compare copies of tied parameters across pipeline stages, by digest.

        Raises: HandshakeError `ties-differ`.
        Cost: one small all_gather per tie.
        """
        ties = ties_of(self.module)
        if ties is not None:
            ties.check()
