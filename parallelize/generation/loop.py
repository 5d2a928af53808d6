"""`generate`: prefill, cache, and one token at a time from logits that stay sharded over the vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallelize.errors import ModelError, Problem, ShapeError
from parallelize.generation.stock import refuse_split
from parallelize.logits import shard_of
from parallelize.ops.vocabulary import check_ids
from parallelize.randomness.counter import key
from parallelize.sampling.candidates import Candidates
from parallelize.sampling.draw import Choice, draw

T = torch.Tensor


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: T,
    *,
    attention_mask: T | None = None,
    max_new_tokens: int,
    temperature: float | T = 1.0,
    top_k: int = 0,
    top_p: float | T = 1.0,
    min_p: float | T = 0.0,
    seed: int = 0,
    rows: T | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> T:
    """Continue prompts, by a causal model of `transformers` that is planned (or not), with `parallelize.sample`.

    Made for plans applied with `loss_parallel=True`: no rank ever sees the whole vocabulary. All ranks of the tp group call
    it with the same arguments and get the same tokens, which are those of the unsharded model.

    Shapes (B prompts of S tokens, n <= max_new_tokens):
        input_ids       [B, S]      shorter prompts are padded on the left
        attention_mask  [B, S]      1, or 0 where a prompt is padded
        returns         [B, S + n]  prompts and what was generated; n is what the longest took

    Args:
        temperature, top_k, top_p, min_p, seed, rows: of `parallelize.sample`; temperature 0 is greedy. The n-th new token
            has position n.
        eos_token_id: ends a row. None: what the model's `generation_config` says; []: nothing ends it.
        pad_token_id: stands after the end of a row. None: the model's, or else the first `eos_token_id`, or 0.

    Cost: that of the forwards (the first of S tokens, then one token each), and of one `sample` a token.
    Raises: before anything runs, ModelError `training-mode`, `no-cache`, `cut-model`,
        `generate-over-cp`; ShapeError `bad-prompts`, `bad-mask`,
        `right-padding`, `bad-option`, `too-long`, `id-out-of-range`.
    """
    taken = _check_model(model)
    _check_prompts(input_ids, attention_mask)
    _check_room(model, input_ids, max_new_tokens)
    stops, pad = _ends(model, eos_token_id, pad_token_id)
    ending = torch.tensor(stops, device=input_ids.device, dtype=input_ids.dtype)
    batch, start = input_ids.shape
    choice = Choice.of(torch.Size((batch,)), input_ids.device, temperature, top_k, top_p, min_p, rows)
    tokens = torch.cat([input_ids, input_ids.new_full((batch, max_new_tokens), pad)], dim=1)
    feed = _Feed(attention_mask, start + max_new_tokens, taken)
    ended = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    cache, stop = None, start
    for new in range(max_new_tokens):
        first = 0 if new == 0 else stop - 1
        out = model(input_ids=tokens[:, first:stop], past_key_values=cache, use_cache=True, **feed(first, stop))
        cache = _cache_of(model, out)
        drawn = draw(Candidates.of(*shard_of(out.logits[:, -1])), choice, key(seed, "sample", new))
        tokens[:, stop] = torch.where(ended, pad, drawn)
        stop += 1
        if stops:
            ended |= torch.isin(drawn, ending)
            if bool(ended.all()):
                break
    return tokens[:, :stop].clone()


class _Feed:
    """The arguments of each forward beside ids and cache."""

    def __init__(self, mask: T | None, length: int, taken: set[str]):
        self.mask = self.places = None
        self.last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        if mask is not None and not bool(mask.all()):
            self.mask = torch.nn.functional.pad(mask.long(), (0, length - mask.shape[1]), value=1)
            if "position_ids" in taken:
                self.places = (self.mask.cumsum(-1) - 1).clamp_(min=0)

    def __call__(self, first: int, stop: int) -> dict[str, Any]:
        given: dict[str, Any] = dict(self.last)
        if self.mask is not None:
            given["attention_mask"] = self.mask[:, :stop]
        if self.places is not None:
            given["position_ids"] = self.places[:, first:stop]
        return given


def _check_model(model: nn.Module) -> set[str]:
    """The arguments that its forward takes."""
    refuse_split(model)
    if model.training:
        what = f"{type(model).__name__} is in training mode: dropout would act, and some models drop their cache"
        raise ModelError(Problem("training-mode", what, fix="model.eval()"))
    taken = set(inspect.signature(type(getattr(model, "_orig_mod", model)).forward).parameters)  # compiled or not
    missing = {"input_ids", "past_key_values", "use_cache", "attention_mask"} - taken
    if missing:
        what = f"{type(model).__name__}.forward takes no {', '.join(sorted(missing))}"
        raise ModelError(
            Problem("no-cache", what, fix="a causal model with a key/value cache, as transformers has them")
        )
    return taken


def _check_prompts(ids: T, mask: T | None) -> None:
    if ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
        what = f"input_ids are {list(ids.shape)} ({ids.dtype})"
        raise ShapeError(Problem("bad-prompts", what, fix="ids [batch, length], at least one of each"))
    if mask is None:
        return
    if mask.shape != ids.shape:
        raise ShapeError(Problem("bad-mask", f"attention_mask {list(mask.shape)} for input_ids {list(ids.shape)}"))
    real = mask != 0
    if not bool(real[:, -1].all()):
        row = int((~real[:, -1]).nonzero()[0])
        fix = 'pad on the left: padding_side="left" of a tokenizer'
        raise ShapeError(Problem("right-padding", f"prompt {row} ends in padding", fix=fix))
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ShapeError(Problem("bad-mask", "attention_mask has zeros after ones", fix="zeros first, then ones"))


def _check_room(model: Any, ids: T, new: int) -> None:
    if not isinstance(new, int) or isinstance(new, bool) or new < 1:
        raise ShapeError(Problem("bad-option", f"max_new_tokens is {new!r}", fix="1 or more"))
    known = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if isinstance(known, nn.Embedding):
        check_ids(ids, known.num_embeddings, "input_ids")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not known]
    if limit is not None and limit in tables and ids.shape[1] + new - 1 > limit:
        what = f"prompts of {ids.shape[1]} tokens and {new} new ones, where the model has {limit} positions"
        raise ShapeError(Problem("too-long", what, fix="shorter prompts, or fewer new tokens"))


def _ends(model: Any, eos: int | Sequence[int] | None, pad: int | None) -> tuple[list[int], int]:
    """(ids that end a row, the id that stands after an end)."""
    own = getattr(model, "generation_config", None)
    eos = getattr(own, "eos_token_id", None) if eos is None else eos
    stops = [] if eos is None else [eos] if isinstance(eos, int) else [int(one) for one in eos]
    pad = getattr(own, "pad_token_id", None) if pad is None else pad
    return stops, pad if pad is not None else (stops or [0])[0]


def _cache_of(model: nn.Module, out: Any) -> Any:
    cache = getattr(out, "past_key_values", None)
    if cache is None or not hasattr(out, "logits"):
        what = f"{type(model).__name__} returned no logits with a cache"
        raise ModelError(Problem("no-cache", what, fix="a causal model whose output has logits and past_key_values"))
    return cache
