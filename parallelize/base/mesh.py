"""Arithmetic of meshes: named axes, sizes, ranks and coordinates, without devices.

Ranks are laid out in row-major order of the axes as named: the last axis changes fastest. `MeshSpec(dp=2, tp=4)` puts
ranks 0..3 in one `tp` group, as `init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))` does.

Torch-free. `comm/meshes.py` makes the `DeviceMesh`, `comm/groups.py` the process groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallelize.base.agreement import text_digest
from parallelize.base.errors import MeshError, Problem, did_you_mean

AXES = ("pp", "dp_replicate", "dp", "dp_shard", "cp", "ep", "tp")
SAMPLE_AXES = ("dp_replicate", "dp", "dp_shard")  # ranks along these axes get different samples; slowest first
DATA_AXES = (*SAMPLE_AXES, "cp")  # ranks along these get different tokens: along cp, of the same samples
FOLDED_AXES = ("dp", "dp_shard", "cp", "tp")  # whose ranks experts are divided over; slowest first
EXPERT_AXES = ("edp", "ep")  # of the folded mesh: copies of all experts, and the ranks of a copy: ep x etp of them
MOST_RANKS = 1 << 20  # groups are listed rank by rank, and the largest clusters have some 200,000 accelerators

_SIZE = re.compile(r"[0-9]{1,100}")


@dataclass(frozen=True, init=False)
class MeshSpec:
    """Named axis sizes, slowest axis first.

    Args:
        axes: (name, size) pairs.
        sizes: more axes, by keyword: `MeshSpec(dp=2, tp=4)`.

    Raises: MeshError `bad-axis-size` for a size that is not a positive integer, or more than MOST_RANKS ranks;
        `repeated-axis`.
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, axes: Sequence[tuple[str, int]] = (), **sizes: int):
        named = (*axes, *sizes.items())
        for name, size in named:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(
                    Problem("bad-axis-size", f"axis {name} has size {size!r}", fix="give a positive integer")
                )
        names = [name for name, _ in named]
        for name in names:
            if names.count(name) > 1:
                raise MeshError(Problem("repeated-axis", f"axis {name} is named {names.count(name)} times"))
        if math.prod(size for _, size in named) > MOST_RANKS:
            what = f"the mesh {','.join(f'{name}={size}' for name, size in named)} has more than {MOST_RANKS:,} ranks"
            raise MeshError(Problem("bad-axis-size", what, fix="correct the size of an axis"))
        object.__setattr__(self, "axes", tuple(named))

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Parse text such as `pp=2,dp=4,tp=8`. Raises: MeshError `bad-mesh`, and as the constructor."""
        axes = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, size = part.partition("=")
            if not equals or not _SIZE.fullmatch(size.strip()):
                raise MeshError(Problem("bad-mesh", f"cannot read {part!r} in {text!r}", fix="write `dp=2,tp=4`"))
            axes.append((name.strip(), int(size)))
        return cls(axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks along each axis, in the order of `names`."""
        return tuple(size for _, size in self.axes)

    @property
    def world_size(self) -> int:
        """The number of ranks of the mesh: the product of the sizes."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """The number of ranks along `axis`. Raises: MeshError `unknown-axis`."""
        if axis not in self.names:
            raise MeshError(
                Problem("unknown-axis", f"this mesh has no axis {axis!r}", fix=did_you_mean(axis, self.names))
            )
        return dict(self.axes)[axis]

    def ranks(self, *axes: str) -> int:
        """The number of ranks along the product of `axes`. An axis that the mesh does not have counts as 1."""
        sizes = dict(self.axes)
        return math.prod(sizes.get(axis, 1) for axis in axes)

    @property
    def shard_axis(self) -> str:
        """The axis over which ZeRO shards."""
        return "dp_shard" if "dp_shard" in self.names else "dp"

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The data axes with more than one rank, over which gradients are summed."""
        return tuple(axis for axis in DATA_AXES if self.ranks(axis) > 1)

    def with_axes(self, other: MeshSpec) -> MeshSpec:
        """The axes of both meshes. An axis that both have gets the size that it has in `other`."""
        return MeshSpec([*((name, size) for name, size in self.axes if name not in other.names), *other.axes])

    def only(self, *axes: str) -> MeshSpec:
        """The mesh of some of its `axes`; names that it does not have are ignored."""
        return MeshSpec([(name, size) for name, size in self.axes if name in axes])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name -> index of `rank` along that axis. Raises: MeshError `bad-rank`."""
        if not 0 <= rank < self.world_size:
            raise MeshError(Problem("bad-rank", f"rank {rank} is not in a mesh of {self.world_size} ranks"))
        index = {}
        for name, size in reversed(self.axes):
            rank, index[name] = divmod(rank, size)
        return {name: index[name] for name in self.names}

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates, one for each axis. Raises: MeshError `bad-coordinate`, `unknown-axis`."""
        for name in coordinates:
            self.size(name)
        rank = 0
        for name, size in self.axes:
            index = coordinates.get(name)
            if index is None or not 0 <= index < size:
                raise MeshError(
                    Problem(
                        "bad-coordinate", f"axis {name} (size {size}) was given {index}", fix="give 0 <= index < size"
                    )
                )
            rank = rank * size + index
        return rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups of ranks that differ only along `axes`, in row-major order of `axes`: the last one changes
        fastest."""
        offsets = self._offsets(axes)
        first_ranks = self._offsets([name for name in self.names if name not in axes])
        return [tuple(first + offset for offset in offsets) for first in first_ranks]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of `groups(*axes)` that contains `rank`."""
        coordinates = self.coordinates(rank)
        first = self.rank(**{name: 0 if name in axes else index for name, index in coordinates.items()})
        return tuple(first + offset for offset in self._offsets(axes))

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        """The offset of each rank along the product of `axes` from the first one."""
        offsets = [0]
        for axis in axes:
            size = self.size(axis)
            stride = math.prod(self.sizes[self.names.index(axis) + 1 :])
            offsets = [first + index * stride for first in offsets for index in range(size)]
        return offsets

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


