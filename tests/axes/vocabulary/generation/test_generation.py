"""Generation on planned models gives the unsharded model's tokens: `transformers`' own loop, and ours on sharded
logits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallelize import (
    ModelError,
    ShapeError,
    ShardedLogits,
    build_mesh,
    cut_pipeline,
    generate,
    parallelize_module,
    sample,
)
from parallelize.axes.vocabulary.generation.transformers_generate import full_logits, same_generator_states
from parallelize.comm.groups import Group
from tests.axes.vocabulary.generation.generation_jobs import SAMPLED, lively_model, ours, prompts, stock
from tests.support.models import FAMILIES, tiny_model
from tests.support.threads import run_ranks

DECODERS = [family for family in FAMILIES if family != "bert"]
BOTH = {"sequence_parallel": True, "loss_parallel": True}


def on_ranks(model: nn.Module, tp: int, options: dict, run):
    """`run(planned model)` on every rank."""
    models = [copy.deepcopy(model) for _ in range(tp)]

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=tp), **options)
        return run(models[rank])

    return run_ranks(tp, body)


HOW = {
    "greedy": {},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "chunked prefill": {"prefill_chunk_size": 4, "cache_implementation": "static"},
}
OPTIONS = {
    "tensor": {},
    "sequence": {"sequence_parallel": True},
    "loss": {"loss_parallel": True},
    "fused": {"loss_parallel": True, "fuse_loss": True},
    "fused whole": {"fuse_loss": True},
    "all": BOTH,
}


@pytest.mark.variants(every=16)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS)
def test_stock_generate_in_every_way(tp, options):
    model = lively_model("llama", num_key_value_heads=2)  # fewer than 4 ranks
    for name, how in HOW.items():
        expected = stock(model, **how)
        for actual in on_ranks(model, tp, OPTIONS[options], lambda net, how=how: stock(net, **how)):
            assert torch.equal(actual, expected), name


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("family", DECODERS)
def test_stock_generate_of_every_family(family):
    model = lively_model(family)
    expected = stock(model, family)
    assert len(expected[:, 7:].unique()) > 3  # else it would tell little
    for tp, how in ((2, {}), (4, {"cache_implementation": "static"})):
        for actual in on_ranks(model, tp, BOTH, lambda net, how=how: stock(net, family, **how)):
            assert torch.equal(actual, expected)


@pytest.mark.variants(every=10)
@pytest.mark.parametrize("family", DECODERS)
def test_ours_on_sharded_logits(family):
    """Greedy as `transformers` does it; sampled as the unsharded model does it."""
    model = lively_model(family)
    greedy, sampled = stock(model, family), ours(model, family, **SAMPLED)
    assert torch.equal(ours(model, family, temperature=0.0), greedy) and not torch.equal(sampled, greedy)
    for tp in (2, 4):
        run = lambda net: (ours(net, family, temperature=0.0), ours(net, family, **SAMPLED))  # noqa: E731
        results = on_ranks(model, tp, BOTH, run)
        assert all(torch.equal(a, greedy) and torch.equal(b, sampled) for a, b in results)


@pytest.mark.parametrize("options", [{}, {"loss_parallel": True, "fuse_loss": True}], ids=["whole", "fused"])
def test_ours_on_other_logits(options):
    model = lively_model("gemma2")
    expected = ours(model, "gemma2", top_p=0.8)
    results = on_ranks(model, 2, options, lambda net: ours(net, "gemma2", top_p=0.8))
    assert all(torch.equal(actual, expected) for actual in results)


def test_rows_end_each_by_itself():
    model = lively_model("llama")
    free = ours(model, max_new_tokens=8, temperature=0.0)
    new = free[:, 7:]
    stops = [int(new[0, 2]), int(new[1, 4]), int(new[2, 1])]
    expected = stock(model, max_new_tokens=8, eos_token_id=stops)
    assert expected.shape[1] < free.shape[1] and (expected == 0).any()  # all rows ended early, some before others
    arguments = {"max_new_tokens": 8, "temperature": 0.0, "eos_token_id": stops}
    assert all(torch.equal(actual, expected) for actual in on_ranks(model, 2, BOTH, lambda net: ours(net, **arguments)))
    model.generation_config.eos_token_id = stops
    assert torch.equal(ours(model, max_new_tokens=8, temperature=0.0, eos_token_id=None), expected)


def test_tokens_are_those_of_forwards_without_a_cache():
    """The n-th new token is `sample` of the last logits, at position n."""
    model = lively_model("qwen3")
    ids, _ = prompts("gemma2")
    expected = ids
    for position in range(4):
        logits = model(input_ids=expected, use_cache=False).logits[:, -1]
        expected = torch.cat([expected, sample(logits, seed=9, position=position, top_p=0.95)[:, None]], dim=1)
    run = lambda net: generate(net, ids, max_new_tokens=4, seed=9, top_p=0.95, eos_token_id=[])  # noqa: E731
    assert all(torch.equal(actual, expected) for actual in on_ranks(model, 2, BOTH, run))


COUNTED_OTHERWISE = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},  # from 0
    "roberta": {"is_decoder": True, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},  # from 2
}


@pytest.mark.parametrize("kind", COUNTED_OTHERWISE)
def test_positions_that_a_model_counts_otherwise(kind):
    """Beside a cache Bamba counts from 0 unless positions are given; RoBERTa's begin after its padding id."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**sizes, **heads, **COUNTED_OTHERWISE[kind]}))
        .double()
        .eval()
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    expected = ids = torch.randint(5, 64, (3, 6))
    for _ in range(6):
        logits = model(input_ids=expected, use_cache=False).logits[:, -1:]
        expected = torch.cat([expected, logits.argmax(-1)], dim=1)
    assert torch.equal(generate(model, ids, max_new_tokens=6, temperature=0, eos_token_id=[]), expected)


