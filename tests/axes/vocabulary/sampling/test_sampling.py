"""Sampling on sharded logits: the tokens of one rank for any tp, the sets of `transformers`, traffic that knows no
V."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from parallelize import ShapeError, build_mesh, sample
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.axes.vocabulary.sampling import candidates, noise
from parallelize.axes.vocabulary.sampling.candidates import Candidates, keep_min_p, keep_top_k, keep_top_p, masses
from parallelize.axes.vocabulary.sampling.noise import gumbel
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops.random.counter import key, open_uniform
from parallelize.ops.vocabulary.class_targets import Vocabulary
from tests.support.threads import run_ranks

ROWS = 6
OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "seed": 5, "position": 3},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 40, "temperature": 1.7},
    {"top_k": 10**6},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.93, "temperature": 2.0},
    {"top_p": 1.0, "min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3},
    {"temperature": torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0, 9.0])},
    {"top_p": torch.tensor([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]), "min_p": torch.tensor([0.0, 0.0, 0.1, 0.5, 0.01, 1.0])},
]


def shard(full: torch.Tensor, tp: int):
    group = Group(build_mesh("cpu", tp=tp).get_group())
    start, stop = even_interval(full.shape[-1], tp, group.rank)
    return mark(full[..., start:stop].clone(), Vocabulary(full.shape[-1], group))


def kinds_of_logits(vocab: int) -> dict[str, torch.Tensor]:
    """[ROWS, vocab], with what makes ties, and tokens that may not be drawn."""
    generator = torch.Generator().manual_seed(vocab)
    z = torch.randn(ROWS, vocab, generator=generator, dtype=torch.float64) * 3
    masked = z.clone()
    masked[:, ::2] = -torch.inf
    masked[:, vocab // 2] = 1.0
    return {
        "float64": z,
        "float32": z.float(),
        "bfloat16": (z + 20).bfloat16(),
        "equal": torch.full_like(z, 3.0),
        "two levels": torch.where(z > 1.0, 2.0, -2.0),
        "masked": masked,
        "far apart": z * 1000,
        "transposed": z.t().contiguous().t(),
    }


@pytest.mark.variants(every=10)
@pytest.mark.parametrize(("tp", "vocab"), [(1, 67), (2, 5), (2, 1001), (4, 5), (4, 67), (4, 1001), (8, 5), (8, 67)])
def test_tokens_are_those_of_one_rank(tp, vocab):
    kinds = kinds_of_logits(vocab)
    expected = {(name, n): sample(z, **options) for name, z in kinds.items() for n, options in enumerate(OPTIONS)}

    def body(rank):
        shards = {name: shard(z, tp) for name, z in kinds.items()}
        return {(name, n): sample(shards[name], **OPTIONS[n]) for name, n in expected}

    for actual in run_ranks(tp, body):
        for configuration, tokens in expected.items():
            assert torch.equal(actual[configuration], tokens), (configuration, OPTIONS[configuration[1]])
            logits = kinds[configuration[0]].gather(1, tokens[:, None])
            assert tokens.dtype == torch.int64 and logits.isfinite().all()


def allowed(candidates: Candidates, **options) -> torch.Tensor:
    """Which tokens [B, V] the filters leave, on a group of one or after top-k."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    temperature, p, min_p = (
        torch.tensor(values[name], dtype=torch.float64) for name in ("temperature", "top_p", "min_p")
    )
    vocab = candidates.full
    candidates = keep_min_p(
        keep_top_p(keep_top_k(candidates, values["top_k"]).temperature_scaled(temperature), p), min_p
    )
    out = torch.zeros(len(candidates.logits), vocab, dtype=torch.bool)
    return out.scatter_(1, candidates.ids.expand(candidates.logits.shape), candidates.logits > -torch.inf)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize(("tp", "vocab"), [(2, 67), (1, 1001), (4, 5), (4, 1001)])
def test_tokens_are_the_same_without_waits(tp, vocab, monkeypatch):
    """As a GPU computes them: see `no_waits`."""
    kinds = kinds_of_logits(vocab)
    expected = {(name, n): sample(z, **options) for name, z in kinds.items() for n, options in enumerate(OPTIONS)}
    calls = []
    for module in (candidates, noise):
        monkeypatch.setattr(module, "avoids_waits", lambda device, count: calls.append(count) or True)

    def body(rank):
        shards = {name: shard(z, tp) for name, z in kinds.items()}
        return {(name, n): sample(shards[name], **OPTIONS[n]) for name, n in expected}

    for actual in run_ranks(tp, body):
        assert [case for case, tokens in expected.items() if not torch.equal(actual[case], tokens)] == []
    assert calls


