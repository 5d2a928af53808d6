"""The mapping between the tensors of a checkpoint in Hugging Face's layout and those of a model, in both directions.

It covers names, prefixes, ties and conversions, and works on names and shapes only: no file is opened. The results say
which boxes the loader reads and the writer writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from parallelize.base.boxes import Part, full_part
from parallelize.base.errors import CheckpointError, Problem, near, short_list
from parallelize.checkpoint.format.resized_vocabulary import ResizedVocabulary, resized_vocabulary
from parallelize.checkpoint.hub.hf_conversions import (
    ConvertedCheckpoint,
    ConvertedTensor,
    Shape,
    convert,
    is_of_transformers,
    revert,
)
from parallelize.checkpoint.hub.traced import named
from parallelize.state.local_config import stock_classes

_MAX_CANDIDATES = 200
"""Among more names than this, similar names are searched only among those with the same numbers."""


@dataclass(frozen=True)
class ComputedTensor:
    """A tensor of the model that is not made of boxes. `compute` returns it, from the full tensors `sources` by
    name."""

    sources: tuple[str, ...]
    compute: Callable[[dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the unsharded model. `name`: the first of its `names`."""

    name: str
    names: tuple[str, ...]
    shape: Shape
    is_buffer: bool


def source_names(source: tuple[Part, ...] | ComputedTensor) -> tuple[str, ...]:
    """The names of the tensors of the checkpoint that a tensor of the model is made of, each once."""
    names = source.sources if isinstance(source, ComputedTensor) else (part.source for part in source)
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class TensorSources:
    """The sources of the tensors of a model in a checkpoint.

    Attributes:
        by_name: canonical name -> parts that cover the tensor, or how it is computed. Optional tensors that the
            checkpoint does not contain are omitted, and so are non-persistent buffers.
        twins: (used, ignored): two tensors of the checkpoint for one tied parameter of the model. They have the same
            shape, and the caller must check that they are equal. If they differ, transformers would untie the model.
        resized: how the vocabulary of the checkpoint differs, where it may. Parts then cover fewer tokens, or more.
    """

    by_name: dict[str, tuple[Part, ...] | ComputedTensor]
    twins: tuple[tuple[str, str], ...] = ()
    resized: ResizedVocabulary | None = None


def find_sources(
    module: nn.Module,
    tensors: Sequence[ModelTensor],
    checkpoint: Mapping[str, tuple[str, Shape]],
    *,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    resize_vocabulary: bool = False,
) -> TensorSources:
    """Find the boxes of tensors of a checkpoint that make up each tensor of a model.

    Args:
        module: the model, or one pipeline stage of it. Its class, config and module tree are used, not its tensors.
        tensors: all tensors of the unsharded model.
        checkpoint: name -> (dtype, shape) of its tensors.
        allow_missing: tensors that the checkpoint does not contain are omitted from the result.
        allow_unexpected: ignore tensors that the model does not have.
        resize_vocabulary: tensors may differ in the number of tokens.

    Raises: CheckpointError with all problems: `missing-tensor` (except those that the class allows to be missing),
        `unexpected-tensor` (except those that the class ignores, and buffers that are not persistent), `wrong-shape`.
    """
    with stock_classes(module):
        return _find_sources(module, tensors, checkpoint, allow_missing, allow_unexpected, resize_vocabulary)


def _find_sources(
    module: nn.Module,
    tensors: Sequence[ModelTensor],
    checkpoint: Mapping[str, tuple[str, Shape]],
    allow_missing: bool,
    allow_unexpected: bool,
    resize_vocabulary: bool,
) -> TensorSources:
    derived = _derived_buffers(module)
    stored = [tensor for tensor in tensors if not (tensor.is_buffer and derived.issuperset(tensor.names))]
    shapes = {name: tensor.shape for tensor in stored for name in tensor.names}
    converted = convert(module, shapes, {name: tuple(shape) for name, (_, shape) in checkpoint.items()})
    ties = _declared_ties(module)
    names_of = {tensor.name: _choose(tensor, converted.tensors, ties) for tensor in stored}
    ignored = _ignored(module, derived)
    unused = {name: targets for name, targets in converted.unused.items() if not any(map(ignored, (name, *targets)))}
    problems = [problem for problem, _ in converted.failed]
    if not allow_missing:
        problems += _missing_problems(_missing_tensors(module, stored, names_of, converted), unused)
    if not allow_unexpected:
        problems += _unexpected_problems(unused, shapes)
    resized = _resized(module, shapes, converted.tensors)
    problems += [
        _wrong_shape(tensor, name, converted.tensors[name], resized)
        for tensor in stored
        for name in names_of[tensor.name]
        if converted.tensors[name].shape != tensor.shape
        and not (resize_vocabulary and _explains(resized, tensor, converted.tensors[name]))
    ]
    if problems:
        raise CheckpointError(*problems)
    by_name = {
        tensor.name: _source(converted.tensors[names_of[tensor.name][0]]) for tensor in stored if names_of[tensor.name]
    }
    twins = tuple(_twins(stored, names_of, converted.tensors))
    return TensorSources(by_name, twins, resized if resize_vocabulary else None)


