"""Initialization: bit-equal full weights for every mesh, and, on request, those that stock PyTorch draws in one
process."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import ModelError, PlanError, build_mesh, full_parameter, full_state_dict, parallelize_module
from parallelize.plan.plan_file import parse_plan
from parallelize.state.randomness.init import stock_generator as stock_numbers
from parallelize.state.randomness.init.distributions import Normal
from parallelize.state.randomness.init.initialize import build_on_meta, initialize, recipe_of
from parallelize.state.randomness.init.recorder import Computed, Fills, Unknown
from parallelize.state.records import applied
from tests.support.models import COMMON, FAMILIES
from tests.support.threads import run_ranks

SEED = 5


@pytest.fixture(autouse=True)
def _constructors_of_pytorch():
    """`from_pretrained` of transformers replaces `torch.linspace` for a while: PyTorch must not remember that as its
    own."""
    torch.utils._device._device_constructors.cache_clear()


def config_of(family: str, **overrides: Any) -> tuple[Any, Any]:
    """(class, config) of a tiny model."""
    import transformers

    config, cls, sizes = FAMILIES[family]
    return getattr(transformers, cls), getattr(transformers, config)(**{**COMMON, **sizes, **overrides})


def on_meta(family: str, **overrides: Any) -> nn.Module:
    cls, config = config_of(family, **overrides)
    with torch.device("meta"):
        return cls(config)


def built(family: str, **overrides: Any) -> nn.Module:
    cls, config = config_of(family, **overrides)
    return build_on_meta(cls, config)


def stock_model(family: str, **overrides: Any) -> nn.Module:
    cls, config = config_of(family, **overrides)
    torch.manual_seed(SEED)
    return cls(config)


def differing(actual: dict[str, torch.Tensor], model: nn.Module) -> list[str]:
    """Names whose bits differ."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() <= actual.keys()
    return [name for name, value in parameters.items() if not torch.equal(actual[name], value)]


def check_planned(make: Any, unsharded: nn.Module, tp: int, **options: Any) -> None:
    """Every rank's part, put together, is the whole model."""
    plan = options.pop("plan", None)
    sequence_parallel = options.pop("sequence_parallel", None)
    models = [make() for _ in range(tp)]

    def body(rank: int) -> dict[str, torch.Tensor]:
        parallelize_module(models[rank], build_mesh("cpu", tp=tp), plan, sequence_parallel=sequence_parallel)
        initialize(models[rank], SEED, **options)
        assert not any(t.is_meta for t in [*models[rank].parameters(), *models[rank].buffers()])
        return full_state_dict(models[rank], every_rank=True)

    for state in run_ranks(tp, body):
        assert not differing(state, unsharded)


# -- the toolkit's own generator ---------------------------------------------------------------------------------------


@pytest.mark.variants(every=10)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mesh_gets_the_same_weights(family, tp):
    """From a meta model, whatever made it; from a model with weights; planned."""
    expected = initialize(on_meta(family), SEED)
    for model in (built(family), stock_model(family)):
        assert not differing(dict(initialize(model, SEED).named_parameters()), expected)
    check_planned(lambda: on_meta(family), expected, tp, sequence_parallel=tp == 4)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_shared_key_value_heads_and_odd_widths(family, kv_heads):
    """Fewer heads than ranks, packed projections with padding, and rows that no rank count divides."""
    sizes = dict(num_key_value_heads=kv_heads, intermediate_size=71, vocab_size=65)
    check_planned(lambda: on_meta(family, **sizes), initialize(on_meta(family, **sizes), SEED), 4)


def test_padding_of_stored_shards_is_zero():
    cls, config = config_of("phi3", num_key_value_heads=2, intermediate_size=71)
    with torch.device("meta"):
        models = [cls(copy.deepcopy(config)) for _ in range(4)]

    def body(rank: int) -> int:
        parallelize_module(models[rank], build_mesh("cpu", tp=4))
        initialize(models[rank], SEED)
        padded = 0
        for owner in models[rank].modules():
            for slot in getattr(applied(owner).planned, "slots", ()):
                if slot.valid is not None:
                    dim, size = slot.valid
                    local = owner._parameters[slot.key].to_local()
                    rest = local.narrow(dim, size, local.shape[dim] - size)
                    assert not rest.any()
                    padded += rest.numel()
        return padded

    assert sum(run_ranks(4, body)) > 0


