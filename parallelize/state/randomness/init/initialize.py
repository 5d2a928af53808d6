"""`initialize`: every rank draws its local elements of the weights, and all meshes get the same weights.

The text of `initialize` is the order: determine the distributions of every parameter, refuse unknown ones, allocate,
and only then write, one parameter at a time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from parallelize.base.boxes import Box, full_box, starts
from parallelize.base.errors import ModelError, PlanError, Problem
from parallelize.base.layout import replicated
from parallelize.ops.random.counter import IndexRun, Key, blocks, key
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.plan.pattern import check_pattern, generic, matches
from parallelize.state.meta_buffers import allocate
from parallelize.state.randomness.init.distributions import Distribution
from parallelize.state.randomness.init.recorder import (
    Computed,
    Fill,
    Fills,
    Initialization,
    Recipe,
    Unknown,
    record_initialization,
)
from parallelize.state.randomness.init.stand_ins import recipe_of_stand_ins
from parallelize.state.randomness.init.stock_generator import replay_stock
from parallelize.state.records import applied, mark_applied, pipeline_cut
from parallelize.state.step_results import as_instance
from parallelize.state.stored_slices import StoredTensor, clear_padding, copy_into, stored_parameters

Rules = Mapping[str, Distribution]


def build_on_meta(build: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Build a model on the meta device, and record how stock PyTorch would initialize it.

    The ops of constructors and of a library's initialization after them are recorded, and `initialize` reads the
    recording. A model of any size takes no memory: `build_on_meta(LlamaForCausalLM, config)`.

    Args:
        build: a class or function that returns the model.
        args, kwargs: the arguments of `build`.

    Returns: the module, with meta parameters and its recording.
    Raises: ModelError `unrecordable-initialisation` if `build` draws random numbers on a real device.
    Cost: no communication.
    """
    with record_initialization() as recorder:
        module = build(*args, **kwargs)
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        recipe = Recipe(
            recorder.recording, {name: recorder.view(tensor) for name, tensor in named if tensor.is_meta}, replay_stock
        )
    mark_applied(module, recipe=recipe)
    return module


def recipe_of(module: nn.Module) -> Recipe | None:
    """What `build_on_meta` recorded, or None."""
    return as_instance(applied(module).recipe, Recipe)


def initialize(
    module: AnyModel,
    seed: int = 0,
    *,
    device: torch.device | str | None = None,
    rules: Rules | None = None,
    stock: bool = False,
    recipe: Recipe | None = None,
    rebuild: Mapping[str, Callable[[], torch.Tensor]] | None = None,
) -> nn.Module:
    """Initialize every parameter, with the same full weights on every mesh. A meta model is allocated first.

    The value of an element depends on the seed, the parameter's first name and the element's index in the full tensor.
    So a model on one process, with a plan, or under `fully_shard` gets bit-equal full weights. The distributions are
    those of the stock model: as `build_on_meta` recorded them, or from the modules' `reset_parameters` and
    `_init_weights`.

    Args:
        module: any model: unsharded, planned, split into pipeline stages, on the meta device or not.
        seed: any integer, the same on every rank.
        device: where a meta model is allocated; None: the mesh's device type, or the CPU.
        rules: name pattern -> distribution, in place of the model's own: `{"layers.*.gate.weight": Normal(0.0, 0.02)}`.
        stock: give bit-equal weights to those of stock PyTorch, built in one process on the CPU after
            `torch.manual_seed(seed)`. Every rank draws all numbers, one full tensor at a time. Needs `build_on_meta`.
        recipe: what `build_on_meta` recorded, if `module` is a part of that model: `recipe_of(full_model)`.
        rebuild: as in `materialize`.

    Returns: the module.
    Raises: before anything is written, ModelError `quantized-weights`, `unknown-initialiser` with every parameter whose
        distribution is not known; `no-recipe`; `unrecordable-initialisation`; PlanError `unmatched-rule`.
    Cost: no communication. Memory: the local shards; one full tensor for `stock` and for parameters that are computed.
    """
    module = module_of(module)
    _refuse_codes(module)
    if recipe is None:
        recipe = recipe_of(module)
    if stock and (recipe is None or rules):
        raise _no_recipe_error(rules is not None and recipe is not None)
    initializations: dict[str, Initialization]
    if stock:
        assert recipe is not None
        initializations = dict.fromkeys(recipe.views, Computed())
    elif recipe is not None:
        initializations = recipe.read() | _from_rules(module, rules or {})
    else:
        recipe, initializations = recipe_of_stand_ins(module, _blanks(module))
        initializations = initializations | _from_rules(module, rules or {})
    first = _first_names(module)
    initializations |= {name: initializations[owner] for name, owner in first.items() if owner in initializations}
    was_meta = {name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta}
    _check(module, initializations, was_meta)
    allocate(module, device, rebuild)
    targets = [*stored_parameters(module), *_meta_buffers(module, was_meta)]
    _draw_local(targets, initializations, seed, first)
    computed = {stored.fqn: stored for stored in targets if isinstance(initializations[stored.fqn], Computed)}

    def store(name: str, full: torch.Tensor) -> None:
        copy_into(computed[name], full, computed[name].local)

    replay_stock(recipe, computed, seed if stock else None, store)
    return module


