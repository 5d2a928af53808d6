"""Every shipped family with experts, with whole experts over data axes, `cp`, pipelines and `tp`: three steps equal the
unsharded model's."""

from __future__ import annotations

from math import prod

import pytest
import torch
import transformers

from parallelize import build_mesh, build_on_meta, parallelize_model
from parallelize.plan.choose import choose_plan
from tests.axes.pipeline.pipeline_jobs import full_value
from tests.support.models import COMMON, MIXTURES, tiny_batch, tiny_model
from tests.support.threads import run_ranks
from tests.training.folded_experts import check, rows_of

FOLDED = {
    "data": ({"dp": 2}, {"ep": 2, "zero": 2}),
    "zero 3": ({"dp": 2}, {"ep": 2, "zero": 3, "recompute": "selective"}),
    "zero 3 of copies": ({"dp": 4}, {"ep": 2, "zero": 3, "overlap": "chunked", "recompute": "full"}),
    "parts": ({"dp": 2}, {"etp": 2, "zero": 1}),
    "sequences": ({"cp": 2}, {"ep": 2}),
    "stages": ({"pp": 2, "dp": 2}, {"ep": 2, "num_microbatches": 2}),
    "recomputed stages": ({"pp": 2}, {"num_microbatches": 2, "recompute": "full"}),
    "tensors": ({"tp": 2}, {"ep": 2, "sequence_parallel": True, "loss_parallel": True, "recompute": "full"}),
}
TIED = ("lfm2_moe", "gemma4_text", "jetmoe", "ernie4_5_moe")


def family_model(family):
    model = tiny_model(family, torch.float64, **({"tie_word_embeddings": False} if family in TIED else {}))
    return model.eval() if family == "phimoe" else model  # in training its router draws


@pytest.mark.variants(every=1000)
@pytest.mark.parametrize("mesh", FOLDED)
@pytest.mark.parametrize("family", MIXTURES)
def test_every_family(family, mesh):
    model, (axes, options) = family_model(family), FOLDED[mesh]
    if "cp" in axes and not choose_plan(model)[0].attention:
        pytest.skip("refused over cp: tests/plan, tests/context")
    check(model, axes, options, length=8)


# -- dropout and bfloat16 ----------------------------------------------------------------------------------------------

MESHES = [
    ({"dp": 2}, {"ep": 2}),
    ({"dp": 2, "tp": 2}, {"ep": 4, "zero": 1, "sequence_parallel": True}),
    ({"dp": 4}, {"ep": 2, "zero": 3}),
    ({"dp": 2}, {"etp": 2, "zero": 2}),
    ({"pp": 2, "dp": 2}, {"ep": 2, "num_microbatches": 2}),
]


def trained(axes, options, family, dropout=0.0, dtype=None):
    """(losses and norms of two steps, initial weights) of a mixture from a seed, of rank 0 and of all stages."""
    config_class, model_class, sizes = MIXTURES[family]
    sizes = {**COMMON, **sizes, "num_hidden_layers": 2, "attention_dropout": dropout}
    config = getattr(transformers, config_class)(**sizes, use_cache=False)

    def body(rank):
        mesh = build_mesh("cpu", **axes)
        model = build_on_meta(getattr(transformers, model_class), config).train()
        more = {"dtype": dtype} if dtype else {}
        parallel = parallelize_model(model, mesh, initialize=3, dropout_seed=5, **more, **options)
        weights = {name: full_value(model, name, p).clone() for name, p in model.named_parameters()}
        optimizer, numbers = parallel.optimizer(torch.optim.SGD, lr=0.05), []
        rows = rows_of(mesh, axes, 8 // prod(axes.get(axis, 1) for axis in ("dp_replicate", "dp")))
        for step in range(2):
            ids, labels = tiny_batch(batch=8, length=8, seed=step)
            numbers.append(float(parallel.step(ids[rows], targets=labels[rows])))
            numbers.append(float(parallel.clip_grad_norm_(1.0)))
            optimizer.step()
            optimizer.zero_grad()
        return numbers, weights

    results = run_ranks(prod(axes.values()), body)
    return results[0][0], {name: value for _, weights in results for name, value in weights.items()}


@pytest.fixture(scope="module")
def of_one_rank():
    """(family, dropout, dtype) -> the run of one rank."""
    return {case: trained({"tp": 1}, {}, *case) for case in CASES}


CASES = [
    ("mixtral", 0.2, None),
    ("mixtral", 0.0, torch.bfloat16),
    ("deepseek_v3", 0.2, None),
    ("gpt_oss", 0.0, torch.bfloat16),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("axes", "options"), MESHES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_dropout_and_losses_do_not_depend_on_the_mesh(of_one_rank, axes, options, case):
    """In bfloat16 to its rounding: sums over ranks round in another order."""
    numbers, weights = trained(axes, options, *case)
    expected, expected_weights = of_one_rank[case]
    assert all(torch.equal(value.to(expected_weights[name]), expected_weights[name]) for name, value in weights.items())
    assert numbers == pytest.approx(expected, rel=2e-2 if case[2] else 5e-6)
