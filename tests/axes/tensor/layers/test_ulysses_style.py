"""The style `ulysses`: attention inside the sequence-parallel region exchanges tokens for heads over `tp`."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import ModelError, build_mesh, parallelize_module
from parallelize.plan.plan_file import parse_plan, plans_folder
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import compare, planned_run, reference_run
from tests.support.threads import run_ranks


def plan_of(family: str):
    """A shipped plan with whole projections and `ulysses` in the place of heads."""
    text = (plans_folder() / f"{family}.yaml").read_text()
    if family == "gpt2":
        text = text.replace("attn: gather(hidden_states)", "attn: ulysses")
        text = text.replace("attn.c_attn: colwise(heads + heads + heads)", "attn.c_attn: sequence")
        text = text.replace("attn.c_proj: rowwise(heads)", "attn.c_proj: sequence")
    else:
        text = text.replace("self_attn: gather(hidden_states)", "self_attn: ulysses(position_embeddings)")
        text = text.replace("self_attn.q_proj: colwise(heads)", "self_attn.q_proj: sequence")
        text = text.replace("self_attn.{k,v}_proj: colwise(kv_heads)", "self_attn.{k,v}_proj: sequence")
        text = text.replace("self_attn.o_proj: rowwise(heads)", "self_attn.o_proj: sequence")
        text = text.replace("replicate(gradient=partial)", "sequence")
    for line in text.splitlines():
        if any(
            word in line
            for word in ("sizes:", "  heads:", "  kv_heads:", "local:", "split_size", "num_key_value_groups")
        ):
            text = text.replace(line + "\n", "")
    return parse_plan(text)


SIZES = [*((name, tp) for name in ("llama", "mistral", "qwen3", "gpt2") for tp in (2, 4)), ("llama", 8)]


@pytest.mark.variants(every=9)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("family", "tp"), SIZES)
def test_equals_unsharded(family, tp, sequence):
    """Four key heads, eight query heads: at tp 8 key heads are shared by ranks. Rows are not divisible."""
    check(family, tp, torch.float64, sequence_parallel=sequence, loss_parallel=sequence)


@pytest.mark.parametrize("tp", [2, 4])
def test_single_precision(tp):
    check("llama", tp, torch.float32, sequence_parallel=True)


def test_heads_that_do_not_divide():
    check("llama", 4, torch.float64, {"num_attention_heads": 6, "num_key_value_heads": 2}, sequence_parallel=True)
    check("llama", 4, torch.float64, {"num_attention_heads": 3, "num_key_value_heads": 1}, sequence_parallel=True)


def check(family, tp, dtype, overrides=None, **options):
    model = tiny_model(family, dtype, **(overrides or {}))
    batches = [tiny_batch(seed=1), tiny_batch(seed=2)]
    expected, plan = reference_run(model, batches), plan_of(family)
    models = [copy.deepcopy(model) for _ in range(tp)]
    for actual in run_ranks(tp, lambda rank: planned_run(models[rank], tp, batches, plan=plan, **options)):
        compare(actual, expected, dtype)


def test_attention_by_hand_is_refused():
    model = tiny_model("llama", torch.float64, attn_implementation="eager")

    def body(rank):
        with pytest.raises(ModelError, match="attention-by-hand"):
            parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2), plan_of("llama"), sequence_parallel=True)

    run_ranks(2, body)
