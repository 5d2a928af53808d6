"""The messages that `explain` predicts are those that real processes send: operation, axis, bytes and count, on every
rank."""

from __future__ import annotations

import pytest

from parallelize import load_plan
from tests.support.models import FAMILIES
from tests.tools.analysis.cost import explain_jobs as jobs

pytestmark = pytest.mark.processes


def check(pool, family, sizes, options, *, batch=2, length=9, model=None):
    configuration = (family, sizes, batch, length, options, model or {})
    predictions = jobs.predicted_messages(*configuration)
    for pp_rank, tp_rank, sent in pool.run(jobs.sent_messages, *configuration):
        predicted = predictions[pp_rank]
        if tp_rank == 0:  # other ranks may have smaller shards
            keys = [key for key in {*sent, *predicted} if sent.get(key) != predicted.get(key)]
            assert sent == predicted, (pp_rank, {key: (sent.get(key), predicted.get(key)) for key in keys})


MODES = [(plan, sp) for plan in FAMILIES for sp in (False, True) if not sp or load_plan(plan).regions]


@pytest.mark.variants(every=12)
@pytest.mark.parametrize(("family", "sequence_parallel"), MODES)
def test_every_plan_on_two(two_processes, family, sequence_parallel):
    check(two_processes, family, {"tp": 2}, {"sequence_parallel": sequence_parallel})


@pytest.mark.variants(every=12)
@pytest.mark.parametrize(("family", "sequence_parallel"), MODES)
def test_every_plan_on_four(four_processes, family, sequence_parallel):
    options = {"sequence_parallel": sequence_parallel, "loss_parallel": family not in ("bert",)}
    check(four_processes, family, {"tp": 4}, options)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero(four_processes, zero):
    check(four_processes, "llama", {"dp": 2, "tp": 2}, {"zero": zero, "sequence_parallel": True})


@pytest.mark.variants(every=6)
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", {"dp": 2, "tp": 2}, {"zero": 1}),
        ("llama", {"dp": 2, "tp": 2}, {"zero": 3}),
        ("gpt2", {"tp": 4}, {}),
        ("phi3", {"pp": 2, "dp": 2}, {"zero": 2, "num_microbatches": 2}),
        ("mixtral", {"dp": 2, "tp": 2}, {"ep": 2, "zero": 1}),
        ("mixtral", {"dp": 4}, {"ep": 2, "zero": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_the_exchange_with_owners(four_processes, family, sizes, options, optimizer):
    check(four_processes, family, sizes, {**options, "optimizer": optimizer}, batch=4, length=16)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_over_replicas_and_microbatches(four_processes, zero):
    options = {"zero": zero, "num_microbatches": 2}
    check(four_processes, "gpt2", {"dp_replicate": 2, "dp": 2}, options)


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zbv"])
def test_a_pipeline(four_processes, schedule, family):
    options = {"schedule": schedule, "num_microbatches": 4, "zero": 0}
    model = {"num_hidden_layers": 4, "tie_word_embeddings": family == "gpt2"}
    check(four_processes, family, {"pp": 2, "tp": 2}, options, batch=4, model=model)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["prompt", "prefix", "lora"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_adapters_of_a_pipeline(four_processes, kind, schedule):
    peft = pytest.importorskip("peft")
    adapter = {
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "lora": peft.LoraConfig(target_modules=["q_proj", "down_proj"]),
    }[kind]
    options = {"schedule": schedule, "num_microbatches": 4, "zero": 0}
    model = {"num_hidden_layers": 4, "adapter": adapter}
    check(four_processes, "llama", {"pp": 2, "tp": 2}, options, batch=4, model=model)


@pytest.mark.sweep
def test_the_whole_mesh(eight_processes):
    options = {"zero": 2, "num_microbatches": 4, "sequence_parallel": True, "loss_parallel": True, "recompute": "full"}
    model = {"num_hidden_layers": 5, "tie_word_embeddings": True}
    check(eight_processes, "llama", {"pp": 2, "dp": 2, "tp": 2}, options, batch=4, model=model)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"cp": 2}, {}),
        ({"cp": 4}, {"recompute": "full"}),
        ({"cp": 4}, {"ulysses": 2}),
        ({"cp": 4}, {"ulysses": 4, "recompute": "selective"}),
        ({"cp": 2, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True}),
        ({"dp": 2, "cp": 2}, {"zero": 1}),
        ({"dp": 2, "cp": 2}, {"zero": 2}),
        ({"dp": 2, "cp": 2}, {"zero": 3}),
        ({"pp": 2, "cp": 2}, {"num_microbatches": 2, "zero": 0}),
    ],
)
def test_over_cp(two_processes, four_processes, sizes, options):
    pool = two_processes if sizes == {"cp": 2} else four_processes
    check(pool, "llama", sizes, options, length=16)


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["deepseek_v32", "lfm2_moe", "qwen3_next"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [({"cp": 2}, {}), ({"cp": 2, "tp": 2}, {"sequence_parallel": True, "ep": 2, "recompute": "full"})],
    ids=str,
)
def test_modules_that_are_gathered_over_cp(two_processes, four_processes, family, sizes, options):
    pool = two_processes if sizes == {"cp": 2} else four_processes
    check(pool, family, sizes, options, length=16)