def _resized(
    module: nn.Module, shapes: Mapping[str, Shape], converted: Mapping[str, ConvertedTensor]
) -> ResizedVocabulary | None:
    def saved_shape(name: str) -> Shape | None:
        return converted[name].shape if name in converted else None

    return resized_vocabulary(module, saved_shape, shapes.get)


def _explains(resized: ResizedVocabulary | None, tensor: ModelTensor, converted: ConvertedTensor) -> bool:
    """Whether a tensor differs in the number of tokens alone, and is read part by part."""
    return resized is not None and converted.parts is not None and resized.explains(converted.shape, tensor.shape)


def parts_to_save(module: nn.Module, tensors: Sequence[ModelTensor]) -> dict[str, tuple[Shape, tuple[Part, ...]]]:
    """The tensors that `save_pretrained` would write: name -> (shape, parts that cover it).

    The target of a part is the written tensor; its source is a tensor of the model, by canonical name. Conversions are
    reverted, and tied tensors are written once, under the same name as in transformers. For a module that is not of
    transformers, each tensor is written under its first name.

    Raises: CheckpointError `unwritable-conversion`.
    """
    derived, converts = _derived_buffers(module), is_of_transformers(module)
    unsaved = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    state = {}
    parts: dict[str, tuple[Shape, tuple[Part, ...]]] = {}
    for tensor in tensors:
        names = [name for name in tensor.names if name not in unsaved and not (tensor.is_buffer and name in derived)]
        if not names:
            continue
        name = _saved_name(module, names)
        if converts:
            state[name] = named(tensor.name, tensor.shape)
        else:
            parts[name] = (tuple(tensor.shape), (full_part(tensor.name, tensor.shape),))
    if not converts:
        return parts
    with stock_classes(module):
        return {name: (tuple(value.shape), value.parts or ()) for name, value in revert(module, state).items()}


def _derived_buffers(module: nn.Module) -> set[str]:
    """Names of buffers that are not persistent: the model computes them, and checkpoints do not store them."""
    modules = module.named_modules(remove_duplicate=False)
    return {f"{name}.{key}".lstrip(".") for name, inner in modules for key in inner._non_persistent_buffers_set}


def _declared_ties(module: nn.Module) -> dict[str, str]:
    """Tied name -> the name whose tensor it shares, as transformers derives it from class and config."""
    ties = getattr(module, "all_tied_weights_keys", None) if is_of_transformers(module) else None
    return dict(ties or {})


def _choose(tensor: ModelTensor, converted: Mapping[str, ConvertedTensor], ties: Mapping[str, str]) -> list[str]:
    """The names under which a checkpoint has a tensor. Names to which others are tied precede names that are tied."""
    own = sorted((name for name in tensor.names if name in converted), key=lambda name: name in ties)
    if own:
        return own
    roots = {ties.get(name, name) for name in tensor.names}
    others = [*roots, *(name for name, root in ties.items() if root in roots)]
    return [name for name in others if name in converted][:1]


def _saved_name(module: nn.Module, names: Sequence[str]) -> str:
    """The name under which `remove_tied_weights_from_state_dict` of transformers keeps a tensor."""
    if len(names) == 1 or not is_of_transformers(module):
        return names[0]
    patterns = [
        f"{prefix}.{pattern}" if prefix else pattern
        for prefix, inner in module.named_modules()
        for pattern in getattr(inner, "_tied_weights_keys", None) or ()
    ]
    untied = [name for name in names if not _matches(name, patterns)]
    return untied[0] if untied else sorted(names)[-1]


def _source(converted: ConvertedTensor) -> tuple[Part, ...] | ComputedTensor:
    return ComputedTensor(converted.sources, converted.compute) if converted.parts is None else converted.parts


def _twins(
    stored: Iterable[ModelTensor], names_of: Mapping[str, list[str]], converted: Mapping[str, ConvertedTensor]
) -> Iterable[tuple[str, str]]:
    for tensor in stored:
        for other in names_of[tensor.name][1:]:
            yield from zip(converted[names_of[tensor.name][0]].sources, converted[other].sources, strict=False)


