"""The verbs that features are written in: `Alone` runs them on one process, `Planned` on each rank of a mesh.

A feature is one function of a side, so that both sides do the same in the same order; what a side records is compared.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize import (
    build_mesh,
    cross_entropy,
    full_gradients,
    full_state_dict,
    gather_sequence,
    next_tokens,
    parallelize_model,
    split_sequence,
)
from tests.matrix.axes import AXES, Axis
from tests.matrix.kinds import IGNORED, ROWS, Kind, logits_of, plan_of, summed_loss

T = torch.Tensor
Loss = Callable[[Any, T], T]
LEARNING_RATE = 0.05
_GENERATOR = threading.Lock()  # ranks are threads with one default generator


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block PyTorch's generator starts from the seed, on every rank: ranks that are threads share it, and
    none draws from it for something else meanwhile."""
    meet = dist.barrier if dist.is_initialized() else (lambda: None)
    meet()
    with _GENERATOR:
        torch.manual_seed(seed)
        yield
    meet()


class Side:
    """What both sides have.

    Attributes:
        kind: of the model. model: the module that trains. folder: for files, the same on every rank.
        records: name to what is compared, in the order of recording.
        alone: whether this is the unsharded model.
        loop: that the side runs, if its row is a change of one. fresh: a copy of the model as it was built, for what
            is restored.
    """

    alone = False
    loop: Any = None
    fresh: Any = None

    def __init__(self, kind: Kind, model: nn.Module, folder: str, others: tuple[nn.Module, ...] = ()):
        self.kind, self.model, self.folder, self.others = kind, model, folder, others
        self.records: dict[str, T] = {}
        self.optimizers: list[torch.optim.Optimizer] = []

    # -- what is compared

    def record(self, name: str, value: Any) -> None:
        """A tensor or number to compare, under a name that is free so far."""
        while name in self.records:
            name += "'"
        self.records[name] = torch.as_tensor(value).detach().clone()

    def finish(self) -> None:
        """Record the gradients that are there, and the weights."""
        self.record_gradients()
        self.record_weights()

    def record_gradients(self) -> None:
        for name, gradient in self.gradients().items():
            self.record(f"gradient {name}", gradient)

    def record_weights(self) -> None:
        for name, weight in self.weights().items():
            self.record(f"weight {name}", weight)

    # -- what the subclasses say

    def place(self, **options: Any) -> None:
        """Put the model on the mesh; keywords are those of `parallelize_model`, over the axis' own."""
        raise NotImplementedError

    def local(self, full: Any) -> Any:
        """This data rank's rows of a tensor or list with `ROWS` entries; dicts of them; anything else as it is."""
        raise NotImplementedError

    def split(self, full: T) -> T:
        """This rank's part of [batch, sequence, ...] along the sequence, for losses written by hand."""
        raise NotImplementedError

    def step(self, number: int = 0, **extra: Any) -> T:
        """Forward and backward of a batch; the mean loss over all its targets is recorded and returned."""
        raise NotImplementedError

    def evaluate(self, number: int = 0, **extra: Any) -> T:
        raise NotImplementedError

    def add_optimizer(self, cls: Any, params: Any = None, **options: Any) -> torch.optim.Optimizer:
        raise NotImplementedError

    def clip(self, norm: float, **options: Any) -> T:
        raise NotImplementedError

    def summed(self, value: T) -> T:
        """The sum over the ranks that have different tokens."""
        raise NotImplementedError

    def gradients(self) -> dict[str, T]:
        raise NotImplementedError

    def weights(self) -> dict[str, T]:
        raise NotImplementedError

    def every_weight(self) -> dict[str, T]:
        """The full weights, on every rank."""
        raise NotImplementedError

    def whole(self, value: T, sequence: bool = False) -> T:
        """The rows of all data ranks, and with `sequence` the tokens of all ranks of `cp` in dim 1."""
        raise NotImplementedError

    def summed_loss(self, output: Any, targets: T) -> T:
        """The sum of the cross entropy over this rank's tokens, of the output of a forward by hand."""
        raise NotImplementedError

    # -- what is said once for both

    def beside(self, model: nn.Module) -> Any:
        """A side for another model on the same mesh, which records into the same records."""
        other = copy.copy(self)
        other.model, other.optimizers = model, []
        return other

    def elsewhere(self) -> Any:
        """This side on another mesh of as many ranks."""
        return self.beside(self.model)

    def evaluate_by_hand(self, number: int = 0) -> None:
        """Records the mean loss of a forward that is called by hand, without gradients."""
        with torch.no_grad():
            total = self.summed_loss(self.forward(number), self.targets(number))
        self.record("by hand", self.summed(total) / self.count(number))

    def inputs(self, number: int = 0) -> dict[str, T]:
        return self.local(self.kind.batch(number)[0])

    def targets(self, number: int = 0) -> T:
        return self.local(self.kind.batch(number)[1])

    def count(self, number: int = 0) -> int:
        """Targets of the whole batch, of all ranks."""
        return int((self.kind.batch(number)[1] != IGNORED).sum())

    def forward(self, number: int = 0, **extra: Any) -> Any:
        """The output of the module, called by hand."""
        cache = {"use_cache": False} if {"stock", "text"} <= self.kind.traits else {}
        return self.model(**{**self.inputs(number), **cache, **extra})

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def like(self, *parts: str) -> dict[str, nn.Parameter]:
        """Parameters with one of the parts in their name."""
        return {name: p for name, p in self.named().items() if any(part in name for part in parts)}

    def optimizer(self, cls: Any = torch.optim.SGD, params: Any = None, **options: Any) -> torch.optim.Optimizer:
        """An optimizer, which `update` steps."""
        built = self.add_optimizer(cls, params, **{"lr": LEARNING_RATE, **options})
        self.optimizers.append(built)
        return built

    def update(self) -> None:
        """Step all optimizers, and drop the gradients."""
        if not self.optimizers:
            self.optimizer()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def train(self, steps: int = 2, **extra: Any) -> None:
        """Steps with updates between them; the gradients of the last one stay."""
        for number in range(steps):
            if number:
                self.update()
            self.step(number, **extra)


