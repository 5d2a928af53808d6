"""What is compared: one model with its weights, one batch, one plan, one mesh, and the modes in which the plan is
applied.

Every process builds the same configuration from the request, so no weights are sent to processes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from parallelize.axes.pipeline.schedules import Schedule, build_schedule
from parallelize.axes.tensor.torch_styles.dicts import is_styles
from parallelize.axes.tensor.torch_styles.lowering import plan_of_styles
from parallelize.base.errors import MeshError, ModelError, Problem, did_you_mean
from parallelize.base.mesh import SAMPLE_AXES, MeshSpec
from parallelize.plan.choose import plan_or_none, shipped_plan_of
from parallelize.plan.model_facts import describe
from parallelize.plan.models.miniature.rates import disable_dropout, without_dropout
from parallelize.plan.models.model_source import ModelSource, copy_of, read_model, source_of
from parallelize.plan.models.nested_tensors import map_tensors
from parallelize.plan.models.tiny_copy import in_dtype
from parallelize.plan.models.transformers_models import is_config
from parallelize.plan.options import Options
from parallelize.plan.pattern import alternatives, matches
from parallelize.plan.schema import Plan
from parallelize.tools.verification.batch import Batch, batch_rows, draw_batch, even_length, sequence_length
from parallelize.tools.verification.compare import ReferenceValues
from parallelize.tools.verification.perturbation import let_inputs_require_gradients, perturb
from parallelize.tools.verification.precision import DTYPES
from parallelize.tools.verification.scaled_source import scaled_source
from parallelize.tools.verification.user_errors import blaming

T = torch.Tensor
_FEW_PARAMETERS = 4_000_000


@dataclass(frozen=True)
class Mode:
    """Options of one application of a plan. None: the plan's default. The mode's name does not include the
    microbatches."""

    sequence_parallel: bool | None = None
    loss_parallel: bool | None = None
    microbatches: int = 1

    def over(self, options: Options) -> Options:
        """The options of a run in this mode."""
        modes = {"sequence_parallel": self.sequence_parallel, "loss_parallel": self.loss_parallel}
        chosen: dict[str, Any] = {name: value for name, value in modes.items() if value is not None}
        return replace(options, **chosen, num_microbatches=self.microbatches)

    def __str__(self) -> str:
        on = [name for name, value in (("sequence", self.sequence_parallel), ("loss", self.loss_parallel)) if value]
        return " + ".join(on) + " parallel" if on else "plain"


@dataclass(frozen=True)
class Request:
    """Everything that a rank needs to build its configurations. For the fields see `verify`."""

    model: Any
    plan: Any = None
    mesh: MeshSpec = field(default_factory=MeshSpec)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    _: KW_ONLY
    seed: int = 0
    full_size: bool = False
    timeout_s: float = 120.0
    trace: bool | None = None
    gain: float = 1.0

    def size(self, axis: str) -> int:
        return self.mesh.ranks(axis)

    @property
    def data_ranks(self) -> int:
        return self.mesh.ranks(*SAMPLE_AXES)

    @property
    def num_microbatches(self) -> int:
        """The largest number of microbatches of any mode: each option is run with one microbatch and with several."""
        if self.options.num_microbatches is not None:
            return self.options.num_microbatches
        return 2 * self.size("pp") if self.size("pp") > 1 else 1 if self.full_size else 2

    @property
    def fewest_microbatches(self) -> int:
        is_fixed = self.options.num_microbatches is not None or self.size("pp") > 1
        return self.num_microbatches if is_fixed else 1

    @property
    def num_stages(self) -> int:
        if self.size("pp") == 1:
            return 1
        return self.schedule().num_stages

    def schedule(self) -> Schedule:
        """The schedule of the pipeline. Raises: what `build_schedule` raises."""
        options = self.options
        return build_schedule(options.schedule, self.size("pp"), self.num_microbatches, options.stages_per_rank)


@dataclass(frozen=True)
class Configuration:
    """One model and one batch, as a request asks for them.

    Attributes:
        inputs, targets: inputs and targets of the full batch, over all data ranks and microbatches.
        plan: None where the request's plan is not a plan file (styles of torch, for example).
        rows, length: sequences in the batch, tokens in a sequence.
        can_split: False if the first dim of the batch is not `rows`. Then every forward gets the full batch.
    """

    request: Request
    model: nn.Module
    inputs: dict[str, Any]
    targets: Any
    plan: Plan | None
    loss: Callable[[Any, Any], T] | None
    count: Callable[[Any], Any] | None
    rows: int
    length: int
    can_split: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.request.options.dtype or "float64"]

    @property
    def is_small(self) -> bool:
        """Whether every rank can store what each module was given and returned, to name the module that differs."""
        elements = sum(parameter.numel() for parameter in self.model.parameters())
        return not self.request.full_size or elements <= _FEW_PARAMETERS

    def modes(self) -> list[Mode]:
        """The requested mode, or every mode that the plan serves."""
        request = self.request
        if request.options.sequence_parallel is not None or request.options.loss_parallel is not None:
            return [Mode(request.options.sequence_parallel, request.options.loss_parallel)]
        if request.size("tp") == 1 or self.plan is None:
            return [Mode()]
        sequence = bool(self.plan.regions)
        loss = any(rule.style.keeps_vocabulary for rule in self.plan.rules)
        modes = [Mode(False, False)]
        modes += [Mode(True, False)] if sequence else []
        if loss and self._has_head():
            modes += [Mode(False, True), *([Mode(True, True)] if sequence else [])]
        return modes

    def _has_head(self) -> bool:
        """Whether the model has the head whose output the plan keeps sharded along the vocabulary."""
        assert self.plan is not None
        names = describe(self.model).module_fqns
        rules = [rule for rule in self.plan.rules if rule.style.keeps_vocabulary]
        patterns = [pattern for rule in rules for pattern in alternatives(rule.pattern)]
        return any(matches(pattern, name) for pattern in patterns for name in names)

    def part(self, value: Any, index: int, count: int) -> Any:
        """Part `index` of `count` equal parts of a tensor whose first dim is the batch. Other values are not split."""
        if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] != self.rows:
            return value
        size = self.rows // count
        return value.narrow(0, index * size, size)

    def is_comparable(self, output: T, mode: Mode) -> bool:
        """Whether outputs of the mode's forwards can be concatenated to this output of the full batch."""
        if self.request.data_ranks * mode.microbatches == 1:
            return True
        return bool(output.ndim) and output.shape[0] == self.rows

    def batch_part(self, index: int, count: int) -> tuple[dict[str, Any], Any]:
        """(inputs, targets) of part `index` of `count` equal parts of the batch."""
        inputs = {name: self.part(value, index, count) for name, value in self.inputs.items()}
        return inputs, self.part(self.targets, index, count)


