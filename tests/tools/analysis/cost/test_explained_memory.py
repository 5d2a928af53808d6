"""The memory that `explain` predicts is that of real processes: exact for what stays, within 3% for activations."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import FAMILIES
from tests.tools.analysis.cost import explain_jobs as jobs

pytestmark = [pytest.mark.processes, pytest.mark.on_cpus("kernels of a GPU allocate otherwise")]


def check(pool, family, sizes, options, *, batch=2, length=33, model=None, within=0.03, to_one_rank=False):
    configuration = (family, sizes, batch, length, options, model or {})
    predictions = jobs.predicted_memory(*configuration, to_one_rank=to_one_rank)
    measure = jobs.measured_memory_to_one_rank if to_one_rank else jobs.measured_memory
    for pp_rank, tp_rank, dp_rank, measured in pool.run(measure, *configuration):
        if tp_rank or dp_rank:  # other ranks may have smaller shards
            continue
        predicted = predictions[pp_rank]
        for key in ("parameters", "gradients", "optimizer"):
            assert predicted[key] == measured[key], (key, predicted[key], measured[key])
        activations = predicted["activations"] + (predicted["buffers"] if options.get("zero") == 3 else 0)
        assert abs(activations / measured["activations"] - 1) < within, (pp_rank, activations, measured["activations"])
        if options.get("zero") == 2:
            assert predicted["buffers"] == measured["buffers"]


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan(two_processes, family):
    """Exact except for the token count (8 bytes) and for what Python's garbage collector has not freed yet."""
    check(two_processes, family, {"tp": 2}, {}, within=0.01)


@pytest.mark.variants(every=5)
@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel": True, "loss_parallel": True},
        {"recompute": "full"},
        {"recompute": "selective", "sequence_parallel": True},
        {"num_microbatches": 2},
        {"dtype": torch.bfloat16, "sequence_parallel": True, "loss_parallel": True},
    ],
    ids=str,
)
def test_modes(two_processes, options):
    check(two_processes, "llama", {"tp": 2}, options, model={"num_hidden_layers": 4}, within=0.01)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero(two_processes, zero):
    check(two_processes, "llama", {"dp": 2}, {"zero": zero}, model={"num_hidden_layers": 4})


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", {"dp": 2}, {"zero": 0}),
        ("llama", {"dp": 2}, {"zero": 1}),
        ("gpt2", {"dp": 2}, {"zero": 2}),
        ("llama", {"dp": 2}, {"zero": 3}),
        ("phi3", {"tp": 2}, {}),
        ("mixtral", {"tp": 2}, {"ep": 2}),
    ],
    ids=str,
)
def test_the_state_of_owners(two_processes, family, sizes, options, optimizer):
    """Of Muon a momentum for each element of a matrix that the rank stores, and AdamW's two moments for all others; of
    Adafactor next to nothing. Both have buffers of what is sent, and of what they own in full."""
    check(two_processes, family, sizes, {**options, "optimizer": optimizer})


SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v"]


@pytest.mark.variants(every=10)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline(two_processes, schedule):
    """Some of these split backward into dgrad and wgrad."""
    options = {"num_microbatches": 4, "schedule": schedule}
    check(two_processes, "llama", {"pp": 2}, options, batch=4, model={"num_hidden_layers": 4}, within=0.015)


@pytest.mark.sweep
def test_mixed_precision_with_zero(four_processes):
    options = {"zero": 1, "dtype": torch.bfloat16, "sequence_parallel": True}
    check(four_processes, "gpt2", {"dp": 2, "tp": 2}, options)


