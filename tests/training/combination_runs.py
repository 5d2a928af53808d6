"""What each rank runs of a combination: the unsharded model and the planned one, compared after every step."""

from __future__ import annotations

import copy
import traceback
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from parallelize import (
    Checkpointer,
    accumulate_gradients,
    build_mesh,
    cross_entropy,
    generate,
    install_dropout,
    next_tokens,
    parallelize_model,
    split_sequence,
    token_log_probs,
)
from parallelize.base.errors import ParallelizeError
from parallelize.state.loop.clip import clip_grad_norm_
from tests.axes.pipeline.pipeline_jobs import full_value
from tests.support.context import softmax_in_float64
from tests.support.models import tiny_model
from tests.training.combinations import Combination, draw

LEARNING_RATE = 0.05
STEPS = 4
Tensors = dict[str, torch.Tensor]


class _DeliberateError(Exception):
    """Raised in a forward by a habit."""


class ImpossibleError(Exception):
    """The unsharded model itself cannot do this."""


# -- batches ----------------------------------------------------------------------------------------------------------


def batch_of(case: Combination, step: int, data_ranks: int) -> tuple[Tensors, torch.Tensor]:
    """The inputs and labels of the global batch of a step."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    rows, length = case.rows * case.microbatches * data_ranks, case.length
    vocab = case.overrides.get("vocab_size", 67)
    ids = torch.randint(3, vocab, (rows, length), generator=generator)
    labels = torch.randint(3, vocab, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.2] = -100
    if case.ignored:
        labels[: case.rows] = -100
        labels[-1, -1] = 5
    inputs: Tensors = {"input_ids": ids}
    kind = case.inputs
    positions = torch.arange(length).expand(rows, -1).contiguous()
    if kind == "embeds":
        width = case.overrides.get("hidden_size", 48)
        values = torch.randn(rows, length, width, generator=generator, dtype=torch.float64)
        inputs = {"inputs_embeds": values.to(getattr(torch, case.options.get("dtype", case.weights)))}
    elif kind == "positions":
        inputs["position_ids"] = positions
    elif kind == "shifted positions":
        inputs["position_ids"] = positions + 3
    elif kind == "packed":
        half = length // 2
        inputs["position_ids"] = (
            torch.cat([torch.arange(half), torch.arange(length - half)]).expand(rows, -1).contiguous()
        )
    elif kind in ("right padding", "left padding"):
        mask = torch.ones(rows, length, dtype=torch.long)
        for row in range(0, rows, 2):
            if kind == "right padding":
                mask[row, -2:] = 0
            else:
                mask[row, :2] = 0
        labels[mask == 0] = -100
        inputs["attention_mask"] = mask
    elif kind == "mask 4-D":
        mask = torch.ones(length, length).tril().bool().expand(rows, 1, -1, -1).clone()
        mask[:, :, 2:, 0] = torch.rand(rows, 1, length - 2, generator=generator) < 0.5
        inputs["attention_mask"] = mask
    elif kind == "strided ids":
        inputs["input_ids"] = ids.t().contiguous().t()
        labels = labels.t().contiguous().t()
    elif kind == "int32 ids":
        inputs["input_ids"] = ids.int()
    return inputs, labels


def is_causal(case: Combination) -> bool:
    return case.family != "bert"


# -- both sides -------------------------------------------------------------------------------------------------------


def token_mean(
    case: Combination, loss: str, logits: Any, targets: torch.Tensor, count: Any, planned: bool
) -> torch.Tensor:
    """The loss of some tokens, divided by the count of all."""
    if not planned:
        flat, wanted = logits.flatten(0, -2), targets.flatten()
        smoothing = 0.1 if loss == "smoothing" else 0.0
        total = F.cross_entropy(flat, wanted, reduction="sum", label_smoothing=smoothing)
        if loss == "z-loss":
            total = total + 0.01 * (flat.logsumexp(-1).square() * (wanted != -100)).sum()
        return total / count
    if loss == "F.cross_entropy":
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum") / count
    if loss == "log probs":
        return -(token_log_probs(logits, targets) * (targets != -100)).sum() / count
    options: dict[str, Any] = {"smoothing": {"label_smoothing": 0.1}, "z-loss": {"z_loss": 0.01}}.get(loss, {})
    return cross_entropy(logits, targets, num_tokens=count, **options)


class Run:
    """One side: a module, its optimizers, and what habits do to them."""

    def __init__(self, case: Combination, module: nn.Module):
        self.case, self.module = case, module
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.renewed: list[Any] = []  # habits that a resumed model needs again
        self.average: Tensors = {}

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def build_optimizer(self, cls: Any, params: Any, **options: Any) -> torch.optim.Optimizer:
        return cls(params, **options)

    def build_optimizers(self) -> None:
        named, kind = self.named(), self.case.optimizer
        every = list(named.values())
        sgd, adamw = torch.optim.SGD, torch.optim.AdamW
        build = self.build_optimizer
        if kind == "sgd":
            self.optimizers = {"a": build(sgd, every, lr=LEARNING_RATE)}
        elif kind in ("momentum", "nesterov"):
            self.optimizers = {
                "a": build(sgd, every, lr=LEARNING_RATE, momentum=0.9, weight_decay=0.1, nesterov=kind == "nesterov")
            }
        elif kind == "adagrad":
            self.optimizers = {"a": build(torch.optim.Adagrad, every, lr=LEARNING_RATE, eps=1e-2)}
        elif kind == "groups" or (kind == "two" and ("pp" in self.case.axes or "pp" in self.case.resumes_on[0])):
            groups = [
                {"params": [p for n, p in named.items() if p.ndim > 1], "weight_decay": 0.2},
                {"params": [p for n, p in named.items() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
            ]
            self.optimizers = {"a": build(adamw, groups, lr=LEARNING_RATE, eps=1e-2)}
        elif kind == "two":
            ends = [p for n, p in named.items() if "embed" in n or "wte" in n]
            ids = {id(p) for p in ends}
            rest = [p for p in every if id(p) not in ids]
            self.optimizers = {
                "a": build(adamw, rest, lr=LEARNING_RATE, eps=1e-2),
                "b": build(sgd, ends, lr=LEARNING_RATE, momentum=0.8),
            }
        else:
            form = {"adamw foreach": {"foreach": True}, "adamw fused": {"fused": True}}.get(kind, {"foreach": False})
            self.optimizers = {"a": build(adamw, every, lr=LEARNING_RATE, eps=1e-2, weight_decay=0.1, **form)}

    def zero_grad(self, to_none: bool = True) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=to_none)

    def step_optimizers(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.step()

    def kwargs(self) -> dict[str, Any]:
        return {"use_cache": False} if is_causal(self.case) else {}


class Unsharded(Run):
    def __init__(self, case: Combination, module: nn.Module):
        super().__init__(case, module)
        if case.dropout:
            install_dropout(module, 0)
        self.build_optimizers()

    def losses(self, inputs: Tensors, labels: torch.Tensor) -> torch.Tensor:
        case = self.case
        if "inputs_embeds" in inputs:
            inputs = {**inputs, "inputs_embeds": inputs["inputs_embeds"].to(getattr(torch, case.weights))}
        if case.loss == "stock labels":
            return self.module(**inputs, labels=labels, **self.kwargs()).loss
        targets = next_tokens(labels) if case.loss == "labels" and is_causal(case) else labels
        logits = self.module(**inputs, **self.kwargs()).logits
        return token_mean(case, case.loss, logits, targets, (targets != -100).sum(), planned=False)

    def forward_backward(self, inputs: Tensors, labels: torch.Tensor) -> torch.Tensor:
        loss = self.losses(inputs, labels)
        (2 * loss if self.case.loss == "retain graph" else loss).backward()
        return loss.detach()

    def evaluate(self, inputs: Tensors, labels: torch.Tensor) -> torch.Tensor:
        self.module.eval()
        with torch.no_grad():
            loss = self.losses(inputs, labels)
        self.module.train()
        return loss

    def clip(self, norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), norm)

    def full(self, value_of: Any) -> Tensors:
        named = self.module.named_parameters(remove_duplicate=False)
        return {n: value_of(p).detach().clone() for n, p in named if value_of(p) is not None}

    def resume(self, folder: str) -> None:
        pass


class ModuleRuntime(Run):
    def __init__(self, case: Combination, module: nn.Module, axes: dict[str, int], options: dict[str, Any]):
        super().__init__(case, module)
        self.axes = axes
        self._apply(module, axes, options)

    def _apply(self, module: nn.Module, axes: dict[str, int], options: dict[str, Any]) -> None:
        self.axes, self.mesh = axes, build_mesh("cpu", **axes)
        self.parallel = parallelize_model(module, self.mesh, **options)
        self.module = self.parallel.module
        self.build_optimizers()

    @property
    def data(self) -> tuple[int, int]:
        rank, size = 0, 1
        for axis in ("dp_replicate", "dp"):
            if axis in self.axes:
                rank = rank * self.axes[axis] + self.mesh.get_local_rank(axis)
                size *= self.axes[axis]
        return rank, size

    def build_optimizer(self, cls: Any, params: Any, **options: Any) -> torch.optim.Optimizer:
        return self.parallel.optimizer(cls, params, **options)

    def local(self, inputs: Tensors, labels: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rank, size = self.data
        rows = len(labels) // size
        part = slice(rank * rows, rank * rows + rows)
        return {name: value[part] for name, value in inputs.items()}, labels[part]

    def forward_backward(self, inputs: Tensors, labels: torch.Tensor) -> torch.Tensor:
        case = self.case
        count = (labels != -100).sum()
        inputs, labels = self.local(inputs, labels)
        if case.loop == "step":
            target = {"labels" if case.loss == "labels" else "targets": labels}
            return self.parallel.step(**inputs, **target, **self.kwargs())
        if case.loss == "stock labels":
            loss = self.module(**inputs, labels=labels, **self.kwargs()).loss
            loss.backward()
            return self.summed(loss)
        total = torch.zeros((), dtype=torch.float64)
        parts = case.microbatches
        rows = len(labels) // parts
        with accumulate_gradients(self.module) if parts > 1 and case.seed % 2 else nullcontext():
            for index in range(parts):
                rows_of = slice(index * rows, (index + 1) * rows if index < parts - 1 else None)
                logits = self.module(**{n: v[rows_of] for n, v in inputs.items()}, **self.kwargs()).logits
                targets = labels[rows_of]
                if "cp" in self.axes:
                    targets = split_sequence(self.module, targets)
                loss = token_mean(case, case.loss, logits, targets, count, planned=True)
                if case.loss == "retain graph":
                    loss.backward(retain_graph=True)
                loss.backward()
                total += loss.detach()
        return self.summed(total)

    def summed(self, loss: torch.Tensor) -> torch.Tensor:
        loss = loss.detach().clone()
        for axis in ("dp_replicate", "dp", "cp"):
            if axis in self.axes:
                dist.all_reduce(loss, group=self.mesh.get_group(axis))
        return loss

    def evaluate(self, inputs: Tensors, labels: torch.Tensor) -> torch.Tensor:
        self.module.eval()
        inputs, labels = self.local(inputs, labels)
        form = "labels" if self.case.loss in ("labels", "stock labels") else "targets"
        loss = self.parallel.evaluate(**inputs, **{form: labels}, **self.kwargs())
        self.module.train()
        return loss

    def clip(self, norm: float) -> torch.Tensor:
        if self.case.seed % 2:
            return self.parallel.clip_grad_norm_(norm)
        return clip_grad_norm_(self.module.parameters(), norm)

    def full(self, value_of: Any) -> Tensors:
        return {n: full_value(self.module, n, value_of(p)) for n, p in self.named().items() if value_of(p) is not None}

    def resume(self, folder: str) -> None:
        with Checkpointer(folder, self.parallel, optimizer=self.optimizers) as checkpoints:
            checkpoints.save(1)
        axes, options = self.case.resumes_on
        if "pp" in axes:
            options = {**options, "num_microbatches": 1}
        module = build_module(self.case, seed=9)
        frozen = {n for n, p in self.named().items() if not p.requires_grad}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, frozen)
        for name, parameter in module.named_parameters():
            if any(name in names for names in everywhere):
                parameter.requires_grad_(False)
        clock_steps = self.parallel.pipeline.steps_done
        self._apply(module, axes, options)
        with Checkpointer(folder, self.parallel, optimizer=self.optimizers) as checkpoints:
            assert checkpoints.resume() == 1
        assert clock_steps == self.parallel.pipeline.steps_done
        for habit in self.renewed:
            habit(self)


def build_module(case: Combination, seed: int = 0) -> nn.Module:
    return tiny_model(case.family, getattr(torch, case.weights), seed=seed, **case.overrides)


# -- habits -----------------------------------------------------------------------------------------------------------


def named_like(run: Run, part: str) -> dict[str, nn.Parameter]:
    """Parameters whose name contains the part; tied ones count by every name of theirs, whatever the stage."""
    aliases: dict[str, set[str]] = {}
    for copy_of in ALIASES:
        for name in copy_of:
            aliases[name] = set(copy_of)
    return {n: p for n, p in run.named().items() if any(part in alias for alias in aliases.get(n, {n}))}


ALIASES: list[set[str]] = []
"""Names of one tied parameter, of the model that runs."""


def layer_of(run: Run, index: int) -> nn.Module:
    for name, module in run.module.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in ("layers", "h", "layer"):
            return module[index]
    raise AssertionError("no layers")


def scaled(factor: float) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    return hook


def raises(module: nn.Module, inputs: Any) -> None:
    raise _DeliberateError("deliberate")


def set_weights(run: Run, weights: Tensors, strict: bool) -> None:
    own = {n for n, _ in run.module.named_parameters(remove_duplicate=False)}
    state = {n: v for n, v in weights.items() if n in own}
    run.module.load_state_dict(state, strict=strict)


# -- the comparison ---------------------------------------------------------------------------------------------------


class Comparison:
    """Both sides, and the largest relative difference of everything compared."""

    def __init__(self, case: Combination, folder: str):
        self.case, self.folder = case, folder
        stock = build_module(case)
        ALIASES[:] = _aliases(stock)
        self.unsharded = Unsharded(case, copy.deepcopy(stock))
        self.errors: dict[str, float] = {}
        self.planned = ModuleRuntime(case, stock, case.axes, dict(case.options))
        self.keeps_gradients = False

    def compare(self, what: str, actual: Tensors, expected: Tensors) -> None:
        floor = 1e-3 * max((float(v.abs().max()) for v in expected.values() if v.numel()), default=0.0)
        for name, value in actual.items():
            reference = expected.get(name, torch.zeros_like(value))
            if self.case.options.get("dtype"):
                error = float((value - reference).norm() / max(float(reference.norm()), floor, 1e-30))
            else:
                error = float((value - reference).abs().max()) / max(float(reference.abs().max()), floor, 1e-30)
            self.note(f"{what} {name}", error)

    def note(self, what: str, error: float) -> None:
        self.errors[what] = float("inf") if error != error else error

    def run(self) -> None:
        both = (self.unsharded, self.planned)
        for step in range(STEPS):
            inputs, labels = batch_of(self.case, step, self.planned.data[1])
            try:
                expected = self.unsharded.forward_backward(inputs, labels)
            except Exception as error:
                raise ImpossibleError(repr(error)) from error
            losses = [expected, self.planned.forward_backward(inputs, labels)]
            self.note(f"loss {step}", float((losses[0] - losses[1]).abs() / losses[0].abs()))
            gradients = [side.full(lambda p: p.grad) for side in both]
            missing = {n for n in gradients[0] if n in self.planned.named()} - gradients[1].keys()
            zeros = {n: torch.zeros_like(gradients[0][n]) for n in missing}
            self.compare(f"gradient {step}", {**gradients[1], **zeros}, gradients[0])
            if self.case.clip:
                norms = [side.clip(self.case.clip) for side in both]
                self.note(f"norm {step}", float((norms[0] - norms[1]).abs() / norms[0]))
            for side in both:
                side.step_optimizers()
            weights = [side.full(lambda p: p) for side in both]
            self.compare(f"weight {step}", weights[1], weights[0])
            self.keeps_gradients = False
            for number, (at, habit, names) in enumerate(self.case.habits):
                if at == step:
                    self.habit(habit, names, step, number)
            if not self.keeps_gradients:
                for side in both:
                    side.zero_grad()
        if self.case.generates and is_causal(self.case) and "pp" not in self.planned.axes:
            self.generated()

    def generated(self) -> None:
        prompts = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(self.case.seed))
        tokens = []
        for side in (self.unsharded, self.planned):
            side.module.eval()
            tokens.append(generate(side.module, prompts, max_new_tokens=4, temperature=0.0, eos_token_id=[]))
            side.module.train()
        self.note("generated", float((tokens[0] != tokens[1]).sum()))

    def habit(self, habit: str, part: str, step: int, at: int = 0) -> None:
        both = (self.unsharded, self.planned)
        case = self.case
        if habit == "eval between":
            inputs, labels = batch_of(case, 50 + step, self.planned.data[1])
            losses = [side.evaluate(inputs, labels) for side in both]
            if case.loss not in ("smoothing", "z-loss"):
                self.note(f"evaluation {step}", float((losses[0] - losses[1]).abs() / losses[0].abs()))
        elif habit == "edit weights":
            for side in both:
                with torch.no_grad():
                    for parameter in named_like(side, part).values():
                        parameter.mul_(0.8)
        elif habit == "edit weights by data":
            for side in both:
                for parameter in named_like(side, part).values():
                    parameter.data.mul_(1.1)
        elif habit == "load weights":
            state = {n: v * 0.9 for n, v in self.unsharded.full(lambda p: p).items()}
            for side in both:
                set_weights(side, state, strict="pp" not in self.planned.axes)
        elif habit == "load some weights":
            state = {n: v * 0.9 for n, v in self.unsharded.full(lambda p: p).items() if part in n}
            for group in ALIASES:
                if any(part in n for n in group):
                    for n in group:
                        state[n] = self.unsharded.full(lambda p: p)[n] * 0.9
            for side in both:
                set_weights(side, state, strict=False)
        elif habit == "state dict round trip":
            for side in both:
                side.module.load_state_dict(side.module.state_dict())
        elif habit == "optimizer state round trip":
            for side in both:
                for optimizer in side.optimizers.values():
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif habit in ("freeze", "unfreeze"):
            for side in both:
                for parameter in named_like(side, part).values():
                    parameter.requires_grad_(habit == "unfreeze" or part == "weight")
        elif habit == "requires_grad twice":
            for side in both:
                side.module.requires_grad_(False)
                side.module.requires_grad_(True)
        elif habit == "zero_grad to zeros":
            for side in both:
                side.zero_grad(to_none=False)
            self.keeps_gradients = True
        elif habit == "no zero_grad":
            self.keeps_gradients = True
        elif habit == "learning rate":
            for side in both:
                for optimizer in side.optimizers.values():
                    for group in optimizer.param_groups:
                        group["lr"] *= 0.5
        elif habit == "exception in a forward":
            self.failed_forward(step)
        elif habit == "gradient hook":

            def halve(side: Run) -> None:
                for parameter in named_like(side, part).values():
                    if parameter.requires_grad:
                        parameter.register_hook(lambda gradient: gradient * 0.5)

            self.both_and_later(halve)
        elif habit == "activation hook":
            index = step % 2
            self.both_and_later(lambda side: layer_of(side, index).register_forward_hook(scaled(1.05)))
        elif habit == "full backward hook":
            self.both_and_later(
                lambda side: layer_of(side, 1).register_full_backward_hook(
                    lambda module, gradients, _: tuple(g * 0.9 if g is not None else None for g in gradients)
                )
            )
        elif habit == "copy evaluates" and "pp" not in self.planned.axes and case.options.get("zero") != 3:
            inputs, _ = batch_of(case, 60, self.planned.data[1])
            with torch.no_grad():
                expected = copy.deepcopy(self.unsharded.module).eval()(**inputs, **self.planned.kwargs()).logits
                local, expected_local = self.planned.local(inputs, expected)
                out = copy.deepcopy(self.planned.module).eval()(**local, **self.planned.kwargs()).logits
                if "cp" not in self.planned.axes:
                    out = out.full_tensor() if hasattr(out, "full_tensor") else out
                    self.compare(f"copy {step}", {"logits": out}, {"logits": expected_local})
        elif habit == "checkpointing by transformers":
            self.both_and_later(lambda side: side.module.gradient_checkpointing_enable())
        elif habit == "forward without backward" and not case.dropout:
            inputs, labels = batch_of(case, 70, self.planned.data[1])
            if "pp" in self.planned.axes:
                self.planned.parallel.forward(**self.planned.local(inputs, labels)[0], **self.planned.kwargs())
            else:
                self.planned.module(**self.planned.local(inputs, labels)[0], **self.planned.kwargs())
        elif habit == "resume elsewhere" and not (
            (case.dropout and case.loop == "manual") or (case.inputs == "mask 4-D" and "cp" in case.resumes_on[0])
        ):
            self.planned.resume(f"{self.folder}/{step}-{at}")
        elif habit == "moving average":
            for side in both:
                current = side.full(lambda p: p)
                side.average = {n: 0.9 * side.average.get(n, v) + 0.1 * v for n, v in current.items()}
            self.compare(f"average {step}", self.planned.average, self.unsharded.average)
        elif habit == "reset optimizer":
            for side in both:
                for optimizer in side.optimizers.values():
                    optimizer.state.clear()
        elif habit == "eval of a part":
            self.both_and_later(lambda side: layer_of(side, 0).eval())
        elif habit == "train call":
            for side in both:
                side.module.train()
        elif habit == "swap weights and back":
            for side in both:
                saved = {n: p.detach().clone() for n, p in side.named().items()}
                with torch.no_grad():
                    for parameter in side.named().values():
                        parameter.zero_()
                    for n, parameter in side.named().items():
                        parameter.copy_(saved[n])

    def both_and_later(self, habit: Any) -> None:
        self.planned.renewed.append(habit)
        habit(self.unsharded)
        habit(self.planned)

    def failed_forward(self, step: int) -> None:
        if self.case.dropout:
            return
        inputs, labels = batch_of(self.case, 80, self.planned.data[1])
        handle = layer_of(self.planned, 1).register_forward_pre_hook(raises)
        for side in (self.planned,):
            side.zero_grad()
            try:
                side.forward_backward(inputs, labels)
                self.note(f"exception {step} was swallowed", float("inf"))
            except _DeliberateError:
                pass
            except ParallelizeError as error:
                if error.slugs != ("stage-failed",):
                    raise
            handle.remove()
            side.zero_grad()
        self.unsharded.zero_grad()


def _aliases(module: nn.Module) -> list[set[str]]:
    names: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [group for group in names.values() if len(group) > 1]


def bound_of(case: Combination) -> float:
    if case.options.get("dtype"):
        return 0.4
    if case.weights == "float32":
        return 1e-3
    return 2e-5 if case.loss == "stock labels" else 1e-8


def run_combination(rank: int, seed: int, folder: str, changes: dict[str, Any] | None = None) -> tuple[str, Any]:
    """("right", worst), ("wrong", differences), ("refused", slugs and message) or ("crash", traceback)."""
    from dataclasses import replace

    case = replace(draw(seed), **(changes or {}))
    try:
        with softmax_in_float64():
            comparison = Comparison(case, folder)
            comparison.run()
    except ParallelizeError as error:
        return "refused", (error.slugs, str(error), traceback.format_exc())
    except ImpossibleError as error:
        return "impossible", str(error)
    except Exception:
        return "crash", traceback.format_exc()
    bound = bound_of(case)
    wrong = {what: error for what, error in comparison.errors.items() if error > bound}
    if wrong:
        return "wrong", dict(list(wrong.items())[:6])
    return "right", max(comparison.errors.values())
