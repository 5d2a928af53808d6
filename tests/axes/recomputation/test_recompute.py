"""Recompute: the same numbers bit for bit, less memory, and no more messages than asked for."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from parallelize import (
    HandshakeError,
    ModelError,
    PlanError,
    accumulate_gradients,
    build_mesh,
    load_plan,
    parallelize_module,
)
from parallelize.axes.recomputation.recompute import (
    in_recompute,
    recompute,
    recompute_cost,
    recomputed,
    remembered,
    replay_key,
    set_recompute,
)
from parallelize.axes.recomputation.saving import SavePolicy
from parallelize.comm import blocking
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.ops import replay_cache
from parallelize.plan.plan_file import parse_plan
from tests.support.live import saved_bytes
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of
from tests.support.threads import run_ranks

COLLECTIVES = {"mode": "selective", "save": "collectives"}
CONFIGURATIONS = [{}, COLLECTIVES, {"mode": "selective"}, {"every": 2}]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def grads(net: nn.Module) -> dict[str, torch.Tensor]:
    return {n: local(p.grad).clone() for n, p in net.named_parameters() if p.grad is not None}


def train(net: nn.Module, steps: int = 2, **options) -> list:
    """Losses, and gradients after each of some SGD steps. `options`: of the model's call."""
    results = []
    for seed in range(1, steps + 1):
        ids, labels = tiny_batch(seed=seed)
        net.zero_grad()
        loss = loss_of(net(input_ids=ids, **options).logits, labels)
        loss.backward()
        results.append((loss.detach(), grads(net)))
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    local(parameter).sub_(local(parameter.grad), alpha=0.05)
    return results


def same(actual: list, expected: list) -> None:
    for (loss, results), (expected_loss, expected_grads) in zip(actual, expected, strict=True):
        assert torch.equal(loss, expected_loss)
        assert results.keys() == expected_grads.keys()
        assert not [name for name in expected_grads if not torch.equal(results[name], expected_grads[name])]


def on_ranks(size: int, body, family: str = "llama", dtype: torch.dtype = torch.float32, **overrides) -> list:
    """`body(rank, planned)` on every rank, with the options of `parallelize_module` under `options`."""
    options = overrides.pop("options", {})
    model = tiny_model(family, dtype, **overrides)
    models = [copy.deepcopy(model) for _ in range(size)]

    def run(rank):
        return body(rank, parallelize_module(models[rank], build_mesh("cpu", tp=size), **options))

    return run_ranks(size, run)


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.variants(every=13)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_bit_equal(family, dtype, size, sequence_parallel):
    def body(rank, planned):
        nets = [copy.deepcopy(planned) for _ in CONFIGURATIONS]
        expected = train(planned)
        for net, how in zip(nets, CONFIGURATIONS, strict=True):
            recompute(net, **how)
            same(train(net), expected)
            assert all(cost.replays == 2 for cost in recompute_cost(net).values())

    on_ranks(size, body, family, dtype, num_key_value_heads=1, options={"sequence_parallel": sequence_parallel})


@pytest.mark.parametrize("how", [{}, {"mode": "selective"}])
def test_dropout_masks_replay(how):
    """Of several rates, from torch's generator.

    Without a cache, which a recomputed model does not make: attention on the CPU rounds otherwise on what a cache
    returns.
    """
    model = tiny_model("gpt2", resid_pdrop=0.2, attn_pdrop=0.3, embd_pdrop=0.1)
    other = recompute(copy.deepcopy(model), plan="gpt2", **how)
    results = []
    for net in (model, other):
        torch.manual_seed(5)
        results.append(train(net, use_cache=False))
        results.append(torch.rand(1))  # the generator stands where it would stand
    same(results[2], results[0])
    assert torch.equal(results[1], results[3])
    torch.manual_seed(6)
    assert not torch.equal(train(model, use_cache=False)[0][0], results[0][0][0])


