"""One training step of the unsharded model, with PyTorch's own loss, clipping and optimiser: what all is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.verification.batch import IGNORED
from parallelize.verification.case import Case, Mode, name_of
from parallelize.verification.compare import Numbers
from parallelize.verification.precision import computing_in
from parallelize.verification.relate import error_of
from parallelize.verification.users import blaming
from parallelize.verification.watch import Trace, Watch, all_tensors, first_tensor, plain

T = torch.Tensor
LEARNING_RATE = 0.1


def reference(case: Case) -> Numbers:
    """The numbers of the unsharded model. Raises: ModelError `reference-failed`, `not-finite`, `nothing-trains`."""
    model = copy.deepcopy(case.model)
    inputs, targets = case.feed(0, 1)
    watched = InputGradients(model)
    with blaming("reference-failed", f"{name_of(case.request.model)} fails unsharded"), computing_in(case.dtype):
        output = model(**watched.feed(inputs))
        loss = stock_loss(case, output, targets) / total(case)
        loss.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    if not gradients:
        raise ModelError(Problem("nothing-trains", "no parameter got a gradient from the unsharded model's loss"))
    outputs = [tensor.detach() for tensor in all_tensors(output)]
    _check_finite({"its loss": loss, **{f"output {at}": one for at, one in enumerate(outputs)}})
    _check_finite({f"the gradient of {name}": grad for name, grad in gradients.items()})
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _half_norm(gradients, model))
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LEARNING_RATE).step()
    weights = {name: p.detach().clone() for name, p in named.items()}
    inputs_grad = watched.found(1)
    return Numbers(loss.detach(), outputs, inputs_grad, watched.embedding, gradients, norm.detach(), weights)


def _check_finite(tensors: dict[str, T]) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            what = f"the unsharded model is not finite: {name} holds infinities or what is not a number"
            raise ModelError(Problem("not-finite", what, fix="look at its inputs, and at the sizes of its weights"))


@torch.no_grad()
def check_repeats(case: Case, want: Numbers, bound: float) -> None:
    """Raises: ModelError `not-deterministic` where a second forward gives other numbers."""
    inputs, targets = case.feed(0, 1)
    what = f"{name_of(case.request.model)} fails unsharded, the second time"
    with blaming("reference-failed", what), computing_in(case.dtype):
        output = copy.deepcopy(case.model)(**inputs)
        loss = stock_loss(case, output, targets) / total(case)
    pairs = [(loss, want.loss), *zip(all_tensors(output), want.outputs, strict=False)]
    if any(error_of(got, wanted) > bound for got, wanted in pairs):
        what = "the unsharded model gives other numbers each time, so there is nothing to compare with"
        fix = "turn off what it draws: dropout that is no `nn.Dropout` and no rate in its config, noise, sampling"
        raise ModelError(Problem("not-deterministic", what, fix=fix))


@torch.no_grad()
def is_a_sum(case: Case, want: Numbers, bound: float) -> bool:
    """Whether the loss of the batch is the sum over its parts, as steps of several microbatches and data ranks take it."""
    parts = case.request.data_ranks * case.request.num_microbatches
    if parts == 1 or not case.can_cut:
        return True
    model, found = copy.deepcopy(case.model), []
    for place in range(parts):
        inputs, targets = case.feed(place, parts)
        what = f"{name_of(case.request.model)} fails unsharded on some rows"
        with blaming("reference-failed", what), computing_in(case.dtype):
            found.append(stock_loss(case, model(**inputs), targets) / total(case))
    return error_of(torch.stack(found).sum(0), want.loss) <= bound


def _half_norm(gradients: dict[str, T], model: nn.Module) -> float:
    """A limit that clipping has to work for."""
    once = [gradients[name] for name, _ in model.named_parameters() if name in gradients]
    return 0.5 * float(torch.stack([grad.double().norm() for grad in once]).norm())


def total(case: Case) -> T:
    """What the loss is divided by: what counts in the whole batch, or without targets one for each data rank."""
    if case.targets is None:
        return torch.tensor(case.request.data_ranks)
    if case.count is not None:
        return torch.as_tensor(case.count(case.targets))
    return (case.targets != IGNORED).sum()


def logits_of(output: Any) -> T:
    return output if isinstance(output, torch.Tensor) else output.logits


def stock_loss(case: Case, output: Any, targets: Any) -> T:
    """The sum over tokens, by PyTorch's own cross entropy where the model brings no loss."""
    if case.loss is not None:
        return case.loss(output, targets)
    logits = logits_of(output)
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, targets.reshape(-1), reduction="sum", ignore_index=IGNORED)


def watch_reference(case: Case, mode: Mode) -> Trace:
    """The unsharded model on the very rows that each rank's forwards get."""
    model = copy.deepcopy(case.model)
    watch = Watch(model)
    parts = case.request.data_ranks * mode.microbatches
    for place in range(parts):
        inputs, targets = case.feed(place, parts)
        with computing_in(case.dtype), watch.during(place):
            (stock_loss(case, model(**inputs), targets) / total(case)).backward()
    named = model.named_parameters(remove_duplicate=False)
    watch.trace.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    return watch.trace


class InputGradients:
    """The gradient of what goes into the model: of its first tensor of numbers, or of its embedded ids.

    Make it before a plan is applied: so it sees what the model itself gives. `embedding`: whose output counts; None: of the
    first that is called.
    """

    def __init__(self, model: nn.Module, embedding: str | None = None):
        self.embedding = embedding or ""
        self._forget()
        for called, module in model.named_modules():
            if isinstance(module, nn.Embedding) and embedding in (None, called):
                module.register_forward_hook(self._hook(called))

    def _forget(self) -> None:
        self.leaf: T | None = None
        self._grads: dict[int, T] = {}
        self._calls = 0

    def feed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a new step, as the model is to get them."""
        self._forget()
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
            call, self._calls = self._calls, self._calls + 1
            tensor.register_hook(lambda grad: self._grads.__setitem__(call, plain(grad).detach().clone()))

        return hook

    def found(self, forwards: int) -> T | None:
        """The gradient over all rows of `forwards` forwards; None where there is none (another stage's, frozen)."""
        if self.leaf is not None:
            return self.leaf.grad
        if not self._grads or self._calls % forwards:
            return None
        each = self._calls // forwards
        firsts = [self._grads.get(place * each) for place in range(forwards)]
        return None if any(one is None for one in firsts) else torch.cat([one for one in firsts if one is not None])
