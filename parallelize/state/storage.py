"""How parameters are stored, as the caller of `parallelize_module` says."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallelize.plan.options import STANDARD


@dataclass(frozen=True)
class Storage:
    """How parameters are stored; see `parallelize_module`."""

    src_data_rank: int | None = 0
    weights_dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    check_replicated: bool | None = None
    compare_every: int = STANDARD.compare_every

    @property
    def compares(self) -> bool:
        """Whether parameters that become replicated DTensors are compared; by default, where they are not broadcast."""
        return self.src_data_rank is None if self.check_replicated is None else self.check_replicated

    @property
    def compare_inputs_every(self) -> int:
        """Forwards between comparisons of the inputs; 0: none."""
        return {True: 1, None: self.compare_every, False: 0}[self.check_replicated]

    def facts(self) -> dict[str, str]:
        """What every rank must have been given alike."""
        return {
            "option weights_dtype": str(self.weights_dtype),
            "option src_data_rank": str(self.src_data_rank),
            "option check_replicated": str(self.check_replicated),
        }
