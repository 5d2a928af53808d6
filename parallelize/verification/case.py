"""What is compared: one model with its weights, one batch, one plan, one mesh, and the modes in which it is applied.

Built alike wherever it is built, so that real processes need no weights sent to them.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from parallelize.errors import MeshError, ModelError, Problem, did_you_mean
from parallelize.mesh import SAMPLE_AXES, MeshSpec
from parallelize.model_source import ModelSource, read_model, source_of
from parallelize.pipeline.schedules import build_schedule
from parallelize.plan.choose import plan_or_none
from parallelize.plan.model import describe
from parallelize.plan.pattern import alternatives, matches
from parallelize.plan.schema import Plan
from parallelize.verification.batch import Batch, draw, longest_rows
from parallelize.verification.precision import DTYPES
from parallelize.verification.scale import (
    drop_nothing,
    even_length,
    perturb,
    scaled,
    sequence_length,
    without_dropout,
)
from parallelize.verification.users import blaming

T = torch.Tensor


@dataclass(frozen=True)
class Mode:
    """Choices of one application of a plan; None: as the plan says. Its name says nothing of the microbatches."""

    sequence_parallel: bool | None = None
    loss_parallel: bool | None = None
    microbatches: int = 1

    def __str__(self) -> str:
        on = [name for name, value in (("sequence", self.sequence_parallel), ("loss", self.loss_parallel)) if value]
        return " + ".join(on) + " parallel" if on else "plain"


@dataclass(frozen=True)
class Request:
    """All that a rank needs to build the case by itself. See `verify`."""

    model: Any
    plan: Any = None
    mesh: MeshSpec = field(default_factory=MeshSpec)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    zero: int = 0
    schedule: str = "1f1b"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    sequence_parallel: bool | None = None
    loss_parallel: bool | None = None
    overlap: str | None = None
    recompute: str = "off"
    dtype: str = "float64"
    seed: int = 0
    full_size: bool = False
    timeout_s: float = 120.0
    ulysses: int = 1
    fuse_loss: bool | None = None

    def size(self, axis: str) -> int:
        return self.mesh.size(axis) if axis in self.mesh.names else 1

    @property
    def data_ranks(self) -> int:
        found = 1
        for axis in SAMPLE_AXES:
            found *= self.size(axis)
        return found

    @property
    def num_microbatches(self) -> int:
        """Of the modes that have most of them: every way of applying a plan is tried with one, and with several."""
        if self.microbatches is not None:
            return self.microbatches
        return 2 * self.size("pp") if self.size("pp") > 1 else 1 if self.full_size else 2

    @property
    def fewest_microbatches(self) -> int:
        return self.num_microbatches if self.microbatches is not None or self.size("pp") > 1 else 1

    @property
    def num_stages(self) -> int:
        if self.size("pp") == 1:
            return 1
        built = build_schedule(self.schedule, self.size("pp"), self.num_microbatches, self.stages_per_rank)
        return built.num_stages


@dataclass(frozen=True)
class Case:
    """Attributes: inputs, targets: of the whole batch, over all data ranks and microbatches. plan: where there is a known one."""

    request: Request
    model: nn.Module
    inputs: dict[str, Any]
    targets: Any
    plan: Plan | None
    loss: Callable[[Any, Any], T] | None
    count: Callable[[Any], Any] | None
    rows: int
    length: int
    can_cut: bool = True  # False: the batch has another first dim than its rows, and is fed whole

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.request.dtype]

    def modes(self) -> list[Mode]:
        """What was asked for, or everything that the plan has."""
        asked = self.request
        if asked.sequence_parallel is not None or asked.loss_parallel is not None:
            return [Mode(asked.sequence_parallel, asked.loss_parallel)]
        if asked.size("tp") == 1 or self.plan is None:
            return [Mode()]
        sequence = self.plan.region is not None
        loss = any(rule.style.options.get("output") == "vocabulary" for rule in self.plan.rules)
        found = [Mode(False, False)]
        found += [Mode(True, False)] if sequence else []
        if loss and self._has_vocabulary():
            found += [Mode(False, True), *([Mode(True, True)] if sequence else [])]
        return found

    def _has_vocabulary(self) -> bool:
        """Whether the model has the head that the plan would keep sharded."""
        assert self.plan is not None
        names = describe(self.model).aliases
        patterns = [rule.pattern for rule in self.plan.rules if rule.style.options.get("output") == "vocabulary"]
        wanted = [one for pattern in patterns for one in alternatives(pattern)]
        return any(matches(pattern, name) for pattern in wanted for name in names)

    def part(self, value: Any, place: int, parts: int) -> Any:
        """One of `parts` equal runs of rows of what has the batch as its first dim; other things whole."""
        if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] != self.rows:
            return value
        size = self.rows // parts
        return value.narrow(0, place * size, size)

    def comparable(self, output: T, mode: Mode) -> bool:
        """Whether the outputs of a mode's forwards can be put together to this one of the whole batch."""
        if self.request.data_ranks * mode.microbatches == 1:
            return True
        return bool(output.ndim) and output.shape[0] == self.rows

    def feed(self, place: int, parts: int) -> tuple[dict[str, Any], Any]:
        """(inputs, targets) of such a run of rows."""
        return {k: self.part(v, place, parts) for k, v in self.inputs.items()}, self.part(self.targets, place, parts)


def build_case(request: Request, device: str = "cpu") -> Case:
    """The first of `build_cases`."""
    return build_cases(request, device)[0][0]