class Alone(Side):
    """One process, plain PyTorch."""

    alone = True

    def __init__(self, kind: Kind, model: nn.Module, folder: str, others: tuple[nn.Module, ...] = ()):
        super().__init__(kind, model, folder, others)
        self.loss: Loss = summed_loss
        self.count_of: Callable[[Any], Any] = lambda targets: (targets != IGNORED).sum()

    def place(self, **options: Any) -> None:
        self.loss = options.get("loss", self.loss)
        self.count_of = options.get("count", self.count_of)

    def local(self, full: Any) -> Any:
        return full

    def split(self, full: T) -> T:
        return full

    def step(self, number: int = 0, **extra: Any) -> T:
        loss = self._mean_loss(number, extra)
        if loss.requires_grad:
            loss.backward()
        self.record("loss", loss)
        return loss.detach()

    def evaluate(self, number: int = 0, **extra: Any) -> T:
        with torch.no_grad():
            loss = self._mean_loss(number, extra)
        self.record("evaluated", loss)
        return loss

    def _mean_loss(self, number: int, extra: dict[str, Any]) -> T:
        """`targets` and `labels` may be passed; inputs are over those of the batch, and None leaves one out."""
        inputs = {**self.inputs(number), **extra}
        targets, labels = inputs.pop("targets", None), inputs.pop("labels", None)
        inputs = {name: value for name, value in inputs.items() if value is not None}
        if labels is not None:  # what the stock loss means, which rounds logits to float32
            targets = next_tokens(labels) if "causal" in self.kind.traits else labels
        targets = self.targets(number) if targets is None else targets
        if {"stock", "text"} <= self.kind.traits:
            inputs.setdefault("use_cache", False)
        return self.loss(self.model(**inputs), targets) / self.count_of(targets)

    def add_optimizer(self, cls: Any, params: Any = None, **options: Any) -> torch.optim.Optimizer:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        return cls(trainable if params is None else params, **options)

    def clip(self, norm: float, **options: Any) -> T:
        total = nn.utils.clip_grad_norm_(self.model.parameters(), norm, **options)
        self.record("norm", total)
        return total

    def summed(self, value: T) -> T:
        return value.detach().clone()

    def gradients(self) -> dict[str, T]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def weights(self) -> dict[str, T]:
        return dict(self.model.state_dict())

    def every_weight(self) -> dict[str, T]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def whole(self, value: T, sequence: bool = False) -> T:
        return value

    def summed_loss(self, output: Any, targets: T) -> T:
        return summed_loss(output, targets)