def test_a_row_draws_the_same_wherever_it_stands():
    model = lively_model("llama")
    ids, mask = prompts()
    arguments = {"max_new_tokens": 5, "eos_token_id": [], "seed": 2}
    whole = generate(model, ids, attention_mask=mask, **arguments)
    part = generate(model, ids[1:], attention_mask=mask[1:], rows=torch.tensor([1, 2]), **arguments)
    assert torch.equal(part, whole[1:])
    alone = generate(model, ids[1:2, 3:], rows=torch.tensor([1]), **arguments)  # without its padding
    assert torch.equal(alone[:, 4:], whole[1:2, 7:])


def test_each_rank_caches_its_own_heads():
    model = lively_model("llama")
    ids, _ = prompts()

    def caches(net):
        cache = net(input_ids=ids, use_cache=True).past_key_values
        fixed = net.generate(ids, max_new_tokens=2, cache_implementation="static", return_dict_in_generate=True)
        return cache.layers[0].keys.shape[1], fixed.past_key_values.layers[0].keys.shape[1]

    assert on_ranks(model, 1, {}, caches) == [(4, 4)]
    with torch.no_grad():
        assert on_ranks(model, 2, BOTH, caches) == [(2, 2)] * 2


def test_decoding_leaves_sequence_parallelism_off():
    """The prompt's rows are spread; one token at a time is whole on every rank."""
    from unittest.mock import patch

    from parallelize.axes.tensor.region import Region

    model = lively_model("llama")
    lengths = []
    real = Region.enter

    def entered(self, x):
        out = real(self, x)
        lengths.append((x.shape[1], self.inside))
        return out

    with patch.object(Region, "enter", entered):
        on_ranks(model, 2, BOTH, lambda net: (stock(net, max_new_tokens=3), ours(net, max_new_tokens=3)))
    assert set(lengths) == {(1, None), (7, 7)}


def test_logits_are_full_only_inside():
    model = lively_model("llama")
    ids, _ = prompts()

    def kinds(net):
        with full_logits(net):
            inside = net(input_ids=ids).logits
        stock(net)
        with pytest.raises((TypeError, AttributeError)):
            net.generate(input_ids="no ids")
        return isinstance(inside, ShardedLogits), isinstance(net(input_ids=ids).logits, ShardedLogits)

    assert on_ranks(model, 2, BOTH, kinds) == [(False, True)] * 2


def test_copies_generate_by_themselves():
    model = lively_model("llama")
    expected = stock(model)

    def run(net):
        twin = copy.deepcopy(net)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        return stock(twin)

    assert all(torch.equal(actual, expected) for actual in on_ranks(model, 2, BOTH, run))


def test_generators_go_on_where_they_were():
    def body(rank):
        with same_generator_states(Group.alone(), torch.device("cpu")):
            return torch.rand(3)

    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(body(0), expected)


class Plain(nn.Module):
    def forward(self, input_ids):
        return input_ids


REFUSED = [
    ({"max_new_tokens": 0}, "bad-option"),
    ({"max_new_tokens": 2.0}, "bad-option"),
    ({"temperature": -1.0}, "bad-option"),
    ({"ids": torch.tensor([[3, 67]])}, "id-out-of-range"),
    ({"ids": torch.tensor([3, 4])}, "bad-prompts"),
    ({"ids": torch.zeros(2, 0, dtype=torch.long)}, "bad-prompts"),
    ({"ids": torch.ones(1, 4)}, "bad-prompts"),
    ({"attention_mask": torch.tensor([[1, 1, 0]])}, "right-padding"),
    ({"attention_mask": torch.tensor([[1, 0, 1]])}, "bad-mask"),
    ({"attention_mask": torch.tensor([[1, 1]])}, "bad-mask"),
    ({"max_new_tokens": 70}, "too-long"),
    ({"model": "training"}, "training-mode"),
    ({"model": "plain"}, "no-cache"),
]


@pytest.mark.parametrize(("arguments", "slug"), REFUSED, ids=[f"{slug}-{n}" for n, (_, slug) in enumerate(REFUSED)])
def test_what_cannot_be_generated_is_refused_before_anything_runs(arguments, slug):
    arguments = {"ids": torch.tensor([[3, 4, 5]]), "max_new_tokens": 2, "model": "eval"} | arguments
    model = {"plain": Plain().eval()}.get(arguments["model"]) or tiny_model("gpt2").train(
        arguments.pop("model") == "training"
    )
    arguments.pop("model", None)
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
    with pytest.raises((ShapeError, ModelError)) as error:
        generate(model, arguments.pop("ids"), **arguments)
    assert error.value.slugs == (slug,)


def test_a_stage_alone_does_not_generate():
    def body(rank):
        model = cut_pipeline(lively_model("llama"), build_mesh("cpu", pp=2, tp=1))
        parallelize_module(model, build_mesh("cpu", pp=2, tp=1))
        slugs = []
        for run in (stock, ours):
            with pytest.raises(ModelError) as error:
                run(model)
            slugs += error.value.slugs
        return slugs

    assert run_ranks(2, body) == [["cut-model"] * 2] * 2