class Draws(nn.Module):
    """One op that draws random numbers, and another behind it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return F.dropout(torch.tanh(torch.native_dropout(self.inner(x), 0.5, True)[0]), 0.5) * x


def test_an_op_that_draws_is_done_again_even_where_it_is_to_be_saved():
    """Left out of a replay, it would leave other random numbers to the one behind it."""
    model = Blocks(Draws)
    other = recompute(copy.deepcopy(model), "selective", units="blocks.*", save=["aten.native_dropout", "matmul"])
    results = []
    for net in (model, other):
        torch.manual_seed(5)
        results.append(run_block(net))
    same(*results)
    assert {cost.ops for cost in recompute_cost(other).values()} == {1}  # the matmul


def test_attention_that_drops_is_done_again():
    attention, matmul = torch.ops.aten._scaled_dot_product_flash_attention.default, torch.ops.aten.mm.default
    saving = SavePolicy(frozenset({attention, matmul}))
    context = SimpleNamespace(is_recompute=False)
    q = torch.zeros(1)
    saved = [saving.policy(context, attention, q, q, q, *rest) for rest in [(), (0.0,), (0.1,), (0.1, True)]]
    saved += [saving.policy(context, attention, q, q, q, dropout_p=rate) for rate in (0.0, 0.1)]
    saved.append(saving.policy(context, matmul, q, q))
    assert [policy is CheckpointPolicy.MUST_SAVE for policy in saved] == [True, True, False, False, True, False, True]


@pytest.mark.parametrize("how", CONFIGURATIONS[:3])
def test_microbatches_and_accumulation(how):
    """Several forwards, then their backwards in another order, twice; pending reductions are summed once."""

    def run(net):
        losses = []
        with accumulate_gradients(net):
            for seed in range(3):
                ids, labels = tiny_batch(seed=seed, length=8 + 2 * seed)
                losses.append(loss_of(net(input_ids=ids).logits, labels))
            for loss in (losses[1], losses[0], losses[2]):
                loss.backward()
        return [(loss.detach(), grads(net)) for loss in losses]

    def body(rank, planned):
        net = recompute(copy.deepcopy(planned), **how)
        same(run(net), run(planned))
        assert {cost.replays for cost in recompute_cost(net).values()} == {3}

    on_ranks(2, body, "qwen3", options={"sequence_parallel": True})


@pytest.mark.parametrize("how", CONFIGURATIONS[:2])
def test_a_graph_that_is_walked_twice(how):
    def run(net):
        ids, labels = tiny_batch()
        loss = loss_of(net(input_ids=ids).logits, labels)
        loss.backward(retain_graph=True)
        loss.backward()
        return [(loss.detach(), grads(net))]

    def body(rank, planned):
        net = recompute(copy.deepcopy(planned), **how)
        same(run(net), run(planned))

    on_ranks(2, body)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("how", CONFIGURATIONS[:3])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_overlapped_linears(sequence_parallel, how):
    def body(rank, planned):
        net = recompute(copy.deepcopy(planned), **how)
        group = Group(dist.group.WORLD)
        with group.recording() as plain:
            expected = train(planned)
        with group.recording() as sent:
            same(train(net), expected)
        extra = sum(size for _, size in sent) - sum(size for _, size in plain)
        assert extra > 0 if not how else extra == 0

    options = {"sequence_parallel": sequence_parallel, "overlap": "chunked"}
    on_ranks(2, body, dtype=torch.float64, options=options)


class Reader(nn.Module):
    """A block in which `b` does not read the block's input, as the plan would have it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.c(torch.tanh(self.a(x)) * self.b(x * 2))


BLOCK = """
schema_version: 1
tensor_parallel:
  blocks.*: gather
  blocks.*.{a,b}: colwise
  blocks.*.c: rowwise
recompute: {units: [blocks.*]}
"""


