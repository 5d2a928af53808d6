"""Which samples this rank gets at each step: a function of (seed, epoch, position) that does not depend on the mesh.

    batches = GlobalBatches(len(dataset), 256, seed=1, mesh=mesh)
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=4)
    for batch in batches.track(loader):
        ...
        checkpoint = batches.state_dict()

A global batch is an interval of the epoch's order of samples, and data rank i of n takes the i-th of its n parts, or,
with `costs`, a part that takes as long to compute as the others. Ranks of one data rank (along tp, pp, cp) get the same
samples. A run that is resumed on another mesh sees the same global batches in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Sampler

from parallelize.base.errors import CheckpointError, DataError, Problem, ShapeError
from parallelize.comm.mesh_view import MeshView
from parallelize.ops.random.counter import Key, bits, key
from parallelize.training.data.balanced_deal import balanced_deal, check_count, checked_costs

_FIELDS = ("seed", "epoch", "batches_done", "num_samples", "global_batch_size", "shuffle", "drop_last")

Batch = TypeVar("Batch")


Samples = list[int] | list[tuple[int, ...]]
"""Of one step on one data rank: indices, or with `joined` those of each microbatch."""


class GlobalBatches(Sampler[Samples]):
    """A batch sampler: iterating gives this rank's indices of each global batch, from the position to the epoch's end.

    With an epoch's last batch, the position moves to the next epoch, which has another order. If an iteration
    is stopped early, the next one continues at the position. The position counts the batches that were returned; a
    DataLoader's workers take them ahead of training. After `track` was called, it counts what the tracked loop has
    taken.

    Args:
        num_samples: the number of samples in the data set.
        global_batch_size: samples per step, over all data ranks.
        seed: the seed of the order. Each epoch has another order.
        shuffle: False keeps the order of the data set.
        drop_last: False ends an epoch with a smaller batch of the remaining samples.
        mesh: a DeviceMesh with any axes, or None for one data rank.
        costs: what each sample costs to compute, in any unit: see `RowCosts`. The samples of a global batch are then
            dealt so that data ranks, and the microbatches of each, have nearly the same sums.
        num_microbatches: of a step, where `costs` are given: consecutive rows of the batch.
        joined: each item is the samples of one microbatch, of any number, for `JoinedRows`, which makes one row of
            them. Needs `costs`.
        lockstep: see `balanced_deal`.

    Raises: ShapeError `indivisible-batch` if a batch does not divide over the data ranks (and microbatches);
        `no-batches` if there is none. DataError `bad-costs`.
    Cost: no communication, and no memory for the order.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        mesh: Any = None,
        costs: Sequence[float] | None = None,
        num_microbatches: int = 1,
        joined: bool = False,
        lockstep: bool = False,
    ):
        self.num_samples, self.global_batch_size = num_samples, global_batch_size
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.data_index, self.data_ranks = (0, 1) if mesh is None else MeshView.of(mesh).sample_place
        self.epoch = self.batches_done = 0
        self._tracked = False
        self.costs = None if costs is None else checked_costs(costs, num_samples)
        self.num_microbatches, self.joined, self.lockstep = num_microbatches, joined, lockstep
        if joined and costs is None:
            what = "joined rows have any number of samples, and nothing says how many"
            raise DataError(Problem("bad-costs", what, fix="costs=[...], a number for each sample"))
        self._check_sizes()

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches in an epoch, the same on every rank."""
        return _steps(self.num_samples, self.global_batch_size, self.drop_last)

    def __len__(self) -> int:
        """The remaining steps of this epoch: the length of an iteration that starts now."""
        return self.steps_per_epoch - self.batches_done

    def __iter__(self) -> Iterator[Samples]:
        return self._hand_out(self.epoch, self.batches_done)

    def _hand_out(self, epoch: int, first: int) -> Iterator[Samples]:
        order = SampleOrder(self.num_samples, self.seed, epoch) if self.shuffle else None
        for step in range(first, self.steps_per_epoch):
            positions = self._positions(step)
            in_order = list(positions) if order is None else order.samples(positions)
            samples: Samples = in_order if self.costs is None else self._dealt(in_order, self.costs)
            if not self._tracked:
                self._move_to(epoch, step + 1)
            yield samples

    def _positions(self, step: int) -> range:
        """This rank's positions in the epoch's order; those of all ranks, where costs decide which it gets."""
        start = step * self.global_batch_size
        size = min(self.global_batch_size, self.num_samples - start)
        if self.costs is not None:
            return range(start, start + size)
        count = size // self.data_ranks
        return range(start + self.data_index * count, start + (self.data_index + 1) * count)

    def _dealt(self, samples: list[int], costs: list[float]) -> Samples:
        """This rank's of the samples of a global batch."""
        of_batch = [costs[n] for n in samples]
        ways = {"joined": self.joined, "lockstep": self.lockstep}
        deal = balanced_deal(of_batch, self.data_ranks, self.num_microbatches, **ways)
        parts = [[samples[n] for n in part] for part in deal[self.data_index]]
        return [tuple(part) for part in parts] if self.joined else [n for part in parts for n in part]

    def track(self, loader: Iterable[Batch]) -> Tracked[Batch]:
        """Iterate a DataLoader (or anything that iterates these batches), counting the batches that the loop has taken.

        `loader` may prefetch, if it begins an epoch only after the loop has taken all batches of the one before.

        Raises: DataError `other-sampler` for a DataLoader that takes its samples from another sampler, or several
            batches at once.
        """
        samplers = [loader.batch_sampler, loader.sampler] if isinstance(loader, DataLoader) else [self]
        if isinstance(loader, DataLoader) and loader.sampler is self and loader.batch_size not in (None, 1):
            what = f"the loader joins {loader.batch_size} of these batches in each of its own"
            raise DataError(Problem("other-sampler", what, fix="DataLoader(dataset, batch_sampler=batches)"))
        if all(sampler is not self for sampler in samplers):
            what = (
                f"the loader's samplers are a {' and a '.join(type(sampler).__name__ for sampler in samplers)}, not "
                "these batches"
            )
            fix = (
                "DataLoader(dataset, batch_sampler=batches); no library need prepare it, as it gives each rank its "
                "samples"
            )
            raise DataError(Problem("other-sampler", what, fix=fix))
        self._tracked = True
        return Tracked(self, loader)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank: the position after the batches taken so far."""
        return {name: getattr(self, name) for name in _FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved position, in the saved order. Iterations that have begun are not changed.

        With another global batch size, the position is the same number of samples.

        Args:
            state: the dict that `state_dict()` returned, on this mesh or another one.

        Raises: CheckpointError `data-position` for another data set or order, or a position between two batches.
            Nothing is changed then.
        """
        _check_state(state)
        if state["num_samples"] != self.num_samples:
            what = f"the saved data set had {state['num_samples']} samples, this one has {self.num_samples}"
            raise _position(what, "use the same data, or do not load the position")
        if state["shuffle"] != self.shuffle:
            raise _position(f"shuffle was {state['shuffle']}", f"pass shuffle={state['shuffle']}")
        done = self._converted(state["batches_done"], state["global_batch_size"])
        self.seed = state["seed"]
        self._move_to(state["epoch"], done)

    def _converted(self, batches: int, size: int) -> int:
        """Batches of `size` samples as batches of this object's size."""
        samples, new_size = batches * size, self.global_batch_size
        if samples % new_size:
            candidates = range(self.data_ranks, max(2 * new_size, size) + 1, self.data_ranks)
            fitting = sorted((n for n in candidates if samples % n == 0), key=lambda n: abs(n - new_size))
            what = (
                f"{samples} samples of the epoch were taken ({batches} batches of {size}), not a multiple of {new_size}"
            )
            fix = f"use a global batch size of {size} until the epoch ends"
            if fitting:
                fix = f"use a global batch size of {' or '.join(map(str, sorted(fitting[:3])))}"
            raise _position(what, fix)
        return samples // new_size

    def _move_to(self, epoch: int, done: int) -> None:
        over = done >= self.steps_per_epoch
        self.epoch, self.batches_done = (epoch + 1, 0) if over else (epoch, done)

    def _check_sizes(self) -> None:
        if min(self.num_samples, self.global_batch_size) < 1 or not self.steps_per_epoch:
            what = f"{self.num_samples} samples make no batch of {self.global_batch_size}"
            raise ShapeError(Problem("no-batches", what, fix="use a smaller batch, or drop_last=False"))
        last = 0 if self.drop_last else self.num_samples % self.global_batch_size
        if self.costs is not None:
            for size, name in ((self.global_batch_size, "a global batch"), (last, "the last batch")):
                if size:
                    check_count(size, self.data_ranks, self.num_microbatches, self.joined, name)
            return
        for size, name, other in (
            (self.global_batch_size, "a global batch", f"a multiple of {self.data_ranks}"),
            (last, "the last batch", "drop_last=True"),
        ):
            if size % self.data_ranks:
                what = f"{name} of {size} samples cannot be split over {self.data_ranks} data ranks"
                raise ShapeError(Problem("indivisible-batch", what, fix=f"use {other}"))


