"""What a recomputed unit saves instead of computing or communicating it again: names, and the memory that each takes.

| name            | saves the results of                                      | elements per unit (T tokens per rank, F out-features) |
|-----------------|-----------------------------------------------------------|-------------------------------------------------|
| matmul          | matmuls with weights: mm, addmm, scaled and grouped mm    | T x F of each linear                            |
| batched_matmul  | bmm, baddbmm: in eager attention the scores, T^2 per head | their results                                   |
| attention       | the fused attention kernels                               | T x heads x head_dim, and its statistics        |
| collectives     | the five below                                            | their sum                                       |
| all_reduce      | all-reduces of planned blocks                             | T x hidden of each                              |
| all_gather      | all-gathers for planned blocks                            | P x T x hidden of each, P ranks                 |
| reduce_scatter  | reduce-scatters of planned blocks                         | T x hidden of each                              |
| all_to_all      | exchanged shards                                          | as large as the message                         |
| ring_attention  | attention over `cp`, with its statistics                  | T x heads x head_dim                            |
| functional_collectives | PyTorch's functional collectives in the module's code, including those of DTensor | their results |
| aten.mm, ...    | a single op                                               | its results                                     |

An overlapped linear is one op with its collective: `all_gather` saves the matmul's result too, and `reduce_scatter` and
`all_reduce` repeat neither the matmul nor the message. The replay cache saves collectives, at no cost for other ops.
PyTorch's selective checkpointing saves other ops, and intercepts every op of the unit. An op that draws random numbers
(attention with dropout) is always repeated: skipping it would leave the generator in the wrong state for the ops after
it.

Limits of selective checkpointing: with saved ops, backward can run once, and an in-place write to a saved result is an
error in backward. With collectives alone there are no such limits.

Source: Korthikanti et al., arXiv:2205.05198, sec. 5.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from parallelize.base.errors import PlanError, Problem, did_you_mean
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops import replay_cache
from parallelize.ops.library import KERNELS, LIBRARY

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
        "parallelize.block_attention",
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
# ops of the code around planned collectives, which a replay from the cache does not run
_COPYING_OPS = {"clone", "copy", "cat", "constant_pad_nd", "empty", "new_empty", "zeros", "fill"}


def kinds_and_ops(save: Iterable[str]) -> tuple[frozenset[str], frozenset[Any]]:
    """(kinds of collectives, ops) of the names in `save`.

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
    """The ops to save for a compiler, which traces collectives as functional ops."""
    return [*ops, *(op for kind in kinds for name in _TRACED[kind] for op in _overloads(f"_c10d_functional.{name}"))]


def _named(name: str) -> set[Any]:
    ops = _overloads(name) if isinstance(name, str) else set()
    known = [*_GROUPS, "collectives", *KINDS, *(member for members in _GROUPS.values() for member in members)]
    if not ops:
        fix = did_you_mean(str(name), known)
        raise PlanError(Problem("unknown-op", f"save has {name!r}, which is no group and no op", fix=fix))
    for op in ops:
        schema = getattr(op, "_schema", None)
        namespace, _, word = ("" if schema is None else schema.name).partition("::")
        if schema is not None and (_aliases(schema) or namespace == "c10d" or word.strip("_") in _COPYING_OPS):
            what = f"{name} is a view, writes to its input, or only copies: it has no result that can be saved"
            raise PlanError(Problem("cannot-save", what, fix="name ops that compute: " + ", ".join(_GROUPS)))
    return ops


def _aliases(schema: Any) -> bool:
    return any(argument.alias_info is not None for argument in schema.arguments)


