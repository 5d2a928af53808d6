"""The counter-based generator, and the normal distribution in exact ops."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from parallelize.ops.random import counter
from parallelize.ops.random import counter as normal
from parallelize.ops.random.counter import (
    IndexRun,
    bits,
    block_size,
    blocks,
    inverse_normal,
    keep_mask,
    key,
    log,
    open_uniform,
    uniform,
)

COUNT = 1 << 18
KEYS = [key(0, "a", 0), key(0, "a", 1), key(0, "b", 0), key(1, "a", 0)]


def indices(count: int = COUNT, start: int = 0, step: int = 1) -> torch.Tensor:
    return torch.arange(start, start + count * step, step)


def one_bits(words: torch.Tensor) -> torch.Tensor:
    """[n] int64 -> [64]: how often each bit is set."""
    return torch.stack([((words >> bit) & 1).sum() for bit in range(64)])


def chi_square(counts: torch.Tensor, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_bits_are_those_of_an_independent_implementation():
    """Unbounded integers of Python, against the shifts and wrapping multiplications of torch."""
    mask = 2**64 - 1
    start, late = (number & mask for number in KEYS[0])
    for index in (0, 1, 2, 12345, 2**31, 2**40 + 7, 2**62):
        z = (index * 0x9E3779B97F4A7C15 + start) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z = ((z ^ (z >> 31)) + late) & mask
        z = ((z ^ (z >> 32)) * 0xD6E8FEB86659FD93) & mask
        z ^= z >> 32
        assert int(bits(KEYS[0], torch.tensor([index]))[0]) & mask == z


@pytest.mark.sweep
@pytest.mark.processes
def test_keys_are_the_same_in_every_process_and_differ_by_each_part():
    code = "from parallelize.ops.random.counter import key; print(*key(3, 'model.layers.0', 5, 7))"
    words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert tuple(map(int, words)) == key(3, "model.layers.0", 5, 7) == (5818496656434501890, -6848975899406778244)
    parts = [key(0, "a"), key(1, "a"), key(0, "b"), key(0, "a", 0), key(0, "a", 0, 0), key(0, "a", 1), key(0, "a0")]
    assert len(set(parts)) == len(parts)


@pytest.mark.parametrize("where", KEYS)
@pytest.mark.parametrize("step", [1, 2, 1024, 2**20 + 1])
def test_every_bit_is_fair(where, step):
    """Also along strided indices, as the rows and columns of a matrix are."""
    spread = (one_bits(bits(where, indices(step=step))) - COUNT / 2) / math.sqrt(COUNT / 4)
    assert float(spread.abs().max()) < 4.5  # of 64 bits: once in 2,000 for fair ones


@pytest.mark.variants(every=5)
@pytest.mark.parametrize(
    "other",
    [
        lambda: bits(KEYS[0], indices(start=1)),
        lambda: bits(KEYS[0], indices(start=1024)),
        lambda: bits(KEYS[1], indices()),
        lambda: bits(KEYS[2], indices()),
        lambda: bits(KEYS[3], indices()),
    ],
    ids=["next index", "next row", "next step", "other site", "other seed"],
)
def test_neighbors_share_nothing(other):
    """Bits of neighbors, and each bit against every other one of the neighbor, agree as often as chance has it."""
    own_bits, theirs = bits(KEYS[0], indices()), other()
    for rotation in range(64):
        turned = (theirs >> rotation & (2 ** (64 - rotation) - 1)) | (theirs << (64 - rotation)) if rotation else theirs
        spread = (one_bits(own_bits ^ turned) - COUNT / 2) / math.sqrt(COUNT / 4)
        assert float(spread.abs().max()) < 5.5  # of 64 x 64 pairs


@pytest.mark.sweep
def test_a_changed_index_bit_changes_half_of_the_bits():
    index = indices()
    for bit in range(40):
        changed = one_bits(bits(KEYS[0], index.clone()) ^ bits(KEYS[0], index ^ (1 << bit))) / COUNT
        assert float((changed - 0.5).abs().max()) < 0.006


def test_keys_whose_windows_overlap_differ_all_the_same():
    """A key that starts where another one is after ten elements: the second half of the key keeps them apart."""
    first = KEYS[0]
    ahead = (first.start + 10 * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
    second = counter.Key(ahead, KEYS[1].late)
    same = bits(first, indices(start=10)) ^ bits(second, indices())
    assert float(((one_bits(same) - COUNT / 2) / math.sqrt(COUNT / 4)).abs().max()) < 4.5


@pytest.mark.parametrize("cells", [256, 4096])
def test_uniform_fills_cells_evenly_alone_and_in_pairs(cells):
    u = uniform(KEYS[0], indices())
    counts = torch.bincount((u * cells).long(), minlength=cells)
    assert abs(chi_square(counts, COUNT / cells) - cells) < 5 * math.sqrt(2 * cells)
    side = int(math.sqrt(cells))
    pairs = (u[:-1] * side).long() * side + (u[1:] * side).long()
    counts = torch.bincount(pairs, minlength=cells)
    assert abs(chi_square(counts, (COUNT - 1) / cells) - cells) < 5 * math.sqrt(2 * cells)


def test_uniform_has_24_or_53_bits_and_never_one():
    for dtype, count in ((torch.float32, 24), (torch.float64, 53)):
        u = uniform(KEYS[0], indices(), dtype)
        scaled = u.double() * 2**count
        assert u.dtype == dtype and torch.equal(scaled, scaled.round())
        assert not torch.equal(scaled / 2, (scaled / 2).round())  # all bits are used
        assert float(u.min()) >= 0.0 and float(u.max()) < 1.0
    inside = open_uniform(KEYS[0], indices())
    assert float(inside.min()) > 0.0 and torch.equal(1.0 - (1.0 - inside), inside)


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.999])
def test_kept_has_the_right_rate(p):
    rate = float(keep_mask(KEYS[0], indices(), p).double().mean())
    assert abs(rate - (1 - p)) <= 4 * math.sqrt(p * (1 - p) / COUNT)


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 1 << 16])
def test_blocks_cover_everything_once_whatever_their_size(size, monkeypatch):
    """Rows of runs, as a sequence shard of packed columns has them."""
    monkeypatch.setattr(counter, "block_size", lambda device: size)
    offsets = torch.tensor([0, 100, 250])
    runs = [IndexRun(0, 3, 11), IndexRun(11, 40, 5)]
    out = torch.full((3, 16), -1)
    for block, index in blocks(offsets, runs):
        assert index.numel() <= max(size, 1)
        assert (out[block.rows, block.columns] == -1).all()
        out[block.rows, block.columns] = index
    columns = torch.tensor([*range(3, 14), *range(40, 45)])
    assert torch.equal(out, offsets[:, None] + columns)


def test_inverse_normal_is_accurate_to_the_last_bits():
    edges = torch.tensor([2.0**-53, 1e-15, 1e-10, 0.075, 0.425, 0.5, 0.925], dtype=torch.float64)
    u = torch.cat([open_uniform(KEYS[0], indices()), edges])
    expected = torch.special.ndtri(u)
    assert float((inverse_normal(u) - expected).abs().max()) < 1e-14
    assert torch.equal(inverse_normal(1.0 - u[: COUNT // 4]), -inverse_normal(u[: COUNT // 4]))  # symmetric


def reference(u: float) -> float:
    """The same in Python's own floats, one rounding an operation."""

    def ratio(polynomials: tuple, r: float) -> float:
        values = []
        for coefficients in polynomials:
            out = r * coefficients[0] + coefficients[1]
            for coefficient in coefficients[2:]:
                out = out * r + coefficient
            values.append(out)
        return values[0] / values[1]

    q = u - 0.5
    r = -(q * q) + 0.180625
    if r >= 0.0:
        return ratio(normal._CENTER, r) * q
    tail = u if u < 0.5 else 1.0 - u
    m, e = math.frexp(tail)
    m, e = (m, e) if m > normal._SQRT_HALF else (m * 2.0, e - 1)
    s = (m - 1.0) / (m + 1.0)
    z, series = s * s, normal._ATANH[0]
    for coefficient in normal._ATANH[1:]:
        series = series * z + coefficient
    logarithm = (series * s + e * normal._LN2_LOW) + e * normal._LN2_HIGH
    r = -logarithm * normal._LINE[0] + normal._LINE[1]
    for _ in range(5):
        r = (-logarithm / r + r) * 0.5
    x = ratio(normal._TAIL, r - 1.6) if r <= 5.0 else ratio(normal._FAR_TAIL, r - 5.0)
    return -x if u < 0.5 else x