class Blocks(nn.Module):
    def __init__(self, block=Reader, number: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(number))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def run_block(net: nn.Module, steps: int = 1, seed: int = 0) -> list:
    results = []
    for step in range(steps):
        random = torch.Generator().manual_seed(seed + step)  # ranks are threads, and share torch's own generator
        net.zero_grad()
        x = torch.randn(3, 5, 8, generator=random).requires_grad_()
        net(x).square().sum().backward()
        results.append((x.grad, grads(net)))
    return results


def test_overlap_learns_between_forward_and_replay():
    """After three forwards the matmul whose result nobody reads is not computed any more: each replay does as its
    forward did."""
    model = Blocks()
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2), parse_plan(BLOCK), overlap="chunked")
        net = recompute(copy.deepcopy(planned))
        same(run_block(net, 5), run_block(planned, 5))

    run_ranks(2, body)


# -- what is sent ------------------------------------------------------------------------------------------------------


@contextmanager
def counted(monkeypatch):
    """Collectives by kind, of each thread's rank."""
    here = threading.local()

    def watch(owner, name, kind):
        stock = getattr(owner, name)

        def call(*args, **kwargs):
            if hasattr(here, "counts"):
                here.counts[kind] += 1
            return stock(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    watch(blocking, "all_reduce", "all_reduce")
    watch(blocking, "all_gather", "all_gather")
    watch(blocking, "reduce_scatter", "reduce_scatter")

    def count(work, *args, **kwargs) -> tuple[list, Counter]:
        here.counts = Counter()
        return work(*args, **kwargs), here.counts

    yield count


# a replay ends with the last tensor that backward needs: sums that only a residual is added to come after it
AGAIN = {
    ("llama", False): {"all_reduce": 1},
    ("llama", True): {"all_gather": 2, "reduce_scatter": 1},
    ("gemma2", False): {"all_reduce": 2},  # norms after the sums
    ("gemma2", True): {"all_gather": 2, "reduce_scatter": 2},
}


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_collectives_are_not_sent_twice(family, sequence_parallel, monkeypatch):
    with counted(monkeypatch) as count:

        def body(rank, planned):
            full, saved, every, sums = (copy.deepcopy(planned) for _ in range(4))
            recompute(full)
            recompute(saved, **COLLECTIVES)
            recompute(every, every=2)
            recompute(sums, "selective", save=["reduce_scatter", "all_reduce"])
            plain, number, first, twice, some = (count(train, net, 1)[1] for net in (planned, saved, every, full, sums))
            again = Counter(AGAIN[family, sequence_parallel])
            assert number == plain
            assert first == plain + again  # one of two layers
            assert twice == plain + again + again
            assert some - plain == Counter({"all_gather": 4} if sequence_parallel else {})

        on_ranks(2, body, family, options={"sequence_parallel": sequence_parallel})


def test_what_keeping_costs():
    """2 sums of [2, 9, 48] a layer; under sequence parallelism two gathers of that and two sums of 5 of 9 rows."""

    def body(rank, planned):
        net = recompute(planned, **COLLECTIVES)
        assert recompute_cost(net)["model.layers.0"].collective_bytes == 0
        train(net, 1)
        return recompute_cost(net)["model.layers.1"]

    full_bytes, shard_bytes = 2 * 9 * 48 * 4, 2 * 5 * 48 * 4
    cost = on_ranks(2, body)[0]
    assert (cost.collectives, cost.collective_bytes, cost.input_bytes) == (2, 2 * full_bytes, full_bytes)
    cost = on_ranks(2, body, options={"sequence_parallel": True})[0]
    assert (cost.collectives, cost.collective_bytes, cost.input_bytes) == (
        4,
        2 * full_bytes + 2 * shard_bytes,
        shard_bytes,
    )
    assert (cost.mode, cost.save, cost.forwards, cost.replays) == ("selective", ("collectives",), 1, 1)


def test_what_saved_matmuls_cost():
    net = recompute(tiny_model("llama"), "selective", save="matmul", plan="llama")
    train(net, 1)
    cost = recompute_cost(net)["model.layers.0"]
    # q, k, v, o, gate, up, down for 18 tokens; torch before 2.13 does not tell the bytes
    assert cost.ops == 7 and cost.op_bytes in (18 * 4 * (48 + 24 + 24 + 48 + 72 + 72 + 48), None)


class Writer(nn.Module):
    """Writes to what a collective has returned."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, x):
        out = self.c(torch.tanh(self.a(x)) * self.b(x))
        out += x
        return torch.tanh(F.relu_(out)) * x


def test_results_that_are_written_to(monkeypatch):
    """The first time they are sent again; from then on a copy is kept."""
    model = Blocks(Writer)
    models = [copy.deepcopy(model) for _ in range(2)]
    with counted(monkeypatch) as count:

        def body(rank):
            planned = parallelize_module(models[rank], build_mesh("cpu", tp=2), parse_plan(BLOCK))
            net = recompute(copy.deepcopy(planned), "selective", save="collectives")
            for seed in range(3):
                expected, plain = count(run_block, planned, seed=seed)
                results, again = count(run_block, net, seed=seed)
                same(results, expected)
                assert (again - plain).total() == (2 if seed == 0 else 0)

        run_ranks(2, body)


def test_the_replay_cache():
    """Kinds apart, lists as they were, writes noticed, replays from the start each time."""
    copies, made = set(), []

    def send(size: int) -> list[torch.Tensor]:
        made.append(size)
        return [torch.full((size,), 1.0), torch.zeros(1)]

    for turn in range(2):
        call = replay_cache.ReplayCache(frozenset({"all_gather"}), copies)
        with replay_cache.RecomputePass(call, replay=False):
            outs = replay_cache.run_collective("all_gather", send, 3)
            replay_cache.run_collective("all_reduce", send, 7)  # of a kind that is not kept
            other = replay_cache.run_collective("all_gather", send, 4)
        outs[0].add_(1)
        again = replay_cache.RecomputePass(call, replay=True)
        for _ in range(2):
            made.clear()
            with again:
                first, second = (
                    replay_cache.run_collective("all_gather", send, 3),
                    replay_cache.run_collective("all_gather", send, 4),
                )
                with pytest.raises(ModelError) as error:
                    replay_cache.run_collective("all_gather", send, 5)
            assert error.value.slugs == ("replay-differs",)
            assert made == ([3] if turn == 0 else [])
            assert torch.equal(first[0], torch.ones(3)) and second[0].data_ptr() == other[0].data_ptr()
            first[0].zero_()  # as the forward did
        assert call.num_bytes == 4 * (3 + 1 + 4 + 1)
    assert copies == {("all_gather", 0)}


def test_passes_one_inside_another():
    outer, inner = replay_cache.ReplayCache(), replay_cache.ReplayCache()
    with replay_cache.RecomputePass(outer, replay=True):
        with pytest.raises(ZeroDivisionError), replay_cache.RecomputePass(inner, replay=False):
            assert replay_key() is inner and not in_recompute()
            _ = 1 / 0
        assert replay_key() is outer and in_recompute()
    assert replay_key() is None


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_full_recompute_saves_most_of_a_deep_model():
    model = tiny_model("llama", num_hidden_layers=12)
    saved = {}
    for name, how in {
        "none": {"mode": "off"},
        "full": {},
        "half": {"every": 2},
        "selective": {"mode": "selective"},
    }.items():
        saved[name], left = saved_bytes(recompute(copy.deepcopy(model), plan="llama", **how))
        assert left < 20_000, (name, left)
    assert saved["full"] <= 0.3 * saved["none"], saved
    assert 0.3 * saved["none"] < saved["half"] < 0.7 * saved["none"], saved
    assert saved["full"] < saved["selective"] < 0.8 * saved["none"], saved


# -- switching ---------------------------------------------------------------------------------------------------------


def test_which_units():
    model = tiny_model("llama", num_hidden_layers=5)
    net = copy.deepcopy(model)
    recompute(net, every=2, plan=load_plan("llama"))
    assert recomputed(net) == {f"model.layers.{n}": "full" for n in (0, 2, 4)}
    base = recompute(copy.deepcopy(model).model, plan="llama")
    assert list(recomputed(base)) == [f"layers.{n}" for n in range(5)]
    some = recompute(copy.deepcopy(model), "selective", units=["model.layers.*.mlp", "model.layers.{1,3}.self_attn"])
    assert len(recomputed(some)) == 7 and set(recomputed(some).values()) == {"selective"}
    named = parse_plan(BLOCK)
    assert list(recomputed(recompute(Blocks(number=3), plan=named))) == ["blocks.0", "blocks.1", "blocks.2"]


def test_switched_while_running():
    model = tiny_model("llama")
    net = recompute(copy.deepcopy(model), "off", plan="llama")
    layers = net.model.layers
    expected = train(copy.deepcopy(model), 1)

    def replays() -> list[int]:
        net.load_state_dict(model.state_dict())
        before = [cost.replays for cost in recompute_cost(net).values()]
        same(train(net, 1), expected)
        return [cost.replays - n for cost, n in zip(recompute_cost(net).values(), before, strict=True)]

    assert recomputed(net)["model.layers.0"] == "off" and replays() == [0, 0]
    set_recompute(layers[1], True)
    assert recomputed(net)["model.layers.1"] == "full" and replays() == [0, 1]
    set_recompute(net, True)
    assert replays() == [1, 1]
    net.load_state_dict(model.state_dict())
    ids, labels = tiny_batch()
    loss = loss_of(net(input_ids=ids).logits, labels)
    set_recompute(net, False)  # after the forward: that one is replayed all the same
    loss.backward()
    assert [cost.replays for cost in recompute_cost(net).values()] == [2, 3]
    net.zero_grad()
    assert replays() == [0, 0]


def test_without_gradients_or_training_nothing_is_recorded():
    net = recompute(tiny_model("llama"), plan="llama")
    ids, labels = tiny_batch()
    with torch.no_grad():
        out = net(input_ids=ids)
    assert out.past_key_values.get_seq_length() == ids.shape[1]  # a cache is made as ever
    loss_of(net.eval()(input_ids=ids).logits, labels).backward()
    net.train().model.layers[0].eval()
    loss_of(net(input_ids=ids).logits, labels).backward()
    assert [cost.forwards for cost in recompute_cost(net).values()] == [0, 1]


def test_hooks_run_once_and_copies_are_independent():
    def body(rank, planned):
        calls = []
        for name in ("model.layers.0", "model.layers.1"):
            planned.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
        recompute(planned, **COLLECTIVES)
        twin = copy.deepcopy(planned)
        set_recompute(twin, False)
        expected = train(twin, 1)
        assert recomputed(planned)["model.layers.0"] == "selective" and len(calls) == 2
        same(train(planned, 1), expected)
        assert len(calls) == 4
        assert [cost.replays for cost in recompute_cost(twin).values()] == [0, 0]

    on_ranks(2, body)


def test_only_some_parameters_train():
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp.up_proj" in name)
    net = recompute(copy.deepcopy(model), plan="llama")
    same(train(net), train(model))


@pytest.mark.filterwarnings("ignore")
def test_mixed_precision():
    model = tiny_model("llama")
    net = recompute(copy.deepcopy(model), "selective", plan="llama")
    results = []
    for either in (model, net):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(train(either))
    same(*results)


# -- arguments ---------------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.seen = []

    def forward(self, x, *, others=None, again=None, note=""):
        self.seen.append((x is again, others["table"][0] is again, note))
        return {"out": torch.tanh(self.inner(x)) * others["table"][1]}


def test_arguments_of_every_shape():
    """Keyword-only, nested, passed twice, not tensors: the replay sees the call that the forward saw.

    Also where saved tensors go elsewhere meanwhile (offloading), and another object comes back for each.
    """
    block = recompute(nn.ModuleDict({"block": Nested()}), units="block")["block"]
    leaf, table = torch.randn(2, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def call():
        x = leaf * 1  # of which only the graph is left when this returns
        return block(x, others={"table": (x, table)}, again=x, note="n")["out"]

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        out = call()
    out.sum().backward()
    assert block.seen == [(True, True, "n")] * 2
    assert torch.equal(table.grad, torch.tanh(block.inner(leaf)).sum(0).detach())


def test_a_write_between_forward_and_backward_is_an_error():
    """Wherever the tensor stood: PyTorch's checkpoint looks at positional tensors only."""
    block = recompute(nn.ModuleDict({"block": Nested()}), units="block")["block"]
    x, table = torch.randn(2, 8), torch.randn(8)
    out = block(x, others={"table": [x, table]}, again=x)
    table.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out["out"].sum().backward()


def test_no_cache_is_made_and_none_is_appended_to():
    model = tiny_model("llama")
    ids, _ = tiny_batch()
    net = recompute(copy.deepcopy(model), plan="llama")
    assert net(input_ids=ids, use_cache=True).past_key_values is None
    inner = net.model  # whose own call makes a cache, and gives it to the layers
    out = inner(input_ids=ids)
    assert out.past_key_values.get_seq_length() == 0
    with torch.no_grad():
        cache = model(input_ids=ids).past_key_values
    with pytest.raises(ModelError) as error:
        net(input_ids=ids, past_key_values=cache)
    assert error.value.slugs == ("cache-in-recompute",)


def test_a_cache_of_layers_whose_state_has_no_length():
    """Convolutions and recurrences have a state in it, which is new or not; layers without attention have nothing."""
    model, (ids, _) = tiny_model("lfm2_moe"), tiny_batch()
    net = recompute(copy.deepcopy(model), plan="lfm2_moe")
    # the call inside makes a cache, as a pipeline stage does
    assert net.model(input_ids=ids).past_key_values is not None
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ModelError, match="cache-in-recompute: Lfm2MoeDecoderLayer"):
        net(input_ids=ids, past_key_values=cache)


