"""Attention by `flex_attention`: functions of scores and of the mask, of heads and tokens of the unsharded model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from tests.matrix.feature import change
from tests.matrix.kinds import OwnModel
from tests.support.flex_models import dense

T = torch.Tensor


class FlexBlockAttention(nn.Module):
    """Documents of five tokens, a slope and a window for each head, a soft cap, and a sink: by the log-sums.

    A process without a planned model computes dense attention, since PyTorch's function has no gradients on CPUs.
    """

    def forward(self: Any, x: T) -> T:
        rows, length, width = x.shape
        query, key, value = (
            linear(x).view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )

        def visible(b: T, h: T, i: T, j: T) -> T:
            return (i >= j) & (i // 5 == j // 5) & (i - j < 2 + h)

        def changed(score: T, b: T, h: T, i: T, j: T) -> T:
            return 3 * torch.tanh(score / 3) - 0.1 * (h + 1) * (i - j)

        mask = create_block_mask(visible, None, self.heads, length, length, x.device.type, BLOCK_SIZE=4)
        attend = dense if torch.is_grad_enabled() and "_applied" not in self.__dict__ else flex_attention
        out, aux = attend(query, key, value, score_mod=changed, block_mask=mask, return_aux=AuxRequest(lse=True))
        out = out * (aux.lse - 0.5).sigmoid().unsqueeze(-1).to(out.dtype)
        return self.out(out.transpose(1, 2).reshape(rows, length, -1))


def _with_flex_attention(model: OwnModel) -> OwnModel:
    for block in model.blocks:
        block.attention.__class__ = type("_Attention", (FlexBlockAttention, type(block.attention)), {})
    return model


change("flex_attention", prepare=_with_flex_attention, needs={"own"})
