"""Runs a forward once and records its operations, with the module that called each and the attributes that gave
sizes."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize.base.patches import active as patches
from parallelize.base.torch_private import torch_tensors as private
from parallelize.base.torch_private.torch_flex import flex_attention_served, is_flex_attention
from parallelize.plan.attribute_paths import is_settings, mapped_integers
from parallelize.plan.dims.boundaries import Boundaries, boundaries_of
from parallelize.plan.dims.factors import leaves, new_dim, size_of
from parallelize.plan.dims.meta_calls import called
from parallelize.plan.dims.operations import apply_rule
from parallelize.plan.dims.record import HiddenCall, Ratio, Record, SizeRead
from parallelize.plan.models.nested_tensors import tensors_in
from parallelize.plan.resolved import ResolvedPlan

T = torch.Tensor
Source = tuple[str, str, int]
"""(module, attribute, value) of an integer that a forward reads."""


def record_forward(
    model: nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    resolved: ResolvedPlan | None = None,
    end: float | None = None,
) -> Record:
    """Run `model` on `inputs`, without gradients, and record it. The model's integer attributes are replaced meanwhile.

    Args:
        model: any module on one device, in the mode in which it is to be recorded.
        inputs: keyword arguments of its forward, or positional ones.
        resolved: a plan over `tp`, at whose boundaries dims become others; None: none do.
        end: of `time.thread_time()`, when it is given up; None: never.

    Returns: the record. Raises: TimeoutError; whatever the forward raises.
    """
    record = Record()
    boundaries = None if resolved is None else boundaries_of(record, resolved)
    _name_parameters(record, model)
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), dict(inputs))
    for tensor in tensors_in((args, kwargs)):
        _fix(record, tensor, "an input of the model")
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            record.mark_ids(tensor)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_named_modules(record, model, boundaries))
        stack.enter_context(_watched_integers(model))
        stack.callback(_RECORD.reset, _RECORD.set(record))
        stack.enter_context(_computed_anew())
        stack.enter_context(flex_attention_served(_flex_as_one_operation))
        stack.enter_context(_SizesRead(record))
        stack.enter_context(private.record_ops(_recorder(record, end)))
        out = model(*args, **kwargs)
    for tensor in tensors_in(out):
        record.fixed += [(dim, "an output of the model") for dim in record.dims(tensor) if dim]
    return record


def _fix(record: Record, tensor: T, what: str) -> None:
    record.set(tensor, [new_dim(size) for size in tensor.shape])
    record.fixed += [(dim, what) for dim in record.dims(tensor) if dim]


def _name_parameters(record: Record, model: nn.Module) -> None:
    """Tied parameters have one name of several, and the same dims under all of them. A module that has several names
    itself, as a block in two places of a list, is known by its first."""
    names: dict[int, str] = {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.rpartition(".")[0] not in modules:
            continue
        first = names.setdefault(id(parameter), name)
        if first == name:
            record.add_weight(parameter, name, [new_dim(size) for size in parameter.shape])
        record.parameters[name], record.first_names[name] = record.dims(parameter), first
    for name, buffer in model.named_buffers():
        _fix(record, buffer, f"the buffer {name}")
        record.mark_constant(buffer)


def _recorder(record: Record, end: float | None) -> Any:
    def run(func: Any, args: tuple, kwargs: dict, call: Any) -> Any:
        if end is not None and time.thread_time() > end:
            raise TimeoutError("the forward takes too long to be recorded")
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return _scalar_on_meta(args[0])
        out = called(func, args, kwargs, call)
        apply_rule(record, func, args, kwargs, out)
        return out

    return run


def _scalar_on_meta(x: T) -> Any:
    """What code reads of a tensor without values: False, as of questions about masks and padding; or zero."""
    return False if x.dtype == torch.bool else 0.0 if x.is_floating_point() else 0


@contextmanager
def _named_modules(record: Record, model: nn.Module, boundaries: Boundaries | None) -> Iterator[None]:
    """Keep `record.module` at the innermost module whose forward runs, and note what modules are called with."""
    with ExitStack() as stack:
        running: list[tuple[str, HiddenCall | None, dict[str, T]]] = []
        alive: list[Any] = []  # so that no later tensor has the storage of an earlier one
        for name, module in model.named_modules():

            def enter(module: nn.Module, args: tuple, kwargs: dict, name: str = name) -> Any:
                call = _call_of(name, module, args, kwargs)
                alive.append((args, kwargs))
                record.calls += [call] if call is not None else []
                record.callers.add((name, record.module))
                running.append((record.module, call, record.arguments))
                record.module, record.arguments = name, _tensor_arguments(module, args, kwargs)
                return None if boundaries is None else boundaries.enter(name, module, args, kwargs)

            def leave(_: nn.Module, __: Any, output: Any, name: str = name) -> Any:
                if not running:  # PyTorch calls this after an error in a hook before it, too
                    return None
                record.module, call, record.arguments = running.pop()
                out = output[0] if isinstance(output, (tuple, list)) and output else output
                if call is not None and isinstance(out, T):
                    call.out, call.result = tuple(out.shape), private.storage_address(out)
                    alive.append(out)
                return None if boundaries is None or output is None else boundaries.leave(name, output)

            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _call_of(name: str, module: nn.Module, args: tuple, kwargs: dict) -> HiddenCall | None:
    names = list(inspect.signature(module.forward).parameters)
    passed = [*((index, names[index] if index < len(names) else "", value) for index, value in enumerate(args))]
    passed += [(names.index(key) if key in names else -1, key, value) for key, value in kwargs.items()]
    for position, key, value in passed:
        if isinstance(value, T) and value.ndim == 3 and value.is_floating_point():
            return HiddenCall(name, (position, key), tuple(value.shape), private.storage_address(value))
    return None


def _tensor_arguments(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, T]:
    """The activations that a module's forward is called with, by name."""
    if type(module).__module__.startswith("torch."):
        return {}
    parameters = inspect.signature(module.forward).parameters.values()
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    passed = {**dict(zip(names, args, strict=False)), **{name: kwargs[name] for name in names if name in kwargs}}
    tensors = {name: value for name, value in passed.items() if isinstance(value, T)}
    return {name: value for name, value in tensors.items() if value.ndim > 1 and value.is_floating_point()}


