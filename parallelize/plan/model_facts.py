"""A model as names, shapes and ties, which is all that `resolve` needs. The model may be on the meta device.

Torch-free: reads modules by their ordinary methods, so nothing of torch is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from parallelize.plan.block_formats import is_conv1d
from parallelize.plan.inner_experts import inner_experts
from parallelize.plan.styles.style import ModuleFacts

_INTEGER_BYTES = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter.

    Attributes:
        names: all its fqns; more than one where it is tied or its module is reused.
        shape: full.
        dtype: without the prefix `torch.`.
        requires_grad: as the model has it.
        packs: of codes or scales of a quantized linear: how many elements of the weight, along the last dim, one of its
            elements stands for. block: elements of the weight between which there is no boundary of ranks.
        counts: of codes `packs`, of the scales beside them 0: the elements of weights that one of its elements counts
            for.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    packs: int = 1
    block: int = 1
    counts: int = 1

    @property
    def fqn(self) -> str:
        return self.names[0]

    @property
    def code_bytes(self) -> int:
        """Bytes of an element of integers, such as codes and scales, which no cast of a model changes; 0: it is
        floating-point."""
        return _INTEGER_BYTES.get(self.dtype, 0)

    @property
    def num_weights(self) -> int:
        """Elements of the weights that it stands for."""
        return prod(self.shape) * self.counts


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model.

    Attributes:
        root: the model.
        modules: first fqn of each module to its facts.
        objects: first fqn of each module to the module.
        module_fqns: every fqn of each module, also of a reused one, to its first fqn.
        parameters: by first fqn.
        parameter_fqns: every fqn of each parameter to its first fqn.
    """

    root: Any
    modules: dict[str, ModuleFacts]
    objects: dict[str, Any]
    module_fqns: dict[str, str]
    parameters: dict[str, ParameterFacts]
    parameter_fqns: dict[str, str]

    @property
    def config(self) -> Any:
        """The model's config, where it has one; of a multimodal model, that of its text part."""
        config = getattr(self.root, "config", None)
        return getattr(config, "text_config", None) or config

    def restricted(self, present: Callable[[str], bool], objects: dict[str, Any]) -> ModelFacts:
        """The part of the model for whose names `present` is true, such as a pipeline stage; `objects` replaces the
        modules."""
        parameters = {}
        for fact in self.parameters.values():
            names = tuple(name for name in fact.names if present(name))
            if names:
                parameters[names[0]] = replace(fact, names=names)
        return ModelFacts(
            self.root,
            {name: facts for name, facts in self.modules.items() if present(name)},
            {name: module for name, module in objects.items() if present(name)},
            {name: first for name, first in self.module_fqns.items() if present(name)},
            parameters,
            {name: fact.fqn for fact in parameters.values() for name in fact.names},
        )

    def structure(self) -> dict[str, str]:
        """What must be equal on every rank, as text by parameter name."""
        return {
            fact.fqn: f"{list(fact.shape)} {fact.dtype} grad={fact.requires_grad} {'='.join(fact.names[1:])}"
            for fact in self.parameters.values()
        }


def describe(model: Any) -> ModelFacts:
    """Read names, shapes and ties of a module tree."""
    first_of: dict[int, str] = {}
    module_fqns, objects, modules = {}, {}, {}
    for name, module in model.named_modules(remove_duplicate=False):
        module_fqns[name] = first_of.setdefault(id(module), name)
        if module_fqns[name] == name:
            objects[name] = module
            modules[name] = _module_facts(name, module)
    quantized = {f"{name}.{key}".lstrip("."): facts for name, facts in modules.items() for key in facts.packs}
    return ModelFacts(model, modules, objects, module_fqns, *_parameters(model, quantized))