def test_bfloat16_weights_are_the_float32_ones_rounded():
    expected = initialize(on_meta("llama"), SEED)
    half = initialize(on_meta("llama").to(torch.bfloat16), SEED)
    for (name, a), (_, b) in zip(expected.named_parameters(), half.named_parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b), name


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
@pytest.mark.parametrize("planned", [True, False])
def test_data_axes_cut_what_tensor_parallelism_left(family, planned):
    """`fully_shard` over dp on top of tp (strided shards), and by itself."""
    from torch.distributed.fsdp import fully_shard

    expected = initialize(on_meta(family), SEED)
    models = [on_meta(family) for _ in range(4)]
    sizes = {"dp": 2, "tp": 2} if planned else {"dp": 4}

    def body(rank: int) -> None:
        net, mesh = models[rank], build_mesh("cpu", **sizes)
        if planned:
            parallelize_module(net, mesh)
        for block in next(m for m in net.modules() if isinstance(m, nn.ModuleList)):
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
        initialize(net, SEED)
        for name, value in expected.named_parameters():
            actual = full_parameter(net, name) if planned else net.get_parameter(name).full_tensor()
            assert torch.equal(actual, value), name

    run_ranks(4, body)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_pipeline_stages_get_their_part(family, stock):
    """A tied head on the last stage is drawn as the embedding on the first, its padding row too."""
    from parallelize.axes.pipeline.cut import cut_pipeline

    sizes = {"tie_word_embeddings": True}
    expected = stock_model(family, **sizes) if stock else initialize(on_meta(family, **sizes), SEED)
    models = [(built if stock else on_meta)(family, **sizes) for _ in range(4)]

    def body(rank: int) -> set[str]:
        net, mesh = models[rank], build_mesh("cpu", pp=2, tp=2)
        cut_pipeline(net, mesh)
        parallelize_module(net, mesh["tp"])
        initialize(net, SEED, stock=stock)
        for name, parameter in net.named_parameters():
            assert torch.equal(full_parameter(net, name, parameter), expected.get_parameter(name)), name
        return {name for name, _ in net.named_parameters()}

    first, _, last, _ = run_ranks(4, body)
    assert "model.embed_tokens.weight" in first and "lm_head.weight" in last
    assert first | last == {name for name, _ in expected.named_parameters(remove_duplicate=False)}


class Zoo(nn.Module):
    """Modules of torch with initializers of every kind, buffers that a checkpoint would store, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 12, padding_idx=3)
        self.conv = nn.Conv1d(12, 14, 3)
        self.norm = nn.BatchNorm1d(14)
        self.up, self.down = nn.Linear(14, 27), nn.Linear(27, 12, bias=False)
        self.layer_norm, self.rms = nn.LayerNorm(12), nn.RMSNorm(12)
        self.attention = nn.MultiheadAttention(12, 3)
        self.mix = nn.Bilinear(5, 4, 3)
        self.gru = nn.GRU(4, 5)
        self.slope = nn.PReLU(3, init=0.3)
        self.head = nn.Linear(12, 23, bias=False)
        self.head.weight = self.embed.weight


class Own(nn.Module):
    """A constructor that initializes by itself, in every way that can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 6)
        self.other = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.randn(6) * 0.1 + 1.0)
        self.plain = nn.Parameter(torch.full((4,), 2.0))
        self.table = nn.Parameter(torch.linspace(0.0, 1.0, 9))
        self.copied = nn.Parameter(self.proj.weight.detach().clone() / 2)
        self.truncated = nn.Parameter(torch.empty(300))
        nn.init.trunc_normal_(self.truncated, std=0.02)
        nn.init.kaiming_normal_(self.proj.weight)
        with torch.no_grad():
            self.proj.weight.mul_(0.5)
            self.proj.bias.uniform_(-3, 3).add_(1.0)
            self.other.weight[2:4].fill_(7.0)
            self.other.bias.data.normal_(0.0, 0.1)


class Orthogonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 5), nn.Linear(5, 7), nn.Linear(6, 6)
        nn.init.orthogonal_(self.first.weight)
        nn.init.sparse_(self.second.weight, 0.5)
        nn.init.dirac_(self.third.weight.data.view(6, 6, 1))
        with torch.no_grad():
            self.second.weight[1].uniform_()


