"""What one forward says about the dims of its tensors: which are the same, and what was done along each."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from parallelize.base.user_code import frame_of_caller, place_of
from parallelize.plan.dims.factors import Dim, new_dim, unify

T = torch.Tensor
Dims = list[Dim]


@dataclass(frozen=True, eq=False)
class FullDimUse:
    """An operation that needs all of a dim, so that the dim cannot be sharded.

    Attributes:
        line: of the model's code.
        is_known: False: there is no rule for the operation, or its dims could not be followed, so that it may need
            less.
    """

    dim: Dim
    operation: str
    module: str
    line: str = ""
    is_known: bool = True


@dataclass(frozen=True, eq=False)
class Contraction:
    """A matmul summed over a dim.

    Attributes:
        weight: the parameter among its operands, by name; empty: none, or several.
        rows: the number of vectors that are multiplied by it, such as tokens; 0: unknown.
    """

    dim: Dim
    weight: str
    module: str
    line: str = ""
    rows: int = 0


@dataclass(frozen=True, eq=False)
class Slice:
    """A range of a dim, which is a dim of its own. `joined`: it was there before, and the dim was made of it by a
    concatenation."""

    dim: Dim
    start: int
    stop: int
    part: Dim
    module: str
    line: str = ""
    joined: bool = False


@dataclass(frozen=True, eq=False)
class ParameterUse:
    """An operation on tensors that depend on parameters, and what it returns.

    Attributes:
        weights: the parameters of which an operand was made alone, by name.
        operand: the dims of an operand that depends on parameters and inputs; None: there is none.
        out: the dims of the result.
        linear: whether the result is a matmul with one of `weights`.
        passed: of each of `weights`, the linears that were called on what was made of it.
    """

    weights: frozenset[str]
    operand: Dims | None
    out: Dims
    linear: bool
    operation: str
    module: str
    passed: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SizeRead:
    """A size of a result that a forward computed from an integer attribute. `attribute` may begin with `config.`.

    It is `NAME.shape` of the last size of an argument, which the module's forward has asked for.
    """

    module: str
    attribute: str
    value: int
    dim: Dim
    operation: str


@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows of a table, taken by ids. `of_tokens`: the ids are an input of the model, or made of nothing else."""

    dim: Dim
    table: str
    of_tokens: bool
    module: str = ""


@dataclass(frozen=True)
class Ratio:
    """The quotient of two integer attributes, of which a size was computed: (module, attribute, value) of each."""

    dividend: tuple[str, str, int]
    divisor: tuple[str, str, int]


@dataclass(eq=False)
class HiddenCall:
    """A call of a module with hidden states.

    Attributes:
        argument: the position, and the name, of its first input that is a floating [batch, tokens, width].
        shape, out: the sizes of that input and of its first result; None where it has another form.
        source, result: the storages of that input and of the result, which tell what is called on what.
    """

    module: str
    argument: tuple[int, str]
    shape: tuple[int, ...]
    source: int
    out: tuple[int, ...] | None = None
    result: int = 0