@pytest.mark.sweep
@pytest.mark.variants(every=6)
@pytest.mark.parametrize(
    ("family", "schedule", "tied"),
    [
        ("llama", "1f1b", True),
        ("gpt2", "zbv", True),
        ("opt", "1f1b", False),
        ("bert", "1f1b", True),
        ("gemma3", "1f1b", True),
    ],
)
def test_pipelines_of_many_microbatches(two_processes, family, schedule, tied):
    """What one stage allocates and another would free adds up over microbatches if it is counted wrongly."""
    options = {"num_microbatches": 16, "schedule": schedule}
    model = {"num_hidden_layers": 6 if family == "gemma3" else 4, "tie_word_embeddings": tied}
    check(two_processes, family, {"pp": 2}, options, batch=16, model=model, within=0.02)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("options", [{}, {"ulysses": 2}, {"recompute": "full"}], ids=str)
def test_over_cp(two_processes, options):
    check(two_processes, "llama", {"cp": 2}, options, length=64)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize("family", ["deepseek_v32", "lfm2_moe"])
def test_modules_that_are_gathered_over_cp(two_processes, family, options):
    check(two_processes, family, {"cp": 2}, options, length=64)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_state_of_parameters_without_a_gradient(two_processes, zero):
    """An optimizer makes none for those that only choose tokens."""
    check(two_processes, "deepseek_v32", {"dp": 2}, {"zero": zero}, model={"num_hidden_layers": 2})


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("options", [{"zero": 0}, {"zero": 2, "recompute": "full"}], ids=str)
@pytest.mark.parametrize("to_one_rank", [True, False])
def test_experts_that_get_all_tokens_or_as_many_as_others(two_processes, to_one_rank, options):
    model = {"num_local_experts": 8, "num_hidden_layers": 3}
    check(two_processes, "mixtral", {"dp": 2}, {"ep": 2, **options}, batch=4, model=model, to_one_rank=to_one_rank)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 4}, {"ep": 2, "recompute": "full"}),
        ({"dp": 4}, {"ep": 2, "recompute": "full", "num_microbatches": 2}),
        ({"dp": 4}, {"ep": 2, "recompute": "selective"}),
        ({"dp": 4}, {"ep": 4, "recompute": "full"}),
        ({"dp": 4}, {"recompute": "full"}),
        ({"dp": 4}, {}),
        ({"dp": 2, "tp": 2}, {"ep": 4, "recompute": "full", "sequence_parallel": True}),
    ],
    ids=str,
)
def test_experts_under_zero_3(four_processes, axes, options):
    """Under recompute memory is highest in a backward, with full gradients of a unit, and those of the one before on
    their way."""
    model = {"num_local_experts": 8, "num_hidden_layers": 3}
    check(four_processes, "mixtral", axes, {**options, "zero": 3}, batch=4, model=model, within=0.02)


def test_grouped_matmuls_that_a_recomputed_unit_saves(two_processes):
    model = {"num_local_experts": 8, "num_hidden_layers": 3}
    check(two_processes, "mixtral", {"dp": 2}, {"recompute": "selective"}, batch=4, model=model, within=0.01)


def test_shared_experts_that_are_computed_beside_the_others(two_processes):
    """The replay of a recomputed layer ends when these have run, with results of the others on their way: it keeps
    those, which are not predicted, and none of the layer's activations, which are four times as much."""
    model = {"num_hidden_layers": 6}
    check(two_processes, "dots1", {"dp": 2}, {"ep": 2, "recompute": "full"}, batch=4, model=model, within=0.06)


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"etp": 2}], ids=str)
def test_copies_of_experts_that_zero_3_splits(four_processes, sizes):
    """Along another dim than the first, of which `fully_shard` makes a copy as it gathers it."""
    model = {"num_local_experts": 8, "num_hidden_layers": 3}
    check(four_processes, "mixtral", {"dp": 4}, {**sizes, "zero": 3}, batch=4, model=model)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{"zero": 0}, {"zero": 2, "recompute": "full"}], ids=str)
def test_experts_that_are_split_over_etp(two_processes, options):
    model = {"num_local_experts": 8, "num_hidden_layers": 3}
    check(two_processes, "mixtral", {"dp": 2}, {"etp": 2, **options}, batch=4, model=model)