# -- the replay from inside --------------------------------------------------------------------------------------------


class Numbered(nn.Module):
    """Multiplies by numbers that count up, as a counter-based dropout would draw them."""

    def __init__(self):
        super().__init__()
        self.inner, self.count, self.log = nn.Linear(8, 8), 0, []

    def forward(self, x):
        def draw():
            self.count += 1
            return self.count

        number = remembered("number", draw)
        self.log.append((number, in_recompute(), replay_key()))
        return torch.tanh(self.inner(x)) * number


def test_what_a_replay_can_ask():
    block = recompute(nn.ModuleDict({"block": Numbered()}), units="block")["block"]
    x = torch.randn(2, 8)
    outs = [block(x), block(x)]
    for out in (outs[1], outs[0], outs[0]):
        out.sum().backward(retain_graph=True)
    assert [(number, again) for number, again, _ in block.log] == [
        (1, False),
        (2, False),
        (2, True),
        (1, True),
        (1, True),
    ]
    keys = [key for *_, key in block.log]
    assert keys[0] is keys[3] is keys[4] and keys[1] is keys[2] and keys[0] is not keys[1]
    gone = weakref.ref(keys[0])
    del keys, outs, out
    block.log.clear()
    assert gone() is None  # the key lives as long as the graph
    assert not in_recompute() and replay_key() is None and remembered("number", lambda: 7) == 7
    with torch.no_grad():
        block(x)
    assert block.log == [(3, False, None)]