@pytest.mark.variants(every=10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 13},
        {"top_p": 0.02},
        {"top_p": 0.5},
        {"top_p": 0.97},
        {"min_p": 0.03},
        {"top_k": 30, "top_p": 0.7},
        {"top_p": 0.8, "min_p": 0.3},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.06},
    ],
    ids=str,
)
def test_the_sets_are_those_of_transformers(options, temperature, dtype):
    import transformers as hf

    z = torch.randn(40, 211, dtype=dtype) * 2
    warpers = [
        hf.TemperatureLogitsWarper(temperature),
        *([hf.TopKLogitsWarper(options["top_k"])] if "top_k" in options else []),
        *([hf.TopPLogitsWarper(options["top_p"])] if "top_p" in options else []),
        *([hf.MinPLogitsWarper(options["min_p"])] if "min_p" in options else []),
    ]
    expected = hf.LogitsProcessorList(warpers)(None, z.clone()) > -torch.inf
    actual = allowed(Candidates.of(z, Vocabulary(211, Group.alone())), temperature=temperature, **options)
    assert torch.equal(actual, expected)
    for position in range(20):
        tokens = sample(z, temperature=temperature, position=position, **options)
        assert actual.gather(1, tokens[:, None]).all()


def test_of_equal_logits_the_lowest_are_kept():
    equal = torch.zeros(2, 12)

    def body(rank):
        candidates = Candidates.of(shard(equal, 4).to_local(), shard(equal, 4).vocabulary)
        selected = keep_top_p(candidates.temperature_scaled(torch.tensor(1.0)), torch.tensor(0.6, dtype=torch.float64))
        return keep_top_k(candidates, 5).ids.tolist(), selected.ids.expand(2, 3)[selected.logits > -torch.inf].tolist()

    candidates = run_ranks(4, body)
    assert all(ids == [[0, 1, 2, 3, 4]] * 2 for ids, _ in candidates)
    # 8 of 12 reach 0.6
    assert [selected for _, selected in candidates] == [
        [0, 1, 2] * 2,
        [3, 4, 5] * 2,
        [6, 7] * 2,
        [],
    ]


def test_frequencies_are_those_of_softmax():
    z = torch.randn(9, dtype=torch.float64) * 1.5
    count = 60_000

    def body(rank):
        marked = shard(z.expand(count, 9), 2)
        return sample(marked, seed=11), sample(marked, seed=11, top_p=0.9, temperature=0.8)

    plain, filtered = run_ranks(2, body)[0]
    selected = allowed(Candidates.of(z[None], Vocabulary(9, Group.alone())), top_p=0.9, temperature=0.8)[0]
    assert 1 < selected.sum() < 9
    for tokens, p in ((plain, z.softmax(-1)), (filtered, (z / 0.8).masked_fill(~selected, -torch.inf).softmax(-1))):
        seen = torch.bincount(tokens, minlength=9)
        assert ((seen - count * p).abs() <= 4.5 * (count * p * (1 - p)).sqrt()).all()


def test_rows_positions_and_seeds_draw_by_themselves():
    z = torch.zeros(400, 1000)
    first = sample(z)
    assert torch.equal(first, sample(z)) and len(first.unique()) > 300  # rows differ
    for other in ({"seed": 1}, {"position": 1}):
        assert (sample(z, **other) != first).float().mean() > 0.98
    assert torch.equal(sample(z[100:300], rows=torch.arange(100, 300)), first[100:300])


def test_a_padded_vocabulary_draws_the_same():
    z = torch.randn(50, 61)
    padded = torch.nn.functional.pad(z, (0, 3), value=-torch.inf)
    for options in OPTIONS[:1] + OPTIONS[4:6]:
        assert torch.equal(sample(z, **options), sample(padded, **options))


def sent_by(tp: int, vocab: int, options: dict) -> list[tuple[str, int]]:
    """(kind, bytes that each rank gives) of each collective of the first rank."""
    sent = []

    def counted(kind):
        real = getattr(Group, kind)

        def call(self, x, *args):
            if self.rank == 0:
                sent.append((kind, x.numel() * x.element_size()))
            return real(self, x, *args)

        return patch.object(Group, kind, call)

    z = torch.randn(3, vocab)
    with counted("all_reduce"), counted("all_gather"):
        run_ranks(tp, lambda rank: sample(shard(z, tp), **options))
    return sent


def test_traffic_is_of_k_and_not_of_the_vocabulary():
    best = ("all_gather", 3 * 16)
    for vocab in (1000, 4000):
        assert sent_by(2, vocab, {}) == sent_by(2, vocab, {"temperature": 0.0}) == [best]
        for k in (5, 100):
            assert sent_by(2, vocab, {"top_k": k, "top_p": 0.9, "min_p": 0.1}) == [("all_gather", 3 * 16 * k)]
        assert sent_by(2, vocab, {"min_p": 0.1}) == [("all_reduce", 3 * 8), best]
        (most, *rounds, ties, last) = sent_by(2, vocab, {"top_p": 0.9})
        assert most == ("all_reduce", 3 * 8) and ties == ("all_gather", 3 * 8) and last == best
        assert len(rounds) <= 13 and set(rounds) == {("all_reduce", 3 * 16 * 8)}
    assert sent_by(4, 30, {"top_k": 20}) == [("all_gather", 3 * 16 * 8)]  # no rank has more than 8
    assert sent_by(1, 30, {"top_p": 0.5}) == []


