"""What each rank does in the tests of sampling and generation on real processes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from parallelize import build_mesh, generate, parallelize_module, sample
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.class_targets import Vocabulary
from tests.support.models import tiny_model

SAMPLED = {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
OPTIONS = [
    {},
    {"temperature": 0.0},
    {"top_k": 3},
    {"top_k": 50, "top_p": 0.9},
    {"top_p": 0.7, "temperature": 1.5},
    {"min_p": 0.05},
]


def lively_model(family: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> nn.Module:
    """A tiny model in evaluation mode whose tokens depend on its prompt: initial weights are too small for that."""
    model: Any = tiny_model(family, dtype, **overrides).eval()
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for parameter in model.parameters():  # large embeddings would make a tied head repeat its prompt
            parameter.mul_(2.0 if parameter is embedding else 10.0 if parameter.ndim > 1 else 0.2)
    return model


def prompts(family: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of odd length, two of them padded on the left.

    Gemma 2 takes its softmax in float32, where the mask of float64 becomes -inf, and padded rows NaN: it gets no
    padding.
    """
    ids = torch.randint(3, 67, (3, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if family != "gemma2":
        mask[1, :3] = mask[2, :2] = 0
    return ids * mask, mask


def stock(model: Any, family: str = "", **how: Any) -> torch.Tensor:
    """`transformers`' own generation."""
    ids, mask = prompts(family)
    options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, "do_sample": False} | how
    return model.generate(input_ids=ids, attention_mask=mask, **options)


def ours(model: Any, family: str = "", **how: Any) -> torch.Tensor:
    ids, mask = prompts(family)
    options = {"max_new_tokens": 6, "eos_token_id": [], "pad_token_id": 0} | how
    return generate(model, ids, attention_mask=mask, **options)


def seeded(seed: int, model: Any, family: str, **how: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    return stock(model, family, do_sample=True, **SAMPLED, **how)


def tokens_differ(rank: int, family: str, tp: int, options: dict[str, Any]) -> list[str]:
    """In which ways the planned model's tokens are not the unsharded one's; the ranks are seeded differently."""
    model = lively_model(family)
    planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=tp), **options)
    wrong = []
    for name, run in {
        "greedy": lambda net, seed: stock(net, family),
        "static cache": lambda net, seed: stock(net, family, cache_implementation="static"),
        "sampled": lambda net, seed: seeded(seed, net, family),
        "ours, greedy": lambda net, seed: ours(net, family, temperature=0.0),
        "ours, sampled": lambda net, seed: ours(net, family, seed=5, **SAMPLED),
    }.items():
        expected, actual = run(model, 100), run(planned, 100 + rank)
        wrong += [] if torch.equal(expected, actual) else [name]
        wrong += [] if len(expected[:, 7:].unique()) > 3 else [f"{name}: dull tokens"]
    return wrong


def compiled_tokens_differ(rank: int, options: dict[str, Any]) -> bool:
    """Whether tokens of `transformers`' compiled loop, which it runs on a GPU for static caches, differ from the
    unsharded model's."""
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    model = lively_model("llama")
    planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2), **options)
    how = CompileConfig(backend="eager", mode=None)
    how._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    actual = stock(planned, cache_implementation="static", compile_config=how)
    assert counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return not torch.equal(actual, stock(model))


def generators_after(rank: int) -> tuple[bool, bool]:
    """(whether a rank seeded alike is where the unsharded run would be; whether one seeded otherwise is where it
    was)."""
    model = lively_model("llama")
    planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2))
    seeded(7, model, "llama")
    expected = torch.rand(3)
    seeded(7, planned, "llama")
    alike = torch.equal(torch.rand(3), expected)
    torch.manual_seed(50 + rank)
    own = torch.rand(3)
    seeded(50 + rank, planned, "llama")
    return alike, torch.equal(torch.rand(3), own)


def sampled_differ(rank: int, tp: int) -> list[Any]:
    """Cases in which tokens of sharded logits are not those of whole ones."""
    group, wrong = Group(build_mesh("cpu", tp=tp).get_group()), []
    for vocab in (3, 67, 1001):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            z = (torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype)
            start, stop = even_interval(vocab, tp, group.rank)
            marked = mark(z[:, start:stop].clone(), Vocabulary(vocab, group))
            for options in OPTIONS:
                if not torch.equal(sample(marked, **options), sample(z, **options)):
                    wrong.append((vocab, dtype, options))
    return wrong
