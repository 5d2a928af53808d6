"""Dropout draws one global mask: the same loss and gradients on 1 and N ranks, in microbatches, on data ranks,
recomputed."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils.checkpoint import checkpoint

from parallelize import ModelError, build_mesh, full_gradients, parallelize_model, parallelize_module
from parallelize.plan.plan_file import parse_plan
from parallelize.state.randomness.dropout.install import dropout_clock, install_dropout
from parallelize.state.randomness.dropout.masks import attention
from parallelize.state.randomness.dropout.position import Position
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import TOLERANCE, loss_of, worst
from tests.support.threads import run_ranks

SEED = 7
RATES: dict[str, dict[str, float]] = {
    "gpt2": dict(resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.3),
    "bert": dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3),
    "llama": dict(attention_dropout=0.3),
    "opt": dict(dropout=0.2, attention_dropout=0.3),
    "gpt_neox": dict(hidden_dropout=0.2, attention_dropout=0.3),
    "phi3": dict(resid_pdrop=0.2, embd_pdrop=0.1, attention_dropout=0.3),
    "qwen3": dict(attention_dropout=0.3),
    "olmo2": dict(attention_dropout=0.2),
}
BATCH = tiny_batch(batch=4, length=9)
TwoSteps = list[tuple[torch.Tensor, dict[str, torch.Tensor]]]


def model_of(family: str, kind: str = "sdpa", **overrides: Any) -> nn.Module:
    return tiny_model(family, torch.float64, attn_implementation=kind, **{**RATES[family], **overrides})


def gradients(model: nn.Module, planned: bool) -> dict[str, torch.Tensor]:
    if planned:
        return full_gradients(model)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def two_steps(model: nn.Module, planned: bool, rows: slice = slice(None)) -> TwoSteps:
    """Loss and gradients of two forwards, which draw different masks; the second adds to the first."""
    ids, labels = (value[rows] for value in BATCH)
    results = []
    for _ in range(2):
        loss = loss_of(model(input_ids=ids).logits, labels)
        loss.backward()
        results.append((loss.detach(), gradients(model, planned)))
    return results


def same(actual: TwoSteps, expected: TwoSteps, bound: float = TOLERANCE[torch.float64]) -> None:
    for (loss, grads), (expected_loss, expected_grads) in zip(actual, expected, strict=True):
        assert worst({"loss": loss}, {"loss": expected_loss})[0] <= bound
        error, name = worst(grads, expected_grads)
        assert error <= bound, f"{name} differs by {error:.1e}"


@lru_cache(maxsize=32)
def one_process(family: str, kind: str = "sdpa", overrides: tuple = ()) -> tuple[nn.Module, TwoSteps]:
    """The model as it was, and what one process finds with the toolkit's dropout."""
    model = model_of(family, kind, **dict(overrides))
    alone = copy.deepcopy(model)
    install_dropout(alone, SEED)
    results = two_steps(alone, planned=False)
    assert worst({"": results[0][0]}, {"": results[1][0]})[0] > 1e-5  # every step drops other elements
    return model, results


def check(family: str, tp: int, kind: str = "sdpa", sequence_parallel: bool = False, **overrides: Any) -> None:
    model, expected = one_process(family, kind, tuple(overrides.items()))
    models = [copy.deepcopy(model) for _ in range(tp)]

    def body(rank: int) -> TwoSteps:
        parallelize_module(models[rank], build_mesh("cpu", tp=tp), sequence_parallel=sequence_parallel)
        install_dropout(models[rank], SEED)
        return two_steps(models[rank], planned=True)

    for actual in run_ranks(tp, body):
        same(actual, expected)


@pytest.mark.variants(every=8)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", RATES)
def test_planned_draws_the_masks_of_one_process(family, tp, sequence_parallel):
    check(family, tp, sequence_parallel=sequence_parallel)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "phi3"])
def test_eager_attention_draws_the_same_masks(family):
    check(family, 2, kind="eager", sequence_parallel=True)
    # some families take the softmax in float32 there
    same(one_process(family, "eager")[1], one_process(family, "sdpa")[1], bound=2e-6)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shared_key_value_heads(kv_heads):
    check("llama", 4, num_key_value_heads=kv_heads)


