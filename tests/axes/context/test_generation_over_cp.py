"""Generation over `cp`: the unsharded model's tokens and logits, from caches of which each rank stores a part."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from parallelize import build_mesh, context_parallel, generate, parallelize_model, parallelize_module
from tests.axes.vocabulary.generation.generation_jobs import SAMPLED, lively_model, ours, prompts, stock
from tests.support.models import FAMILIES
from tests.support.parity import worst
from tests.support.threads import run_ranks

transformers = pytest.importorskip("transformers")
WITHOUT_CP = {"bert"}
DECODERS = [name for name in FAMILIES if name not in WITHOUT_CP]
HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "chunked prefill": {"prefill_chunk_size": 4, "cache_implementation": "static"},
}
MESHES = [({"cp": 2}, {}), ({"cp": 4}, {"ulysses": 2}), ({"cp": 2, "tp": 2}, {"sequence_parallel": True})]


def over(model: Any, sizes: dict[str, int], **options: Any) -> Any:
    net, mesh = copy.deepcopy(model), build_mesh("cpu", **sizes)
    return parallelize_module(net, mesh, **options) if "tp" in sizes else context_parallel(net, mesh, **options)


def on_ranks(model: Any, sizes: dict[str, int], run: Any, **options: Any) -> list[Any]:
    world = sizes["cp"] * sizes.get("tp", 1)
    return run_ranks(world, lambda rank: run(over(model, sizes, **options)))


def same_tokens(actual: list[torch.Tensor], expected: torch.Tensor) -> None:
    assert len(expected[:, 7:].unique()) > 3  # else it would tell little
    assert all(torch.equal(tokens, expected) for tokens in actual)


@pytest.mark.variants(every=9)
@pytest.mark.parametrize(("sizes", "options"), MESHES, ids=str)
@pytest.mark.parametrize("how", HOW)
def test_stock_generate_in_every_way(how, sizes, options):
    model = lively_model("llama", num_key_value_heads=2)
    expected = stock(model, **HOW[how])
    same_tokens(on_ranks(model, sizes, lambda net: stock(net, **HOW[how]), **options), expected)


@pytest.mark.variants(every=20)
@pytest.mark.parametrize("sizes", [{"cp": 2}, {"cp": 4}], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_every_family(name, sizes):
    """By the stock loop with a dynamic cache, and by ours; the prompts of two rows are padded."""
    model = lively_model(name)
    expected = stock(model, name)
    results = on_ranks(model, sizes, lambda net: (stock(net, name), ours(net, name, temperature=0.0)))
    same_tokens([tokens for pair in results for tokens in pair], expected)


@pytest.mark.variants(every=6)
@pytest.mark.parametrize(("sizes", "options"), MESHES, ids=str)
@pytest.mark.parametrize("loss", [{}, {"loss_parallel": True}, {"loss_parallel": True, "fuse_loss": True}], ids=str)
def test_sampled_on_sharded_logits(loss, sizes, options):
    if loss and "tp" not in sizes:
        pytest.skip("logits are sharded over tp")
    model = lively_model("qwen3")
    expected = ours(model, **SAMPLED)
    same_tokens(on_ranks(model, sizes, lambda net: ours(net, **SAMPLED), **options, **loss), expected)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_windows_that_are_left_behind(name, cache):
    """Many times the window is generated, and chunks longer than it follow."""
    model = lively_model(name)
    how = {"max_new_tokens": 24, "cache_implementation": cache}
    expected = stock(model, "gemma2", **how)
    for sizes in ({"cp": 2}, {"cp": 4}):
        same_tokens(on_ranks(model, sizes, lambda net: stock(net, "gemma2", **how)), expected)


@pytest.mark.parametrize("use_cache", [True, False])
def test_prompts_shorter_than_the_ranks(use_cache):
    model, ids = lively_model("mistral"), torch.tensor([[5]])
    how = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
    expected = model.generate(ids, **how)
    assert all(torch.equal(x, expected) for x in on_ranks(model, {"cp": 4}, lambda net: net.generate(ids, **how)))


CANDIDATES = [
    ("lookup", "mistral", MESHES[0]),
    *((way, "llama", mesh) for way in ("lookup", "model") for mesh in MESHES),
]


@pytest.mark.variants(every=7)
@pytest.mark.parametrize(("way", "name", "mesh"), CANDIDATES, ids=str)
def test_candidates_that_are_rejected(way, name, mesh):
    """Prompt lookup, and decoding with an assistant, which crop the cache."""
    model, ids = lively_model(name), prompts()[0][:1].repeat(1, 2)
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    how |= {"prompt_lookup_num_tokens": 3} if way == "lookup" else {"assistant_model": lively_model("llama", seed=3)}
    expected, (sizes, options) = model.generate(ids, **how), mesh
    results = on_ranks(model, sizes, lambda net: net.generate(ids, **how), **options)
    assert all(torch.equal(tokens, expected) for tokens in results)


# -- logits, and loops of one's own ------------------------------------------------------------------------------------


def logits_of_steps(model: Any, padded: bool, chunks: tuple[int, ...], total: int, keep: int) -> torch.Tensor:
    """The last `keep` logits of each call: a prompt, and chunks of new tokens, into one cache."""
    ids = torch.randint(3, 67, (3, total), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :5] = mask[2, :2] = 0
    cache, start, out = None, 0, []
    for chunk in chunks:
        inputs = {"input_ids": ids[:, start : start + chunk], "past_key_values": cache, "use_cache": True}
        if padded:
            inputs["attention_mask"] = mask[:, : start + chunk]
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, start : start + chunk]
        with torch.no_grad():
            result = model(**inputs, logits_to_keep=keep)
        cache, start = result.past_key_values, start + chunk
        out.append(result.logits[:, -keep:])
        assert cache.get_seq_length() == start
    return torch.cat(out, 1)


@pytest.mark.variants(every=8)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("sizes", "options"), MESHES, ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3"])
def test_logits_of_a_prompt_of_steps_and_of_a_second_prompt(name, sizes, options, padded):
    model, how = lively_model(name), (padded, (13, 1, 1, 6, 1, 1), 23, 1)
    expected = logits_of_steps(model, *how)
    for actual in on_ranks(model, sizes, lambda net: logits_of_steps(net, *how), **options):
        assert worst({"": actual}, {"": expected})[0] <= 1e-12


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 4e-2)], ids=str)
def test_single_and_half_precision(dtype, bound):
    from tests.support.models import tiny_model

    model, how = tiny_model("llama", dtype).eval(), (True, (13, 1, 1, 6, 1), 22, 2)
    expected = logits_of_steps(copy.deepcopy(model).double(), *how)
    for actual in on_ranks(model, {"cp": 2}, lambda net: logits_of_steps(net, *how)):
        assert worst({"": actual.double()}, {"": expected})[0] <= bound


def test_each_rank_stores_its_part_of_the_cache():
    """And a static cache reserves what this rank will store, and no more."""
    model, ids = lively_model("llama"), torch.randint(3, 67, (2, 24))
    how = {"max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}

    def body(net):
        tokens = []
        for kind in (None, "static"):
            cache = net.generate(ids, cache_implementation=kind, **how, return_dict_in_generate=True).past_key_values
            assert cache.get_seq_length() == 32
            tokens += [layer.keys.shape[2] for layer in cache.layers]
        keys = cache.layers[0].keys
        return tokens, keys.untyped_storage().nbytes() // (keys[:, :, 0].numel() * keys.itemsize)

    for tokens, reserved in on_ranks(model, {"cp": 4}, body):
        assert set(tokens) == {8} and 8 <= reserved <= 9


def test_a_sliding_layer_stores_its_window():
    model = lively_model("mistral")
    window = model.config.sliding_window

    def body(net):
        out = net.generate(
            prompts()[0], max_new_tokens=30, do_sample=False, pad_token_id=0, return_dict_in_generate=True
        )
        return [layer.keys.shape[2] for layer in out.past_key_values.layers]

    for per_layer in zip(*on_ranks(model, {"cp": 2}, body), strict=True):
        assert sum(per_layer) == window and max(per_layer) <= window // 2 + 1


def test_a_cache_is_copied_cropped_and_reset():
    """Two continuations of one prompt; tokens that are removed are computed again; a cache serves a second prompt."""
    model = lively_model("llama")
    ids = torch.randint(3, 67, (2, 20), generator=torch.Generator().manual_seed(5))

    @torch.no_grad()
    def body(net):
        cache = net(ids[:, :12], use_cache=True, logits_to_keep=1).past_key_values
        other, out = copy.deepcopy(cache), []
        for continued, part in ((cache, ids[:, 12:15]), (other, ids[:, 15:17])):
            out.append(net(part, past_key_values=continued, use_cache=True).logits[:, -1])
        cache.crop(-6)  # three of the prompt too
        out.append(net(ids[:, 9:17], past_key_values=cache, use_cache=True).logits[:, -1])
        cache.batch_select_indices(torch.tensor([1]))
        out.append(net(ids[1:, 17:18], past_key_values=cache, use_cache=True).logits[:, -1])
        cache.batch_repeat_interleave(2)
        out.append(net(ids[:, 18:19], past_key_values=cache, use_cache=True).logits[:, -1])
        cache.reset()
        out.append(net(ids[:, :9], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1])
        return out

    with torch.no_grad():
        expected = [model(ids[:, :15]).logits[:, -1], model(torch.cat([ids[:, :12], ids[:, 15:17]], 1)).logits[:, -1]]
        expected += [model(ids[:, :17]).logits[:, -1], model(ids[1:, :18]).logits[:, -1]]
        rows = torch.cat([ids[1:, :18].repeat(2, 1), ids[:, 18:19]], 1)
        expected += [model(rows).logits[:, -1], model(ids[:, :9]).logits[:, -1]]
    for sizes, options in MESHES:
        for actual in on_ranks(model, sizes, body, **options):
            assert worst(dict(enumerate(actual)), dict(enumerate(expected)))[0] <= 1e-12


def test_after_training_and_with_the_cache_of_a_list_of_layers_that_grows():
    model = lively_model("llama")
    ids, mask = prompts()

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", dp=1, cp=2))
        parallel.step(input_ids=ids, labels=ids)
        parallel.module.eval()
        net, cache = parallel.module, transformers.DynamicCache()  # layers appear with their first update
        return stock(net, past_key_values=cache), generate(net, ids, attention_mask=mask, max_new_tokens=6)

    expected = stock(model)
    assert all(torch.equal(tokens, expected) for tokens, _ in run_ranks(2, body))
