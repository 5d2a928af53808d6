"""Models that call a part of theirs with embedded sequences, such as a text model beside a tower of images: `cp` shards
the sequences at the call of that part.

What runs before it has all tokens on every rank: it embeds them, and puts what a tower returns in the places of some.
The part, and what follows it, has the tokens of its rank. The gradient of what runs before is each rank's part of a sum
over `cp`, as of any parameter: the gradient of a token is zero on all ranks but its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from parallelize.axes.batch.input_batch import InputBatch
from parallelize.axes.context.cache_shards import cache_refused
from parallelize.axes.context.cached_calls import KEEP, CachedCall
from parallelize.axes.context.forward_state import Context
from parallelize.axes.context.inputs import CACHES, ContextInputs, local_tokens, one_row, refuse_short
from parallelize.plan.schema import Plan
from parallelize.state.forward_steps import SEQUENCES, add_step, run_inner

T = torch.Tensor


class OuterInputs(ContextInputs):
    """The inputs of the model around the part: they stay full, but for the labels."""

    def __init__(self, root: nn.Module, plan: Plan):
        super().__init__(root, plan, checks_positions=False)

    def local_call(
        self, context: Context, root: nn.Module, batch: InputBatch
    ) -> tuple[tuple, dict[str, Any], CachedCall | None]:
        """The arguments of a call: all tokens, and this rank's targets. The context learns the length of the sequences.

        Raises: as `ContextInputs.local_call`.
        """
        self.form.signature.bind(None, *batch.args, **batch.kwargs)
        call = dict(batch.inputs)
        if context.generating or call.get("use_cache") or any(call.get(name) is not None for name in CACHES):
            raise cache_refused(f"a key/value cache of {self.name}, whose sequences are sharded in a part of it,")
        keep = call.get(KEEP)
        if isinstance(keep, T) or keep:
            raise one_row()
        layout = context.layout_of(batch.length)
        refuse_short(layout)
        context.begin(layout.full, None)
        context.current().is_gathered = True  # until the part is called
        if call.get("labels") is not None:
            labels = self.labels_of_call(context, root, batch, layout.full)
            call |= {name: local_tokens(value, layout, context.group.rank) for name, value in labels.items()}
        if self.takes_cache:
            call["use_cache"] = False
        return *batch.call(call), None


class PartCall:
    """The call of the part; stored on its module.

    Args:
        inputs: shards the inputs of the part.
    """

    def __init__(self, context: Context, inputs: ContextInputs):
        self.context, self.inputs = context, inputs

    def run(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.context.current()  # raises outside of a forward of the model
        batch = self.inputs.form.batch(args, kwargs)
        args, kwargs, _ = self.inputs.local_call(self.context, module, batch)
        return run_inner(module, SEQUENCES, args, kwargs)


def install_part(part: nn.Module, context: Context, plan: Plan) -> None:
    """Let a part of a model shard the sequences that it is called with."""

    @functools.wraps(type(part).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._applied.context_call.run(self, args, kwargs)

    call = PartCall(context, ContextInputs(part, plan, has_cache=False))
    add_step(part, SEQUENCES, forward, context_call=call)
