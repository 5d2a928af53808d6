"""Optimizers that users bring: two whose update of a parameter needs all of it, and one that takes signs."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

T = torch.Tensor


class Shampoo(Optimizer):
    """Each matrix preconditioned from both sides by what its gradients add up to, and momentum of every parameter.

    Source: Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization", 2018, algorithm 1.
    """

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, update = self.state[p], p.grad
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    if p.ndim == 2:
                        sizes = zip(("left", "right"), p.shape, strict=True)
                        state |= {key: torch.eye(size, dtype=p.dtype, device=p.device) for key, size in sizes}
                if p.ndim == 2:
                    state["left"] += update @ update.T
                    state["right"] += update.T @ update
                    update = _inverse_root(state["left"]) @ update @ _inverse_root(state["right"])
                state["momentum"].mul_(group["momentum"]).add_(update)
                p.sub_(state["momentum"], alpha=group["lr"])


def _inverse_root(matrix: T) -> T:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**-0.25) @ vectors.T


class BlockAdam(Optimizer):
    """Adam whose moments are integers of 8 bits, with a scale for each block of a parameter.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, with linear codes.
    """

    BLOCK = 16

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-2):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("step", 0)
                state["step"] += 1
                moments = []
                for number, (beta, value) in enumerate(zip(group["betas"], (p.grad, p.grad**2), strict=True)):
                    last = self._read(state, number, p)
                    moments.append(last.lerp(value, 1 - beta))
                    self._write(state, number, moments[-1])
                corrected = [m / (1 - beta ** state["step"]) for m, beta in zip(moments, group["betas"], strict=True)]
                p.sub_(corrected[0] / (corrected[1].clamp(min=0).sqrt() + group["eps"]), alpha=group["lr"])

    def _read(self, state: dict[str, Any], number: int, like: T) -> T:
        if f"codes {number}" not in state:
            return torch.zeros_like(like)
        values = state[f"codes {number}"].to(like.dtype) * state[f"scales {number}"]
        return values.flatten()[: like.numel()].view_as(like)

    def _write(self, state: dict[str, Any], number: int, value: T) -> None:
        flat = value.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % self.BLOCK)).view(-1, self.BLOCK)
        scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        state[f"codes {number}"], state[f"scales {number}"] = (blocks / scales).round().to(torch.int8), scales


class Lion(Optimizer):
    """Signs of an average of gradients. Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                # tanh in the place of the sign: that of a gradient near zero is the sign of its rounding
                p.sub_(torch.tanh(50 * average.lerp(p.grad, 1 - group["betas"][0])), alpha=group["lr"])
                average.lerp_(p.grad, 1 - group["betas"][1])