class Tracked(Generic[Batch]):
    """A loader whose batches are counted as a loop takes them. Made by `GlobalBatches.track`."""

    def __init__(self, batches: GlobalBatches, loader: Iterable[Batch]):
        self.batches, self.loader = batches, loader

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            self.batches._move_to(self.batches.epoch, self.batches.batches_done + 1)
            yield batch

    def __len__(self) -> int:
        return len(self.batches)


def _steps(num_samples: int, size: int, drop_last: bool) -> int:
    return num_samples // size if drop_last else -(-num_samples // size)


def _check_state(state: Any) -> None:
    if not isinstance(state, dict) or state.keys() != set(_FIELDS):
        raise _position("this is not a saved position", f"pass the dict of state_dict(), with {list(_FIELDS)}")
    for name in _FIELDS:
        kind = bool if name in ("shuffle", "drop_last") else int
        if type(state[name]) is not kind or (kind is int and name != "seed" and state[name] < 0):
            raise _position(f"the saved {name} is of {type(state[name]).__name__}", "use another checkpoint")
    size = state["global_batch_size"]
    if not size or state["batches_done"] >= _steps(state["num_samples"], size, state["drop_last"]):
        what = f"{state['batches_done']} batches of {size} of {state['num_samples']} samples cannot have been taken"
        raise _position(what, "use another checkpoint")