def _refuse_codes(module: nn.Module) -> None:
    """Raises: ModelError `quantized-weights` for a model with quantized linears, whose codes no distribution draws."""
    for name, inner in module.named_modules():
        if getattr(inner, "packs", None):
            what = f"the weight of {generic(name)} is quantized, and codes are made of a weight that has values"
            fix = "initialize(model, seed), then quantize(model); or load_pretrained, which quantizes while it reads"
            raise ModelError(Problem("quantized-weights", what, fix=fix))


def _blanks(module: nn.Module) -> dict[str, torch.Tensor]:
    """Full-shaped meta tensors of every parameter by each of its names, including those of other pipeline stages."""
    blanks = {
        name: torch.empty(stored.shape, dtype=stored.local.dtype, device="meta")
        for stored in stored_parameters(module)
        for name in stored.names
    }
    cut = pipeline_cut(module)
    for fact in cut.facts.parameters.values() if cut is not None else ():
        for name in fact.names:
            blanks.setdefault(name, torch.empty(fact.shape, dtype=getattr(torch, fact.dtype), device="meta"))
    return blanks


def _first_names(module: nn.Module) -> dict[str, str]:
    """Name -> the first name of the parameter in the full model, which its key contains."""
    cut = pipeline_cut(module)
    if cut is not None:
        return cut.facts.parameter_fqns
    return {name: stored.fqn for stored in stored_parameters(module) for name in stored.names}


def _from_rules(module: nn.Module, rules: Rules) -> dict[str, Initialization]:
    """The initialization of each parameter that a rule matches, by each of its names."""
    initializations: dict[str, Initialization] = {}
    problems = []
    for pattern, distribution in rules.items():
        check_pattern(pattern, "rules")
        matched = [
            stored for stored in stored_parameters(module) if any(matches(pattern, name) for name in stored.names)
        ]
        for stored in matched:
            full = full_box(stored.shape)
            initializations |= dict.fromkeys(stored.names, Fills((Fill(full, distribution),)))
        if not matched:
            problems.append(Problem("unmatched-rule", f"{pattern!r} matches no parameter", "rules"))
    if problems:
        raise PlanError(*problems)
    return initializations


def _check(module: nn.Module, initializations: dict[str, Initialization], was_meta: set[str]) -> None:
    unsaved = set(_unsaved(module))
    needed = [*(name for name, _ in module.named_parameters()), *(name for name in was_meta if name not in unsaved)]
    unknown: dict[str, list[str]] = {}
    for name in dict.fromkeys(needed):
        initialization = initializations.get(name, Unknown("it is not in the recording"))
        if isinstance(initialization, Unknown):
            unknown.setdefault(generic(name), []).append(initialization.reason)
    if unknown:
        rows = tuple(
            (name + (f" (x{len(reasons)})" if len(reasons) > 1 else ""), reasons[0])
            for name, reasons in unknown.items()
        )
        what = f"the initialization of {sum(map(len, unknown.values()))} parameters is not known"
        fix = "build the model by build_on_meta(Class, ...), or give rules={pattern: Normal(0.0, 0.02)}"
        raise ModelError(Problem("unknown-initialiser", what, "", rows, fix))


def _no_recipe_error(with_rules: bool) -> ModelError:
    if with_rules:
        what = "stock=True gives the weights of the stock model, so rules cannot change them"
        return ModelError(Problem("no-recipe", what, fix="leave out the rules"))
    what = "stock=True needs a recording of how the model was built"
    fix = "model = build_on_meta(Class, config), then apply the plan and call initialize"
    return ModelError(Problem("no-recipe", what, fix=fix))


def _unsaved(module: nn.Module) -> Iterator[str]:
    """Names of the buffers that a checkpoint does not contain."""
    for name, owner in module.named_modules():
        for buffer in owner._non_persistent_buffers_set:
            yield f"{name}.{buffer}" if name else buffer


def _meta_buffers(module: nn.Module, was_meta: set[str]) -> list[StoredTensor]:
    """Buffers that a checkpoint contains, and that were on the meta device."""
    unsaved = set(_unsaved(module))
    return [
        StoredTensor(name, (name,), buffer, tuple(buffer.shape), replicated(tuple(buffer.shape), 1).slices(0))
        for name, buffer in module.named_buffers()
        if name in was_meta and name not in unsaved
    ]