def test_modules_of_torch_with_and_without_a_recording():
    expected = initialize(build_on_meta(Zoo), SEED)
    with torch.device("meta"):
        plain = Zoo()
    actual = initialize(plain, SEED)
    assert plain.head.weight is plain.embed.weight and expected.head.weight is expected.embed.weight
    assert not differing(dict(actual.named_parameters()), expected)
    for name, buffer in Zoo().named_buffers():
        assert torch.equal(actual.get_buffer(name), buffer) and torch.equal(expected.get_buffer(name), buffer), name
    assert not actual.embed.weight[3].any() and actual.embed.weight[2].any()


def test_distributions_are_those_of_the_stock_model():
    """Moments of a parameter that is large enough to tell, for each initializer."""
    stock = nn.Sequential(nn.Linear(300, 400), nn.Embedding(300, 200), nn.Conv1d(60, 70, 5))
    own = initialize(copy.deepcopy(stock), SEED)
    for (name, a), (_, b) in zip(stock.named_parameters(), own.named_parameters(), strict=True):
        if a.ndim > 1:
            assert not torch.equal(a, b)
            assert abs(float(a.std() / b.std()) - 1) < 0.02 and abs(float(a.abs().max() / b.abs().max()) - 1) < 0.25, (
                name
            )


def test_a_constructor_that_initializes_by_itself_is_read_from_a_recording():
    own = initialize(build_on_meta(Own), SEED)
    readings = recipe_of(own).read()
    assert readings["table"] == Computed() and torch.equal(own.table, torch.linspace(0.0, 1.0, 9))
    drawn = {n: [fill.distribution for fill in r.fills] for n, r in readings.items() if isinstance(r, Fills)}
    assert drawn["proj.weight"] == [Normal(0.0, (2 / 8) ** 0.5 / 2)]
    assert str(drawn["proj.bias"]) == "[Uniform(low=-2.0, high=4.0)]"
    assert drawn["scale"] == [Normal(1.0, 0.1)]
    assert str(drawn["truncated"]) == "[TruncatedNormal(mean=0.0, std=0.02, low=-2.0, high=2.0)]"
    assert [fill.box[0] for fill in readings["other.weight"].fills] == [(0, 8), (2, 4)]
    assert (own.other.weight[2:4] == 7.0).all() and not (own.other.weight[[1, 4]] == 7.0).any()
    assert float(own.truncated.abs().max()) < 0.1


def test_unknown_initializers_are_named_before_anything_is_written():
    model = Own()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ModelError) as error:
        initialize(model, SEED)
    assert error.value.slugs == ("unknown-initialiser",)
    text = str(error.value)
    assert "scale" in text and "build_on_meta" in text and "initializes parameters" in text
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    with torch.device("meta"):
        meta = Own()
    with pytest.raises(ModelError):
        initialize(meta, SEED)
    assert all(p.is_meta for p in meta.parameters())
    unread = recipe_of(build_on_meta(Orthogonal)).read()
    assert isinstance(unread["first.weight"], Unknown) and isinstance(unread["second.weight"], Unknown)
    with pytest.raises(ModelError) as error:
        initialize(build_on_meta(Orthogonal), SEED)
    assert "first.weight" in str(error.value) and "second.weight" in str(error.value)


class ByMethod(nn.Module):
    """As tutorials do it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.init_weights()

    def init_weights(self) -> None:
        self.proj.weight.data.uniform_(-0.1, 0.1)


class ByConvention(nn.Module):
    """As small GPTs do it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(40, 40)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)


def test_methods_that_initialize_are_found():
    with pytest.raises(ModelError) as error:
        initialize(ByMethod(), SEED)
    assert "uniform_(-0.1, 0.1)" in str(error.value)
    assert float(initialize(build_on_meta(ByMethod), SEED).proj.weight.abs().max()) <= 0.1
    plain, recorded = initialize(ByConvention(), SEED), initialize(build_on_meta(ByConvention), SEED)
    assert not differing(dict(plain.named_parameters()), recorded)
    assert abs(float(plain.proj.weight.std()) - 0.5) < 0.05