# -- integers that give sizes ------------------------------------------------------------------------------------------


class _Watched(int):
    """An integer that knows its sources: attributes, and quotients of two of them."""

    sources: frozenset[Source]
    ratios: frozenset[Ratio]

    def __new__(cls, value: int, sources: frozenset[Source], ratios: frozenset[Ratio] = frozenset()) -> _Watched:
        self = super().__new__(cls, value)
        self.sources, self.ratios = sources, ratios
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __float__(self) -> float:
        self.note_number()
        return float(int(self))

    def read_sources(self) -> list[Source]:
        """Those that a size follows, in order: of a quotient not what it was divided by, which may be as large."""
        divisors = {ratio.divisor for ratio in self.ratios}
        return sorted(source for source in self.sources if source not in divisors)

    def note_number(self) -> None:
        """It becomes a real number, as in a scale."""
        record = _RECORD.get()
        if record is not None:
            record.numbers |= {source[:2] for source in self.sources}


_RECORD: ContextVar[Record | None] = ContextVar("record", default=None)
"""Of the forward that runs now."""


def _arithmetic(name: str) -> Any:
    plain = getattr(int, name)

    def run(self: _Watched, other: Any) -> Any:
        result = plain(self, other)
        if type(result) is not int:
            if type(result) is float or type(other) is float:
                self.note_number()
            return result
        sources: frozenset[Source] = getattr(other, "sources", frozenset())
        ratios: frozenset[Ratio] = getattr(other, "ratios", frozenset())
        if name == "__floordiv__" and len(self.sources) == len(sources) == 1:
            ratios |= {Ratio(*self.sources, *sources)}
        return _Watched(result, self.sources | sources, self.ratios | ratios)

    return run


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "truediv", "rtruediv", "pow"):
    setattr(_Watched, f"__{_name}__", _arithmetic(f"__{_name}__"))


