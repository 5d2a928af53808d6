"""What a forward draws is that of one process on every mesh: noise, masks, timesteps, skipped layers; losses and all
gradients."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize import (
    Cuts,
    ModelError,
    build_mesh,
    full_gradients,
    install_dropout,
    parallelize_model,
    parallelize_module,
    recompute,
)
from parallelize.plan.plan_file import parse_plan
from tests.axes.context.test_dropout_over_cp import check
from tests.support.models import tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

WIDTH, VALUES, LENGTH = 6, 11, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


class Net(nn.Module):
    """Ids [batch, tokens] to logits, by way of `enter` and `inside`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.code = nn.Embedding(VALUES, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, VALUES)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def inside(self, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        return block(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.enter(self.embed(ids))
        for block in self.blocks:
            x = self.inside(x, block)
        return self.head(x)


class Autoencoder(Net):
    """A VAE: noise times a deviation of its own."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.code(x).chunk(2, -1)
        return mean + torch.randn_like(mean) * (0.5 * log_variance).exp()


class Masked(Net):
    """A masked autoencoder: of each row it sees the tokens with the least numbers, in a random order of its own."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.rand(x.shape[:2], device=x.device).argsort(1)
        seen = x.gather(1, order[:, :3, None].expand(-1, -1, x.shape[2]))
        return torch.cat([seen, seen.new_zeros(len(x), x.shape[1] - 3, x.shape[2])], 1).gather(
            1, order.argsort(1)[..., None].expand_as(x)
        )


class Diffusion(Net):
    """A DiT with noise inside: timesteps of rows, noise by `torch.distributions`, and rows whose condition is
    dropped."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        time = torch.randint(1, 1000, (len(x), 1, 1)) / 1000
        noise = torch.distributions.Normal(torch.zeros_like(x), 1.0).sample()
        kept = torch.bernoulli(torch.full((len(x), 1, 1), 0.6, dtype=x.dtype))
        return (1 - time) * x * kept + time * noise


class Stochastic(Net):
    """Stochastic depth of rows, and layers that are skipped."""

    def inside(self, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        if torch.rand([]) < 0.3:
            return x
        return x + (block(x) - x) * x.new_empty(len(x), 1, 1).bernoulli_(0.7) / 0.7


PLAN = """
schema_version: 1
tensor_parallel: {"{embed,code,head}": replicate, "blocks.*.up": colwise, "blocks.*.down": rowwise}
"""
RULES = {
    "embed": "replicate",
    "code": "replicate",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "replicate",
}
CUTS = Cuts("blocks", first=("embed", "code"), last=("head",))
IDS = torch.randint(0, VALUES, (4, LENGTH), generator=torch.Generator().manual_seed(1))


def made(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return cls().double()


def steps_alone(model: nn.Module, count: int = 3) -> list[dict[str, torch.Tensor]]:
    model, results = copy.deepcopy(model), []
    install_dropout(model)
    for _ in range(count):
        model.zero_grad()
        loss = F.cross_entropy(model(IDS).flatten(0, 1), IDS.roll(-1, 1).flatten())
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach()} | grads)
    assert len({float(result["loss"]) for result in results}) == count  # each step draws others
    return results


def steps_on(model: nn.Module, sizes: dict[str, int], count: int = 3, **options: Any) -> list[dict[str, torch.Tensor]]:
    mesh, results, ids = build_mesh("cpu", **sizes), [], IDS
    if "dp" in sizes:
        ids = IDS.chunk(2)[mesh.get_local_rank("dp")]
    parallel = parallelize_model(copy.deepcopy(model), mesh, dict(RULES), **options)
    for _ in range(count):
        loss = parallel.step(ids, targets=ids.roll(-1, 1))
        grads = {name: grad.clone() for name, grad in full_gradients(parallel.module).items()}
        results.append({"loss": loss.detach()} | grads)
        for parameter in parallel.module.parameters():
            parameter.grad = None
    return results


def check_own(cls: type[nn.Module], sizes: dict[str, int], **options: Any) -> None:
    model = made(cls)
    expected, seen = steps_alone(model), set()
    for results in run_ranks(2, lambda rank: steps_on(model, sizes, **options)):
        for actual, wanted in zip(results, expected, strict=True):
            assert {name for name in actual if bool(actual[name].any())} <= {*wanted}
            seen |= actual.keys()
            error, name = worst(actual, {name: wanted.get(name, torch.zeros_like(actual[name])) for name in actual})
            assert error <= 1e-12, f"{name} differs by {error:.1e}"
    assert seen >= expected[0].keys()


MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {}),
    ({"pp": 2}, {"cuts": CUTS, "num_microbatches": 2}),
    ({"dp": 2}, {"zero": 3}),
    ({"tp": 2}, {"num_microbatches": 2}),
    ({"dp": 2}, {"num_microbatches": 2}),
    ({"pp": 2}, {"cuts": CUTS, "num_microbatches": 4}),
]


@pytest.mark.variants(every=4)
@pytest.mark.parametrize(("sizes", "options"), MESHES, ids=str)
@pytest.mark.parametrize("cls", [Autoencoder, Masked, Diffusion, Stochastic])
def test_models_that_draw_train_as_one_process(cls, sizes, options):
    check_own(cls, sizes, **options)


class Noisy(nn.Embedding):
    """NEFTune: noise on embeddings, as large as the sequence is long."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids)
        return x + torch.empty_like(x).uniform_(-0.1, 0.1) if self.training else x


LANGUAGE: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"cp": 2}, {}),
    ({"tp": 2}, {"sequence_parallel": True}),
    ({"pp": 2}, {"num_microbatches": 2}),
    ({"dp": 2}, {"zero": 3}),
    ({"cp": 2, "tp": 2}, {"sequence_parallel": True, "recompute": "full"}),
]