def _overloads(name: str) -> set[Any]:
    """The ops of "namespace.op" (every functional overload) or "namespace.op.overload"; none if it does not exist."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    try:
        op_packet = getattr(getattr(torch.ops, namespace), packet)
        if overload:
            return {getattr(op_packet, overload)}
        if not hasattr(op_packet, "overloads"):  # a higher-order op
            return {op_packet}
        ops = [getattr(op_packet, overload_name) for overload_name in op_packet.overloads()]
    except (AttributeError, RuntimeError):
        return set()
    functional = [op for op in ops if not _aliases(op._schema)]
    return set(functional or ops)


class SavePolicy:
    """The policy of selective checkpointing for one forward of a unit. It counts the saved results and their bytes.

    Args:
        ops: ops whose results are saved.
    """

    __slots__ = ("count", "num_bytes", "ops")

    def __init__(self, ops: frozenset[Any]):
        self.ops, self.count = ops, 0
        self.num_bytes: int | None = 0  # None if this torch does not report it

    def policy(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in self.ops or _draws(op, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            self.count += 1
            out = getattr(context, "op_output", None)  # torch 2.13 has it, older ones do not
            if out is None:
                self.num_bytes = None
            elif self.num_bytes is not None:
                tensors = [leaf for leaf in private.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
                self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        return CheckpointPolicy.MUST_SAVE

    def contexts(self, cache: replay_cache.ReplayCache) -> tuple[AbstractContextManager, AbstractContextManager]:
        """The contexts of the forward and of its replays."""
        first, again = replay_cache.RecomputePass(cache, replay=False), replay_cache.RecomputePass(cache, replay=True)
        if not self.ops:
            return first, again
        caching, cached = (_mode_for_ops(mode, self.ops) for mode in create_selective_checkpoint_contexts(self.policy))
        return _Both(first, caching), _Both(again, cached)


def _mode_for_ops(mode: Any, ops: frozenset[Any]) -> Any:
    """PyTorch's mode for these ops alone. It counts all ops, and refuses a replay that runs more than its forward did.

    A unit of `fully_shard` inside of a recomputed one, as experts are that fold over data axes, does: outside of the
    forward of the root it takes itself for the root, and gathers what was gathered.
    """
    stock: Any = type(mode)
    mode.__class__, mode.ops = _mode_of_ops(stock), ops
    return mode


@lru_cache(maxsize=4)
def _mode_of_ops(stock: Any) -> type:
    def dispatch(self: Any, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if op not in self.ops:
            return op(*args, **(kwargs or {}))
        return stock.__torch_dispatch__(self, op, types, args, kwargs)

    return type(f"{stock.__name__}OfOps", (stock,), {"__torch_dispatch__": dispatch})


class _Both(AbstractContextManager):
    def __init__(self, *contexts: AbstractContextManager):
        self.contexts, self.stack = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self.contexts:
            self.stack.enter_context(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)


def _draws(op: Any, args: tuple, kwargs: dict) -> bool:
    """Whether this call of an op draws random numbers."""
    argument = _dropout_argument(op)
    if argument is None:
        return False
    position, name = argument
    if not name:  # a random op without a probability
        return True
    return bool(kwargs.get(name, args[position] if position < len(args) else 0.0))


@lru_cache(maxsize=256)
def _dropout_argument(op: Any) -> tuple[int, str] | None:
    """(position, name) of the dropout probability of an op that draws random numbers; (-1, "") if it has no
    probability.

    None for an op that draws no random numbers.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return None
    names = [argument.name for argument in op._schema.arguments]
    return next(((n, name) for n, name in enumerate(names) if name.startswith("dropout")), (-1, ""))


def _kernel_with_replay(name: str) -> Callable[..., Any]:
    """The kernel of an overlapped linear, which in a replay may take its result from the replay cache."""

    def kernel(*args: Any) -> Any:
        group_kernel = KERNELS[name]
        return replay_cache.run_collective(_LINEARS[name], group_kernel.function, *group_kernel.with_group(args))

    return kernel


for _name in _LINEARS:
    # these take precedence over the kernel for all devices in `ops/matmul/matmul_ops.py`
    for _device in ("CPU", "CUDA", "XPU"):
        LIBRARY.impl(_name, _kernel_with_replay(_name), _device)