@dataclass
class Record:
    """The record of one forward.

    Attributes:
        parameters: the dims of each parameter, by each of its names. first_names: by each name, the one by which uses
            name it.
        computed_with: the parameters that an operation read, by first name; the forward may leave out others, as those
            of an optional branch.
        fixed: dims that other code sees or gives in full: (dim, of what).
        repeats: factors by which the heads of queries are more than those of keys and values.
        lookups: of embeddings.
        unknown: operations without a rule, with the modules that called them.
        calls: of modules with hidden states, in the order in which they began.
        callers: (module, the innermost module whose forward called it) of every call.
        ratios: of attributes, in the order in which they were read.
        numbers: attributes that became real numbers, as in a scale: (module, attribute) of each.
        widths: the last dim of arguments that a module's forward asked for their shape: by module and `NAME.shape`.
        token_shards: at the boundaries of a plan: dims of tokens of which a rank has a part. gathered_tokens: and which
            were gathered.
        split_inputs: of a module that splits the features of its input: that dim before it was split.
        gathered_outputs: of a module whose features are gathered: that dim of its output.
    """

    parameters: dict[str, Dims] = field(default_factory=dict)
    first_names: dict[str, str] = field(default_factory=dict)
    computed_with: set[str] = field(default_factory=set)
    mixes: list[FullDimUse] = field(default_factory=list)
    contractions: list[Contraction] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    uses: list[ParameterUse] = field(default_factory=list)
    reads: list[SizeRead] = field(default_factory=list)
    fixed: list[tuple[Dim, str]] = field(default_factory=list)
    repeats: list[Dim] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    calls: list[HiddenCall] = field(default_factory=list)
    callers: set[tuple[str, str]] = field(default_factory=set)
    ratios: dict[Ratio, None] = field(default_factory=dict)
    numbers: set[tuple[str, str]] = field(default_factory=set)
    widths: dict[tuple[str, str], Dim] = field(default_factory=dict)
    token_shards: list[Dim] = field(default_factory=list)
    gathered_tokens: list[Dim] = field(default_factory=list)
    split_inputs: dict[str, Dim] = field(default_factory=dict)
    gathered_outputs: dict[str, Dim] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._dims: Any = WeakIdKeyDictionary()
        self._weights: Any = WeakIdKeyDictionary()
        self._passed: Any = WeakIdKeyDictionary()
        self._learned: Any = WeakIdKeyDictionary()
        self._ids: Any = WeakIdKeyDictionary()
        self._constant: Any = WeakIdKeyDictionary()
        self._computed: Any = WeakIdKeyDictionary()
        self.module = ""
        self.arguments: dict[str, T] = {}  # tensors that it is called with, by name

    # -- tensors -------------------------------------------------------------------------------------------------------

    def dims(self, tensor: T) -> Dims:
        """The dims of a tensor; new ones for a tensor that no recorded operation made."""
        dims = self._dims.get(tensor)
        if dims is None:
            dims = self._dims[tensor] = [new_dim(size) for size in tensor.shape]
            if tensor.ndim and tensor.numel() > 1:
                self.fixed += [(dim, "a constant of the model's code") for dim in dims if dim]
        return dims

    def set(self, tensor: T, dims: Dims) -> None:
        self._dims[tensor] = dims

    def fresh(self, tensor: T) -> None:
        """New dims, about which nothing is known."""
        self.set(tensor, [new_dim(size) for size in tensor.shape])

    def weights(self, tensor: T) -> frozenset[str]:
        """The parameters of which a tensor was made alone."""
        return self._weights.get(tensor, frozenset())

    def depends(self, tensor: T) -> bool:
        """Whether a tensor depends on a parameter, so that it has a gradient in training."""
        return bool(self._learned.get(tensor))

    def weight_of(self, module: str) -> str:
        """The weight of a module by the name that the record has of it, which is that of another module where it is
        tied."""
        name = f"{module}.weight".lstrip(".")
        return self.first_names.get(name, name)

    def add_weight(self, tensor: T, name: str, dims: Dims) -> None:
        self.set(tensor, dims)
        self._weights[tensor], self._learned[tensor] = frozenset((name,)), True

    def mark_constant(self, tensor: T) -> None:
        """A buffer, which depends on no input."""
        self._constant[tensor] = True

    def is_constant(self, tensor: T) -> bool:
        """Whether a tensor was made of buffers and numbers alone."""
        return bool(self._constant.get(tensor))

    def is_computed(self, tensor: T) -> bool:
        """Whether a tensor depends on activations, as choices of a router do."""
        return bool(self._computed.get(tensor))

    def mark_ids(self, tensor: T) -> None:
        """Integers that are an input of the model."""
        self._ids[tensor] = True

    def are_ids(self, tensor: T) -> bool:
        return bool(self._ids.get(tensor))

    def sum_gradient(self, tensor: T) -> None:
        """The gradient of this tensor is summed over the ranks: what it was made of has all of its own."""
        self._weights.pop(tensor, None)

    def note(self, inputs: list[T], outputs: list[T], operation: str, linear: bool) -> None:
        """Record how results depend on parameters."""
        weights: frozenset[str] = frozenset().union(*(self.weights(x) for x in inputs))
        self.computed_with |= weights
        alone = bool(weights) and all(self.weights(x) or self.is_constant(x) for x in inputs)
        if all(self.is_constant(x) for x in inputs):
            for out in outputs:
                self.mark_constant(out)
        learned = any(self.depends(x) for x in inputs)
        passed = self._linears_passed(inputs, self.module if linear else "")
        if any(self.is_computed(x) or (self.depends(x) and not self.weights(x)) for x in inputs):
            for out in outputs:
                self._computed[out] = True
        if any(self.are_ids(x) for x in inputs):
            for out in outputs:
                if not out.is_floating_point() and out.dtype != torch.bool:
                    self.mark_ids(out)
        floating = [out for out in outputs if out.is_floating_point() or out.is_complex()]
        for out in floating:
            self._learned[out] = learned
            if alone:
                self._weights[out], self._passed[out] = weights, passed
        if not learned or alone or not floating:
            return
        operands: list[Dims | None] = [self.dims(x) for x in inputs if self.depends(x) and not self.weights(x)]
        result = self.dims(floating[0])
        self.uses += [
            ParameterUse(weights, dims, result, linear, operation, self.module, passed) for dims in operands or [None]
        ]

    def _linears_passed(self, inputs: list[T], linear: str) -> dict[str, frozenset[str]]:
        """Of each parameter of which an input was made alone, the linears on the way. `linear`: the module of this
        matmul, or ""."""
        passed: dict[str, frozenset[str]] = {}
        modules = {linear, self.weight_of(linear).rpartition(".")[0]}
        for x in inputs:
            for name in self.weights(x):
                through = self._passed.get(x, {}).get(name, frozenset())
                if linear and name.rpartition(".")[0] not in modules:
                    through |= {linear}
                passed[name] = passed.get(name, through) & through
        return passed

    # -- dims ----------------------------------------------------------------------------------------------------------

    def mix(self, dims: Iterable[Dim], operation: str, is_known: bool = True) -> None:
        line, is_known = line_of_model(), is_known and not _is_over_ranks()
        self.mixes += [FullDimUse(dim, operation, self.module, line, is_known) for dim in dims if dim]

    def tie(self, first: Dim, second: Dim, operation: str) -> Dim:
        """One dim for two operands, of which one may have size 1."""
        if first and second and first is not second and not unify(first, second):
            self.mix((first, second), f"{operation} of sizes whose factors differ", is_known=False)
        return first or second


_OVER_RANKS = "load_balancing_loss_func"
"""Of `transformers`: where its operations need all tokens, the sums over ranks are made
(`axes/zero/router_loss.py`)."""


def line_of_model() -> str:
    """File and line of the innermost code that is neither PyTorch's nor this package's."""
    return place_of(frame_of_caller(sys._getframe(1)))


def _is_over_ranks() -> bool:
    frame = frame_of_caller(sys._getframe(1))
    return frame is not None and frame.f_code.co_name == _OVER_RANKS
