"""`flex_attention` as planned models run it: PyTorch's kernel where there is one, explicit scores where it has no
gradients, and a modeled kernel on tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelize.base.errors import Problem, ShapeError
from parallelize.base.torch_private.torch_flex import flex_attention_served, serve_flex_attention
from parallelize.ops.attention.flex_masks import LocalMask, visible_by
from parallelize.ops.attention.flex_model import modeled_attention
from parallelize.ops.attention.flex_scores import Attended, ScoreMod, attend_by_scores

T = torch.Tensor


def serve_flex() -> None:
    """From now on, while a planned model lives, `flex_attention` is seen by function modes, and has gradients on a
    CPU."""
    serve_flex_attention(attend_flex)


def flex_served() -> Any:
    """A block in which it is so."""
    return flex_attention_served(attend_flex)


def attend_flex(
    stock: Callable[..., Any],
    query: T,
    key: T,
    value: T,
    score_mod: ScoreMod | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any,
) -> Any:
    """With the arguments of `flex_attention`, and PyTorch's own function before them.

    block_mask: also a `LocalMask`. Returns: what PyTorch's function does. Raises: ShapeError `flex-shapes`.
    """
    if query.is_meta:
        return returned(modeled_attention(query, key, value, score_mod, block_mask), return_lse, return_aux)
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if query.device.type == "cpu" and (needs_gradients or not torch.compiler.is_dynamo_compiling()):
        _check(query, key, block_mask, enable_gqa)
        mask_mod = None if block_mask is None else visible_by(block_mask)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        return returned(attend_by_scores(query, key, value, score_mod, mask_mod, factor), return_lse, return_aux)
    if isinstance(block_mask, LocalMask):
        block_mask = block_mask.built(query.device)
    options = {"return_lse": return_lse, "kernel_options": kernel_options, "return_aux": return_aux}
    return stock(query, key, value, score_mod, block_mask, scale, enable_gqa, **options)


def returned(attended: Attended, return_lse: bool, return_aux: Any) -> Any:
    """The results in the form that a caller of `flex_attention` asks for."""
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        lse = attended.lse if return_aux.lse else None
        return attended.out, AuxOutput(lse=lse, max_scores=attended.max_scores if return_aux.max_scores else None)
    return (attended.out, attended.lse) if return_lse else attended.out


def _check(query: T, key: T, block_mask: Any, enable_gqa: bool) -> None:
    """What PyTorch's function checks of shapes. Raises: ShapeError `flex-shapes`."""
    what, heads, key_heads = "", query.shape[1], key.shape[1]
    if heads != key_heads and not (enable_gqa and heads % key_heads == 0):
        what = f"{heads} query heads and {key_heads} key heads"
        fix = "enable_gqa=True, and query heads that are a multiple of key heads"
    elif block_mask is not None and tuple(block_mask.shape[-2:]) != (query.shape[2], key.shape[2]):
        what = f"{query.shape[2]} queries and {key.shape[2]} keys, with a block mask of {tuple(block_mask.shape)}"
        fix = "create_block_mask(..., Q_LEN=queries, KV_LEN=keys)"
    if what:
        raise ShapeError(Problem("flex-shapes", f"flex_attention of {what}", fix=fix))
