"""Attention over `cp`: heads are traded within a place, blocks travel between places, and heads are traded back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from parallelize import _torch_private as private
from parallelize.context.state import Attention, Context, Sequence
from parallelize.errors import ModelError, Problem
from parallelize.ops.ring_attention import Masking, ring_attention
from parallelize.ops.ulysses import HeadCut, to_heads, to_rows

T = torch.Tensor


def attend(site: Attention, q: T, k: T, v: T, masking: Masking) -> T:
    """Attention of own query rows to the whole sequence.

    Shapes (s: own rows): q [B, H, s, D], k [B, K, s, D], v [B, K, s, E]; returns [B, H, s, E].

    Raises: ModelError `wrong-rows`, `attention-kind`.
    """
    context, device = site.context, q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # as PyTorch's own attention does
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    sequence = context.current()
    _check(site, sequence, q, k, masking)
    context.attended.add(site.fqn)
    if masking.window >= sequence.rows.full:  # of this forward: in a recompute it may not be the last one
        masking = replace(masking, window=0)
    traded = context.ulysses.size > 1
    heads = HeadCut.of(q.shape[1], k.shape[1], context.ulysses.size)
    if traded:
        rows = sequence.rows.members(context.place)
        q, k, v = to_heads(q, k, v, context.ulysses, heads, rows)
    out = _over_ring(context, sequence, q, k, v, masking)
    if traded:
        out = to_rows(out, context.ulysses, heads, rows)
    context.keep(sequence, out)
    return out


def _check(site: Attention, sequence: Sequence, q: T, k: T, masking: Masking) -> None:
    rows = sum(stop - start for start, stop in sequence.rows.of_rank(site.context.group.rank))
    if q.shape[2] != rows or k.shape[2] != rows:
        what = f"{site.fqn} attends with {q.shape[2]} queries to {k.shape[2]} keys, and this rank holds {rows} rows"
        fix = "self-attention without caches; cross-attention has no place on cp"
        raise ModelError(Problem("wrong-rows", what, fix=fix))
    kind = "causal" if masking.causal else "bidirectional"
    if kind != site.kind:
        what = f"{site.fqn} is {kind}, and the plan says that it is {site.kind}"
        raise ModelError(Problem("attention-kind", what, fix=f"write `{kind}` under `attention:`"))


def _over_ring(context: Context, sequence: Sequence, q: T, k: T, v: T, masking: Masking) -> T:
    if not q.shape[1]:  # fewer heads than ranks: nothing to do here, but backward has to pass
        empty = q.new_zeros((*q.shape[:3], v.shape[3]))
        return empty + (q.sum() + k.sum() + v.sum())
    simple = sequence.documents is None and not masking.window and not masking.softcap
    if context.ring.size == 1 and simple:
        options: dict[str, Any] = {"is_causal": masking.causal, "scale": masking.scale}
        if q.shape[1] != k.shape[1]:
            options["enable_gqa"] = True
        with private.plain_calls():
            return F.scaled_dot_product_attention(q, k, v, **options)
    runs = tuple(sequence.rows.of_place(place) for place in range(context.ring.size))
    return ring_attention(q, k, v, context.ring, runs, masking, sequence.documents)


def masking_of(
    site: Attention, causal: bool, window: int | None, scale: float | None, softcap: float | None, q: T
) -> Masking:
    """The mask that a call of attention asks for.

    Raises: ModelError `window-without-causal`.
    """
    found = Masking(causal, window or 0, q.shape[-1] ** -0.5 if scale is None else float(scale), softcap or 0.0)
    if found.window and not causal:
        what = f"{site.fqn} has a window of {window} rows and no causal mask"
        raise ModelError(Problem("window-without-causal", what, fix="leave it off cp: only causal windows are known"))
    return found
