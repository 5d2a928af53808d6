"""Routers that choose one expert after another by a maximum (`sparsemixer` of Phi 3.5), whose choices are replaced.

For each choice such a router computes

    the largest score                        in evaluation its index is the choice
    scores far below it, left out            masked_fill; weights are a softmax of the others
    the largest score with noise             in training; its index is the choice
    the largest weight                       in training; it decides which gradient estimate is taken

and the next one among the experts that are left. The indices are replaced, and an expert that is chosen is not left out: had the
router made this choice, it would not have been. So the stock router computes weights and its own gradient from its own scores.

Source: Liu et al., GRIN: GRadient-INformed MoE, arXiv:2409.12136.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

T = torch.Tensor
FUNCTION = "sparsemixer"
_MAX = (torch.max, torch.Tensor.max)
_MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)
MAXIMA_IN_TRAINING = 3  # for each choice; the second one is it


class ReplacedMaxima(TorchFunctionMode):
    """Replaces the choices within one call of such a router.

    Args:
        count: the number of experts. training: of the router.
        replacing: scores -> [tokens, k], the replacing choices; -1 for tokens that are routed as before.
        decide: (replacing choices [tokens], those of the router) -> the choices.

    Attributes:
        maxima, masks: how often the router took a maximum of scores, and left out scores.
    """

    def __init__(self, count: int, training: bool, replacing: Callable[[T], T], decide: Callable[[T, T], T]):
        super().__init__()
        self.count, self.training = count, training
        self.replacing, self.decide = replacing, decide
        self.maxima = self.masks = 0

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        scores = args[0] if args else None
        if not isinstance(scores, torch.Tensor) or scores.ndim != 2 or scores.shape[1] != self.count:
            return func(*args, **kwargs)
        if func in _MAX and len(args) + len(kwargs) > 1:
            return self._maximum(scores, func(*args, **kwargs))
        if func in _MASKED_FILL:
            return func(scores, self._unmasked(scores, args[1]), *args[2:], **kwargs)
        return func(*args, **kwargs)

    def _maximum(self, scores: T, largest: Any) -> Any:
        n, kind = divmod(self.maxima, MAXIMA_IN_TRAINING if self.training else 1)
        self.maxima += 1
        if kind != (1 if self.training else 0):
            return largest
        replacing = self._of_choice(scores, n).view_as(largest.indices)
        return torch.return_types.max((largest.values, self.decide(replacing, largest.indices)))

    def _unmasked(self, scores: T, mask: T) -> T:
        """The mask, which leaves no expert out that is chosen."""
        replacing = self._of_choice(scores, self.masks)[:, None]
        self.masks += 1
        return torch.where(replacing < 0, mask, mask.scatter(1, replacing.clamp(min=0), False))

    def _of_choice(self, scores: T, n: int) -> T:
        """[tokens]: the n-th replacing choices; -1 after the last, where the router is another one than the head of the file says."""
        replacing = self.replacing(scores)
        return replacing[:, n] if n < replacing.shape[1] else replacing.new_full((len(scores),), -1)

    def has_chosen(self, k: int) -> bool:
        """Whether the router computed what the head of the file says, for k choices."""
        return (self.maxima, self.masks) == (k * (MAXIMA_IN_TRAINING if self.training else 1), k)
