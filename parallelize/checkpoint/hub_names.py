"""Which tensors of a checkpoint in Hugging Face's layout make which tensors of a model, and the other way round.

Names, prefixes, ties and conversions; arithmetic on shapes only. No file is opened here, and no data is read: the loader
takes from here which boxes to read, the writer which to write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from parallelize.checkpoint.boxes import Part
from parallelize.checkpoint.hub_conversions import Converted, Made, Shape, convert, is_of_transformers, revert
from parallelize.checkpoint.stock_class import stock_classes
from parallelize.checkpoint.traced import named
from parallelize.errors import CheckpointError, Problem, near, short_list

FEW = 200
"""Names among which a near one is looked for; among more, only those with the same numbers."""


@dataclass(frozen=True)
class Computed:
    """A tensor of the model that no boxes make: from the whole tensors `sources`, by name, `compute` makes the whole."""

    sources: tuple[str, ...]
    compute: Callable[[dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Wanted:
    """A tensor of the model. `names` are all its names, `name` the first; `shape` is that of the full tensor."""

    name: str
    names: tuple[str, ...]
    shape: Shape
    is_buffer: bool


@dataclass(frozen=True)
class Sources:
    """Where the tensors of a model stand in a checkpoint.

    Attributes:
        by_name: canonical name -> parts that cover the tensor, or how it is computed. Absent: what the checkpoint may
            lack (and lacks), and buffers that are never stored.
        twins: pairs of tensors of the checkpoint for one tensor of the model, which ties them: (used, ignored). They
            have the same shape; whether they are equal only their data tell. transformers unties a model where not.
    """

    by_name: dict[str, tuple[Part, ...] | Computed]
    twins: tuple[tuple[str, str], ...] = ()


def parts_in(
    module: nn.Module,
    wanted: Sequence[Wanted],
    held: Mapping[str, tuple[str, Shape]],
    *,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
) -> Sources:
    """Say from which boxes of which tensors of a checkpoint each tensor of a model is made.

    Args:
        module: its class, config and module tree are read, never its tensors: it may hold one pipeline stage.
        wanted: all tensors of the whole model.
        held: tensor of the checkpoint -> (dtype, shape).
        allow_missing: what the checkpoint lacks is absent from the result. allow_unexpected: what it holds beyond.

    Raises: CheckpointError with all of `missing-tensor` (but not what the class says may be missing),
        `unexpected-tensor` (but not what the class says to ignore, nor buffers that the model computes itself),
        `wrong-shape`.
    """
    with stock_classes(module):
        return _parts_in(module, wanted, held, allow_missing, allow_unexpected)


def _parts_in(
    module: nn.Module,
    wanted: Sequence[Wanted],
    held: Mapping[str, tuple[str, Shape]],
    allow_missing: bool,
    allow_unexpected: bool,
) -> Sources:
    derived = _derived_buffers(module)
    stored = [one for one in wanted if not (one.is_buffer and derived.issuperset(one.names))]
    shapes = {name: one.shape for one in stored for name in one.names}
    found = convert(module, shapes, {name: tuple(shape) for name, (_, shape) in held.items()})
    ties = _declared_ties(module)
    chosen = {one.name: _choose(one, found.made, ties) for one in stored}
    ignored = _ignored(module, derived)
    strange = {name: to for name, to in found.strange.items() if not any(map(ignored, (name, *to)))}
    problems = [problem for problem, _ in found.failed]
    if not allow_missing:
        problems += _missing(_absent(module, stored, chosen, found), strange)
    if not allow_unexpected:
        problems += _unexpected(strange, shapes)
    problems += [
        _wrong_shape(one, name, found.made[name])
        for one in stored
        for name in chosen[one.name]
        if found.made[name].shape != one.shape
    ]
    if problems:
        raise CheckpointError(*problems)
    by_name = {one.name: _source(found.made[chosen[one.name][0]]) for one in stored if chosen[one.name]}
    return Sources(by_name, tuple(_twins(stored, chosen, found.made)))


def parts_out(module: nn.Module, wanted: Sequence[Wanted]) -> dict[str, tuple[Shape, tuple[Part, ...]]]:
    """Say what `save_pretrained` would write: name -> (shape, parts that cover it).

    The target of a part is the tensor written; its source is a tensor of the model, by canonical name. Conversions are
    reverted as transformers reverts them, and tied tensors are written once, under the name that it keeps. A module that
    is not of transformers is written by its own names, the first of each tensor.

    Raises: CheckpointError `unwritable-conversion`.
    """
    derived = _derived_buffers(module)
    unsaved = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    state = {}
    for one in wanted:
        names = [name for name in one.names if name not in unsaved and not (one.is_buffer and name in derived)]
        if names:
            state[_kept(module, names)] = named(one.name, one.shape)
    with stock_classes(module):
        return {name: (tuple(value.shape), value.parts or ()) for name, value in revert(module, state).items()}


def _derived_buffers(module: nn.Module) -> set[str]:
    """Names of buffers that are not persistent: the model computes them, no checkpoint stores them."""
    modules = module.named_modules(remove_duplicate=False)
    return {f"{name}.{key}".lstrip(".") for name, inner in modules for key in inner._non_persistent_buffers_set}


def _declared_ties(module: nn.Module) -> dict[str, str]:
    """Tied name -> the name whose tensor it shares, as transformers has found it from class and config."""
    ties = getattr(module, "all_tied_weights_keys", None) if is_of_transformers(module) else None
    return dict(ties or {})


def _choose(one: Wanted, made: Mapping[str, Made], ties: Mapping[str, str]) -> list[str]:
    """The names under which a checkpoint has a tensor, best first: what others are tied to, before those that are."""
    own = sorted((name for name in one.names if name in made), key=lambda name: name in ties)
    if own:
        return own
    roots = {ties.get(name, name) for name in one.names}
    others = [*roots, *(name for name, root in ties.items() if root in roots)]
    return [name for name in others if name in made][:1]


def _kept(module: nn.Module, names: Sequence[str]) -> str:
    """The name under which transformers' `remove_tied_weights_from_state_dict` leaves a tensor."""
    if len(names) == 1 or not is_of_transformers(module):
        return names[0]
    patterns = [
        f"{prefix}.{pattern}" if prefix else pattern
        for prefix, inner in module.named_modules()
        for pattern in getattr(inner, "_tied_weights_keys", None) or ()
    ]
    free = [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
    return free[0] if free else sorted(names)[-1]


def _source(made: Made) -> tuple[Part, ...] | Computed:
    return Computed(made.sources, made.compute) if made.parts is None else made.parts


def _twins(
    stored: Iterable[Wanted], chosen: Mapping[str, list[str]], made: Mapping[str, Made]
) -> Iterable[tuple[str, str]]:
    for one in stored:
        for other in chosen[one.name][1:]:
            yield from zip(made[chosen[one.name][0]].sources, made[other].sources, strict=False)


def _absent(
    module: nn.Module, stored: Iterable[Wanted], chosen: Mapping[str, list[str]], found: Converted
) -> list[Wanted]:
    """What must be in the checkpoint and is not; what a failed conversion was for has its own problem."""
    failed = {name for _, names in found.failed for name in names}
    patterns = _patterns(module, "_keys_to_ignore_on_load_missing")
    return [
        one
        for one in stored
        if not chosen[one.name]
        and not failed.intersection(one.names)
        and not all(_matches(name, patterns) for name in one.names)
    ]


def _patterns(module: nn.Module, attribute: str) -> list[str]:
    return sorted(getattr(module, attribute, None) or ()) if is_of_transformers(module) else []


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _ignored(module: nn.Module, derived: set[str]) -> Callable[[str], bool]:
    """Which names the model says not to mind, as transformers decides it, or computes itself."""
    patterns = _patterns(module, "_keys_to_ignore_on_load_unexpected")
    # buffers that older versions stored: transformers' `_adjust_missing_and_unexpected_keys`
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


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Names that look like `name`."""
    if len(known) > FEW:
        known = [other for other in known if _numbers(other) == _numbers(name)][:FEW]
    return near(name, known)


def _alike(names: Iterable[str]) -> list[list[str]]:
    """Names that differ in their numbers only, together: one problem for all layers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return list(groups.values())


def _rows(names: Sequence[str], known: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The others that are alike, and names near the first."""
    rows = (("also", short_list(names[1:], 4)),) if len(names) > 1 else ()
    close = _near(names[0], known)
    return (*rows, ("near", ", ".join(close))) if close else rows


def _missing(absent: Sequence[Wanted], strange: Mapping[str, object]) -> list[Problem]:
    by_name = {one.name: one for one in absent}
    problems = []
    for names in _alike(by_name):
        one = by_name[names[0]]
        shape = ("shape", str(list(one.shape)))
        tied = (("or as", ", ".join(one.names[1:])),) if len(one.names) > 1 else ()
        what = "the checkpoint does not hold it" + (f", nor {len(names) - 1} like it" if len(names) > 1 else "")
        rows = (shape, *tied, *_rows(names, list(strange)))
        fix = "check that the checkpoint is of this model, or allow missing tensors"
        problems.append(Problem("missing-tensor", what, names[0], rows, fix))
    return problems


def _unexpected(strange: Mapping[str, tuple[str, ...]], shapes: Mapping[str, Shape]) -> list[Problem]:
    problems = []
    for names in _alike(strange):
        taken = [to for to in strange[names[0]] if to in shapes]
        what = f"the checkpoint holds {taken[0]} twice" if taken else "the model has no tensor for it"
        what += f", nor for {len(names) - 1} like it" if len(names) > 1 and not taken else ""
        fix = "check that the checkpoint is of this model, or allow unexpected tensors"
        rows = _rows(names, list(shapes))
        problems.append(Problem("unexpected-tensor", what, names[0], rows, fix))
    return problems


def _wrong_shape(one: Wanted, name: str, made: Made) -> Problem:
    rows = (
        ("model", f"{name} {list(one.shape)}"),
        ("checkpoint", f"{list(made.shape)} from {short_list(made.sources, 4)}"),
    )
    return Problem("wrong-shape", "the checkpoint holds another shape", one.name, rows, "check the model's config")