def test_inverse_normal_has_the_bits_of_plain_floats():
    """On any machine: nothing is fused, and no library is asked for a logarithm or a root."""
    edges = torch.tensor([2.0**-53, 1e-15, 3e-12, 0.07, 0.0751, 0.9, 1 - 2.0**-40], dtype=torch.float64)
    u = torch.cat([open_uniform(KEYS[0], indices(20_000)), edges])
    expected = torch.tensor([reference(x) for x in u.tolist()], dtype=torch.float64)
    assert torch.equal(inverse_normal(u), expected)


def test_log_is_accurate():
    edges = torch.tensor([2.0**-1000, 0.5, 1.0, 0.7071067811865476], dtype=torch.float64)
    x = torch.cat([open_uniform(KEYS[0], indices()), edges])
    assert float(((log(x) - x.log()).abs() / x.log().abs().clamp(min=1e-3)).max()) < 1e-15
    assert float(log(torch.tensor([1.0], dtype=torch.float64))) == 0.0


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("chunk", [1, 3, 5, 17, 1000])
def test_normal_has_the_same_bits_in_chunks_of_any_size(chunk):
    """A vectorized log or cosine would not: its loop's tail is another code."""
    full = inverse_normal(open_uniform(KEYS[0], indices(3001)))
    parts = [
        inverse_normal(open_uniform(KEYS[0], indices(min(chunk, 3001 - start), start)))
        for start in range(0, 3001, chunk)
    ]
    assert torch.equal(torch.cat(parts), full)


def test_blocks_are_small_and_fixed():
    assert block_size(torch.device("cpu")) == 1 << 16  # on the one thread of these tests