def named_once(model: Any) -> list[tuple[tuple[str, ...], Any]]:
    """(all its names, parameter) of every parameter, in the order of the model."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    return [(tuple(fqns), parameters[key]) for key, fqns in names.items()]


def _parameters(model: Any, quantized: dict[str, ModuleFacts]) -> tuple[dict[str, ParameterFacts], dict[str, str]]:
    parameters: dict[str, ParameterFacts] = {}
    parameter_fqns: dict[str, str] = {}
    for fqns, tensor in named_once(model):
        dtype = str(tensor.dtype).removeprefix("torch.")
        fact = ParameterFacts(fqns, tuple(tensor.shape), dtype, tensor.requires_grad)
        parameters[fqns[0]] = _facts_of_codes(fact, quantized[fqns[0]]) if fqns[0] in quantized else fact
        parameter_fqns |= dict.fromkeys(fqns, fqns[0])
    return parameters, parameter_fqns


def _facts_of_codes(fact: ParameterFacts, linear: ModuleFacts) -> ParameterFacts:
    """The facts of a parameter of a quantized linear."""
    key = fact.fqn.rpartition(".")[2]
    packs = linear.packs[key]
    return replace(fact, packs=packs, block=linear.block, counts=packs if key.endswith("_codes") else 0)


def _module_facts(name: str, module: Any) -> ModuleFacts:
    shapes = {key: tuple(value.shape) for key, value in module._parameters.items() if value is not None}
    flags, class_name = _expert_flags(module, shapes), type(module).__name__
    packs = dict(getattr(module, "packs", None) or {})
    if flags:
        count, block = next(iter(shapes.values()))[0], module.form.block if packs else 1
        stacked = dict(getattr(module, "stacked", None) or {}) if packs else {}
        return ModuleFacts(name, "experts", class_name, shapes, flags, count, packs=packs, block=block, stacked=stacked)
    if packs:
        return ModuleFacts(name, "linear", class_name, shapes, packs=packs, block=module.form.block)
    if (inner := inner_experts(module)) is not None:
        return ModuleFacts(name, inner.kind, class_name, shapes, {}, inner.num_experts, inner.shapes)
    return ModuleFacts(name, _kind(module, shapes), class_name, shapes, num_experts=_stacked_count(shapes))


def _stacked_count(shapes: dict[str, tuple[int, ...]]) -> int:
    """The number of matrices in each parameter, if all are stacks of as many; else 0."""
    counts = {shape[0] if len(shape) == 3 else 0 for shape in shapes.values()}
    return counts.pop() if len(counts) == 1 else 0


EXPERT_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
"""Attributes of an instance by which `transformers` says how experts are stored. Their classes differ in nothing
else."""


def _expert_flags(module: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, bool]:
    """The flags of a module with stacked experts; empty for any other."""
    values = vars(module)
    if "is_transposed" not in values or not any(len(shape) == 3 for shape in shapes.values()):
        return {}
    return {name: bool(values.get(name, name == "is_concatenated")) for name in EXPERT_FLAGS}


def is_sequential(module: Any) -> bool:
    """Whether a module calls its children one after another, as `nn.Sequential` does and its subclasses may."""
    stock = next((cls for cls in type(module).__mro__ if f"{cls.__module__}.{cls.__name__}" == _SEQUENTIAL), None)
    return stock is not None and getattr(type(module), "forward", None) is getattr(stock, "forward", None)


_SEQUENTIAL = "torch.nn.modules.container.Sequential"


def _kind(module: Any, shapes: dict[str, tuple[int, ...]]) -> str:
    """By attributes and shapes, not by class, so that subclasses and equivalent classes count."""
    weight = shapes.get("weight", ())
    extra = set(shapes) - {"weight", "bias"}
    if len(weight) == 2 and not extra:
        if hasattr(module, "num_embeddings"):
            return "embedding"
        if is_conv1d(module):
            return "conv1d"
        if getattr(module, "out_features", None) == weight[0]:
            return "linear"
    channels = getattr(module, "groups", None)
    if weight and not extra and channels == getattr(module, "in_channels", None) == weight[0]:
        return "depthwise"
    if len(weight) > 2 and not extra and type(channels) is int and channels > 1 and not module.transposed:
        return "grouped"
    if (
        len(weight) == 1
        and not extra
        and hasattr(module, "num_groups" if hasattr(module, "num_channels") else "running_mean")
    ):
        return "channel_norm"
    if len(weight) == 1 and not extra:
        return "norm"
    if len(weight) > 2 and not extra and channels == 1 and _is_convolution(module, weight):
        return "convolution"
    return "other"


def _is_convolution(module: Any, weight: tuple[int, ...]) -> bool:
    """Whether it sums over all of its input channels, as a linear does: [out, in, ...]."""
    return (
        weight[:2] == (getattr(module, "out_channels", 0), getattr(module, "in_channels", 0)) and not module.transposed
    )