def _position(what: str, fix: str) -> CheckpointError:
    return CheckpointError(Problem("data-position", what, fix=fix))


# -- sample order ----------------------------------------------------------------------------------------------------
# The order in which an epoch takes its samples, of which any part can be computed by itself.


ROUNDS = 10


class SampleOrder:
    """A permutation of `count` samples, for a seed and an epoch, of which any part can be computed by itself.

    A number is written as two digits, of bases a and b, where a * b is just above `count`. In each round a random
    function of one digit is added to the other. Each round can be inverted, so all rounds are a permutation of a * b
    numbers. Results of `count` or above are permuted again until they are below (cycle walking), which leaves a
    permutation of `count`.
    Cost: no memory for the order; about 200 small integer ops per batch.
    Source: Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
    """

    def __init__(self, count: int, seed: int, epoch: int):
        self.count = count
        self.bases = (math.isqrt(count - 1) + 1, -(-count // (math.isqrt(count - 1) + 1)))
        self.keys = [key(seed, "order of samples", epoch, number) for number in range(ROUNDS)]

    def samples(self, positions: range) -> list[int]:
        """The samples at these positions of the order."""
        permuted = self._permuted(torch.arange(positions.start, positions.stop, device="cpu"))
        while (outside := permuted >= self.count).any():
            permuted[outside] = self._permuted(permuted[outside])
        return permuted.tolist()

    def _permuted(self, numbers: torch.Tensor) -> torch.Tensor:
        a, b = self.bases
        high, low = numbers // b, numbers % b
        for number, round_key in enumerate(self.keys):
            if number % 2:
                low = (low + _random(round_key, high, b)) % b
            else:
                high = (high + _random(round_key, low, a)) % a
        return high * b + low


def _random(round_key: Key, numbers: torch.Tensor, below: int) -> torch.Tensor:
    """A random function of each number, in [0, below): uniform to within below / 2^63."""
    return bits(round_key, numbers.clone()).bitwise_and_(2**63 - 1) % below
