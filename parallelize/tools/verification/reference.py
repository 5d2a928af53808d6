"""One training step of the unsharded model, with PyTorch's own loss, clipping and optimizer: the reference of all
comparisons."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops.vocabulary.cross_entropy import check_positions
from parallelize.plan.models.model_source import ModelSource, copy_of
from parallelize.plan.models.nested_tensors import floating_in
from parallelize.plan.models.output_logits import logits_of
from parallelize.plan.models.transformers_models import fix_of_type
from parallelize.state.randomness.dropout.install import install_draws
from parallelize.state.randomness.dropout.position import Position
from parallelize.tools.verification.batch import IGNORED
from parallelize.tools.verification.compare import ReferenceValues
from parallelize.tools.verification.configuration import Configuration, Mode, name_of
from parallelize.tools.verification.module_trace import ModuleTrace, ModuleTracer, first_tensor, local_copy
from parallelize.tools.verification.precision import computing_in
from parallelize.tools.verification.relations import error_of
from parallelize.tools.verification.user_errors import blaming

T = torch.Tensor
LEARNING_RATE = 0.1


def reference_step(configuration: Configuration) -> ReferenceValues:
    """Run the step. Raises: ModelError `reference-failed`, `not-finite`, `nothing-trains`."""
    model, _ = _unsharded(configuration)
    inputs, targets = configuration.batch_part(0, 1)
    input_gradients = InputGradients(model)
    named = name_of(configuration.request.model)
    fix = fix_of_type(named) if isinstance(configuration.request.model, (str, ModelSource)) else ""
    with blaming("reference-failed", f"{named} fails unsharded", fix), computing_in(configuration.dtype):
        output = model(**input_gradients.start_step(inputs))
        loss = stock_loss(configuration, output, targets) / loss_divisor(configuration)
        loss.backward()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    if not gradients:
        raise ModelError(Problem("nothing-trains", "no parameter got a gradient from the unsharded model's loss"))
    outputs = [tensor.detach() for tensor in floating_in(output)]
    _check_finite({"its loss": loss, **{f"output {index}": tensor for index, tensor in enumerate(outputs)}})
    _check_finite({f"the gradient of {name}": grad for name, grad in gradients.items()})
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _half_norm(gradients, model))
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LEARNING_RATE).step()
    return ReferenceValues(
        loss=loss.detach(),
        outputs=outputs,
        inputs=input_gradients.gradient(1),
        embedding=input_gradients.embedding,
        gradients=gradients,
        norm=norm.detach(),
        weights={name: p.detach().clone() for name, p in parameters.items()},
    )


def _unsharded(configuration: Configuration) -> tuple[nn.Module, Callable[[int, int], AbstractContextManager[Any]]]:
    """A copy of the model; and a context for its forward on part `index` of `count` of the batch.

    What a forward draws is that of the ranks, which is a function of the position of a row in the batch.
    """
    model = copy_of(configuration.model)
    clock, rows = install_draws(model, seed=0), configuration.rows
    return model, lambda index, count: clock.at(Position(0, index * rows // count, rows // count))


def _check_finite(tensors: dict[str, T]) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            what = f"the unsharded model is not finite: {name} contains infinity or NaN"
            raise ModelError(Problem("not-finite", what, fix="check its inputs, and the magnitude of its weights"))


@torch.no_grad()
def check_repeats(configuration: Configuration, reference: ReferenceValues, bound: float) -> None:
    """Raises: ModelError `not-deterministic` where a second forward computes other numbers."""
    inputs, targets = configuration.batch_part(0, 1)
    what = f"{name_of(configuration.request.model)} fails unsharded, the second time"
    with blaming("reference-failed", what), computing_in(configuration.dtype):
        output = _unsharded(configuration)[0](**inputs)
        loss = stock_loss(configuration, output, targets) / loss_divisor(configuration)
    pairs = [(loss, reference.loss), *zip(floating_in(output), reference.outputs, strict=False)]
    if any(error_of(actual, expected) > bound for actual, expected in pairs):
        what = "the unsharded model computes other numbers each time, so there is no reference"
        fix = "turn off its random numbers: dropout that is no `nn.Dropout` and no rate in its config, noise, sampling"
        raise ModelError(Problem("not-deterministic", what, fix=fix))


@torch.no_grad()
def is_a_sum(configuration: Configuration, reference: ReferenceValues, bound: float) -> bool:
    """Whether the batch's loss is the sum over its parts, as steps with several microbatches and data ranks compute
    it."""
    count = configuration.request.data_ranks * configuration.request.num_microbatches
    if count == 1 or not configuration.can_split:
        return True
    (model, part_at), losses = _unsharded(configuration), []
    for index in range(count):
        inputs, targets = configuration.batch_part(index, count)
        what = f"{name_of(configuration.request.model)} fails unsharded on some rows"
        with blaming("reference-failed", what), computing_in(configuration.dtype), part_at(index, count):
            losses.append(stock_loss(configuration, model(**inputs), targets) / loss_divisor(configuration))
    return error_of(torch.stack(losses).sum(0), reference.loss) <= bound


def _half_norm(gradients: dict[str, T], model: nn.Module) -> float:
    """Half of the gradients' norm: a limit that makes clipping necessary."""
    unique = [gradients[name] for name, _ in model.named_parameters() if name in gradients]
    return 0.5 * float(torch.stack([grad.double().norm() for grad in unique]).norm())