@torch.no_grad()
def _draw_local(
    targets: list[StoredTensor], initializations: dict[str, Initialization], seed: int, first: dict[str, str]
) -> None:
    """Draw this rank's elements of each parameter with the counter-based generator."""
    for stored in targets:
        clear_padding(stored, stored.local)
        initialization = initializations[stored.fqn]
        for number, fill in enumerate(initialization.fills if isinstance(initialization, Fills) else ()):
            # the text is part of the key: another spelling would change every weight of a seed
            fill_key = key(seed, f"initialise {first.get(stored.fqn, stored.fqn)}", number)
            draw_into(stored, fill.box, fill.distribution, fill_key)


# -- write -----------------------------------------------------------------------------------------------------------
# Write a distribution, or a full tensor, into the slices that a rank stores.


def draw_into(stored: StoredTensor, box: Box, distribution: Distribution, key: Key) -> None:
    """Draw this rank's elements of a box of the full tensor: element i of the full tensor gets number i of the key."""
    for pair in stored.slices:
        part = pair.within(box)
        if part is not None:
            _draw(stored.local[part.local], stored.shape, starts(part.box), distribution, key)


def _draw(
    out: torch.Tensor, shape: tuple[int, ...], start: tuple[int, ...], distribution: Distribution, key: Key
) -> None:
    """Fill `out`, a block of a tensor of this shape that begins at `start`."""
    split_dims = out.ndim  # dims from here on are full, so that one run covers them
    while split_dims > 0 and out.shape[split_dims - 1] == shape[split_dims - 1]:
        split_dims -= 1
    run_dim = max(split_dims - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offsets = torch.zeros(1, dtype=torch.int64, device=out.device)
    for dim in range(run_dim):
        along = torch.arange(start[dim], start[dim] + out.shape[dim], device=out.device) * strides[dim]
        offsets = (offsets[:, None] + along).flatten()
    if not out.is_contiguous() and run_dim > 1:  # several split dims: its rows are no view
        scratch = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        _draw(scratch, shape, start, distribution, key)
        out.copy_(scratch)
        return
    flat = out.view(len(offsets), -1)
    first = start[run_dim] * strides[run_dim] if shape else 0
    for block, index in blocks(offsets, [IndexRun(0, first, flat.shape[1])]):
        values = distribution.draw(key, index)
        if out.dtype in (torch.float16, torch.bfloat16):
            values = values.to(torch.float32)  # CPU and CUDA both round float64 to them by way of float32
        flat[block.rows, block.columns] = values.to(out.dtype)


# -- building --------------------------------------------------------------------------------------------------------
# The device and dtype of modules that are being built.


@contextmanager
def building(device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Iterator[None]:
    """A context in which any module is built on a device and with parameters of a dtype, whatever its class.

        with building("cuda", torch.bfloat16):
            model = Transformer(config)

    Each floating-point parameter gets the dtype when it is assigned to its module, before it is initialized, and stays
    the object that it is, with its class, its hooks and its other names. Buffers keep the dtype that their module gives
    them: tables of positions lose what they are for in a narrow one, and so they would under `torch.set_default_dtype`.
    Contexts nest, and hold for the thread that enters them; of several dtypes the innermost one is given.

    Args:
        device: of parameters and buffers, unless the module names another one. None: as without the context.
        dtype: of floating-point parameters. None: as without the context.

    Returns: a context manager, whose value is None.
    Raises: ModelError `not-floating-point`.
    """
    if dtype is not None and not dtype.is_floating_point:
        fix = "torch.bfloat16, torch.float32, ...; quantize after building"
        raise ModelError(Problem("not-floating-point", f"parameters of {dtype} cannot be initialized", fix=fix))
    with (
        torch.device(device) if device is not None else nullcontext(),
        _creating_in_dtype(dtype) if dtype else nullcontext(),
    ):
        yield


class _DtypeContexts(threading.local):
    """The dtypes of the contexts that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []


_dtype_contexts = _DtypeContexts()


@contextmanager
def _creating_in_dtype(dtype: torch.dtype) -> Iterator[None]:
    # of all threads; `_convert` looks for the one it is in
    handle = register_module_parameter_registration_hook(_convert)
    _dtype_contexts.dtypes.append(dtype)
    try:
        yield
    finally:
        _dtype_contexts.dtypes.pop()
        handle.remove()


def _convert(module: nn.Module, name: str, parameter: Any) -> None:
    """A hook: give a parameter the innermost dtype, in place. A lazy one gets its shape in this dtype later."""
    if not _dtype_contexts.dtypes or not isinstance(parameter, nn.Parameter) or not parameter.is_floating_point():
        return
    if parameter.dtype != _dtype_contexts.dtypes[-1]:
        parameter.data = parameter.data.to(_dtype_contexts.dtypes[-1])