def build_configuration(request: Request, device: str = "cpu") -> Configuration:
    """The first of `build_configurations`."""
    return build_configurations(request, device)[0][0]


def build_configurations(request: Request, device: str = "cpu") -> list[list[Configuration]]:
    """One list of configurations for each model. The configurations of a list differ in their batch.

    There are two models, with a vocabulary that tp does not divide and one that it divides, where the config has a
    vocabulary. The sequence lengths of the batches vary in the same way.

    Raises: ParallelizeError for a model, plan or batch that cannot be read, built or run.
    """
    request = checked(request)
    variants = [_configurations_of(request, device, even=False)]
    config = getattr(variants[0][0].model, "config", None)
    if (
        request.size("tp") > 1
        and not request.full_size
        and (hasattr(config, "vocab_size") or hasattr(getattr(config, "text_config", None), "vocab_size"))
        and not callable(request.model)
    ):
        variants.append(_configurations_of(request, device, even=True))
    return variants


def _configurations_of(request: Request, device: str, even: bool) -> list[Configuration]:
    """One model with its batches. All batches but the first have a padding mask, if the model takes one."""
    source, model = _model(request, even)
    plan = (
        plan_of_styles(model, request.plan)
        if is_styles(request.plan)
        else plan_or_none(model, request.plan, request.mesh.ranks("tp"))
    )
    if plan is not None and plan.unlowered_styles:  # PyTorch's styles, applied as they are
        plan = None
    model = in_dtype(model, DTYPES[request.options.dtype or "float64"])
    perturb(model, request.seed, request.gain)
    disable_dropout(model)
    let_inputs_require_gradients(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(Problem("nothing-trains", "no parameter of the model requires a gradient"))
    lengths = [sequence_length(request.size("tp"))]
    if max(request.size("tp"), request.size("cp")) > 1 and not request.full_size:
        lengths.append(even_length(request.size("tp")))
    if plan is not None and plan.on_unclaimed == "leave":  # PyTorch's styles take shards to be equally long
        lengths = lengths[1:] or lengths
    rows = rows_of(request)
    batches = [
        draw_batch(source, model, request.seed, rows=rows, length=length, padded=index > 0)
        for index, length in enumerate(lengths)
    ]
    model = model.to(device)
    return [_configuration(request, device, model, plan, source, batch) for batch in batches]


def _configuration(
    request: Request, device: str, model: nn.Module, plan: Plan | None, source: ModelSource, batch: Batch
) -> Configuration:
    dtype = DTYPES[request.options.dtype or "float64"]
    return Configuration(
        request,
        model,
        inputs={name: _on_device(value, device, dtype) for name, value in batch.inputs.items()},
        targets=_on_device(batch.targets, device, dtype),
        plan=plan,
        loss=source.loss,
        count=source.count,
        rows=batch.rows,
        length=batch.length,
        can_split=_can_split(request, batch),
    )


def _can_split(request: Request, batch: Batch) -> bool:
    """Whether the batch can be split. Raises: ModelError `bad-inputs` where it cannot be and has to be."""
    if batch.can_split:
        return True
    if request.data_ranks * request.fewest_microbatches == 1:
        return False
    what = (
        f"{batch.rows} rows were asked for, and the shapes are {batch.shapes()}; {request.mesh} has to split the batch"
    )
    fix = "return tensors whose first dim is the `batch` of `inputs(batch, sequence)`"
    raise ModelError(Problem("bad-inputs", what, fix=fix))


def checked(request: Request) -> Request:
    """The request with the plan's defaults for options that it leaves open, except for the modes: all of them are run.

    Raises: ParallelizeError for options that are wrong for every model, and what choosing the plan raises.
    """
    if request.options.dtype is not None and request.options.dtype not in DTYPES:
        dtype = request.options.dtype
        raise ModelError(Problem("bad-dtype", f"cannot verify in {dtype!r}", fix=did_you_mean(dtype, DTYPES)))
    if not request.mesh.axes:
        raise MeshError(Problem("no-axes", "a mesh needs named axes", fix="write `tp=4` or `pp=2,dp=2,tp=2`"))
    if not isinstance(request.seed, int) or not 0 <= request.seed < 2**62:
        raise ModelError(Problem("bad-seed", f"{request.seed!r} is no seed", fix="an integer of 0 or more"))
    if not isinstance(request.gain, (int, float)) or not 0 < request.gain <= 1:
        raise ModelError(Problem("bad-gain", f"{request.gain!r} is no gain", fix="a number above 0 and at most 1"))
    if not isinstance(request.timeout_s, (int, float)) or not request.timeout_s > 0:
        raise ModelError(Problem("bad-timeout", f"a timeout of {request.timeout_s!r} s", fix="more than 0"))
    options = request.options.complete(_plan_options(request))
    own = ("sequence_parallel", "loss_parallel", "fuse_loss", "dtype")  # the dtype to verify in is not that of training
    request = replace(request, options=replace(options, **{name: getattr(request.options, name) for name in own}))
    request.schedule()
    return request


def _plan_options(request: Request) -> Options | None:
    """The `defaults:` of the plan that the model will get."""
    if request.plan == "auto":  # a derived plan has no defaults
        return None
    if request.plan is not None:
        plan = plan_or_none(None, request.plan)
    else:
        source = source_of_request(request)
        by_type = source.config is not None  # a plan that is translated for other types has no defaults
        plan = shipped_plan_of(source.config) if by_type else plan_or_none(_model(request, even=False)[1], None)
    return plan.options if plan is not None else None


def source_of_request(request: Request) -> ModelSource:
    """The source of the model that a request names. Raises: ModelError of a model that cannot be read."""
    model = request.model
    if isinstance(model, ModelSource):
        return model
    if isinstance(model, nn.Module):
        return source_of(lambda: copy_of(model), name=name_of(model))
    if callable(model):
        return source_of(model, request.overrides, name_of(model))
    return read_model(model, request.overrides)


def _model(request: Request, even: bool) -> tuple[ModelSource, nn.Module]:
    source = source_of_request(request)
    if source.config is None:
        with blaming("factory-failed", f"{name_of(request.model)} failed"):
            return source, source.build("cpu", seed=request.seed)
    with blaming("bad-config", f"no model can be built from the config of {source.text}"):
        if request.full_size:
            without_dropout(source.config)
        else:
            folding = {"ep": request.options.ep or 1, "etp": request.options.etp or 1}
            source = scaled_source(source, request.size("tp"), request.num_stages, even=even, **folding)
        return source, source.build("cpu", seed=request.seed)


def name_of(model: Any) -> str:
    """The name of a model in a report."""
    if isinstance(model, ModelSource):
        return model.text
    if isinstance(model, nn.Module):
        return type(model).__name__
    if is_config(model):
        return str(model.model_type)
    function = getattr(model, "func", model)  # of a functools.partial
    return getattr(function, "__name__", None) or str(model)


def rows_of(request: Request) -> int:
    """Rows of the full batch: three for each data rank and microbatch, or two where there are many."""
    return batch_rows(request.data_ranks * request.num_microbatches, sequence_length(request.size("tp")))


def _on_device(value: Any, device: str, dtype: torch.dtype) -> Any:
    """The value with its tensors on the device, those of real numbers in the dtype."""
    return map_tensors(lambda x: x.to(device, dtype) if x.is_floating_point() else x.to(device), value)


def without_weights(request: Request) -> Request:
    """The request in a form that can be sent to another process. Raises: ModelError `not-picklable`."""
    if isinstance(request.model, ModelSource):
        request = replace(request, model=request.model.text)
    try:
        pickle.dumps(request)
    except Exception as error:  # pickle raises PicklingError, AttributeError, TypeError, and what a __reduce__ raises
        what = f"{name_of(request.model)} cannot be sent to another process: {str(error).splitlines()[0]}"
        fix = "name it: `package.module:function`, or a function at the top of a module"
        raise ModelError(Problem("not-picklable", what, fix=fix)) from None
    return request


# -- mode choice -----------------------------------------------------------------------------------------------------
# Which mode is run on which model, with how many microbatches: each choice is run at least once, without all
# combinations.


@dataclass(frozen=True)
class Comparison:
    """One application of the plan, the configurations on which it runs a step, and the unsharded model's values for
    each."""

    mode: Mode
    configurations: list[Configuration]
    references: list[ReferenceValues]


def choose_comparisons(
    variants: list[tuple[list[Configuration], list[ReferenceValues]]], can_split: bool
) -> list[Comparison]:
    """Distribute models and numbers of microbatches over the modes. A single mode gets every model and both numbers.

    Args:
        variants: the configurations and reference values of each model; the models differ in their vocabulary.
        can_split: whether a step may have several microbatches although none were requested.
    """
    configuration = variants[0][0][0]
    modes, request = configuration.modes(), configuration.request
    few = request.fewest_microbatches
    many = request.num_microbatches if can_split and configuration.can_split else few
    if len(modes) == 1 and (len(variants) > 1 or few != many):
        modes = modes * 2
    comparisons = []
    for index, mode in enumerate(modes):
        configurations, references = variants[index % len(variants)]
        microbatches = many if (index + 1) // 2 % 2 else few
        comparisons.append(Comparison(replace(mode, microbatches=microbatches), configurations, references))
    return comparisons