def loss_divisor(configuration: Configuration) -> T:
    """What the loss is divided by: the count of the full batch, or without targets the number of data ranks."""
    if configuration.targets is None:
        return torch.tensor(configuration.request.data_ranks)
    if configuration.count is not None:
        return torch.as_tensor(configuration.count(configuration.targets))
    return (configuration.targets != IGNORED).sum()


def stock_loss(configuration: Configuration, output: Any, targets: Any) -> T:
    """The sum over tokens: the model's own loss, or PyTorch's cross entropy."""
    if configuration.loss is not None:
        return configuration.loss(output, targets)
    logits = logits_of(output)
    if not targets.is_floating_point():
        check_positions(targets, tuple(logits.shape[:-1]), logits.shape[-1])
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, targets.reshape(-1), reduction="sum", ignore_index=IGNORED)


def trace_reference(configuration: Configuration, mode: Mode) -> ModuleTrace:
    """Trace the unsharded model on the same parts of the batch that the forwards of the ranks get."""
    model, part_at = _unsharded(configuration)
    tracer = ModuleTracer(model)
    count = configuration.request.data_ranks * mode.microbatches
    for index in range(count):
        inputs, targets = configuration.batch_part(index, count)
        with computing_in(configuration.dtype), tracer.microbatch(index), part_at(index, count):
            (stock_loss(configuration, model(**inputs), targets) / loss_divisor(configuration)).backward()
    parameters = model.named_parameters(remove_duplicate=False)
    tracer.trace.gradients = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
    return tracer.trace


class InputGradients:
    """The gradient of the model's first floating-point input, or of the output of its embedding.

    Create it before a plan is applied, so that its hooks see the stock embedding's output.

    Args:
        embedding: the embedding whose output counts. None: the first one that is called. Empty: none.
    """

    def __init__(self, model: nn.Module, embedding: str | None = None):
        self.embedding = embedding or ""
        self._reset()
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and embedding in (None, name):
                module.register_forward_hook(self._hook(name))

    def _reset(self) -> None:
        self.leaf: T | None = None
        self._grads: dict[int, T] = {}
        self._num_calls = 0

    def start_step(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Reset, and return the inputs of a new step, of which the first floating-point tensor requires a gradient."""
        self._reset()
        name = next((k for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()), None)
        if name is None:
            return inputs
        self.leaf = inputs[name].detach().clone().requires_grad_()
        return {**inputs, name: self.leaf}

    def _hook(self, name: str) -> Callable:
        def hook(_: nn.Module, args: tuple, output: Any) -> None:
            if self.leaf is not None:
                return
            self.embedding = self.embedding or name
            tensor = first_tensor(output)
            if name != self.embedding or private.backward_id() != -1 or tensor is None or not tensor.requires_grad:
                return
            call, self._num_calls = self._num_calls, self._num_calls + 1
            tensor.register_hook(lambda grad: self._grads.__setitem__(call, local_copy(grad)))

        return hook

    def gradient(self, forwards: int) -> T | None:
        """The gradient over all rows of `forwards` forwards. None where there is none: on other stages, or frozen."""
        if self.leaf is not None:
            return self.leaf.grad
        if not self._grads or self._num_calls % forwards:
            return None
        calls_per_forward = self._num_calls // forwards
        first_grads = [self._grads.get(index * calls_per_forward) for index in range(forwards)]
        grads = [grad for grad in first_grads if grad is not None]
        return torch.cat(grads) if len(grads) == forwards else None
