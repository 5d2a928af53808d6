"""Tokens that an adapter of PEFT puts before each prompt: prompt tuning, prefix tuning, P-tuning.

Its forward puts them before whatever it is called with. A token after the prompt must not have them before itself: they
are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

T = torch.Tensor
_IN_THE_CACHE = frozenset({"PREFIX_TUNING", "CARTRIDGE"})
_NO_PROMPT = SimpleNamespace(is_prompt_learning=False, peft_type=None)


@dataclass(frozen=True)
class VirtualTokens:
    """The tokens before a prompt.

    Attributes:
        model: the adapted model; None: there are none. count: how many they are.
        has_positions: whether tokens may come with positions; the adapter drops those of others.
    """

    model: Any = None
    count: int = 0
    has_positions: bool = True

    def mask(self, mask: T) -> T:
        """[B, count + S], all of these before a mask [B, S]."""
        return torch.nn.functional.pad(mask, (self.count, 0), value=1)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A context in which the forward adds none."""
        if self.model is None:
            yield
            return
        configs, name = self.model.peft_config, self.model.active_adapter
        own = configs[name]
        configs[name] = _NO_PROMPT
        try:
            yield
        finally:
            configs[name] = own


def virtual_tokens(model: nn.Module) -> VirtualTokens:
    """Those that this model's adapter adds; none where it is disabled."""
    configs = getattr(model, "peft_config", None)
    name = getattr(model, "active_adapter", None)
    config = configs.get(name) if isinstance(configs, dict) and isinstance(name, str) else None
    if config is None or not config.is_prompt_learning or getattr(model, "_adapters_disabled", False):
        return VirtualTokens()
    kind = getattr(config.peft_type, "value", config.peft_type)
    return VirtualTokens(model, config.num_virtual_tokens, kind in _IN_THE_CACHE)