def possible_expert_ranks(spec: MeshSpec) -> list[int]:
    """The numbers of ranks, ep x etp, over which the experts can be divided.

    Each divides the ranks of dp x cp x tp, and is a multiple or a divisor of tp, so that no group of tp is cut
    unevenly.
    """
    ranks, tp = spec.ranks(*FOLDED_AXES), spec.ranks("tp")
    return [n for n in _divisors(ranks) if n % tp == 0 or tp % n == 0]


def _divisors(number: int) -> list[int]:
    """In ascending order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def folding_order(spec: MeshSpec) -> list[str]:
    """The axes of a mesh in the order in which experts fold over them: tp changes fastest, then cp, then dp."""
    outer = [name for name in ("pp", "dp_replicate") if name in spec.names]
    return [*outer, *(name for name in FOLDED_AXES if name in spec.names)]


def folded(spec: MeshSpec, expert_ranks: int) -> MeshSpec:
    """The same ranks as experts see them: pp, dp_replicate, edp, ep, where edp x expert_ranks = dp x cp x tp.

    expert_ranks: those that have one copy of all experts together, ep x etp; the size of the axis `ep`.

    Source: Liu et al., MoE Parallel Folding, arXiv:2504.14960.
    """
    outer = [(name, spec.size(name)) for name in ("pp", "dp_replicate") if name in spec.names]
    return MeshSpec([*outer, ("edp", spec.ranks(*FOLDED_AXES) // expert_ranks), ("ep", expert_ranks)])


def folded_coordinates(spec: MeshSpec, expert_ranks: int, coordinates: Mapping[str, int]) -> dict[str, int]:
    """Coordinates in the folded mesh of a rank at these coordinates."""
    order = folding_order(spec)
    ordered = MeshSpec([(name, spec.size(name)) for name in order])
    return folded(spec, expert_ranks).coordinates(ordered.rank(**{name: coordinates[name] for name in order}))


def axis_order(spec: MeshSpec, zero: int) -> list[Problem]:
    """What is wrong with the order of axes for a ZeRO stage, whose axes must be slower than `tp`."""
    pairs = [(spec.shard_axis, "tp")] if zero > 0 else []
    pairs += [("dp_replicate", spec.shard_axis)] if zero == 3 else []
    return [
        Problem(
            "axis-order",
            f"ZeRO {zero} needs {first} before {second}, and the mesh is {spec}",
            fix=f"name {first} first",
        )
        for first, second in pairs
        if first in spec.names and second in spec.names and spec.names.index(first) > spec.names.index(second)
    ]


_MOST_NAMED = 16


def short_name(ranks: Sequence[int]) -> str:
    """Ranks as text; of many a digest, because each message of a group's rendezvous contains the group's name."""
    text = "_".join(map(str, ranks))
    if len(ranks) <= _MOST_NAMED:
        return text
    return f"{ranks[0]}_to_{ranks[-1]}_of_{len(ranks)}_{text_digest(text).hex()}"