def test_dropout_is_there():
    model, expected = one_process("llama")
    assert worst({"": expected[0][0]}, {"": two_steps(copy.deepcopy(model).eval(), False)[0][0]})[0] > 1e-5
    other = copy.deepcopy(model)
    install_dropout(other, SEED + 1)
    assert worst({"": expected[0][0]}, {"": two_steps(other, False)[0][0]})[0] > 1e-5


# -- the batch cut in other ways ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_microbatches_draw_their_rows_of_the_mask(family):
    """Two microbatches at their positions give the gradients of the whole batch."""
    full, parts = model_of(family), model_of(family)
    ids, labels = BATCH
    install_dropout(full, SEED)
    clock = install_dropout(parts, SEED)
    with dropout_clock(full).at(Position(step=3)):
        F.cross_entropy(full(input_ids=ids).logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    for start, stop in ((0, 1), (1, 4)):
        with clock.at(Position(step=3, batch_offset=start, batch_size=stop - start)):
            logits = parts(input_ids=ids[start:stop]).logits
        F.cross_entropy(logits.flatten(0, 1), labels[start:stop].flatten(), reduction="sum").backward()
    error, name = worst(gradients(parts, False), gradients(full, False))
    assert error <= 1e-11, f"{name} differs by {error:.1e}"


def test_the_clock_is_saved_and_forwards_without_dropout_do_not_count():
    model = model_of("gpt2")
    clock = install_dropout(model, SEED)
    first = model(input_ids=BATCH[0]).logits
    model.eval()(input_ids=BATCH[0])
    state = clock.state_dict()
    second = model.train()(input_ids=BATCH[0]).logits
    again = model_of("gpt2")
    install_dropout(again, 0).load_state_dict(state)
    assert state == {"seed": SEED, "step": 1, "evaluations": 0}
    assert torch.equal(again(input_ids=BATCH[0]).logits, second) and not torch.equal(first, second)


# -- recompute ---------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Blocks with dropout of every kind, recomputed in backward."""

    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attn(x), 0.2, training=self.training)
        return F.dropout(x + self.mlp(x), 0.1, training=self.training)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25 if self.training else 0.0, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