def test_rules_say_what_is_drawn():
    names = [name for name, _ in Own().named_parameters()]
    model = initialize(Own(), SEED, rules={name: Normal(1.0, 0.5) for name in names})
    assert abs(float(model.truncated.mean()) - 1.0) < 0.1
    assert not differing(
        dict(model.named_parameters()), initialize(Own(), SEED, rules={"*": Normal(1.0, 0.5), "*.*": Normal(1.0, 0.5)})
    )
    with pytest.raises(PlanError) as error:
        initialize(Own(), SEED, rules={"missing.*": Normal()})
    assert error.value.slugs == ("unmatched-rule",)


def test_seeds_and_names_give_other_numbers():
    a, b = (initialize(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), seed) for seed in (1, 2))
    assert not torch.equal(a[0].weight, b[0].weight) and not torch.equal(a[0].weight, a[1].weight)
    assert torch.equal(initialize(copy.deepcopy(b), 1)[0].weight, a[0].weight)


# -- what stock PyTorch draws ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_numbers_of_whole_models(family):
    expected = stock_model(family)
    actual = initialize(built(family), SEED, stock=True)
    assert not differing(dict(actual.named_parameters()), expected)
    for name, buffer in expected.named_buffers():
        assert torch.equal(actual.get_buffer(name), buffer), name


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "bert", "gemma2"])
def test_stock_numbers_of_planned_models(family, tp):
    check_planned(lambda: built(family), stock_model(family), tp, stock=True, sequence_parallel=tp == 2)


PLAN = "schema_version: 1\ntensor_parallel: {'0': embedding, '1': replicate, '2': colwise, '3': rowwise}"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_stock_numbers_of_plain_modules(tp):
    def sequential() -> nn.Module:
        return nn.Sequential(nn.Embedding(31, 12), nn.LayerNorm(12), nn.Linear(12, 27), nn.Linear(27, 12))

    torch.manual_seed(SEED)
    expected = sequential()
    check_planned(lambda: build_on_meta(sequential), expected, tp, stock=True, plan=parse_plan(PLAN))


@pytest.mark.parametrize("build", [Zoo, Own, Orthogonal])
def test_stock_numbers_of_initializers_of_every_kind(build):
    """Those too that look at what they drew, draw in parts with others between, or factorize."""
    torch.manual_seed(SEED)
    expected = build()
    actual = initialize(build_on_meta(build), SEED, stock=True)
    assert not differing(dict(actual.named_parameters()), expected)


class Interleaved(nn.Module):
    """The second draw of `first` comes after a draw of `second`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.rand(41, 31))
        with torch.no_grad():
            self.first[3:5].normal_(5.0)
            self.second[:, 2].fill_(3.0)


def test_no_more_than_one_tensor_is_full_while_stock_numbers_are_drawn(monkeypatch):
    torch.manual_seed(SEED)
    expected = Interleaved()
    alive: list[int] = []
    play = stock_numbers._Replayer._run_ops

    def counted(self: Any, places: list[int]) -> dict[int, Any]:
        storages = play(self, places)
        alive.append(len(storages))
        return storages

    monkeypatch.setattr(stock_numbers._Replayer, "_run_ops", counted)
    actual = initialize(build_on_meta(Interleaved), SEED, stock=True)
    assert not differing(dict(actual.named_parameters()), expected)
    assert max(alive) == 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_stock_numbers_are_drawn_once_each(family, monkeypatch):
    """Those that are overwritten later too, but none twice."""
    drawn: list[str] = []
    draw = stock_numbers._Replayer._drawn

    def counted(self: Any, node: Any, *rest: Any) -> Any:
        drawn.append(node.name)
        return draw(self, node, *rest)

    monkeypatch.setattr(stock_numbers._Replayer, "_drawn", counted)
    model = built(family)
    initialize(model, SEED, stock=True)
    assert len(drawn) == sum(op.random for op in recipe_of(model).recording.ops) > 10


def test_stock_numbers_need_a_recording_and_no_rules():
    for model, options in ((on_meta("llama"), {}), (built("llama"), {"rules": {"lm_head.weight": Normal()}})):
        with pytest.raises(ModelError) as error:
            initialize(model, SEED, stock=True, **options)
        assert error.value.slugs == ("no-recipe",)


def test_real_draws_in_a_recording_are_refused():
    def build() -> nn.Module:
        torch.rand(3, device="cpu")
        return nn.Linear(2, 2)

    with pytest.raises(ModelError) as error:
        build_on_meta(build)
    assert error.value.slugs == ("unrecordable-initialisation",)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    initialize(built("gpt2"), SEED, stock=True)
    initialize(on_meta("gpt2"), SEED)
    assert torch.equal(torch.get_rng_state(), before)


# -- memory ------------------------------------------------------------------------------------------------------------

MEMORY = """
import json, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from parallelize import build_mesh, parallelize_module
from parallelize.state.randomness.init.initialize import build_on_meta, initialize

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