@pytest.mark.variants(every=5)
@pytest.mark.parametrize(("sizes", "options"), LANGUAGE, ids=str)
def test_noise_on_tokens_is_placed_in_the_sequence(sizes, options):
    model = tiny_model("llama", torch.float64).train()
    model.model.embed_tokens.__class__ = Noisy
    check(model, sizes, **options)


DROPPED: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"pp": 2}, {"num_microbatches": 2}),
    ({"tp": 2}, {}),
    ({"cp": 2}, {}),
    ({"dp": 2}, {"zero": 3}),
    ({"dp": 2}, {"zero": 1, "recompute": "full"}),
    ({"pp": 4}, {"num_microbatches": 2}),
]


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize(("sizes", "options"), DROPPED, ids=str)
def test_all_ranks_skip_the_layers_that_one_process_skips(sizes, options, rate):
    """LayerDrop of OPT, alone and beside dropout."""
    model = tiny_model("opt", torch.float64, layerdrop=0.5, num_hidden_layers=4, dropout=rate).train()
    check(model, sizes, **options)


# -- without parallelize_model -----------------------------------------------------------------------------------------


def test_ranks_of_a_plan_alone_draw_the_same():
    """Their seed is that of PyTorch's generator on the first rank; in evaluation too."""
    model = made(Autoencoder)

    def body(rank: int) -> tuple:
        planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2), parse_plan(PLAN))
        return planned(IDS).detach(), planned(IDS).detach(), planned.eval()(IDS).detach()

    (first, second, third), others = run_ranks(2, body)
    assert all(torch.equal(*pair) for pair in zip((first, second, third), others, strict=True))
    assert not torch.equal(first, second) and not torch.equal(first, third)


def test_pytorchs_own_generator_does_not_advance_and_one_of_the_caller_is_used():
    own = torch.Generator().manual_seed(3)

    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.rand_like(x), torch.rand(x.shape, generator=own)])

    model, state = Draws(), torch.get_rng_state()
    install_dropout(model)
    drawn = model(torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drawn[1], torch.rand(2, 3, generator=torch.Generator().manual_seed(3)))


