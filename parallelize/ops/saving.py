"""What a recomputed unit keeps instead of computing or sending it again: names, and what each of them costs.

| name            | kept is the result of                                     | bytes a unit (T tokens a rank, F out-features)  |
|-----------------|-----------------------------------------------------------|-------------------------------------------------|
| matmul          | products with weights: mm, addmm, scaled and grouped mm   | T x F of each linear                            |
| batched_matmul  | bmm, baddbmm: in eager attention the scores, T^2 a head   | their results                                   |
| attention       | the fused attention kernels                               | T x heads x head_dim, and its statistics        |
| collectives     | the five below                                            | their sum                                       |
| all_reduce      | sums of planned blocks                                    | T x hidden of each                              |
| all_gather      | rows gathered for planned blocks                          | P x T x hidden of each, P ranks                 |
| reduce_scatter  | own rows of sums                                          | T x hidden of each                              |
| all_to_all      | traded shards                                             | as large as what is sent                        |
| ring_attention  | attention over `cp`, with its statistics                  | T x heads x head_dim                            |
| functional_collectives | PyTorch's functional collectives in the module's own code, DTensor's among them | their results |
| aten.mm, ...    | any one op                                                | its results                                     |

An overlapped linear is one op with its collective: `all_gather` keeps its products too, `reduce_scatter` and `all_reduce` make
the product as little as the message a second time. Collectives are kept by the tape, at no cost for other ops; other ops by
PyTorch's selective checkpointing, which looks at every op of the unit. An op that draws random numbers (attention with dropout)
is always done again: skipped, it would leave the generator where the ops after it do not expect it.

Limits of PyTorch's part: with ops saved a graph is walked backward once, and a saved product that the model writes to in
place is an error in backward. With collectives alone neither holds.

Source: Korthikanti et al., arXiv:2205.05198, sec. 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from parallelize import _torch_private as private
from parallelize.errors import PlanError, Problem, did_you_mean
from parallelize.groups import Group
from parallelize.ops import (
    linears,  # noqa: F401  whose ops get a kernel here
    tape,
)
from parallelize.ops.library import KERNELS, LIBRARY, group_key, with_group

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring_attention")
DEFAULT = ("matmul", "attention", "collectives")
_LINEARS = {
    "all_gather_linear": "all_gather",
    "linear_reduce_scatter": "reduce_scatter",
    "linear_all_reduce": "all_reduce",
}
_GROUPS = {
    "matmul": (
        *("aten.mm", "aten.addmm", "aten._scaled_mm", "aten._grouped_mm", "aten._scaled_grouped_mm"),
        *("parallelize.column_linear", *(f"parallelize.{name}" for name in _LINEARS)),
    ),
    "batched_matmul": ("aten.bmm", "aten.baddbmm"),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward",
        "aten._efficient_attention_forward",
        "higher_order.flex_attention",
        "parallelize.ring_attention",
    ),
    "functional_collectives": tuple(
        f"_c10d_functional.{name}"
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")
    ),
}
_TRACED = {
    "all_reduce": ("all_reduce", "all_reduce_"),
    "all_gather": ("all_gather_into_tensor",),
    "reduce_scatter": ("reduce_scatter_tensor",),
    "all_to_all": ("all_to_all_single",),
    "ring_attention": (),
}
# what the code around planned collectives runs, which a replay that sends nothing leaves out
_OWN_OPS = {"clone", "copy", "cat", "constant_pad_nd", "empty", "new_empty", "zeros", "fill"}


def what_to_keep(save: Iterable[str]) -> tuple[frozenset[str], frozenset[Any]]:
    """(kinds of collectives, ops) behind names.

    Raises: PlanError `unknown-op`, `cannot-save`.
    """
    kinds: set[str] = set()
    ops: set[Any] = set()
    for name in save:
        if name == "collectives":
            kinds |= set(KINDS)
        elif name in KINDS:
            kinds.add(name)
        elif name in _GROUPS:
            ops |= {op for member in _GROUPS[name] for op in _overloads(member)}  # this torch may lack some
        else:
            ops |= _named(name)
    return frozenset(kinds), frozenset(ops)


def traced_ops(kinds: frozenset[str], ops: frozenset[Any]) -> list[Any]:
    """The same for a compiler, which sees collectives as functional ops."""
    return [*ops, *(op for kind in kinds for name in _TRACED[kind] for op in _overloads(f"_c10d_functional.{name}"))]


def _named(name: str) -> set[Any]:
    found = _overloads(name) if isinstance(name, str) else set()
    known = [*_GROUPS, "collectives", *KINDS, *(member for members in _GROUPS.values() for member in members)]
    if not found:
        fix = did_you_mean(str(name), known)
        raise PlanError(Problem("unknown-op", f"save has {name!r}, which is no group and no op", fix=fix))
    for op in found:
        schema = getattr(op, "_schema", None)
        namespace, _, word = ("" if schema is None else schema.name).partition("::")
        if schema is not None and (_aliases(schema) or namespace == "c10d" or word.strip("_") in _OWN_OPS):
            what = f"{name} is a view, writes to its input, or only copies: it has no result that can be kept"
            raise PlanError(Problem("cannot-save", what, fix="name ops that compute: " + ", ".join(_GROUPS)))
    return found


def _aliases(schema: Any) -> bool:
    return any(argument.alias_info is not None for argument in schema.arguments)


def _overloads(name: str) -> set[Any]:
    """The ops of "namespace.op" (every overload that is functional) or "namespace.op.overload"; none where absent."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(torch.ops, namespace), packet)
        if overload:
            return {getattr(found, overload)}
        if not hasattr(found, "overloads"):  # a higher-order op
            return {found}
        ops = [getattr(found, one) for one in found.overloads()]
    except (AttributeError, RuntimeError):
        return set()
    functional = [op for op in ops if not _aliases(op._schema)]
    return set(functional or ops)


