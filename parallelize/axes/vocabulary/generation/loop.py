"""`generate`: prefill, then one token at a time with a key/value cache, from logits that stay sharded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import nn

from parallelize.axes.vocabulary.generation.caches import reserve
from parallelize.axes.vocabulary.generation.captured_decoding import (
    CapturedDecoding,
    is_worthwhile,
    no_graph,
    warn_of,
    why_not,
)
from parallelize.axes.vocabulary.generation.transformers_generate import (
    fast_generation,
    generating_groups,
    refuse_split,
)
from parallelize.axes.vocabulary.generation.virtual_tokens import VirtualTokens, virtual_tokens
from parallelize.axes.vocabulary.logits.forms import shard_of
from parallelize.axes.vocabulary.sampling.candidates import Candidates
from parallelize.axes.vocabulary.sampling.draw import SamplingOptions, draw, log_probs_of
from parallelize.base.errors import ModelError, Problem, ShapeError
from parallelize.ops.random.counter import Key, key
from parallelize.ops.vocabulary.class_targets import check_ids
from parallelize.plan.models.wrapped_models import AnyModel, forward_signature, module_of
from parallelize.state.records import inside_adapters

T = torch.Tensor


@overload
def generate(
    model: AnyModel,
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
    cuda_graph: bool | None = None,
    output_log_probs: Literal[False] = False,
) -> T: ...


@overload
def generate(
    model: AnyModel,
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
    cuda_graph: bool | None = None,
    output_log_probs: Literal[True],
) -> tuple[T, T]: ...


@torch.no_grad()
def generate(
    model: AnyModel,
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
    cuda_graph: bool | None = None,
    output_log_probs: bool = False,
) -> T | tuple[T, T]:
    """Continue prompts with a causal model of `transformers`, with or without a plan, by `parallelize.sample`.

    Intended for plans applied with `loss_parallel=True`: no rank stores logits of the full vocabulary. All ranks of tp
    and cp call it with the same arguments and get the same tokens as the unsharded model.

    Args:
        model: a causal model in eval mode whose forward takes `past_key_values`, without pp.
        input_ids: [B, S], B prompts of S tokens. Shorter prompts are padded on the left.
        attention_mask: [B, S], 1 for tokens and 0 for padding. None: no padding.
        max_new_tokens: the largest number of new tokens per prompt, at least 1.
        temperature, top_k, top_p, min_p, seed, rows: as in `parallelize.sample`; temperature 0 is greedy. The n-th new
            token has position n, from 0.
        eos_token_id: id or ids that end a row. None: those of the model's `generation_config`; []: no id ends a row.
        pad_token_id: fills a row after its end. None: that of the model, or else the first `eos_token_id`, or 0.
        cuda_graph: whether a forward of one token is captured and replayed. None: on a GPU, for 16 new tokens or more,
            if the model and its cache allow it (docs/vocabulary.md). True: as None for any number, with an error where
            it is not.
        output_log_probs: also return the log-probability of each new token, of the logits that it was drawn from.

    Returns: [B, S + n], prompts and new tokens, where n <= max_new_tokens is the number of the longest row. With
        `output_log_probs` a pair of it and [B, n], in at least float32: log softmax(logits / temperature) of each new
        token, over the whole vocabulary (filters change what is drawn, and not this number), and 0 after the end of a
        row. Rows with temperature 0 are not divided.
    Raises: before the first forward, ModelError `training-mode`, `no-cache`, `cut-model`, `generate-over-ep`;
        ShapeError `bad-prompts`, `bad-mask`, `right-padding`, `bad-option`, `too-long`, `id-out-of-range`. After it,
        ModelError `no-cuda-graph`.
    Cost: one forward of S tokens, then one forward per new token, and the communication of one `sample` per token; with
        `output_log_probs` also an all-gather of 4 values per row and token over the tp group. Gloo ranks of one host
        sum through shared memory meanwhile (see `through_shared_memory`); a plain cache grows in place. A CUDA graph
        costs three more forwards, and memory for two caches while its own is made.
    """
    model = module_of(model)
    parameters = _check_model(model)
    _check_prompts(input_ids, attention_mask)
    virtual = virtual_tokens(getattr(model, "_orig_mod", model))
    _check_room(model, virtual.count + input_ids.shape[1], input_ids, max_new_tokens)
    stops, pad = _ends(model, eos_token_id, pad_token_id)
    ending = torch.tensor(stops, device=input_ids.device, dtype=input_ids.dtype)
    batch, start = input_ids.shape
    options = SamplingOptions.of(torch.Size((batch,)), input_ids.device, temperature, top_k, top_p, min_p, rows)
    tokens = torch.cat([input_ids, input_ids.new_full((batch, max_new_tokens), pad)], dim=1)
    has_table = bool(_positions_of_table(model))
    extra_inputs = _ExtraInputs(input_ids, attention_mask, start + max_new_tokens, parameters, has_table, virtual)
    drawn_tokens = _DrawnTokens(model, extra_inputs, options, seed, cuda_graph)
    ended = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    log_probs: list[T] = []
    stop = start
    with fast_generation(_planned(model)):
        for new in range(max_new_tokens):
            drawn = (
                drawn_tokens.after_prompt(input_ids, max_new_tokens) if new == 0 else drawn_tokens(tokens, stop, new)
            )
            tokens[:, stop] = torch.where(ended, pad, drawn)
            if output_log_probs:
                log_probs.append(drawn_tokens.log_probs(drawn).masked_fill_(ended, 0.0))
            stop += 1
            if stops:
                ended |= torch.isin(drawn, ending)
                if bool(ended.all()):
                    break
    sequences = tokens[:, :stop].clone()
    return (sequences, torch.stack(log_probs, 1)) if output_log_probs else sequences


class _DrawnTokens:
    """The new tokens [B] of one call: after the prompt, and then after each token, from a graph if there is one."""

    def __init__(
        self,
        model: nn.Module,
        extra_inputs: _ExtraInputs,
        options: SamplingOptions,
        seed: int,
        cuda_graph: bool | None,
    ):
        self.model, self.extra_inputs, self.options = model, extra_inputs, options
        self.inner = _planned(model)
        self.seed, self.cuda_graph, self.virtual = seed, cuda_graph, extra_inputs.virtual
        self.cache: Any = None
        self.candidates: Candidates | None = None  # of the last draw, before any filter
        self.starting: CapturedDecoding | None = None
        self.captured: CapturedDecoding | None = None

    def after_prompt(self, ids: T, new_tokens: int) -> T:
        out = _run(self.model, self.extra_inputs.of_prompt(ids.shape[1]), ids, self.cache)
        start = self.virtual.count + ids.shape[1]
        self.cache, longest = _cache_of(self.model, out), start + new_tokens
        if self._captures(ids, new_tokens):
            forward, groups = partial(self._decode, self.extra_inputs.constant), generating_groups(self.inner)
            mask, refuse = (
                self.extra_inputs.after_prompt,
                partial(_refuse, type(self.inner).__name__, bool(self.cuda_graph)),
            )
            self.starting = CapturedDecoding(forward, self.options, self.cache, start, longest, mask, groups, refuse)
        else:
            reserve(self.cache, longest)
        return self._draw(out, 0)

    def __call__(self, tokens: T, stop: int, new: int) -> T:
        """The `new`-th token, after `stop` tokens."""
        ids, inputs = tokens[:, stop - 1 : stop], self.extra_inputs.of_token(stop - 1)
        if self.captured is not None:
            drawn = self.captured(ids, inputs.get("position_ids"), self._key(new))
            self.candidates = self.captured.candidates
            return drawn
        out = self._decode(inputs, ids, self.cache)
        if self.starting is not None:
            expected, _ = shard_of(out.logits[:, -1])
            if self.starting.start(ids, inputs.get("position_ids"), self._key(new), expected):
                self.captured, self.cache = self.starting, None
            else:
                reserve(self.cache, self.virtual.count + tokens.shape[1])
            self.starting = None
        return self._draw(out, new)

    def _decode(self, constant: dict[str, Any], ids: T, cache: Any, inputs: dict[str, T] | None = None) -> Any:
        with self.virtual.left_out():
            return _run(self.model, constant, ids, cache, inputs)

    def _draw(self, out: Any, new: int) -> T:
        self.candidates = Candidates.of(*shard_of(out.logits[:, -1]))
        return draw(self.candidates, self.options, self._key(new))

    def log_probs(self, tokens: T) -> T:
        """Of tokens [B], by the logits of the last call."""
        assert self.candidates is not None
        return log_probs_of(self.candidates, tokens, self.options.temperature)

    def _key(self, new: int) -> Key:
        return key(self.seed, "sample", new)

    def _captures(self, ids: T, new_tokens: int) -> bool:
        """Raises: ModelError `no-cuda-graph`."""
        if self.cuda_graph is False or (self.cuda_graph is None and not (ids.is_cuda and is_worthwhile(new_tokens))):
            return False
        start = self.virtual.count + ids.shape[1]
        why = why_not(self.inner, self.cache, start, ids.device) if ids.is_cuda else f"runs on {ids.device.type}"
        if why and self.cuda_graph:
            raise no_graph(f"{type(self.inner).__name__} {why}")
        return not why


def _refuse(name: str, is_demanded: bool, reason: str) -> None:
    if is_demanded:
        raise no_graph(f"{name}: {reason}")
    warn_of(reason)


def _planned(model: nn.Module) -> nn.Module:
    """The model that has the plan: inside of a compiled one, or of adapters that came later."""
    return inside_adapters(getattr(model, "_orig_mod", model))


def _run(model: nn.Module, constant: dict[str, Any], ids: T, cache: Any, inputs: dict[str, T] | None = None) -> Any:
    return model(input_ids=ids, past_key_values=cache, use_cache=True, **constant, **(inputs or {}))


class _ExtraInputs:
    """The inputs of each forward other than ids and cache: the mask of padded prompts, positions, `logits_to_keep`.

    Positions are given for padded prompts, and to models without a table of them: some of these count from 0 beside a
    cache too (Bamba). Those with a table count by themselves, and not all from 0 (RoBERTa).

    Args:
        ids: [B, S], prompts. mask: [B, S], or None.
        length: tokens of the longest possible sequence.
        parameters: the parameter names of the model's forward.
        has_table: whether the model has a table of positions.
        virtual: tokens that the model puts before the prompt.
    """

    def __init__(
        self, ids: T, mask: T | None, length: int, parameters: set[str], has_table: bool, virtual: VirtualTokens
    ):
        self.virtual = virtual
        self.mask = self.after_prompt = places = None
        self.constant = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        if not has_table:
            places = torch.arange(length, device=ids.device).repeat(len(ids), 1)
        if mask is not None and not bool(mask.all()):
            self.mask = torch.nn.functional.pad(mask.long(), (0, length - mask.shape[1]), value=1)
            self.after_prompt = virtual.mask(self.mask)
            if virtual.has_positions:
                places = (self.mask.cumsum(-1) - 1).clamp_(min=0)
        self.positions = places if "position_ids" in parameters else None

    def of_prompt(self, length: int) -> dict[str, Any]:
        """Of a prompt's tokens; the model knows of those that it puts before it."""
        inputs: dict[str, Any] = dict(self.constant)
        if self.mask is not None:
            inputs["attention_mask"] = self.mask[:, :length]
        if self.positions is not None and self.virtual.has_positions:
            inputs["position_ids"] = self.positions[:, :length]
        return inputs

    def of_token(self, place: int) -> dict[str, Any]:
        """Of the one token at this place of its row."""
        inputs: dict[str, Any] = dict(self.constant)
        if self.after_prompt is not None:
            inputs["attention_mask"] = self.after_prompt[:, : self.virtual.count + place + 1]
        if self.positions is not None:
            inputs["position_ids"] = self.virtual.count + self.positions[:, place : place + 1]
        return inputs