@contextmanager
def _watched_integers(model: nn.Module) -> Iterator[None]:
    """Replace the integer attributes of modules that are not PyTorch's own, and of their configs."""
    with ExitStack() as stack:
        configs: dict[int, tuple[str, Any]] = {}
        for name, module in model.named_modules():
            if type(module).__module__.startswith("torch."):
                continue
            _watch(stack, module.__dict__, name, "")
            for key, value in module.__dict__.items():
                if (key == "config" and hasattr(value, "__dict__")) or is_settings(value):
                    configs.setdefault(id(value), (key, value))
        for key, config in configs.values():
            _watch(stack, config.__dict__, "", f"{key}.")
        yield


@contextmanager
def _computed_anew() -> Iterator[None]:
    """Inside, `einops` computes sizes each time: those of an equal earlier call were computed from another module's
    attributes."""
    einops: Any = sys.modules.get("einops.einops")
    cached = getattr(einops, "_reconstruct_from_shape", None)
    if cached is None or not hasattr(cached, "__wrapped__"):
        yield
        return
    with patches.within(einops, "_reconstruct_from_shape", cached.__wrapped__):
        yield


def _watch(stack: ExitStack, values: dict[str, Any], name: str, prefix: str) -> None:
    """Also integers in tuples, lists and dicts that are attributes, and those that functions close over."""

    def watched(path: str, value: int) -> int:
        return _Watched(value, frozenset([(name, path, value)])) if value > 1 else value

    for key, value in list(values.items()):
        if key in _OF_MODULES or (prefix and key.startswith("_")):
            continue
        new = watched(prefix + key, value) if type(value) is int else value
        new = new if prefix else mapped_integers(new, watched, key)
        if new is not value:
            values[key] = new
            stack.callback(values.__setitem__, key, value)


_OF_MODULES = frozenset((*vars(nn.Module()), "forward"))
"""What `torch.nn.Module` itself keeps, and a forward of an instance, in whose place a planned one is set."""


_OF_NUMBERS = ("add", "sub", "mul", "div", "true_divide", "pow", "__truediv__", "__rtruediv__", "__pow__", "__rpow__")
"""Functions that compute with an integer, rather than with a size."""