def blocks(reentrant: bool | None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Checkpointed(reentrant).double()


def inputs(seed: int, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", ["each", "first then second", "second then first", "together"])
def test_recompute_draws_the_masks_of_its_own_forward(reentrant, order):
    """Also while several forwards wait for their backward, as pipeline microbatches do."""
    plain, recomputed = blocks(None), blocks(reentrant)
    for model in (plain, recomputed):
        install_dropout(model, SEED)
        outs = []
        for seed in (1, 2):
            outs.append(model(inputs(seed)).square().sum())
            if order == "each":
                outs.pop().backward()
        if order == "second then first":
            outs.reverse()
        for out in [torch.stack(outs).sum()] if order == "together" else outs:
            out.backward()
    actual, expected = gradients(recomputed, False), gradients(plain, False)
    assert worst(actual, expected)[0] == 0.0


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor, recomputed: bool = False) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if recomputed else self.block(x)
        return x


def test_a_module_called_twice_draws_twice_and_its_recompute_is_refused():
    model = Twice()
    install_dropout(model, SEED)
    model.block[0] = nn.Identity()
    once = model.block[1]._applied.dropout
    assert once is not None
    out = model(torch.ones(64, 8))
    rate = float((out != 0).float().mean())
    assert 0.15 < rate < 0.35  # two masks, not one twice
    loss = model(torch.ones(2, 8, requires_grad=True), recomputed=True).sum()
    with pytest.raises(ModelError) as error:
        loss.backward()
    assert error.value.slugs == ("ambiguous-dropout",)


def test_the_toolkits_recompute_tells_calls_of_one_module_apart():
    from parallelize.axes.recomputation.recompute import recompute

    plain, recomputed = Twice(), Twice()
    recomputed.load_state_dict(plain.state_dict())
    recompute(recomputed, units="block")
    results = []
    for model in (plain, recomputed):
        install_dropout(model, SEED)
        x = torch.ones(30, 8, requires_grad=True)
        model(x).square().sum().backward()
        results.append((x.grad, model.block[0].weight.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_rate_of_zero_costs_nothing_and_may_rise_later():
    model = model_of("llama", attention_dropout=0.0)
    install_dropout(model, SEED)
    sites = model.model.layers[0].self_attn._applied.dropout[0]
    seen = []
    real = type(sites.mode).__torch_function__

    def counted(self: Any, func: Any, *rest: Any) -> Any:
        seen.append(func)
        return real(self, func, *rest)

    type(sites.mode).__torch_function__ = counted
    try:
        first = model(input_ids=BATCH[0]).logits
        assert not seen
        model.model.layers[1].self_attn.attention_dropout = 0.5
        assert not torch.equal(model(input_ids=BATCH[0]).logits, first) and seen
    finally:
        type(sites.mode).__torch_function__ = real


# -- a model of one's own ----------------------------------------------------------------------------------------------

OWN = """
schema_version: 1
sizes: {heads: 4}
sequence_parallel: {layers: blocks}
tensor_parallel:
  blocks.*:
    attn: gather
    attn.qkv: colwise(heads + heads + heads)
    attn.out: rowwise(heads)
    mlp: gather
    mlp.0: colwise
    mlp.3: rowwise
local:
  blocks.*.attn: {heads: heads}
"""


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_dropout_on_split_features_functions_and_attention(tp, sequence_parallel):
    """Between a column and a row linear, by function in a block, and on the weights of packed heads."""
    model = blocks(None)
    alone = copy.deepcopy(model)
    install_dropout(alone, SEED)
    expected = alone(inputs(1))
    expected.square().sum().backward()
    models = [copy.deepcopy(model) for _ in range(tp)]

    def body(rank: int) -> tuple:
        net = parallelize_module(
            models[rank], build_mesh("cpu", tp=tp), parse_plan(OWN), sequence_parallel=sequence_parallel
        )
        install_dropout(net, SEED)
        out = net(inputs(1))
        out.square().sum().backward()
        return out.detach(), full_gradients(net)

    for out, grads in run_ranks(tp, body):
        assert worst({"": out}, {"": expected.detach()})[0] <= 1e-12
        assert worst(grads, gradients(alone, False))[0] <= 1e-12


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 28), nn.Linear(14, 8), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(self.drop(gate.sigmoid() * value))


def test_dropout_on_a_chunk_of_a_packed_projection():
    model = Gated().double()
    alone = copy.deepcopy(model)
    install_dropout(alone, SEED)
    expected = alone(inputs(1)).detach()
    models = [copy.deepcopy(model) for _ in range(2)]
    plan = "schema_version: 1\ntensor_parallel: {up: colwise(chunks=2), down: rowwise}"

    def body(rank: int) -> torch.Tensor:
        net = parallelize_module(models[rank], build_mesh("cpu", tp=2), parse_plan(plan))
        install_dropout(net, SEED)
        return net(inputs(1)).detach()

    for actual in run_ranks(2, body):
        assert worst({"": actual}, {"": expected})[0] <= 1e-12


# -- the op itself -----------------------------------------------------------------------------------------------------


def test_masked_values_rate_and_gradient():
    model = nn.Sequential(nn.Dropout(0.25))
    install_dropout(model, SEED)
    x = (torch.rand(300, 200) + 0.5).requires_grad_()
    out = model(x)
    keep = out != 0
    assert abs(float(keep.float().mean()) - 0.75) < 0.01
    assert torch.allclose(out[keep], x[keep] / 0.75) and not (out == x).any()
    out.sum().backward()
    assert torch.allclose(x.grad, keep / 0.75)
    rows, columns = keep.float().mean(1), keep.float().mean(0)
    assert float(rows.std()) < 0.04 and float(columns.std()) < 0.035  # no stripes


def test_all_or_nothing_and_in_place():
    model = nn.Sequential(nn.Dropout(1.0))
    install_dropout(model, SEED)
    x = torch.ones(3, 4, requires_grad=True)
    out = model(x)
    out.sum().backward()
    assert not out.any() and not x.grad.any()
    written = nn.Sequential(nn.Dropout(0.5, inplace=True))
    install_dropout(written, SEED)
    x = torch.ones(30, 40)
    assert written(x) is x and (x == 2).any() and (x == 0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "additive", "grouped", "scaled"])
def test_attention_by_weights_is_sdpa(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, t, 6, generator=generator, dtype=torch.float64) for n, t in ((4, 5), (4, 5), (4, 5)))
    options: dict[str, Any] = {}
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "bool":
        options["attn_mask"] = torch.rand(2, 1, 5, 5, generator=generator) > 0.4
        options["attn_mask"][0, 0, 2] = False  # a row without keys
    elif kind == "additive":
        options["attn_mask"] = torch.randn(2, 4, 5, 5, generator=generator, dtype=torch.float64).to(dtype)
    elif kind == "grouped":
        k, v, options["enable_gqa"] = k[:, :2], v[:, :2], True
    elif kind == "scaled":
        options["scale"] = 0.3
    q, k, v = (part.to(dtype).requires_grad_() for part in (q, k, v))
    keep = torch.ones(2, 4, 5, 5, dtype=torch.bool)
    actual, expected = attention(q, k, v, keep, 0.0, **options), F.scaled_dot_product_attention(q, k, v, **options)
    bound = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 0.03}[dtype]
    assert actual.dtype == dtype and worst({"": actual}, {"": expected})[0] < bound
    for a, b in zip(
        torch.autograd.grad(actual.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        assert float((a - b).abs().max()) < bound * 4


def test_nothing_draws_from_the_global_generator():
    model = model_of("gpt2")
    install_dropout(model, SEED)
    before = torch.get_rng_state()
    two_steps(model, planned=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copy_of_the_model_has_a_clock_of_its_own():
    model = model_of("gpt2")
    install_dropout(model, SEED)
    other = copy.deepcopy(model)
    first = model(input_ids=BATCH[0]).logits
    assert torch.equal(other(input_ids=BATCH[0]).logits, first)
    assert dropout_clock(other) is not dropout_clock(model)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    def __init__(self, call: Any):
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


class CallsOneD(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout1d(x, 0.5, self.training)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.Dropout2d(0.1), "Dropout2d"),
        (nn.AlphaDropout(0.1), "AlphaDropout"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "MultiheadAttention"),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.1), "LSTM"),
        (nn.RReLU(), "RReLU"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_modules_without_a_global_mask_are_refused_by_name(module, name):
    model = nn.Sequential(nn.Dropout(0.5), module)
    with pytest.raises(ModelError) as error:
        install_dropout(model, SEED)
    assert error.value.slugs == ("unplaceable-dropout",) and name in str(error.value) and "1" in str(error.value)
    assert dropout_clock(model) is None and "forward" not in model[0].__dict__


def test_functions_without_a_global_mask_are_refused_by_name():
    model = nn.Sequential(CallsOneD())
    install_dropout(model, SEED)
    with pytest.raises(ModelError) as error:
        model(torch.ones(2, 3, 4))
    assert "dropout1d" in str(error.value) and error.value.slugs == ("unplaceable-dropout",)
    model.eval()(torch.ones(2, 3, 4))


def test_dropout_that_no_code_reveals_is_found_in_the_first_forward():
    model = nn.Sequential(Calls(lambda x: F.dropout(x, 0.5)))
    install_dropout(model, SEED)
    with pytest.raises(ModelError) as error:
        model(torch.ones(2, 3))
    assert error.value.slugs == ("unplaceable-dropout",) and "dropout" in str(error.value)


def test_other_refusals():
    part = nn.Sequential(nn.Dropout(0.5))
    install_dropout(nn.Sequential(part), SEED)
    with pytest.raises(ModelError) as error:
        part(torch.ones(2, 3))
    assert error.value.slugs == ("dropout-outside-forward",)
    with pytest.raises(ModelError) as error:
        model = nn.Sequential(nn.Dropout(0.5))
        install_dropout(model, SEED)
        install_dropout(model, SEED)
    assert error.value.slugs == ("already-installed",)


def test_an_activation_that_cannot_be_placed_is_refused_by_name():
    class Reshaped(Block):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.mlp = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.mlp["up"](x)
            return self.mlp["down"](self.drop(x.view(*x.shape[:-1], -1, 2)).flatten(-2))

    plan = "schema_version: 1\ntensor_parallel: {mlp.up: colwise, mlp.down: rowwise, 'attn.{qkv,out}': replicate}"
    models = [Reshaped().double() for _ in range(2)]

    def body(rank: int) -> None:
        net = parallelize_module(models[rank], build_mesh("cpu", tp=2), parse_plan(plan))
        install_dropout(net, SEED)
        with pytest.raises(ModelError) as error:
            net(inputs(0))
        assert error.value.slugs == ("unplaceable-dropout",) and "drop" in str(error.value)

    run_ranks(2, body)


def test_dropout_modules_keep_their_eval_and_zero_rate():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0))
    install_dropout(model, 0)
    x = torch.ones(4, 6)
    assert not torch.equal(model(x), x)
    assert torch.equal(model.eval()(x), x)