layers, rank, world, stock = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "stock"
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=2048, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers,
                     num_attention_heads=16, num_key_value_heads=8)
model = build_on_meta(LlamaForCausalLM, config)
count = sum(p.numel() for p in model.parameters())
parallelize_module(model, build_mesh("cpu", tp=world))
before = peak()
initialize(model, 0, stock=stock)
stored = sum(p.to_local().nbytes for p in model.parameters())
print(json.dumps({"count": count, "before": before, "peak": peak(), "stored": stored}))
"""


def measured(layers: int, rank: int, world: int, how: str) -> dict[str, int]:
    arguments = [sys.executable, "-c", MEMORY, str(layers), str(rank), str(world), how]
    # every tensor in pages of its own, which go when it goes: the peak is then what is alive, not what the allocator
    # keeps
    steady = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=200, env=steady)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize(("how", "rank"), [("own", 1), ("stock", 3)])
def test_a_rank_stores_its_shard_and_one_tensor(how, rank):
    """The rise of a fresh process's peak at two sizes: its slope against parameters is at most 1.05 / world; what is
    left over at either size is less than one full tensor (with a margin for the allocator)."""
    world, item = 4, 4
    small, large = measured(4, rank, world, how), measured(16, rank, world, how)
    slope = (large["peak"] - large["before"] - small["peak"] + small["before"]) / (large["count"] - small["count"])
    assert slope * world / item <= 1.05, (slope * world / item, small, large)
    assert large["stored"] * world / item <= 1.01 * large["count"]
    one_tensor = 2816 * 1024 * item
    for measurement in (small, large):
        assert measurement["peak"] - measurement["before"] - measurement["stored"] <= one_tensor + (4 << 20), (
            measurement
        )


FILLS = {
    "normal_": lambda x: x.normal_(0.5, 2.0),
    "uniform_": lambda x: x.uniform_(-1.0, 3.0),
    "bernoulli_": lambda x: x.bernoulli_(0.25),
    "exponential_": lambda x: x.exponential_(2.0),
    "random_": lambda x: x.random_(0, 9),
    "by probabilities": lambda x: x.bernoulli_(torch.full((30, 30), 0.25).add_(0.5)),
    "by drawn probabilities": lambda x: x.bernoulli_(torch.rand(30, 30)),
    "drawn again": lambda x: x.bernoulli_(torch.rand(30, 30)).add_(1.0).normal_(0.0, 2.0),
    "rates": lambda x: x.copy_(torch.poisson(torch.rand(30, 30) * 5)),
}


@pytest.mark.parametrize("name", FILLS)
def test_recorded_fills_draw_nothing_and_are_repeated(name):
    def build() -> nn.Module:
        module = nn.Linear(30, 30, bias=False)
        with torch.no_grad():
            assert FILLS[name](module.weight) is module.weight
        module.after = nn.Linear(3, 3)
        return module

    torch.manual_seed(3)
    expected = build()
    before = torch.get_rng_state()
    model = build_on_meta(build)
    assert torch.equal(torch.get_rng_state(), before) and model.weight.is_meta
    initialize(model, 3, stock=True)
    assert torch.equal(model.weight, expected.weight) and torch.equal(model.after.weight, expected.after.weight)


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: x.normal_(0.0, -1.0),
        lambda x: x.uniform_(1.0, 0.0),
        lambda x: torch.empty(2, dtype=torch.int8).normal_(),
        lambda x: torch.empty(2, dtype=torch.complex64).exponential_(),
        lambda x: torch.empty(2, dtype=torch.bool).geometric_(0.5),
    ],
)
def test_arguments_of_recorded_fills_are_checked(fill):
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        with torch.no_grad():
            fill(module.weight)
        return module

    with pytest.raises(RuntimeError) as stock:
        build()
    with pytest.raises(RuntimeError) as recorded:
        build_on_meta(build)
    assert isinstance(recorded.value, RuntimeError) and recorded.type in (
        stock.type,
        RuntimeError,
    )  # on meta it is this one