_SHAPED = ("view", "reshape", "expand", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_empty")
"""Functions whose integers are the sizes of the result, in its order: equal sizes are told apart."""


def _sizes_in_order(name: str, args: tuple, flat: list[Any], ndim: int) -> dict[int, int]:
    """The integers that a function was called with, by the dims of its result that have them as sizes; empty where that
    is not known."""
    if name in _SHAPED:
        sizes = [leaf for leaf in flat if isinstance(leaf, int)]
        return dict(enumerate(sizes)) if len(sizes) == ndim else {}
    if name == "unflatten" and len(args) == 3:
        return dict(enumerate(args[2], args[1] % args[0].ndim))
    return {}


def _flex_as_one_operation(
    stock: Any,
    query: T,
    key: T,
    value: T,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    return_aux: Any = None,
) -> Any:
    """`flex_attention` as PyTorch's other attention, whose dims are the same: its functions see one score at a time.

    One score is computed and added to queries, so that what its function reads is recorded beside heads.
    """
    if score_mod is not None:
        zero = torch.zeros((), dtype=torch.int64, device=query.device)
        query = query + score_mod(query.new_zeros(()), zero, zero, zero, zero)
    scores: dict[str, Any] = {} if query.shape[1] == key.shape[1] else {"enable_gqa": True}
    out = F.scaled_dot_product_attention(query, key, value, **scores)
    sums = query.sum(-1)
    if return_aux is not None:
        return out, type(return_aux)(lse=sums, max_scores=sums)
    return (out, sums) if return_lse else out


class _SizesRead(TorchFunctionMode):
    """Notes which dims of a function's results have a size that was computed from an attribute."""

    def __init__(self, record: Record):
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_flex_attention(func):
            return _flex_as_one_operation(func, *args, **(kwargs or {}))
        if func is T.__getitem__:
            args = (args[0], _as_slices(args[1]))
        out = func(*args, **(kwargs or {}))
        if func is T.size or getattr(func, "__self__", None) is T.shape:
            return self._with_width(out, *args, **(kwargs or {}))
        flat = list(_sizes_apart(private.tree_leaves((args, kwargs))))
        watched = [leaf for leaf in flat if isinstance(leaf, _Watched)]
        limits = [limit for leaf in flat for limit in _limits(leaf)]
        name = getattr(func, "__name__", "")
        if name in _OF_NUMBERS:
            for number in watched:
                number.note_number()
        if name == "repeat_interleave":
            self._note_repeats(watched, out)
        elif watched or limits:
            before = [leaves(dim) for x in flat if isinstance(x, T) for dim in self.record.dims(x)]
            for result in private.tree_leaves(out):
                if isinstance(result, T):
                    sizes = _sizes_in_order(name, args, flat, result.ndim)
                    if sizes:
                        self._note(watched, result, name, lambda value, _, index: sizes.get(index) is value)  # noqa: B023
                    else:
                        is_new = [leaves(dim) not in before for dim in self.record.dims(result)]
                        self._note(watched, result, name, lambda value, size, index: is_new[index] and value == size)  # noqa: B023
                    if limits and isinstance(args[0], T) and args[0].ndim == result.ndim:
                        source = args[0].shape
                        self._note(limits, result, name, lambda _, size, index: size != source[index])  # noqa: B023
        return out

    def _with_width(self, sizes: Any, x: T, dim: int | None = None) -> Any:
        """The sizes of a tensor, of which the last knows that it is the width of an argument of the module whose
        forward runs, or of what was computed from one and has that dim last."""
        name = self._argument_of_width(x) if x.ndim and x.shape[-1] > 1 and dim in (None, -1, x.ndim - 1) else ""
        if not name:
            return sizes
        module, width = self.record.module, x.shape[-1]
        self.record.widths[module, name] = self.record.dims(x)[-1]
        watched = _Watched(width, frozenset([(module, name, width)]))
        return watched if dim is not None else torch.Size((*sizes[:-1], watched))

    def _argument_of_width(self, x: T) -> str:
        """`NAME.shape` of the argument whose width is that of a tensor; empty: there is none."""
        width = leaves(self.record.dims(x)[-1])
        for name, value in self.record.arguments.items():
            if value is x or leaves(self.record.dims(value)[-1]) == width:
                return f"{name}.shape"
        return ""

    def _note(self, watched: list[_Watched], result: T, operation: str, gives: Callable[[int, int, int], bool]) -> None:
        """gives: whether an integer gives the size of the dim at an index."""
        for index, (dim, size) in enumerate(zip(self.record.dims(result), result.shape, strict=True)):
            for value in watched:
                if dim and gives(value, size, index):
                    self.record.reads += [
                        SizeRead(*self._local_source(source), dim, operation) for source in value.read_sources()
                    ]
                    self.record.ratios |= {
                        Ratio(self._local_source(ratio.dividend), self._local_source(ratio.divisor)): None
                        for ratio in value.ratios
                    }

    def _note_repeats(self, watched: list[_Watched], result: T) -> None:
        """Of an integer that repeats the elements of a dim, the factors that it added: the last of one of the result's
        dims."""
        for value in watched:
            for dim in self.record.dims(result):
                added = leaves(dim)
                while size_of(added) > value:
                    added = added[1:]
                if (
                    added
                    and size_of(added) == value
                    and set(added) <= {f for d in self.record.repeats for f in leaves(d)}
                ):
                    self.record.reads += [
                        SizeRead(*self._local_source(source), added, "repeat_interleave")
                        for source in value.read_sources()
                    ]

    def _local_source(self, source: Source) -> Source:
        """A field of a config is local in the module that reads it."""
        return source[0] or self.record.module, *source[1:]


def _sizes_apart(leaves: list[Any]) -> Iterator[Any]:
    """The arguments of a function, with each number of a `torch.Size` by itself."""
    for leaf in leaves:
        yield from leaf if isinstance(leaf, torch.Size) else (leaf,)


def _as_slices(index: Any) -> Any:
    """A list of one index is a range, which tensors without values do not show."""
    if isinstance(index, tuple):
        lists = [item for item in index if isinstance(item, list) or (isinstance(item, T) and item.ndim)]
        return tuple(map(_as_slices, index)) if len(lists) == 1 else index
    if isinstance(index, list) and len(index) == 1 and type(index[0]) is int:
        return slice(index[0], index[0] + 1 or None)
    return index


def _limits(leaf: Any) -> list[_Watched]:
    return (
        [limit for limit in (leaf.start, leaf.stop) if isinstance(limit, _Watched)] if isinstance(leaf, slice) else []
    )