# -- dropout that is not installed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_training_without_installed_dropout_is_refused_before_anything_is_sent(sequence_parallel):
    models = [model_of("gpt2") for _ in range(2)]

    def body(rank: int) -> None:
        model = parallelize_module(models[rank], build_mesh("cpu", tp=2), sequence_parallel=sequence_parallel)
        with pytest.raises(ModelError) as error:
            model(input_ids=BATCH[0])
        assert error.value.slugs == ("dropout-not-installed",) and "install_dropout" in str(error.value)
        model.eval()(input_ids=BATCH[0])
        install_dropout(model.train(), SEED)
        model(input_ids=BATCH[0])

    run_ranks(2, body)


def test_rates_of_zero_and_dropout_that_is_installed_around_the_model_are_not_refused():
    models = [nn.Sequential(model_of("gpt2")) for _ in range(2)]

    def body(rank: int) -> None:
        stock = parallelize_module(tiny_model("llama", torch.float64), build_mesh("cpu", tp=2))
        stock.train()(input_ids=BATCH[0])
        parallelize_module(models[rank][0], build_mesh("cpu", tp=2))
        install_dropout(models[rank], SEED)
        models[rank](BATCH[0])

    run_ranks(2, body)


class Dropped(nn.Module):
    """Two linears, with a dropout whose masks cover features together."""

    def __init__(self, dropout: nn.Module):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(4, 8), nn.Linear(8, 4), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(self.up(x)))


