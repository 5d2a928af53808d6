"""The order in which an epoch takes its samples, of which any part can be computed by itself."""

from __future__ import annotations

import math

import torch

from parallelize.ops.random.counter import Key, bits, key

ROUNDS = 10


class SampleOrder:
    """A permutation of `count` samples, for a seed and an epoch, of which any part can be computed by itself.

    A number is written as two digits, of bases a and b, where a * b is just above `count`. In each round a random function
    of one digit is added to the other. Each round can be inverted, so all rounds are a permutation of a * b numbers. Results
    of `count` or above are permuted again until they are below (cycle walking), which leaves a permutation of `count`.
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