class Host(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random() + numpy.random.rand()


def test_what_python_and_numpy_draw_is_that_of_the_step():
    results = []
    for noise in (1, 2):
        random.seed(noise)
        numpy.random.seed(noise)
        model = Host()
        clock = install_dropout(model)
        results.append([model(torch.ones(2)) for _ in range(3)])
        assert clock.step == 3 and random.random() == random.Random(noise).random()
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert len({float(x[0]) for x in results[0]}) == 3


# -- recompute ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["blocks", "checkpoint", "reentrant"])
def test_a_recompute_draws_the_numbers_of_its_forward(how):
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * torch.randn_like(x)).sin() * torch.rand(len(x), 1, dtype=x.dtype)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Noise() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x) if how in ("", "blocks") else checkpoint(block, x, use_reentrant=how == "reentrant")
            return x

    results, method = [], how
    for how in ("", method):
        torch.manual_seed(0)
        model = Stack().double()
        if how == "blocks":
            recompute(model, "full", units="blocks.*")
        install_dropout(model)
        x = torch.linspace(0.0, 1.0, 12, dtype=torch.float64).view(3, 4).requires_grad_()
        model(x).square().sum().backward()
        results.append({"x": x.grad} | {name: p.grad for name, p in model.named_parameters()})
    assert worst(*results)[0] == 0.0


def test_a_checkpointed_function_that_draws_is_refused():
    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda y: y * torch.rand_like(y), x, use_reentrant=False)

    model = Draws()
    install_dropout(model)
    with pytest.raises(ModelError) as error:
        model(torch.ones(2, requires_grad=True))
    assert error.value.slugs == ("unplaceable-draw",) and "test_draws.py" in str(error.value)


def test_what_cannot_be_placed_is_refused_on_every_rank():
    class Between(Net):
        def inside(self, x: torch.Tensor, block: Any) -> torch.Tensor:
            y = block.up(x)
            return x + block.down(y * torch.rand(y.shape[0], y.shape[1], 1).expand_as(y))

    model = made(Between)

    def body(rank: int) -> None:
        planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2), parse_plan(PLAN))
        with pytest.raises(ModelError) as error:
            planned(IDS)
        assert error.value.slugs == ("unplaceable-draw",) and "test_draws.py" in str(error.value)

    run_ranks(2, body)


# -- the numbers -------------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Any, float, float]] = {
    "rand": (lambda n: torch.rand(n), 0.5, 12**-0.5),
    "uniform in half precision": (lambda n: torch.empty(n, dtype=torch.bfloat16).uniform_(-1, 1), 0.0, 3**-0.5),
    "normal": (lambda n: torch.normal(torch.full((n,), 2.0), 3.0), 2.0, 3.0),
    "exponential": (lambda n: torch.empty(n).exponential_(2.0), 0.5, 0.5),
    "bernoulli": (lambda n: torch.bernoulli(torch.full((n,), 0.3)), 0.3, 0.21**0.5),
    "integers": (lambda n: torch.randint(-3, 6, (n,)), 1.0, (80 / 12) ** 0.5),
    "geometric": (lambda n: torch.empty(n).geometric_(0.5), 2.0, 2**0.5),
    "log normal": (lambda n: torch.empty(n).log_normal_(0.0, 0.5), 1.1331, 0.6039),
    "gamma": (lambda n: torch.distributions.Gamma(torch.full((n,), 2.0), 1.0).sample(), 2.0, 2**0.5),
    "poisson": (lambda n: torch.poisson(torch.full((n,), 4.0)), 4.0, 2.0),
    "choice": (lambda n: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), n, replacement=True), 1.5, 0.75**0.5),
    "first of a choice": (lambda n: torch.multinomial(torch.tensor([[1.0, 0.0, 3.0]] * n), 1), 1.5, 0.75**0.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_means_and_deviations(kind):
    draw, mean, deviation = KINDS[kind]

    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return draw(len(x))

    model, count = Draws(), 40_000
    install_dropout(model)
    first, second = (model(torch.ones(count)).double() for _ in range(2))
    assert not torch.equal(first, second)
    assert abs(float(first.mean()) - mean) < 5 * deviation / count**0.5
    assert abs(float(first.std()) / deviation - 1) < 0.05


def test_permutations():
    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.randperm(len(x))

    model = Draws()
    install_dropout(model)
    first, second = model(torch.ones(50)), model(torch.ones(50))
    assert not torch.equal(first, second) and torch.equal(first.sort().values, torch.arange(50))
