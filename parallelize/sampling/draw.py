"""`sample`: one token for each row of logits, which may stay sharded over the vocabulary.

A token is drawn by the Gumbel-max trick: the largest of z_v / T + g_v over the allowed tokens v. The noise g_v is a function
of (seed, position, row, v), so each rank draws that of its own tokens, and nobody communicates to agree on it. What is sent
is one (score, token) pair a row, and what the filters send; the vocabulary never is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from parallelize.errors import Problem, ShapeError
from parallelize.logits import shard_of
from parallelize.randomness.counter import Key, block_size, key
from parallelize.sampling.candidates import Candidates, check_highest, keep_min_p, keep_top_k, keep_top_p
from parallelize.sampling.noise import highest_score

T = torch.Tensor
_COLDEST = 1e-30  # any float32 logit divided by it is a float64, and stays the only one that is drawn


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
    """Draw a token for each row of logits sharded over the vocabulary (or whole ones).

    The filters work in the order of `transformers`: temperature, `top_k`, `top_p`, `min_p`, each on what the one before has
    left. Of equal logits the lowest token ids are kept, and the lowest wins. With the same logits and arguments the tokens
    are those of one rank, to the last one, for any number of ranks; all ranks get the same tokens.

    Shapes (B any leading dims, P = tp size):
        logits   [B, V] `ShardedLogits`, a DTensor `Shard(-1)`, or a plain whole tensor; -inf: never drawn
        returns  [B]    token ids, int64

    Args:
        temperature: logits are divided by it. 0: the token of the highest logit (greedy). Else 1e-30 at least.
        top_k: only the k highest. 0: all.
        top_p: only the smallest set of the highest whose probabilities sum to `top_p` (at least one).
        min_p: only those at least `min_p` times as probable as the most probable.
        seed: any whole number, the same on every rank.
        position: another number for each draw with this seed, as the place of the token in its text.
        rows: [B] whole numbers below 2^31 that tell rows apart, in the place of 0 to B - 1: those of the whole batch where
            it is split over data axes.

    `temperature`, `top_p` and `min_p` may be tensors [B], of one value a row, or [] of one for all.

    Cost, a row and rank: 16 bytes gathered; with `top_k` min(k, V/P) times 16 bytes gathered instead, the rest is then free
    of communication; else one value for `top_p` or `min_p`, and for `top_p` at most 13 reductions of 16 values and a gather
    of one. Nothing grows with the vocabulary.
    Raises: ShapeError `bad-option`, `bad-rows`; `bad-logits` where a row's highest is NaN or infinite.
    Source: Gumbel-max, arXiv:1411.0030; top-p, arXiv:1904.09751; min-p, arXiv:2407.01082.
    """
    local, vocabulary = shard_of(logits)
    lead = local.shape[:-1]
    choice = Choice.of(lead, local.device, temperature, top_k, top_p, min_p, rows)
    local = local.detach().reshape(lead.numel(), local.shape[-1])
    if not lead.numel():
        return torch.empty(lead, dtype=torch.int64, device=local.device)
    return draw(Candidates.of(local, vocabulary), choice, key(seed, "sample", position)).view(lead)


@dataclass(frozen=True)
class Choice:
    """How to draw: checked options, as tensors.

    Args:
        greedy, top_k: for all rows.
        heat, mass, share: temperature, top_p, min_p in float64: scalars of numbers, one value a row of tensors. mass, share None: no such filter.
        rows: [B] numbers of the rows.
    """

    greedy: bool
    top_k: int
    heat: T
    mass: T | None
    share: T | None
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
    ) -> Choice:
        """Raises: ShapeError `bad-option`, `bad-rows`."""
        if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 0:
            raise ShapeError(Problem("bad-option", f"top_k is {top_k!r}", fix="a whole number, 0 or more"))
        given = {"temperature": (temperature, math.inf), "top_p": (top_p, 1.0), "min_p": (min_p, 1.0)}
        heat, mass, share = (_option(name, *one, lead, device) for name, one in given.items())
        return Choice(
            _is(temperature, 0.0),
            top_k,
            heat,
            None if _is(top_p, 1.0) else mass,
            None if _is(min_p, 0.0) else share,
            _rows(rows, lead.numel(), device),
        )


def draw(found: Candidates, choice: Choice, where: Key) -> T:
    """A token [B] for each row, the same on every rank. Raises: ShapeError `bad-logits`."""
    if choice.greedy:
        scores, tokens = _greedy(found)
    else:
        found = keep_top_k(found, choice.top_k).cooled(choice.heat)
        found = found if choice.mass is None else keep_top_p(found, choice.mass)
        found = found if choice.share is None else keep_min_p(found, choice.share)
        scale = (choice.heat > 0.0).double() if choice.heat.ndim else None
        scores, tokens = _best(found.packed(), where, choice.rows, scale)
    check_highest(scores)
    return tokens


def _best(found: Candidates, where: Key, rows: T, scale: T | None) -> tuple[T, T]:
    """(score, token) of the best candidate of each row, on every rank; block by block, of which the first wins a tie."""
    score, token = found.nothing()
    width = max(1, block_size(found.logits.device) // len(rows))
    for start in range(0, found.logits.shape[1], width):
        z, ids = found.logits[:, start : start + width], found.ids[:, start : start + width]
        value, place = highest_score(z, ids, rows, scale, where)
        best = ids.expand(z.shape).gather(-1, place.unsqueeze(-1)).squeeze(-1)
        token = torch.where(value > score, best, token)
        score = torch.maximum(value, score)
    return found.gathered_best(score, token)


def _greedy(found: Candidates) -> tuple[T, T]:
    """(logit, token) of the highest logit of each row, on every rank."""
    score, token = found.nothing()
    if found.logits.shape[1]:
        score, token = found.logits.max(-1)
        score = score.double().nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        token = token + found.ids[0, 0]
    return found.gathered_best(score, token)


def _is(option: float | T, value: float) -> bool:
    return not isinstance(option, torch.Tensor) and option == value


def _option(name: str, value: float | T, high: float, lead: torch.Size, device: torch.device) -> T:
    """A float64 scalar of a number, one value a row [B] of a tensor."""
    out = torch.as_tensor(value, dtype=torch.float64, device=device)
    if isinstance(value, torch.Tensor):
        if value.ndim and value.shape != lead:
            what = f"{name} has shape {list(value.shape)}, the rows of logits {list(lead)}"
            raise ShapeError(Problem("bad-option", what, fix="one number, or one a row"))
        out = out.expand(lead).reshape(-1)
    known = not isinstance(value, torch.Tensor) or value.device.type == "cpu"
    if known and not bool(((out >= 0.0) & (out <= high) & out.isfinite()).all()):
        allowed = "a finite number, 0 or more" if high == math.inf else "a number from 0 to 1"
        raise ShapeError(Problem("bad-option", f"{name} is {value}", fix=allowed))
    if known and high == math.inf and bool(((out > 0.0) & (out < _COLDEST)).any()):
        what = f"{name} is {value}: logits divided by it may be more than a float64 holds"
        raise ShapeError(Problem("bad-option", what, fix=f"0 for the most probable token, or {_COLDEST:g} and more"))
    return out


def _rows(rows: T | None, count: int, device: torch.device) -> T:
    if rows is None:
        return torch.arange(count, device=device)
    if rows.numel() != count or rows.is_floating_point():
        what = f"rows has shape {list(rows.shape)} ({rows.dtype}) for {count} rows of logits"
        raise ShapeError(Problem("bad-rows", what, fix="one whole number a row"))
    return rows.reshape(-1).to(device, torch.int64)
