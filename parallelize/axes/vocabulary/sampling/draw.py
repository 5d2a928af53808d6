"""`sample`: one token for each row of logits, which may stay sharded over the vocabulary.

A token is drawn by the Gumbel-max trick: the largest of z_v / T + g_v over the allowed tokens v. The noise g_v is a
function of (seed, position, row, v), so each rank computes the noise of its local tokens without communication. The
ranks exchange one (score, token) pair per row, and what the filters need; they never exchange the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from parallelize.axes.vocabulary.logits.forms import shard_of
from parallelize.axes.vocabulary.sampling.candidates import (
    Candidates,
    check_highest,
    keep_min_p,
    keep_top_k,
    keep_top_p,
)
from parallelize.axes.vocabulary.sampling.noise import highest_score
from parallelize.base.errors import Problem, ShapeError
from parallelize.ops.random.counter import AnyKey, block_size, key
from parallelize.ops.vocabulary.class_targets import HardTargets, Vocabulary
from parallelize.ops.vocabulary.softmax import statistics, temperature_scaled, working_dtype

T = torch.Tensor
_MIN_TEMPERATURE = 1e-30  # any float32 logit divided by it is a finite float64, and far enough above the next one


@torch.no_grad()
def sample(
    logits: T,
    *,
    temperature: float | T = 1.0,
    top_k: int = 0,
    top_p: float | T = 1.0,
    min_p: float | T = 0.0,
    seed: int = 0,
    position: int = 0,
    rows: T | None = None,
) -> T:
    """Draw a token for each row of logits that are sharded over the vocabulary, or full.

    The filters run in the order of `transformers`: temperature, `top_k`, `top_p`, `min_p`, each on the tokens that the
    previous one left. Of equal logits the lowest token ids are kept, and the lowest wins. The same logits and arguments
    give exactly the same tokens for any number of ranks. All ranks of the tp group get the same tokens.

    `temperature`, `top_p` and `min_p` may be tensors: [B] for one value per row, or [] for one value for all rows.

    Args:
        logits: [B, V] (B: any leading dims), as `ShardedLogits`, a DTensor `Shard(-1)` or a plain full tensor. A token
            with logit -inf is never drawn.
        temperature: divides the logits. 0: the token with the highest logit (greedy). Otherwise at least 1e-30.
        top_k: keep the k highest logits. 0: all.
        top_p: keep the smallest set of the most probable tokens whose probabilities sum to `top_p`; at least one token.
        min_p: keep the tokens at least `min_p` times as probable as the most probable one.
        seed: any integer, the same on every rank.
        position: an integer that differs for each draw with this seed, such as the token's position in the sequence.
        rows: [B], integers below 2^31 that identify the rows. None: 0 to B - 1. For a batch that is split over data
            axes, the indices of the rows in the global batch.

    Returns: [B], token ids, int64.
    Raises: ShapeError `bad-option`, `bad-rows`; `bad-logits` if the highest logit of a row is NaN or infinite.
    Cost, per row and rank: an all-gather of 16 bytes. With `top_k`, an all-gather of min(k, V/P) times 16 bytes
        instead, and no other communication. Otherwise one value for `top_p` or `min_p`, and for `top_p` at most 13
        reductions of 16 values (up to 2^20 candidates on a GPU 10 of 128) and an all-gather of one value. No cost grows
        with the vocabulary.
    Source: Gumbel-max, arXiv:1411.0030; top-p, arXiv:1904.09751; min-p, arXiv:2407.01082.
    """
    local, vocabulary = shard_of(logits)
    lead = local.shape[:-1]
    options = SamplingOptions.of(lead, local.device, temperature, top_k, top_p, min_p, rows)
    local = local.detach().reshape(lead.numel(), local.shape[-1])
    if not lead.numel():
        return torch.empty(lead, dtype=torch.int64, device=local.device)
    return draw(Candidates.of(local, vocabulary), options, key(seed, "sample", position)).view(lead)


@dataclass(frozen=True)
class SamplingOptions:
    """Checked options of `sample`, as tensors.

    Args:
        greedy, top_k: the settings for all rows.
        temperature, top_p, min_p: float64, a scalar or one value per row [B]. top_p, min_p: None without that filter.
        rows: [B], the indices of the rows.
    """

    greedy: bool
    top_k: int
    temperature: T
    top_p: T | None
    min_p: T | None
    rows: T

    @staticmethod
    def of(
        lead: torch.Size,
        device: torch.device,
        temperature: float | T = 1.0,
        top_k: int = 0,
        top_p: float | T = 1.0,
        min_p: float | T = 0.0,
        rows: T | None = None,
    ) -> SamplingOptions:
        """Raises: ShapeError `bad-option`, `bad-rows`."""
        if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 0:
            raise ShapeError(Problem("bad-option", f"top_k is {top_k!r}", fix="an integer, 0 or more"))
        checked_temperature = _option("temperature", temperature, math.inf, lead, device)
        checked_top_p = _option("top_p", top_p, 1.0, lead, device)
        checked_min_p = _option("min_p", min_p, 1.0, lead, device)
        return SamplingOptions(
            greedy=_is(temperature, 0.0),
            top_k=top_k,
            temperature=checked_temperature,
            top_p=None if _is(top_p, 1.0) else checked_top_p,
            min_p=None if _is(min_p, 0.0) else checked_min_p,
            rows=_rows(rows, lead.numel(), device),
        )


def can_be_captured(candidates: Candidates, options: SamplingOptions) -> bool:
    """Whether a CUDA graph may contain the draw: the host waits for nothing in it."""
    has_top_k = 0 < options.top_k < candidates.full
    after_top_k = replace(candidates, max_local=options.top_k) if has_top_k else candidates
    return options.greedy or after_top_k.avoids_waits


def draw(candidates: Candidates, options: SamplingOptions, noise_key: AnyKey) -> T:
    """A token [B] for each row, the same on every rank. Raises: ShapeError `bad-logits`."""
    if options.greedy:
        scores, tokens = _greedy(candidates)
    else:
        candidates = keep_top_k(candidates, options.top_k).temperature_scaled(options.temperature)
        candidates = candidates if options.top_p is None else keep_top_p(candidates, options.top_p)
        candidates = candidates if options.min_p is None else keep_min_p(candidates, options.min_p)
        noise_scale = (options.temperature > 0.0).double() if options.temperature.ndim else None
        scores, tokens = _best(candidates.packed(), noise_key, options.rows, noise_scale)
    check_highest(scores)
    return tokens


def log_probs_of(candidates: Candidates, tokens: T, temperature: T) -> T:
    """log softmax(logits / temperature) [B] of one token of each row, as `token_log_probs` gives it.

    Args:
        candidates: the whole vocabulary.
        tokens: [B], ids of the full vocabulary.
        temperature: a scalar or [B]; rows with 0 are not divided.

    Returns: in float32 at least, the same on every rank.
    Cost: one all-gather of 4 values per row.
    """
    z = temperature_scaled(candidates.logits, torch.where(temperature == 0.0, 1.0, temperature))
    vocabulary = Vocabulary(candidates.full, candidates.group)
    targets = HardTargets(tokens, vocabulary, 0.0, None, working_dtype(z))
    return statistics(z, targets, candidates.group).losses.neg_()


def _best(candidates: Candidates, noise_key: AnyKey, rows: T, noise_scale: T | None) -> tuple[T, T]:
    """(score, token) of the best candidate of each row, on every rank. Works in blocks; the first block wins a tie."""
    score, token = candidates.worst()
    width = max(1, block_size(candidates.logits.device) // len(rows))
    for start in range(0, candidates.logits.shape[1], width):
        z, ids = candidates.logits[:, start : start + width], candidates.ids[:, start : start + width]
        value, index = highest_score(z, ids, rows, noise_scale, noise_key)
        best = ids.expand(z.shape).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        token = torch.where(value > score, best, token)
        score = torch.maximum(value, score)
    return candidates.gathered_best(score, token)


def _greedy(candidates: Candidates) -> tuple[T, T]:
    """(logit, token) of the highest logit of each row, on every rank. Before any filter, so ids are consecutive."""
    score, token = candidates.worst()
    if candidates.logits.shape[1]:
        score, token = candidates.logits.max(-1)
        score = score.double().nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        token = token + candidates.ids[0, 0]
    return candidates.gathered_best(score, token)


def _is(option: float | T, value: float) -> bool:
    return not isinstance(option, torch.Tensor) and option == value


def _option(name: str, value: float | T, high: float, lead: torch.Size, device: torch.device) -> T:
    """The option in float64: a scalar for a number, one value per row [B] for a tensor."""
    out = torch.as_tensor(value, dtype=torch.float64, device=device)
    if isinstance(value, torch.Tensor):
        if value.ndim and value.shape != lead:
            what = f"{name} has shape {list(value.shape)}, the rows of logits {list(lead)}"
            raise ShapeError(Problem("bad-option", what, fix="one number, or one per row"))
        out = out.expand(lead).reshape(-1)
    on_cpu = not isinstance(value, torch.Tensor) or value.device.type == "cpu"  # else a check would wait for the device
    if on_cpu and not bool(((out >= 0.0) & (out <= high) & out.isfinite()).all()):
        allowed = "a finite number, 0 or more" if high == math.inf else "a number from 0 to 1"
        raise ShapeError(Problem("bad-option", f"{name} is {value}", fix=allowed))
    if on_cpu and high == math.inf and bool(((out > 0.0) & (out < _MIN_TEMPERATURE)).any()):
        what = f"{name} is {value}: logits divided by it may overflow float64"
        fix = f"0 for the most probable token, or at least {_MIN_TEMPERATURE:g}"
        raise ShapeError(Problem("bad-option", what, fix=fix))
    return out


def _rows(rows: T | None, count: int, device: torch.device) -> T:
    if rows is None:
        return torch.arange(count, device=device)
    if rows.numel() != count or rows.is_floating_point():
        what = f"rows has shape {list(rows.shape)} ({rows.dtype}) for {count} rows of logits"
        raise ShapeError(Problem("bad-rows", what, fix="one integer per row"))
    return rows.reshape(-1).to(device, torch.int64)
