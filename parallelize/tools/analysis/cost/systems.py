"""Training systems by name: what 16 bits mean in each, and what they hide behind compute. Torch-free.

"bfloat16" says how matmuls are computed. In which dtype gradients are stored and summed, whether the optimizer keeps
float32 copies, and whether reductions run during backward are choices of the system around them. `systems.yaml` has a
row for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from parallelize.tools.analysis.record.constants import constant

OWN = "parallelize"
_FILE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class System:
    """One system.

    Attributes:
        gradients, reduced: bytes of an element of a gradient as it is stored, and as it is sent, in 16-bit training.
        copies: bytes of the float32 copy that the optimizer steps; 0 where stored weights are float32.
        scatters: whether ZeRO 1 reduce-scatters gradients, rather than summing all of them on each rank.
        step_bytes: for each element that an optimizer's step takes, what it allocates: flat copies of gradients, in 16
            bits and in float32, and the temporaries of an unfused update.
        over_cp: whether ZeRO splits over the ranks of cp too, and not over data ranks alone.
        copied: whether gathered parameters are copied out of the buffer that they arrive in, and gradients into the one
            that is scattered, as `fully_shard` does.
        by_owner: whether ZeRO 1 gives whole parameters to ranks, each of which broadcasts its own after a step.
        logits: bytes of each logit that its metrics hold beside the loss.
        constants_of: the system whose fitted constants it has; empty: its own.
    """

    name: str
    title: str
    gradients: float
    reduced: float
    copies: float
    scatters: bool
    step_bytes: float
    over_cp: bool = False
    copied: bool = False
    by_owner: bool = False
    logits: float = 0.0
    constants_of: str = ""

    @property
    def fitted(self) -> str:
        """The name that its constants have."""
        return self.constants_of or self.name

    @property
    def hidden(self) -> float:
        """The part of reductions over data axes that runs behind backward."""
        return constant(f"hidden.{self.fitted}")

    @property
    def optimizer(self) -> float:
        """The memory traffic of the optimizer's step, over that of one fused kernel."""
        return constant(f"optimizer.{self.fitted}")

    @property
    def step_ms(self) -> float:
        """Of a step, whatever its size: norms of gradients, counters, the loop."""
        return constant(f"step_ms.{self.fitted}")

    @property
    def stage_s(self) -> float:
        """Of the host, for each action of a pipeline: its messages, and the hand-over."""
        return constant(f"stage_ms.{self.fitted}") * 1e-3

    @property
    def reserve(self) -> float:
        """Bytes of a GPU that are not tensors: the context, NCCL, libraries' workspaces."""
        return constant(f"reserve_gb.{self.fitted}") * 1e9

    @property
    def fragmentation(self) -> float:
        """What the allocator holds beside tensors, over what tensors take."""
        return constant(f"fragmentation.{self.fitted}")


def system(name: str) -> System:
    """A system by one of the names of `known_systems`."""
    return _all()[name]


def known_systems() -> tuple[str, ...]:
    """Names of all systems."""
    return tuple(_all())


@lru_cache(maxsize=1)
def _all() -> Mapping[str, System]:
    raw = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {name: System(name, **values) for name, values in raw.items()}
