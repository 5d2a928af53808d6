"""The same bits on CUDA as on the CPU: counter, normal distribution, initialization, dropout; streams with CUDA's
state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallelize.ops.random.counter import bits, inverse_normal, key, open_uniform, uniform
from parallelize.state.randomness.dropout.install import dropout_clock, install_dropout
from parallelize.state.randomness.dropout.position import Position
from parallelize.state.randomness.init.distributions import Normal, TruncatedNormal, Uniform
from parallelize.state.randomness.init.initialize import build_on_meta, initialize
from parallelize.state.randomness.streams import Streams
from tests.support.models import tiny_batch, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
COUNT = (1 << 20) + 3
WHERE = key(0, "cuda", 1)


def indices(device: str) -> torch.Tensor:
    return torch.arange(COUNT, device=device)


@pytest.mark.parametrize("draw", [bits, uniform, open_uniform, lambda k, i: inverse_normal(open_uniform(k, i))])
def test_numbers_have_the_bits_of_the_cpu(draw):
    assert torch.equal(draw(WHERE, indices("cuda")).cpu(), draw(WHERE, indices("cpu")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "drawn", [Normal(0.0, 0.02), Uniform(-0.1, 0.3), TruncatedNormal(0.0, 1.0, -2.0, 1.0)], ids=str
)
def test_distributions_have_the_bits_of_the_cpu(drawn, dtype):
    values = [drawn.draw(WHERE, indices(device)).to(torch.float32).to(dtype).cpu() for device in ("cpu", "cuda")]
    assert torch.equal(*values)


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_the_bits_of_the_cpu(dtype, stock):
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(301, 64), nn.LayerNorm(64), nn.Linear(64, 127), nn.Conv1d(5, 7, 3)).to(dtype)

    on_cpu, on_cuda = (initialize(build_on_meta(build), 3, device=d, stock=stock) for d in ("cpu", "cuda"))
    for (name, a), (_, b) in zip(on_cpu.named_parameters(), on_cuda.named_parameters(), strict=True):
        assert b.is_cuda and torch.equal(a, b.cpu()), name


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_dropout_has_the_masks_of_the_cpu(kind):
    rates = dict(resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.3)
    model = tiny_model("gpt2", torch.float64, attn_implementation=kind, **rates)
    ids, _ = tiny_batch()
    results = []
    for device in ("cpu", "cuda"):
        here = copy.deepcopy(model).to(device)
        install_dropout(here, 7)
        out = here(input_ids=ids.to(device)).logits
        out.square().sum().backward()
        results.append((out.detach().cpu(), {name: p.grad.cpu() for name, p in here.named_parameters()}))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)


def test_recompute_on_the_device_threads_of_backward():
    rates = dict(resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.3)
    model = tiny_model("gpt2", torch.float64, **rates).cuda()
    ids = tiny_batch()[0].cuda()
    results = []
    for recomputed in (False, True):
        here = copy.deepcopy(model)
        if recomputed:
            here.gradient_checkpointing_enable()
        install_dropout(here, 7)
        here(input_ids=ids).logits.square().sum().backward()
        results.append({name: p.grad for name, p in here.named_parameters()})
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_streams_keep_the_state_of_cuda():
    streams = Streams(1)
    streams.declare("a")
    torch.cuda.manual_seed(5)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(5)
    with streams("a"):
        first = torch.rand(4, device="cuda")
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    state = copy.deepcopy(streams.state_dict())
    with streams("a"):
        second = torch.rand(4, device="cuda")
    assert not torch.equal(first, second)
    again = Streams(0)
    again.load_state_dict(state)
    with again("a"):
        assert torch.equal(torch.rand(4, device="cuda"), second)


class Draws(nn.Module):
    """What one forward draws on a device, by every kind of operation that has bits of its own."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        like, shares = torch.empty_like(x), x.cpu().sigmoid().to(x.device)
        drawn = [torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 9), torch.bernoulli(shares)]
        drawn += [like.bernoulli_(0.3), like.clone().exponential_(), torch.normal(x, 2.0), like.clone().random_(3, 7)]
        drawn += [torch.randperm(len(x), device=x.device), torch.rand(x.shape, device=x.device, dtype=torch.bfloat16)]
        drawn += [torch.multinomial(shares, 2), torch.multinomial(shares, 3, replacement=True)]
        return [x.detach().cpu() for x in drawn]


def test_a_forward_draws_the_same_on_both_devices():
    x, model, results = torch.linspace(-1, 1, 300).view(100, 3), Draws(), []
    install_dropout(model)
    for device in ("cpu", "cuda"):
        with dropout_clock(model).at(Position(2, batch_offset=4, batch_size=100)):
            results.append(model(x.to(device)))
    state = torch.cuda.get_rng_state()
    model(x.cuda())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert [torch.equal(*pair) for pair in zip(*results, strict=True)] == [True] * len(results[0])
