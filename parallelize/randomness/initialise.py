"""`initialize`: every rank draws its own elements of the weights, and all meshes get the same weights.

The order is the text of `initialize`: find out what every parameter is drawn from, refuse what nobody knows, allocate, and
only then write, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from parallelize.errors import ModelError, PlanError, Problem
from parallelize.layout import replicated
from parallelize.meta import allocate
from parallelize.pieces import Stored, stored_parameters
from parallelize.pipeline.cut import cut_of
from parallelize.plan.pattern import check_pattern, generic, matches
from parallelize.randomness import stock as stock_numbers
from parallelize.randomness.counter import key
from parallelize.randomness.distributions import Distribution
from parallelize.randomness.fill import clear_padding, copy_into, draw_into
from parallelize.randomness.recipes import Layer, Layers, Played, Reading, Recipe, Unknown
from parallelize.randomness.recording import recording
from parallelize.randomness.shadow import recipe_of_stand_ins

Rules = Mapping[str, Distribution]


def build_on_meta(build: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """`build(*args, **kwargs)` on the meta device, remembering how stock PyTorch would have initialised it.

    What constructors do, and a library's initialisation after them, is recorded op by op; `initialize` reads it. No memory
    is taken: `build_on_meta(LlamaForCausalLM, config)` of any size.

    Raises: ModelError `unrecordable-initialisation` where a constructor draws real numbers.
    """
    with recording() as recorder:
        module = build(*args, **kwargs)
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        recipe = Recipe(recorder.tape, {name: recorder.view(tensor) for name, tensor in named if tensor.is_meta})
    module.__dict__[_RECIPE] = recipe
    return module


_RECIPE = "_parallelize_recipe"


def recipe_of(module: nn.Module) -> Recipe | None:
    """What `build_on_meta` remembered, or None."""
    return module.__dict__.get(_RECIPE)


def initialize(
    module: nn.Module,
    seed: int = 0,
    *,
    device: torch.device | str | None = None,
    rules: Rules | None = None,
    stock: bool = False,
    recipe: Recipe | None = None,
    rebuild: Mapping[str, Callable[[], torch.Tensor]] | None = None,
) -> nn.Module:
    """Fill every parameter, the same way for every mesh. No communication; a meta model is allocated first.

    An element's number depends on the seed, the parameter's first name and the element's place in the full tensor, so a
    model on one process, planned, or under `fully_shard` gets bit-equal full weights. What a parameter is drawn from is
    what the stock model would do: what `build_on_meta` recorded, or its modules' `reset_parameters` and `_init_weights`.

    Args:
        module: any model: whole, planned, cut into stages, on the meta device or not.
        seed: any whole number, the same on every rank.
        device: where a meta model is allocated; None: the mesh's device type, or the CPU.
        rules: name pattern -> distribution, over what the model does: `{"layers.*.gate.weight": Normal(0.0, 0.02)}`.
        stock: bit-equal to what stock PyTorch draws when it builds the model in one process on the CPU after
            `torch.manual_seed(seed)`. Every rank draws all of it, one full tensor at a time; needs `build_on_meta`.
        recipe: what `build_on_meta` recorded, where `module` is a part of that model: `recipe_of(whole)`.
        rebuild: as `materialize` takes it.

    Returns: the module.
    Raises: ModelError `unknown-initialiser` naming every parameter that nobody can fill, before anything is written;
        `no-recipe`; PlanError `unmatched-rule`.
    """
    held = recipe if recipe is not None else recipe_of(module)
    if stock and (held is None or rules):
        raise _no_recipe(rules is not None and held is not None)
    wanted: dict[str, Reading]
    if stock:
        assert held is not None
        wanted = dict.fromkeys(held.places, Played())
    elif held is not None:
        wanted = held.read() | _ruled(module, rules or {})
    else:
        held, found = recipe_of_stand_ins(module, _everything(module))
        wanted = found | _ruled(module, rules or {})
    first = _first_names(module)
    wanted |= {name: wanted[owner] for name, owner in first.items() if owner in wanted}
    was_meta = {name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta}
    _check(module, wanted, was_meta)
    allocate(module, device, rebuild)
    targets = [*stored_parameters(module), *_meta_buffers(module, was_meta)]
    _draw_own(targets, wanted, seed, first)
    played = {stored.fqn: stored for stored in targets if isinstance(wanted[stored.fqn], Played)}
    stock_numbers.play(held, played, seed if stock else None, lambda name, full: copy_into(played[name], full))
    return module


def _everything(module: nn.Module) -> dict[str, torch.Tensor]:
    """Full-shaped blanks of every parameter by every name, those of other pipeline stages too."""
    blanks = {
        name: torch.empty(stored.shape, dtype=stored.local.dtype, device="meta")
        for stored in stored_parameters(module)
        for name in stored.names
    }
    cut = cut_of(module)
    for fact in cut.facts.parameters.values() if cut is not None else ():
        for name in fact.names:
            blanks.setdefault(name, torch.empty(fact.shape, dtype=getattr(torch, fact.dtype), device="meta"))
    return blanks


def _first_names(module: nn.Module) -> dict[str, str]:
    """Name -> the first name of the parameter, by which it is keyed: of the whole model, where this is a stage of it."""
    cut = cut_of(module)
    if cut is not None:
        return cut.facts.owners
    return {name: stored.fqn for stored in stored_parameters(module) for name in stored.names}


def _ruled(module: nn.Module, rules: Rules) -> dict[str, Reading]:
    """What the user's rules say, by name."""
    found: dict[str, Reading] = {}
    problems = []
    for pattern, distribution in rules.items():
        check_pattern(pattern, "rules")
        named = [stored for stored in stored_parameters(module) if any(matches(pattern, name) for name in stored.names)]
        for stored in named:
            whole = tuple(slice(0, size) for size in stored.shape)
            found |= dict.fromkeys(stored.names, Layers((Layer(whole, distribution),)))
        if not named:
            problems.append(Problem("unmatched-rule", f"{pattern!r} matches no parameter", "rules"))
    if problems:
        raise PlanError(*problems)
    return found