def test_other_forms_of_logits():
    z = torch.randn(2, 3, 40, dtype=torch.float64, requires_grad=True)
    expected = sample(z, top_p=0.9)
    assert expected.shape == (2, 3) and not expected.requires_grad
    assert torch.equal(expected.view(-1), sample(z.view(6, 40), top_p=0.9))
    assert sample(z[0, 0]).shape == () and sample(z[:0]).shape == (0, 3)
    assert torch.equal(sample(z[0, 0]), sample(z[0])[0])

    def body(rank):
        mesh = build_mesh("cpu", tp=4)
        start, stop = even_interval(40, 4, rank)
        spread = DTensor.from_local(z.detach()[..., start:stop], mesh, [Shard(-1)], shape=z.shape, stride=z.stride())
        return sample(spread, top_p=0.9), sample(shard(z, 4), top_p=0.9)

    for spread, marked in run_ranks(4, body):
        assert torch.equal(spread, expected) and torch.equal(marked, expected)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_without_a_highest_are_refused_on_every_rank(bad, options):
    z = torch.randn(3, 20)
    z[1, 13] = bad
    if bad == -torch.inf:
        z[1] = bad

    def body(rank):
        with pytest.raises(ShapeError, match="row 1 of 3") as error:
            sample(shard(z, 4), **options)
        return error.value.slugs

    assert run_ranks(4, body) == [("bad-logits",)] * 4


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        ({"temperature": -1.0}, "bad-option"),
        ({"temperature": float("nan")}, "bad-option"),
        ({"top_k": -1}, "bad-option"),
        ({"top_k": 2.0}, "bad-option"),
        ({"top_p": 1.1}, "bad-option"),
        ({"min_p": -0.1}, "bad-option"),
        ({"min_p": torch.tensor([0.1, 2.0])}, "bad-option"),
        ({"top_p": torch.tensor([0.1, 0.2, 0.3])}, "bad-option"),
        ({"rows": torch.arange(3)}, "bad-rows"),
        ({"rows": torch.ones(2)}, "bad-rows"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options, slug):
    with pytest.raises(ShapeError) as error:
        sample(torch.randn(2, 7), **options)
    assert error.value.slugs == (slug,)


def test_masses_and_noise_do_not_depend_on_where_an_element_stands():
    x = -torch.rand(100_003, dtype=torch.float64) * 40
    full = masses(x, 44)
    assert torch.equal(full, torch.cat([masses(part, 44) for part in x.split(997)]))
    assert (full.double() / 2**44 - x.exp()).abs().max() <= 0.51 * 2**-44
    u = open_uniform(key(1, "u"), torch.arange(100_003))
    assert torch.equal(gumbel(u), torch.cat([gumbel(part) for part in u.split(997)]))
    assert torch.allclose(gumbel(u), -torch.log(-torch.log(u)), rtol=0, atol=1e-13)


def test_the_lowest_of_equal_logits_wins_over_blocks_too():
    z = torch.zeros(6, 30_000)  # more than one block a row
    z[:, :11_000] = -1.0
    assert sample(z, temperature=torch.zeros(6)).tolist() == sample(z, temperature=0.0).tolist() == [11_000] * 6


def test_options_of_one_number_may_be_tensors_of_no_dims():
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, temperature=torch.tensor(0.0)), logits.argmax(-1))
    assert sample(logits[0], temperature=torch.tensor(0.0)) == logits[0].argmax()
    for option, value in (("temperature", 0.5), ("top_p", 0.4), ("min_p", 0.3), ("top_p", 1.0), ("min_p", 0.0)):
        number, tensor = (
            sample(logits, **{option: kind}) for kind in (value, torch.tensor(value, dtype=torch.float64))
        )
        assert torch.equal(number, tensor), option


@pytest.mark.parametrize("temperature", [1e-308, 1e-31, torch.tensor([1.0, 1e-40, 0.0], dtype=torch.float64)])
def test_temperatures_that_would_overflow_are_refused(temperature):
    logits = torch.randn(3, 50)
    with pytest.raises(ShapeError, match="temperature") as error:
        sample(logits, temperature=temperature)
    assert error.value.slugs == ("bad-option",)
    assert torch.equal(sample(logits * 1e30, temperature=1e-30), logits.argmax(-1))
