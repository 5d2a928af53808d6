"""The call sites of dropout in a model, and the dropout that replaces them.

The forward of `nn.Dropout` modules is replaced. Functional dropout and attention dropout are intercepted by a function
mode, which is on only while a module runs whose code calls them. The layout of the activations at a call site is
determined at its first call, from the last planned module that ran before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import Layout
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops.attention.weight_dropout import WeightDropout
from parallelize.state.forward_steps import DROPOUT, run_inner
from parallelize.state.randomness.dropout.draw_places import DrawPlace, no_place, order_of, place_of
from parallelize.state.randomness.dropout.global_index import (
    ActivationLayout,
    LocalTokens,
    columns_of,
    first_row,
    no_global_mask,
)
from parallelize.state.randomness.dropout.masks import attention, drop, mask
from parallelize.state.randomness.dropout.position import Clock
from parallelize.state.records import applied
from parallelize.state.step_results import SequenceRegion, ShardedSequences, as_instance


@dataclass(frozen=True)
class ColumnOutput:
    """The sharded output of a column linear.

    Attributes:
        layout: the layout of the linear's weight.
        widest: the largest number of local features among the column linears of the same parent module.
    """

    layout: Layout
    widest: int


class DropoutSites:
    """The state of all dropout of one model: the clock, layouts of activations, and the modules that run now.

    Args:
        clock: gives the step and the key of each call.
        rank, size: rank and size of the tp group.
        region: the sequence-parallel region, or None.
        sequences: how sequences are sharded over `cp`, or None.
    """

    def __init__(
        self,
        clock: Clock,
        rank: int = 0,
        size: int = 1,
        region: SequenceRegion | None = None,
        sequences: ShardedSequences | None = None,
    ):
        self.clock, self.rank, self.size, self.region, self.sequences = clock, rank, size, region, sequences
        self.layouts: dict[str, ActivationLayout] = {}
        self.last: ColumnOutput | None = None  # of the last planned module; None if its output is not sharded
        self.scopes: list[Scope] = []
        self.mode = _FunctionalDropout(self)
        self.first_forward = ExitStack()  # stores the `FirstForwardCheck` while it is on
        self.checked = False
        self.follows = True  # whether `last` is known

    def __deepcopy__(self, memo: dict) -> DropoutSites:
        clock, region = deepcopy(self.clock, memo), deepcopy(self.region, memo)
        sequences = deepcopy(self.sequences, memo)
        copy = memo[id(self)] = DropoutSites(clock, self.rank, self.size, region, sequences)
        copy.layouts.update(self.layouts)
        return copy

    # -- the first forward ----------------------------------------------------------------------------------------

    def begin_check(self, training: bool) -> None:
        """In the first forward in training, refuse dropout that was not recognized in any module's code."""
        if training and not self.checked:
            self.checked = True
            self.first_forward.enter_context(FirstForwardCheck(self))

    def end_check(self) -> None:
        self.first_forward.close()

    # -- the replacement of dropout -------------------------------------------------------------------------------

    def dropout(self, x: torch.Tensor, p: float, call_site: str, inplace: bool) -> torch.Tensor:
        """Dropout of an activation with the global mask."""
        with private.plain_calls():
            keep = self._mask(x.shape, x.device, p, call_site, self._layout_of_activation)
            return drop(x, keep, p, inplace)

    def attention(self, call_site: str, query: Any, key: Any, value: Any, p: float, **options: Any) -> Any:
        """Attention with a global mask over the weights [batch, heads, query tokens, key tokens]."""
        with private.plain_calls():
            if query.ndim != 4:
                what = f"attention of shape {list(query.shape)}"
                raise no_global_mask(what, "call it with [batch, heads, ..]", call_site)
            shape = torch.Size((*query.shape[:-1], key.shape[-2]))
            keep = self._mask(shape, query.device, p, call_site, self._layout_of_attention)
            return attention(query, key, value, keep, p, **options)

    def of_weights(self, call_site: str, query: torch.Tensor, key: torch.Tensor, p: float) -> WeightDropout:
        """The dropout of attention weights over `cp`, where no rank has all of them: masks are drawn with the
        scores."""
        stream, forward = self.clock.call(call_site)
        layout = self.layouts.get(call_site)
        if layout is None:
            layout = self._layout_of_attention(torch.Size((*query.shape[:-1], key.shape[-2])), call_site)
            self.layouts[call_site] = layout
        position, heads = forward.position, query.shape[1]
        first = first_row(query.shape[:1], position.batch_offset, position.batch_size)
        return WeightDropout(stream, p, first, layout.rank * heads, layout.size * heads)

    def place_of_draw(self, shape: torch.Size, device: torch.device, call_site: str, line: str) -> DrawPlace:
        """The elements of a draw that this rank draws. line: for messages. Raises: ModelError `unplaceable-draw`."""
        key, forward = self.clock.call(call_site)
        position = forward.position
        if call_site not in self.layouts:
            self.layouts[call_site] = self._layout_of_draw(shape, position.batch_size, line)
        layout = self.layouts[call_site]
        if layout.kind == "sequence" and private.backward_id() == -1:
            assert self.region is not None
            forward.tokens[call_site] = self.region.inside
        whole = forward.tokens.get(call_site)
        if layout.kind == "sequence" and whole is None:  # one token is decoded: nothing is sharded
            layout = ActivationLayout("full")
        positions = None if self.sequences is None else self.sequences.local_positions()
        local = None if positions is None else LocalTokens(*positions)
        tokens = local.count if local is not None else whole
        if layout.kind == "sequence" and tokens is not None:
            tokens = -(-tokens // self.size)
        order = order_of(shape, position.batch_size, tokens, whole if local is None else local.full, line)
        batch = (position.batch_offset, position.batch_size)
        return place_of(key, order, layout, batch, whole, local, device)

    def _mask(
        self, shape: torch.Size, device: torch.device, p: float, call_site: str, layout_of: Callable
    ) -> torch.Tensor:
        global_index, key = self._place(shape, device, call_site, layout_of)
        if p >= 1.0:
            return torch.zeros(shape, dtype=torch.bool, device=device)
        return mask(shape, global_index, key, p)

    def _place(self, shape: torch.Size, device: torch.device, call_site: str, layout_of: Callable) -> Any:
        """(global index of the elements of an activation, key of the call)."""
        key, forward = self.clock.call(call_site)
        layout = self.layouts.get(call_site)
        if layout is None:
            layout = self.layouts[call_site] = layout_of(shape, call_site)
        if layout.kind == "sequence" and private.backward_id() == -1:
            assert self.region is not None
            forward.tokens[call_site] = self.region.inside  # that of an encoder is another one than that of its decoder
            if forward.tokens[call_site] is None:  # one token is decoded: nothing is sharded
                layout = ActivationLayout("full")
        position = forward.position
        batch = (position.batch_offset, position.batch_size)
        positions = None if self.sequences is None else self.sequences.local_positions()
        local = None if positions is None else LocalTokens(*positions)
        return layout.global_index(shape, batch, forward.tokens.get(call_site), device, local), key

    # -- layouts of activations -----------------------------------------------------------------------------------

    def _layout_of_activation(self, shape: torch.Size, call_site: str) -> ActivationLayout:
        if self.size == 1:
            return ActivationLayout("full")
        if self.last is None:
            in_region = self.region is not None and self.region.inside is not None
            return ActivationLayout("sequence", self.rank, self.size) if in_region else ActivationLayout("full")
        columns = columns_of(self.last.layout, self.rank, shape[-1])
        if columns is not None:
            return columns
        if len(shape) == 4 and shape[2] == shape[3]:  # attention weights of a forward that computes them itself
            return self._layout_of_attention(shape, call_site)
        raise no_global_mask(
            f"an activation of shape {list(shape)} after a column linear of {self.last.widest} local features",
            "put dropout on the linear's own output, on attention weights, or after the row linear",
            call_site,
        )

    def _layout_of_draw(self, shape: torch.Size, rows: int | None, line: str) -> ActivationLayout:
        """Of numbers for rows, or for the step, all ranks of tp have all; of others those for the activations there."""
        if self.size == 1 or math.prod(shape) in (1, rows):
            return ActivationLayout("full")
        if not self.follows:
            what = f"random numbers of shape {list(shape)}, first drawn after forwards that drew none,"
            raise no_place(what, line)
        try:
            return self._layout_of_activation(shape, line)
        except ModelError as error:
            raise no_place(f"random numbers of shape {list(shape)} between column and row linears", line) from error

    def _layout_of_attention(self, shape: torch.Size, call_site: str) -> ActivationLayout:
        if self.size == 1 or self.last is None:
            if self.region is not None and self.region.inside is not None:
                raise no_global_mask("attention on a sequence shard", "give the block a `gather` rule", call_site)
            return ActivationLayout("full")
        if self.last.widest % shape[1]:
            raise no_global_mask(
                f"attention over {shape[1]} heads after column linears of {self.last.widest} local features",
                "shard the weights by heads: `colwise(heads)`",
                call_site,
            )
        return ActivationLayout("heads", self.rank, self.size)


class ModuleDropout(NamedTuple):
    """The dropout of one module.

    rates: see `rates_of`.
    """

    sites: DropoutSites
    fqn: str
    rates: Sequence[tuple[nn.Module, str]] = ()


class Scope:
    """One call of a module whose code calls dropout functions. Its call sites are numbered in the order of their
    calls."""

    __slots__ = ("fqn", "number")

    def __init__(self, fqn: str):
        self.fqn, self.number = fqn, 0

    def call_site(self) -> str:
        self.number += 1
        return f"{self.fqn}#{self.number - 1}"


# -- functions ---------------------------------------------------------------------------------------------------------


class _FunctionalDropout(TorchFunctionMode):
    """Intercepts calls of functional dropout while a module with such calls runs."""

    def __init__(self, sites: DropoutSites):
        super().__init__()
        self.sites = sites

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        replacement = _INTERCEPTED.get(func)
        kwargs = kwargs or {}
        return func(*args, **kwargs) if replacement is None else replacement(self.sites, func, args, kwargs)


def _functional_dropout(sites: DropoutSites, func: Any, args: tuple, kwargs: dict) -> Any:
    arguments = _bound(("input", "p", "training", "inplace"), (None, 0.5, True, False), args, kwargs)
    if not arguments["training"] or not arguments["p"]:
        return func(*args, **kwargs)
    return sites.dropout(arguments["input"], arguments["p"], sites.scopes[-1].call_site(), arguments["inplace"])


def _torch_dropout(sites: DropoutSites, func: Any, args: tuple, kwargs: dict) -> Any:
    arguments = _bound(("input", "p", "train"), (None, 0.5, True), args, kwargs)
    if not arguments["train"] or not arguments["p"]:
        return func(*args, **kwargs)
    return sites.dropout(arguments["input"], arguments["p"], sites.scopes[-1].call_site(), func is torch.dropout_)


def _attention(sites: DropoutSites, func: Any, args: tuple, kwargs: dict) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    arguments = _bound(names, (None, None, None, None, 0.0, False, None, False), args, kwargs)
    p = arguments.pop("dropout_p")
    if not p:
        return func(*args, **kwargs)
    query, key, value = (arguments.pop(name) for name in names[:3])
    return sites.attention(sites.scopes[-1].call_site(), query, key, value, p, **arguments)


def _refused(sites: DropoutSites, func: Any, args: tuple, kwargs: dict) -> Any:
    name = func.__name__
    training = kwargs.get("training", kwargs.get("train", True))
    p = kwargs.get("dropout_p", kwargs.get("p", 0.5))
    if name == "multi_head_attention_forward":
        p, training = args[10] if len(args) > 10 else p, args[13] if len(args) > 13 else training
    if not training or not p:
        return func(*args, **kwargs)
    raise refused_function(name, sites.scopes[-1].fqn)


def refused_function(name: str, fqn: str) -> ModelError:
    return no_global_mask(name, "use nn.Dropout, F.dropout, or scaled_dot_product_attention(dropout_p=...)", fqn)


def _bound(names: tuple[str, ...], defaults: tuple, args: tuple, kwargs: dict) -> dict[str, Any]:
    return {**dict(zip(names, defaults, strict=True)), **dict(zip(names, args, strict=False)), **kwargs}


REFUSED_FUNCTIONS = (
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.multi_head_attention_forward,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
    torch.native_dropout,
)
_INTERCEPTED: dict[Any, Callable[[DropoutSites, Any, tuple, dict], Any]] = {
    F.dropout: _functional_dropout,
    torch.dropout: _torch_dropout,
    torch.dropout_: _torch_dropout,
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys(REFUSED_FUNCTIONS, _refused),
}


# -- modules -----------------------------------------------------------------------------------------------------------


class FirstForwardCheck(TorchFunctionMode):
    """In the first forward in training, raises an error for dropout that was not recognized in any module's code."""

    def __init__(self, sites: DropoutSites):
        super().__init__()
        self.sites = sites

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _INTERCEPTED and not self.sites.scopes and self._drops(func, args, kwargs):
            raise no_global_mask(
                f"{func.__name__}, called by a function that is not a method of a module",
                "call it from the forward of a module, or use nn.Dropout",
            )
        return func(*args, **kwargs)

    def _drops(self, func: Any, args: tuple, kwargs: dict) -> bool:
        if func is F.scaled_dot_product_attention:
            return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
        arguments = _bound(("input", "p", "training"), (None, 0.5, True), args[:3], kwargs)
        return bool(arguments.get("p")) and bool(arguments.get("training", arguments.get("train", True)))


def dropout_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """`nn.Dropout.forward` with the global mask."""
    if not self.training or self.p == 0.0:
        return input
    planned: ModuleDropout = self._applied.dropout
    return planned.sites.dropout(input, self.p, planned.fqn, self.inplace)


def scoped_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module whose code calls dropout functions; they are intercepted in training at a rate above
    zero."""
    sites, fqn, rates = self._applied.dropout
    if not _drops_now(self, rates):
        return run_inner(self, DROPOUT, args, kwargs)
    sites.scopes.append(Scope(fqn))
    try:
        if len(sites.scopes) > 1:  # the mode is on
            return run_inner(self, DROPOUT, args, kwargs)
        with sites.mode:
            return run_inner(self, DROPOUT, args, kwargs)
    finally:
        sites.scopes.pop()


def _drops_now(module: nn.Module, rates: Sequence[tuple[nn.Module, str]]) -> bool:
    return module.training and (not rates or any(holder.__dict__[name] for holder, name in rates))


@contextmanager
def dropout_scope(module: nn.Module) -> Iterator[None]:
    """Intercept the dropout functions of a module inside: for a forward that backward runs again, without
    `scoped_forward`.

    The forward itself is inside of both: the numbers of its calls start again here, as they do in the second forward.
    """
    dropout = as_instance(applied(module).dropout, ModuleDropout)
    if dropout is None or not _drops_now(module, dropout.rates):
        yield
        return
    scopes = dropout.sites.scopes
    scopes.append(Scope(dropout.fqn))
    try:
        with dropout.sites.mode if len(scopes) == 1 else nullcontext():
            yield
    finally:
        scopes.pop()


def rates_of(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, attribute) of a module's dropout rates: numbers with `drop` in their name, and `p` of `nn.Dropout`
    children.

    While all of them are zero there is no dropout, and the function mode, which costs 1 to 2 us per torch call, stays
    off.
    """
    attributes = [
        (module, name) for name, value in vars(module).items() if "drop" in name.lower() and type(value) in (int, float)
    ]
    return attributes + [(child, "p") for child in module.children() if isinstance(child, nn.Dropout)]


def refused_modules(module: nn.Module) -> list[Problem]:
    """Problems for modules whose dropout has no global mask."""
    unsupported = unsupported_modules(module).items()
    return [problem for fqn, inner in unsupported for problem in refused_function(type(inner).__name__, fqn).problems]


def unsupported_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules, by name, that drop at a rate above zero and whose dropout has no global mask."""
    modules = {}
    for fqn, inner in module.named_modules():
        p = getattr(inner, "p", 0.0) if isinstance(inner, _REFUSED_MODULES) else 0.0
        if isinstance(inner, (nn.MultiheadAttention, nn.RNNBase)):
            p = inner.dropout
        if isinstance(inner, nn.RReLU) or p:
            modules[fqn] = inner
    return modules


_REFUSED_MODULES = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