def _check(module: nn.Module, wanted: dict[str, Reading], was_meta: set[str]) -> None:
    unsaved = {name for name, _ in _unsaved(module)}
    needed = [*(name for name, _ in module.named_parameters()), *(name for name in was_meta if name not in unsaved)]
    bad: dict[str, list[str]] = {}
    for name in dict.fromkeys(needed):
        reading = wanted.get(name, Unknown("it is not in what was recorded"))
        if isinstance(reading, Unknown):
            bad.setdefault(generic(name), []).append(reading.why)
    if bad:
        rows = tuple((name + (f" (x{len(why)})" if len(why) > 1 else ""), why[0]) for name, why in bad.items())
        fix = "build the model by build_on_meta(Class, ...), or give rules={pattern: Normal(0.0, 0.02)}"
        count = sum(map(len, bad.values()))
        raise ModelError(
            Problem("unknown-initialiser", f"{count} parameters are filled in a way that is not known", "", rows, fix)
        )


def _no_recipe(with_rules: bool) -> ModelError:
    what = "stock=True draws what the stock model draws, and rules say something else" if with_rules else ""
    return ModelError(
        Problem(
            "no-recipe",
            what or "stock=True needs the record of how the model was built",
            fix="leave out the rules"
            if with_rules
            else "model = build_on_meta(Class, config), then plan and initialize",
        )
    )


def _unsaved(module: nn.Module):
    for name, owner in module.named_modules():
        for key_ in owner._non_persistent_buffers_set:
            yield f"{name}.{key_}" if name else key_, owner


def _meta_buffers(module: nn.Module, was_meta: set[str]) -> list[Stored]:
    """Buffers that a checkpoint would hold, and that nothing has filled yet."""
    unsaved = {name for name, _ in _unsaved(module)}
    return [
        Stored(name, (name,), buffer, tuple(buffer.shape), replicated(tuple(buffer.shape), 1).slices(0))
        for name, buffer in module.named_buffers()
        if name in was_meta and name not in unsaved
    ]


@torch.no_grad()
def _draw_own(targets: list[Stored], wanted: dict[str, Reading], seed: int, first: dict[str, str]) -> None:
    """Each parameter's elements on this rank, by the toolkit's own generator."""
    for stored in targets:
        clear_padding(stored)
        reading = wanted[stored.fqn]
        for number, layer in enumerate(reading.layers if isinstance(reading, Layers) else ()):
            where = key(seed, f"initialise {first.get(stored.fqn, stored.fqn)}", number)
            draw_into(stored, layer.box, layer.distribution, where)