def test_a_forward_that_changes_is_refused():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.times = nn.Linear(8, 8), 0

        def forward(self, x):
            self.times += 1
            for _ in range(self.times):
                x = ops.reduce(x, Group(dist.group.WORLD))
            return torch.tanh(self.inner(x))

    def body(rank):
        net = recompute(nn.ModuleDict({"block": Fickle()}), "selective", units="block", save="collectives")
        out = net["block"](torch.randn(2, 8, requires_grad=True))
        with pytest.raises(ModelError) as error:
            out.sum().backward()
        return error.value.slugs

    assert run_ranks(2, body) == [("replay-differs",)] * 2


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED = [
    ("bad-recompute", PlanError, dict(mode="fully", plan="llama")),
    ("bad-recompute", PlanError, dict(every=0, plan="llama")),
    ("bad-recompute", PlanError, dict(every=True, plan="llama")),
    ("bad-recompute", PlanError, dict(save="matmul", plan="llama")),
    ("unknown-op", PlanError, dict(mode="selective", save=["collective"], plan="llama")),
    ("unknown-op", PlanError, dict(mode="selective", save=["aten.nothing"], plan="llama")),
    ("cannot-save", PlanError, dict(mode="selective", save=["aten.view"], plan="llama")),
    ("cannot-save", PlanError, dict(mode="selective", save=["aten.clone"], plan="llama")),
    ("cannot-save", PlanError, dict(mode="selective", save=["c10d.allreduce_"], plan="llama")),
    ("no-recompute-units", ModelError, dict()),
    ("no-recompute-units", ModelError, dict(units="model.layer.*")),
    ("no-recompute-units", ModelError, dict(units="model.layers.{0,7}")),
    ("no-recompute-units", ModelError, dict(units="model.layers")),
    ("nested-units", ModelError, dict(units=["model.layers.*", "model.layers.*.mlp"])),
    ("bad-pattern", PlanError, dict(units="model.layers.**")),
]