def build_cases(request: Request, device: str = "cpu") -> list[list[Case]]:
    """For each vocabulary (one that tp does not divide, one that it does) the batches, of such lengths too.

    Raises: ParallelizeError for what cannot be read, built or fed.
    """
    check(request)
    found = [_cases_of(request, device, even=False)]
    config = getattr(found[0][0].model, "config", None)
    if (
        request.size("tp") > 1
        and not request.full_size
        and hasattr(config, "vocab_size")
        and not callable(request.model)
    ):
        found.append(_cases_of(request, device, even=True))
    return found


def _cases_of(request: Request, device: str, even: bool) -> list[Case]:
    """One model with its batches; all but the first give a padding mask to a model that takes one."""
    source, model = _model(request, even)
    plan = plan_or_none(model, request.plan)
    model = model.to(DTYPES[request.dtype])
    perturb(model, request.seed)
    drop_nothing(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(Problem("nothing-trains", "no parameter of the model requires a gradient"))
    lengths = [sequence_length(request.size("tp"))]
    if max(request.size("tp"), request.size("cp")) > 1 and not request.full_size:
        lengths.append(even_length(request.size("tp")))
    batches = [
        draw(source, model, request.seed, rows_of(request), each, padded=at > 0) for at, each in enumerate(lengths)
    ]
    model = model.to(device)
    return [_case(request, device, model, plan, source, batch) for batch in batches]


def _case(
    request: Request, device: str, model: nn.Module, plan: Plan | None, source: ModelSource, batch: Batch
) -> Case:
    dtype = DTYPES[request.dtype]
    inputs = {key: _placed(value, device, dtype) for key, value in batch.inputs.items()}
    can_cut = _can_cut(request, batch)
    targets = _placed(batch.targets, device, dtype)
    return Case(request, model, inputs, targets, plan, source.loss, source.count, batch.rows, batch.length, can_cut)


def _can_cut(request: Request, batch: Batch) -> bool:
    """Whether the rows can be dealt out. Raises: ModelError `bad-inputs` where they must be and cannot."""
    if batch.can_cut:
        return True
    if request.data_ranks * request.fewest_microbatches == 1:
        return False
    what = f"{batch.rows} rows were asked for, and came as {batch.shapes()}; {request.mesh} has to cut them"
    fix = "return tensors whose first dim is the batch that `inputs(batch, sequence)` is given"
    raise ModelError(Problem("bad-inputs", what, fix=fix))


def check(request: Request) -> None:
    """Raises: ParallelizeError for what is wrong whatever the model is."""
    if request.dtype not in DTYPES:
        raise ModelError(
            Problem("bad-dtype", f"cannot verify in {request.dtype!r}", fix=did_you_mean(str(request.dtype), DTYPES))
        )
    if not request.mesh.axes:
        raise MeshError(Problem("no-axes", "a mesh needs named axes", fix="write `tp=4` or `pp=2,dp=2,tp=2`"))
    count = request.microbatches
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ModelError(Problem("bad-microbatches", f"a step of {count!r} microbatches", fix="1 or more"))
    if not isinstance(request.seed, int) or not 0 <= request.seed < 2**62:
        raise ModelError(Problem("bad-seed", f"{request.seed!r} is no seed", fix="a whole number from 0 on"))
    if not isinstance(request.timeout_s, (int, float)) or not request.timeout_s > 0:
        raise ModelError(Problem("bad-timeout", f"a timeout of {request.timeout_s!r} s", fix="more than 0"))
    build_schedule(request.schedule, max(request.size("pp"), 1), request.num_microbatches, request.stages_per_rank)


def _model(request: Request, even: bool) -> tuple[ModelSource, nn.Module]:
    given = request.model
    if isinstance(given, ModelSource):
        source = given
    elif isinstance(given, nn.Module):
        source = source_of(lambda: copy.deepcopy(given), name=name_of(given))
    elif callable(given):
        source = source_of(given, request.overrides, name_of(given))
    else:
        source = read_model(given, request.overrides)
    if source.config is not None:
        with blaming("bad-config", f"the config of {source.text} makes no model"):
            config = source.config
            if not request.full_size:
                config = scaled(config, request.size("tp"), request.num_stages, even=even)
            without_dropout(config)
            source = source.with_config(config)
            return source, source.build("cpu", seed=request.seed)
    with blaming("factory-failed", f"{name_of(given)} failed"):
        return source, source.build("cpu", seed=request.seed)


def name_of(model: Any) -> str:
    """How a model is called in a report."""
    if isinstance(model, ModelSource):
        return model.text
    if isinstance(model, nn.Module):
        return type(model).__name__
    inner = getattr(model, "func", model)  # of a functools.partial
    return getattr(inner, "__name__", None) or str(model)


def rows_of(request: Request) -> int:
    """Each data rank and microbatch gets three rows, or two where there are many."""
    return longest_rows(request.data_ranks * request.num_microbatches, sequence_length(request.size("tp")))


def _placed(value: Any, device: str, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def without_weights(request: Request) -> Request:
    """The request as it can be sent to another process. Raises: ModelError `not-picklable`."""
    if isinstance(request.model, ModelSource):
        request = replace(request, model=request.model.text)
    try:
        pickle.dumps(request)
    except Exception as error:  # whatever pickling makes of a closure
        what = f"{name_of(request.model)} cannot be sent to another process: {str(error).splitlines()[0]}"
        fix = "name it: `package.module:function`, or a function at the top of a module"
        raise ModelError(Problem("not-picklable", what, fix=fix)) from None
    return request