def _check_model(model: nn.Module) -> set[str]:
    """Check that a model can generate; returns the parameter names of its forward."""
    refuse_split(model)
    if model.training:
        what = (
            f"{type(model).__name__} is in training mode: dropout would be active, and some models disable their cache"
        )
        raise ModelError(Problem("training-mode", what, fix="model.eval()"))
    parameters = set(forward_signature(getattr(model, "_orig_mod", model)).parameters)  # compiled or not
    missing = {"input_ids", "past_key_values", "use_cache", "attention_mask"} - parameters
    if missing:
        what = f"{type(model).__name__}.forward takes no {', '.join(sorted(missing))}"
        raise ModelError(Problem("no-cache", what, fix="a causal model of transformers, with a key/value cache"))
    return parameters


def _check_prompts(ids: T, mask: T | None) -> None:
    if ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
        what = f"input_ids are {list(ids.shape)} ({ids.dtype})"
        raise ShapeError(Problem("bad-prompts", what, fix="ids [batch, length], at least one of each"))
    if mask is None:
        return
    if mask.shape != ids.shape:
        raise ShapeError(Problem("bad-mask", f"attention_mask {list(mask.shape)} for input_ids {list(ids.shape)}"))
    is_token = mask != 0
    if not bool(is_token[:, -1].all()):
        row = int((~is_token[:, -1]).nonzero()[0])
        fix = 'pad on the left: padding_side="left" of a tokenizer'
        raise ShapeError(Problem("right-padding", f"prompt {row} ends in padding", fix=fix))
    if bool((is_token[:, :-1] & ~is_token[:, 1:]).any()):
        raise ShapeError(Problem("bad-mask", "attention_mask has zeros after ones", fix="zeros first, then ones"))