@pytest.mark.parametrize(("slug", "kind", "how"), REFUSED)
def test_refused(slug, kind, how):
    net = tiny_model("llama")
    with pytest.raises(kind) as error:
        recompute(net, **how)
    assert error.value.slugs == (slug,) and recomputed(net) == {}
    assert not any("forward" in module.__dict__ for module in net.modules())
    recompute(net, plan="llama")  # nothing was left behind


def test_misspelled_names_are_suggested():
    with pytest.raises(PlanError, match="did you mean `collectives`"):
        recompute(tiny_model("llama"), "selective", save="collective", plan="llama")
    with pytest.raises(ModelError, match=r"did you mean `model.layers"):
        recompute(tiny_model("llama"), units="model.layer.0")


def test_twice_is_refused():
    net = recompute(tiny_model("llama"), plan="llama")
    with pytest.raises(ModelError) as error:
        recompute(net, plan="llama")
    assert error.value.slugs == ("already-recomputed",)
    with pytest.raises(ModelError) as error:
        set_recompute(net.lm_head, True)
    assert error.value.slugs == ("no-recompute-units",)


def test_checkpointing_of_transformers_is_refused_before_and_after():
    net = tiny_model("llama")
    net.gradient_checkpointing_enable()
    with pytest.raises(ModelError) as error:
        recompute(net, plan="llama")
    assert error.value.slugs == ("foreign-recompute",)
    net.gradient_checkpointing_disable()
    recompute(net, plan="llama").gradient_checkpointing_enable()
    with pytest.raises(ModelError) as error:
        net(input_ids=tiny_batch()[0])
    assert error.value.slugs == ("foreign-recompute",)


def test_ranks_that_disagree():
    def body(rank, planned):
        with pytest.raises(HandshakeError) as error:
            recompute(planned, every=rank + 1)
        assert recomputed(planned) == {}
        with pytest.raises((HandshakeError, PlanError)) as one_fails:
            recompute(planned, "full" if rank else "none")
        recompute(planned)
        return error.value.slugs, one_fails.value.slugs

    results = on_ranks(2, body)
    assert results == [(("ranks-disagree",), ("bad-recompute",)), (("ranks-disagree",), ("ranks-disagree",))]