@pytest.mark.variants(every=6)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 4}, {"ep": 4, "sequence_parallel": True}),
        ({"tp": 4}, {"ep": 2}),
        ({"dp": 4}, {"ep": 4, "zero": 0}),
        ({"dp": 4}, {"ep": 2, "zero": 1}),
        ({"dp": 4}, {"ep": 2, "zero": 2, "num_microbatches": 2}),
        ({"dp": 4}, {"ep": 2, "zero": 3, "recompute": "full"}),
        ({"dp": 2, "tp": 2}, {"ep": 4, "zero": 2, "sequence_parallel": True}),
        ({"dp": 2, "tp": 2}, {"ep": 2, "zero": 1, "recompute": "selective"}),
        ({"dp_replicate": 2, "dp": 2}, {"ep": 2, "zero": 2, "num_microbatches": 2}),
        ({"dp_replicate": 2, "dp": 2}, {"ep": 2, "zero": 3}),
        ({"pp": 2, "dp": 2}, {"ep": 2, "zero": 0, "num_microbatches": 2}),
        ({"dp": 4}, {"ep": 2, "etp": 2, "zero": 1}),
        ({"dp": 4}, {"etp": 2, "zero": 2, "num_microbatches": 2}),
        ({"dp": 4}, {"etp": 2, "zero": 3}),
        ({"dp": 2, "tp": 2}, {"ep": 2, "etp": 2, "zero": 1, "sequence_parallel": True}),
        ({"tp": 4}, {"etp": 2}),
    ],
    ids=str,
)
def test_experts_whose_tokens_are_divided_evenly(four_processes, sizes, options):
    model = {"num_local_experts": 8, "num_hidden_layers": 3}
    check(four_processes, "mixtral", sizes, options, batch=4, length=16, model=model)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pp": 2, "dp": 2}, {"zero": 0, "num_microbatches": 2}),
        ({"pp": 2, "tp": 2}, {"sequence_parallel": True, "num_microbatches": 2}),
        ({"pp": 4}, {"num_microbatches": 4}),
        ({"pp": 2, "cp": 2}, {"num_microbatches": 2}),
        ({"dp_replicate": 2, "dp": 2}, {"zero": 2}),
    ],
    ids=str,
)
def test_what_the_load_balancing_loss_sends(four_processes, sizes, options):
    """The first layer has no router, so that its stage may have nothing to send along."""
    model = {"output_router_logits": True, "num_hidden_layers": 4, "mlp_only_layers": [0]}
    check(four_processes, "qwen2_moe", sizes, options, batch=4, length=16, model=model)


@pytest.mark.sweep
@pytest.mark.variants(every=3)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp": 4}, {"ep": 4, "zero": 1}),
        ({"dp": 2, "tp": 2}, {"ep": 4, "zero": 2, "sequence_parallel": True, "recompute": "full"}),
        ({"dp": 4}, {"ep": 2, "zero": 3, "num_microbatches": 2}),
        ({"pp": 2, "dp": 2}, {"ep": 2, "zero": 0, "num_microbatches": 2}),
        ({"dp": 4}, {"ep": 2, "etp": 2, "zero": 1}),
    ],
    ids=str,
)
def test_a_rank_that_gets_all_tokens(four_processes, sizes, options):
    model = {"num_local_experts": 8, "num_hidden_layers": 4}
    configuration = ("mixtral", sizes, 4, 16, options, model)
    predictions = jobs.predicted_messages(*configuration, to_one_rank=True)
    worst = jobs.predicted_worst_routing(*configuration)
    for pp_rank, ep_rank, sent, most, received in four_processes.run(jobs.messages_to_one_rank, *configuration):
        if ep_rank == 0:
            assert sent == predictions[pp_rank]
            assert most == [worst.rows, worst.choices] and received == worst.received_bytes
    assert worst.choices == worst.even_choices * options["ep"]