def _check_room(model: Any, length: int, ids: T, new: int) -> None:
    if not isinstance(new, int) or isinstance(new, bool) or new < 1:
        raise ShapeError(Problem("bad-option", f"max_new_tokens is {new!r}", fix="1 or more"))
    embedding = _embedding_of(model)
    if isinstance(embedding, nn.Embedding):
        check_ids(ids, embedding.num_embeddings, "input_ids")
    limit = _positions_of_table(model)
    if limit and length + new - 1 > limit:
        what = f"prompts of {length} tokens and {new} new ones, where the model has {limit} positions"
        raise ShapeError(Problem("too-long", what, fix="shorter prompts, or fewer new tokens"))


def _embedding_of(model: Any) -> Any:
    return model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None


def _positions_of_table(model: Any) -> int:
    """How many positions a model has a learned table of; 0 where it has none."""
    limit, embedding = getattr(getattr(model, "config", None), "max_position_embeddings", None), _embedding_of(model)
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not embedding]
    return limit if limit is not None and limit in tables else 0


def _ends(model: Any, eos: int | Sequence[int] | None, pad: int | None) -> tuple[list[int], int]:
    """(ids that end a row, the id that fills a row after its end)."""
    config = getattr(model, "generation_config", None)
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    stops = [] if eos is None else [eos] if isinstance(eos, int) else [int(token) for token in eos]
    pad = getattr(config, "pad_token_id", None) if pad is None else pad
    return stops, pad if pad is not None else (stops or [0])[0]


def _cache_of(model: nn.Module, out: Any) -> Any:
    cache = getattr(out, "past_key_values", None)
    if cache is None or not hasattr(out, "logits"):
        what = f"{type(model).__name__} returned no logits with a cache"
        raise ModelError(Problem("no-cache", what, fix="a causal model whose output has logits and past_key_values"))
    return cache