class Planned(Side):
    """A rank of a mesh."""

    def __init__(self, kind: Kind, model: nn.Module, folder: str, axis: Axis, others: tuple[nn.Module, ...] = ()):
        super().__init__(kind, model, folder, others)
        self.axis = axis
        self.mesh = build_mesh("cpu", **axis.sizes)
        self.parallel: Any = None

    @property
    def data_rank(self) -> int:
        rank = 0
        for name in ("dp_replicate", "dp"):
            if name in self.axis.sizes:
                rank = rank * self.axis.sizes[name] + self.mesh.get_local_rank(name)
        return rank

    def place(self, **options: Any) -> None:
        self.parallel = self.apply(self.model, **options)
        self.model = self.parallel.module

    def apply(self, model: nn.Module, **options: Any) -> Any:
        """Any model on the mesh of this side, with the options of its axis."""
        defaults: dict[str, Any] = dict(self.axis.options)
        if "pp" in self.axis.sizes:
            defaults["num_microbatches"] = 4 // self.axis.data_ranks
            if defaults.get("schedule") == "zbv":
                defaults["stages_per_rank"] = 2
        if self.kind.plan == "own":
            options.setdefault("plan", plan_of(self.kind, self.folder))
        return parallelize_model(model, self.mesh, **{**defaults, **options})

    def local(self, full: Any) -> Any:
        if isinstance(full, dict):
            return {name: self.local(value) for name, value in full.items()}
        if isinstance(full, (torch.Tensor, list, tuple)) and len(full) == ROWS:
            rows = ROWS // self.axis.data_ranks
            return full[self.data_rank * rows : (self.data_rank + 1) * rows]
        return full

    def split(self, full: T) -> T:
        return split_sequence(self.model, full) if "cp" in self.axis.sizes else full

    def step(self, number: int = 0, **extra: Any) -> T:
        loss = self.parallel.step(**self._call(number, extra))
        self.record("loss", loss)
        return loss

    def evaluate(self, number: int = 0, **extra: Any) -> T:
        loss = self.parallel.evaluate(**self._call(number, extra))
        self.record("evaluated", loss)
        return loss

    def _call(self, number: int, extra: dict[str, Any]) -> dict[str, Any]:
        call = {**self.inputs(number), **extra}
        if "labels" not in call:
            call.setdefault("targets", self.targets(number))
        return {name: value for name, value in call.items() if value is not None}

    def add_optimizer(self, cls: Any, params: Any = None, **options: Any) -> torch.optim.Optimizer:
        return self.parallel.optimizer(cls, params, **options)

    def clip(self, norm: float, **options: Any) -> T:
        total = self.parallel.clip_grad_norm_(norm, **options)
        self.record("norm", total)
        return total

    def summed(self, value: T) -> T:
        value = value.detach().clone()
        for name in ("dp_replicate", "dp", "cp"):
            if self.axis.sizes.get(name, 1) > 1:
                dist.all_reduce(value, group=self.mesh.get_group(name))
        return value

    def gradients(self) -> dict[str, T]:
        return full_gradients(self.model)

    def weights(self) -> dict[str, T]:
        return full_state_dict(self.model)

    def every_weight(self) -> dict[str, T]:
        return full_state_dict(self.model, every_rank=True)

    def elsewhere(self) -> Any:
        other = self.beside(self.model)
        other.axis = AXES[_another(self.axis)]
        other.mesh = build_mesh("cpu", **other.axis.sizes)
        return other

    def whole(self, value: T, sequence: bool = False) -> T:
        if sequence:
            value = gather_sequence(self.model, value)
        rows = len(value)
        full = value.new_zeros(rows * self.axis.data_ranks, *value.shape[1:])
        full[self.data_rank * rows : (self.data_rank + 1) * rows] = value
        for name in ("dp_replicate", "dp"):
            if self.axis.sizes.get(name, 1) > 1:
                dist.all_reduce(full, group=self.mesh.get_group(name))
        return full

    def summed_loss(self, output: Any, targets: T) -> T:
        return cross_entropy(logits_of(output), self.split(targets), ignore_index=IGNORED, reduction="sum")


def _another(axis: Axis) -> str:
    """The name of a mesh of as many ranks that divides a model otherwise."""
    if axis.world_size == 1:
        return "one"
    if axis.world_size == 2:
        return "tp-sp-lp" if "dp" in axis.sizes else "dp-zero3"
    if axis.world_size == 4:
        return "pp-dp-zero2" if "tp" in axis.sizes else "dp-tp-zero3"
    return "dp-cp-tp" if "pp" in axis.sizes else "pp-dp-tp"