class Saving:
    """Which ops one forward of a unit keeps the results of, and how many there were.

    Args:
        ops: whose results are kept.
    """

    __slots__ = ("num_bytes", "number", "ops")

    def __init__(self, ops: frozenset[Any]):
        self.ops, self.number = ops, 0
        self.num_bytes: int | None = 0  # None where this torch does not tell

    def policy(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in self.ops or _draws(op, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            self.number += 1
            out = getattr(context, "op_output", None)  # torch 2.13 has it, older ones do not
            if out is None:
                self.num_bytes = None
            elif self.num_bytes is not None:
                tensors = [leaf for leaf in private.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
                self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        return CheckpointPolicy.MUST_SAVE

    def contexts(self, call: tape.Call) -> tuple[AbstractContextManager, AbstractContextManager]:
        """What the forward and its replays run in."""
        first, again = tape.Pass(call, replay=False), tape.Pass(call, replay=True)
        if not self.ops:
            return first, again
        caching, cached = create_selective_checkpoint_contexts(self.policy)
        return _Both(first, caching), _Both(again, cached)


class _Both(AbstractContextManager):
    def __init__(self, *contexts: AbstractContextManager):
        self.contexts, self.stack = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self.contexts:
            self.stack.enter_context(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)


def _draws(op: Any, args: tuple, kwargs: dict) -> bool:
    """Whether this call of an op takes random numbers."""
    place = _dropout_argument(op)
    if place is None:
        return False
    number, name = place
    return bool(kwargs.get(name, args[number] if 0 <= number < len(args) else 0.0 if name else 1.0))


@lru_cache(maxsize=256)
def _dropout_argument(op: Any) -> tuple[int, str] | None:
    """(position, name) of the probability of an op that draws random numbers; (-1, "") where it has none."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return None
    names = [argument.name for argument in op._schema.arguments]
    return next(((n, name) for n, name in enumerate(names) if name.startswith("dropout")), (-1, ""))


def _once(name: str) -> Callable[..., Any]:
    """The kernel of an overlapped linear, which in a replay may find its result on the tape."""

    def kernel(*args: Any) -> Any:
        args = with_group(name, args, Group.by_key(group_key(name, args)))
        return tape.sent(_LINEARS[name], KERNELS[name], *args)

    return kernel


for _name in _LINEARS:
    for _device in ("CPU", "CUDA", "XPU"):  # before the kernel for every device that `ops/linears.py` has
        LIBRARY.impl(_name, _once(_name), _device)