@pytest.mark.parametrize(
    "plan", [{"up": "colwise", "down": "rowwise"}, {"up": ColwiseParallel(), "down": RowwiseParallel()}]
)
def test_dropout_without_a_global_mask_is_refused_in_training_too(plan):
    def body(rank: int) -> None:
        model = parallelize_module(Dropped(nn.AlphaDropout(0.5)), build_mesh("cpu", tp=2), plan)
        with pytest.raises(ModelError) as error:
            model(torch.ones(2, 3, 4))
        assert error.value.slugs == ("dropout-not-installed",) and "dropout would draw" in str(error.value)
        model.eval()(torch.ones(2, 3, 4))
        with pytest.raises(ModelError) as error:
            parallelize_model(Dropped(nn.AlphaDropout(0.5)), build_mesh("cpu", tp=2), plan)
        assert error.value.slugs == ("unplaceable-dropout",)

    run_ranks(2, body)


def test_dicts_whose_layouts_nothing_knows_are_refused():
    rows = RowwiseParallel(output_layouts=Shard(1))
    scattering = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": rows}
    kept = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(), "dropout": SequenceParallel()}

    def body(rank: int) -> None:
        for styles in (scattering, kept):
            mesh, model = build_mesh("cpu", tp=2), Dropped(nn.Dropout(0.5))
            with pytest.raises(ModelError) as error:
                parallelize_model(model, mesh, styles)
            assert error.value.slugs == ("unplaceable-dropout",) and not hasattr(model.up.weight, "placements")
            parallelize_module(model, mesh, styles)
            with pytest.raises(ModelError) as error:
                install_dropout(model, SEED)
            assert error.value.slugs == ("unplaceable-dropout",)
            if (
                styles is scattering
            ):  # no fix that is refused in turn; a style for the dropout itself draws as PyTorch does
                with pytest.raises(ModelError, match="unplaceable-dropout"):
                    model.train()(torch.zeros(2, 4, 4))

    run_ranks(2, body)


class BesideAttentionOfTorch(nn.Module):
    """Its own code drops, so that it is seen that torch's attention, at a rate of zero, gets all of its arguments by
    position."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.dropout = nn.MultiheadAttention(8, 2), 0.5

    def forward(self, x: torch.Tensor, p: float = 0.0) -> torch.Tensor:
        attention = self.attention
        inner, outer = attention.in_proj_weight, attention.out_proj.weight
        args = (x, x, x, 8, 2, inner, None, None, None, False, p, outer, None)
        return F.multi_head_attention_forward(*args)[0] + attention(F.dropout(x, self.dropout), x, x)[0]


def test_attention_of_torch_by_position():
    model = BesideAttentionOfTorch()
    install_dropout(model)
    x = torch.randn(5, 1, 8)
    assert model(x).shape == x.shape
    with pytest.raises(ModelError, match=r"unplaceable-dropout.*multi_head_attention_forward"):
        model(x, 0.3)
