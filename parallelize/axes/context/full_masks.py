"""Attention masks of the full sequence, for attention modules that are gathered over `cp`.

A model of `transformers` makes masks for the tokens that it sees, which are those of one rank. Its config names another maker of masks,
which calls the model's own one for the full sequence, with the padding and the packed documents of the call. Where any attention runs
over the ranks, no mask is made: that one needs none, and a model makes all masks in one place.
"""

from __future__ import annotations

from typing import Any

import torch

from parallelize.axes.context.forward_state import Context
from parallelize.base.errors import ModelError, Problem
from parallelize.state.local_config import LocalConfig, full_config

T = torch.Tensor
NAME = "parallelize_gathered"
"""of the maker of masks in the registry of `transformers`"""
_CONTEXT = "context_parallel"  # the field of a config by which the maker knows the sequences


def register_masks() -> None:
    """Register the maker of masks with `transformers`."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(NAME, _full_mask)


def config_with_masks(config: Any, context: Context) -> LocalConfig:
    """The config of a module that makes masks."""
    return LocalConfig(config, {"_attn_implementation": NAME, _CONTEXT: context})


def mask_of_model(context: Context, call: dict[str, Any], full: int) -> T | None:
    """The padding mask that a model is called with, [B, S] although it gets local tokens; None for none.

    Where masks are made it is never None, so that the model does not take the jumps in local positions for packed documents.
    """
    padding = context.current().padding
    if padding is not None or not context.makes_masks:
        return padding
    tokens = next(value for value in call.values() if isinstance(value, T) and value.ndim >= 2)
    return torch.ones(tokens.shape[0], full, dtype=torch.int64, device=tokens.device)


def _full_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any = None, config: Any = None, **options: Any
) -> T | None:
    """The mask of all tokens, as `transformers` makes it without `cp`; its arguments are of the local ones."""
    from transformers import masking_utils

    context: Context = getattr(config, _CONTEXT)
    sequences, name = context.current(), full_config(config)._attn_implementation
    if name not in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS:
        what = f"masks of attn_implementation={name!r} are not known for the full sequence of a gathered module"
        raise ModelError(Problem("given-mask", what, fix='attn_implementation="sdpa" or "eager"'))
    full, padding = sequences.layout.full, sequences.padding
    options |= {"q_offset": 0, "kv_offset": 0, "attention_mask": None if padding is None else padding.bool()}
    if sequences.positions is not None:
        positions = sequences.positions.expand(batch_size, -1)
        packed: Any = masking_utils.find_packed_sequence_indices(positions)  # not None: the call has several documents
        mask_function = masking_utils.packed_sequence_compatibility_function(mask_function, positions, packed)
        options["allow_is_causal_skip"] = False
    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name]
    return make(
        batch_size=batch_size, q_length=full, kv_length=full, mask_function=mask_function, config=config, **options
    )
