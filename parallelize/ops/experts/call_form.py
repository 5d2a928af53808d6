"""What ranks must have alike in one call of experts: it tells how many bytes a row has, and which messages backward sends.

Each rank sends it along with its counts of rows, before any row. So ranks that differ all get an error, where their messages
would not fit together and some would wait for ever.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.comm.groups import Group

T = torch.Tensor
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CallForm(NamedTuple):
    """Of one rank, in integers.

    Attributes:
        name: digest of the name of the experts.
        choices, hidden: of a token.
        dtype, weights_dtype: indices in `DTYPES`; -1 for another.
        has_backward: whether tokens or weights require a gradient.
    """

    name: int
    choices: int
    hidden: int
    dtype: int
    weights_dtype: int
    has_backward: int

    @classmethod
    def of(cls, where: str, tokens: T, weights: T) -> CallForm:
        """where: the name of the experts. tokens: [tokens, hidden]. weights: [tokens, k]."""
        has_backward = torch.is_grad_enabled() and (tokens.requires_grad or weights.requires_grad)
        dtypes = _index_of(tokens.dtype), _index_of(weights.dtype)
        return cls(_digest(where), weights.shape[1], tokens.shape[1], *dtypes, int(has_backward))

    def tensor(self, device: torch.device) -> T:
        """[fields], int64."""
        return _tensor(self, device)

    def text(self, other: CallForm) -> str:
        """What another rank calls, in words."""
        if other.name != self.name:
            return "other experts"
        gradients = "with" if other.has_backward else "without"
        dtypes = f"{_name_of(other.dtype)} tokens and {_name_of(other.weights_dtype)} weights"
        return f"{other.choices} choices of a token of width {other.hidden}, {dtypes}, {gradients} gradients"


FIELDS = len(CallForm._fields)


def check_forms(form: CallForm, forms: list[CallForm], group: Group, where: str) -> None:
    """forms: by rank of the group. Raises: ModelError `experts-differ`, on every rank of the group."""
    if all(other == form for other in forms):
        return
    rows = tuple((f"rank {rank}", form.text(other)) for rank, other in zip(group.ranks, forms, strict=True))
    what = f"{where} is called in one way on some ranks and in another on others"
    fix = "run the same layers on every rank of ep, in the same mode, with routers that give as many choices"
    raise ModelError(Problem("experts-differ", what, rows=rows[:16], fix=fix))


def _index_of(dtype: torch.dtype) -> int:
    return DTYPES.index(dtype) if dtype in DTYPES else -1


def _name_of(index: int) -> str:
    return str(DTYPES[index]).removeprefix("torch.") if index >= 0 else "other"


@lru_cache(maxsize=4096)
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


@lru_cache(maxsize=4096)
def _tensor(form: CallForm, device: torch.device) -> T:
    return torch.tensor(form, dtype=torch.int64, device=device)