def _missing_tensors(
    module: nn.Module, stored: Iterable[ModelTensor], names_of: Mapping[str, list[str]], converted: ConvertedCheckpoint
) -> list[ModelTensor]:
    """The required tensors that the checkpoint does not contain. Failed conversions have their own problem."""
    failed = {name for _, names in converted.failed for name in names}
    patterns = _patterns(module, "_keys_to_ignore_on_load_missing")
    return [
        tensor
        for tensor in stored
        if not names_of[tensor.name]
        and not failed.intersection(tensor.names)
        and not all(_matches(name, patterns) for name in tensor.names)
    ]


def _patterns(module: nn.Module, attribute: str) -> list[str]:
    return sorted(getattr(module, attribute, None) or ()) if is_of_transformers(module) else []


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _ignored(module: nn.Module, derived: set[str]) -> Callable[[str], bool]:
    """A test for unexpected names that are ignored, as in transformers: by patterns of the class, or not persistent
    buffers."""
    patterns = _patterns(module, "_keys_to_ignore_on_load_unexpected")
    # buffers that older versions stored, as in `_adjust_missing_and_unexpected_keys`
    if is_of_transformers(module) and any(buffer.endswith("rotary_emb.inv_freq") for buffer in derived):
        patterns.append(r"rotary_emb\.inv_freq")
    if is_of_transformers(module) and any(buffer.endswith("position_ids") for buffer in derived):
        patterns.append(r"(^|\.)position_ids$")
    prefix = f"{getattr(module, 'base_model_prefix', '')}."

    def ignored(name: str) -> bool:
        return _matches(name, patterns) or not derived.isdisjoint((name, prefix + name, name.removeprefix(prefix)))

    return ignored


def _numbers(name: str) -> list[str]:
    return re.findall(r"\d+", name)


def _similar(name: str, known: Sequence[str]) -> list[str]:
    """Names in `known` that are similar to `name`."""
    if len(known) > _MAX_CANDIDATES:
        known = [other for other in known if _numbers(other) == _numbers(name)][:_MAX_CANDIDATES]
    return near(name, known)


def _group_by_pattern(names: Iterable[str]) -> list[list[str]]:
    """Groups of names that differ only in numbers, so that all layers make one problem."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return list(groups.values())


def _rows(names: Sequence[str], known: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The other names of a group, and names that are similar to the first."""
    rows = (("also", short_list(names[1:], 4)),) if len(names) > 1 else ()
    similar = _similar(names[0], known)
    return (*rows, ("near", ", ".join(similar))) if similar else rows


def _missing_problems(missing: Sequence[ModelTensor], unused: Mapping[str, object]) -> list[Problem]:
    by_name = {tensor.name: tensor for tensor in missing}
    problems = []
    for names in _group_by_pattern(by_name):
        tensor = by_name[names[0]]
        shape = ("shape", str(list(tensor.shape)))
        tied = (("or as", ", ".join(tensor.names[1:])),) if len(tensor.names) > 1 else ()
        what = "the checkpoint does not contain it" + (f", nor {len(names) - 1} like it" if len(names) > 1 else "")
        rows = (shape, *tied, *_rows(names, list(unused)))
        fix = "check that the checkpoint is of this model, or allow missing tensors"
        problems.append(Problem("missing-tensor", what, names[0], rows, fix))
    return problems


def _unexpected_problems(unused: Mapping[str, tuple[str, ...]], shapes: Mapping[str, Shape]) -> list[Problem]:
    problems = []
    for names in _group_by_pattern(unused):
        taken = [target for target in unused[names[0]] if target in shapes]
        what = f"the checkpoint has {taken[0]} twice" if taken else "the model has no tensor for it"
        what += f", nor for {len(names) - 1} like it" if len(names) > 1 and not taken else ""
        fix = "check that the checkpoint is of this model, or allow unexpected tensors"
        rows = _rows(names, list(shapes))
        problems.append(Problem("unexpected-tensor", what, names[0], rows, fix))
    return problems


def _wrong_shape(
    tensor: ModelTensor, name: str, tensors: ConvertedTensor, resized: ResizedVocabulary | None
) -> Problem:
    rows = (
        ("model", f"{name} {list(tensor.shape)}"),
        ("checkpoint", f"{list(tensors.shape)} from {short_list(tensors.sources, 4)}"),
    )
    fix = "check the model's config"
    if _explains(resized, tensor, tensors):
        fix += "; or resize_vocabulary=True, which reads the tokens that both have"
    return Problem("wrong-shape", "the checkpoint has another shape", tensor.name, rows, fix)
