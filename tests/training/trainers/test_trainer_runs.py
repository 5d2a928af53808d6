"""A run of a stock Trainer on a mesh has the losses, norms and evaluations of the stock Trainer on one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.training.trainers import trainer_jobs as jobs

pytest.importorskip("accelerate")
pytestmark = pytest.mark.on_cpus("the Trainer of its jobs is told to use the CPU")

SPLIT = dict(gradient_accumulation_steps=2, per_device_train_batch_size=4)
ROUTED = dict(family="mixtral", config={"output_router_logits": True})
TP, DP, PP, CP = {"tp": 2}, {"dp": 2}, {"pp": 2}, {"cp": 2}
BOTH, STAGES = {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}
swept = partial(pytest.param, marks=pytest.mark.sweep)

CASES = [
    pytest.param(TP, dict(sequence_parallel=True, loss_parallel=True), {}, id="tp, sequence and loss parallel"),
    pytest.param(DP, dict(zero=3), SPLIT, id="ZeRO 3, accumulation"),
    pytest.param(PP, dict(num_microbatches=4), {}, id="pp"),
    pytest.param(BOTH, dict(zero=1, ep=4), ROUTED, id="ZeRO 1, ep, router loss"),
    pytest.param(BOTH, dict(zero=2, sequence_parallel=True), dict(adapter="lora"), id="LoRA"),
    pytest.param({"dp": 2, "cp": 2}, dict(zero=1), SPLIT, id="ZeRO 1, cp, accumulation"),
    swept({"dp": 2, "cp": 2}, dict(zero=3, ulysses=2), {}, id="cp by ulysses"),
    swept({"cp": 2, "tp": 2}, dict(sequence_parallel=True, loss_parallel=True), {}, id="cp, tp, loss parallel"),
    swept({"pp": 2, "cp": 2}, dict(num_microbatches=4), {}, id="pp, cp"),
    swept({"dp": 2, "cp": 2}, dict(zero=2), dict(adapter="lora"), id="LoRA, cp"),
    swept({"dp": 2, "cp": 2}, dict(ep=2), ROUTED, id="ep, cp, router loss"),
    swept({"pp": 2, "tp": 2}, dict(num_microbatches=4), dict(adapter="lora"), id="LoRA, pp, tp"),
    swept(DP, dict(zero=3), dict(adapter="dora"), id="DoRA, ZeRO 3"),
    swept(TP, {}, {}, id="tp"),
    swept(TP, {}, SPLIT, id="tp, accumulation"),
    swept(DP, dict(zero=0), {}, id="ZeRO 0"),
    swept(DP, dict(zero=1), SPLIT, id="ZeRO 1"),
    swept(DP, dict(zero=2), SPLIT, id="ZeRO 2"),
    swept(DP, dict(ep=2), {**ROUTED, **SPLIT}, id="ep"),
    swept(PP, dict(num_microbatches=2), SPLIT, id="pp, accumulation"),
    swept(BOTH, dict(zero=2, fuse_loss=True), {}, id="ZeRO 2, tp, fused loss"),
    swept(STAGES, dict(zero=3, num_microbatches=2), {}, id="pp, ZeRO 3"),
    swept({"pp": 2, "tp": 2}, dict(num_microbatches=4, loss_parallel=True), {}, id="pp, tp"),
    swept(STAGES, dict(zero=1, ep=2, num_microbatches=2), dict(family="mixtral"), id="pp, ep"),
]
SETTINGS = {
    "gradient_checkpointing": dict(gradient_checkpointing=True),
    "bf16": dict(bf16=True, dtype=torch.float32),
    "label_smoothing_factor": dict(label_smoothing_factor=0.1),
    "compute_loss_func": dict(extras={"compute_loss_func": jobs.counted_loss}, **SPLIT),
    "compute_metrics": dict(extras={"compute_metrics": jobs.predicted}, per_device_eval_batch_size=4),
    "dataloader_num_workers": dict(dataloader_num_workers=1, dataloader_multiprocessing_context="fork"),
    "torch_compile": dict(torch_compile=True, torch_compile_backend="aot_eager"),
    "epochs, schedule": dict(max_steps=-1, num_train_epochs=2, lr_scheduler_type="cosine", warmup_steps=2),
    "max_grad_norm": dict(max_grad_norm=0),
    "optim": dict(optim="sgd"),
}
ON = {
    "pp": (PP, dict(num_microbatches=4)),
    "ZeRO 2": (DP, dict(zero=2)),
    "tp": (TP, dict(loss_parallel=True)),
    "cp": (CP, {}),
}
OF_FULL_LOGITS = ("label_smoothing_factor", "compute_loss_func", "torch_compile")
REFUSED = {(mesh, name) for mesh in ("pp", "tp", "cp") for name in OF_FULL_LOGITS}
SLOW = {("pp", "dataloader_num_workers"), ("ZeRO 2", "dataloader_num_workers")}
IN_MINUTES = {("pp", "compute_metrics"), ("ZeRO 2", "compute_loss_func"), ("ZeRO 2", "compute_metrics")}


def assert_same(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, rel=tolerance), name


@pytest.mark.variants(every=1)
@pytest.mark.parametrize(("axes", "options", "settings"), CASES)
def test_steps_and_evaluations_are_those_of_one_process(ranks, tmp_path, axes, options, settings):
    expected = jobs.run_trainer(0, str(tmp_path / "one"), None, **settings)
    outcomes = ranks(axes, jobs.run_trainer, str(tmp_path / "mesh"), axes, options, **settings)
    assert_same(outcomes[0], expected)
    assert all(outcome == outcomes[0] for outcome in outcomes)


OTHER_LOSSES = [
    pytest.param("gpt2", PP, dict(num_microbatches=2), {}, id="gpt2, pp"),  # its name says of no loss what it is
    swept("gpt2", TP, {}, {}, id="gpt2, tp"),
    swept("gpt2", DP, dict(zero=1), SPLIT, id="gpt2, ZeRO 1, accumulation"),
    swept("gpt2", CP, {}, {}, id="gpt2, cp"),
    swept("bert", DP, dict(zero=3), {}, id="bert, ZeRO 3"),  # a mean that takes no count
    swept("bert", PP, dict(num_microbatches=2), {}, id="bert, pp"),
]


@pytest.mark.parametrize(("family", "axes", "options", "settings"), OTHER_LOSSES)
def test_losses_of_other_kinds_are_those_of_one_process(ranks, tmp_path, family, axes, options, settings):
    settings = dict(family=family, max_steps=2, **settings)
    expected = jobs.run_trainer(0, str(tmp_path / "one"), None, **settings)
    outcome = ranks(axes, jobs.run_trainer, str(tmp_path / "mesh"), axes, options, **settings)[0]
    for result in (expected, outcome):
        del result["flos"]  # of stages with a tied head
    assert_same(outcome, expected)


@pytest.mark.sweep
@pytest.mark.parametrize("axes", [TP, DP], ids=["tp", "dp"])
def test_a_trainer_of_two_sequences_evaluates_as_on_one_process(ranks, tmp_path, axes):
    expected = jobs.translated(0, str(tmp_path / "one"), None)
    assert_same(ranks(axes, jobs.translated, str(tmp_path / "mesh"), axes)[0], expected)


@pytest.mark.parametrize(
    ("mesh", "setting"),
    [
        pytest.param(mesh, setting, marks=[] if (mesh, setting) in IN_MINUTES else pytest.mark.sweep)
        for mesh in ON
        for setting in SETTINGS
        if (mesh, setting) not in REFUSED | SLOW
    ],
)
def test_settings_of_the_trainer_work(ranks, tmp_path, mesh, setting):
    axes, options = ON[mesh]
    expected = jobs.run_trainer(0, str(tmp_path / "one"), None, **SETTINGS[setting])
    outcome = ranks(axes, jobs.run_trainer, str(tmp_path / "mesh"), axes, options, **SETTINGS[setting])[0]
    assert_same(outcome, expected, 2e-3 if setting == "bf16" else 1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("setting", OF_FULL_LOGITS)
def test_settings_that_read_logits_work_on_full_ones(ranks, tmp_path, setting):
    expected = jobs.run_trainer(0, str(tmp_path / "one"), None, **SETTINGS[setting])
    outcome = ranks(TP, jobs.run_trainer, str(tmp_path / "mesh"), TP, {}, **SETTINGS[setting])[0]
    assert_same(outcome, expected)


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", ["ZeRO 2", "tp", "cp"])
def test_packed_rows_work(ranks, tmp_path, mesh):
    axes, options = ON[mesh]
    expected = jobs.packed(0, str(tmp_path / "one"), None)
    assert_same(ranks(axes, jobs.packed, str(tmp_path / "mesh"), axes, options)[0], expected)


@pytest.mark.parametrize("mesh", ["ZeRO 2", *(pytest.param(axis, marks=pytest.mark.sweep) for axis in ("tp", "cp"))])
def test_generation_in_evaluation_works(ranks, tmp_path, mesh):
    axes, options = ON[mesh]
    expected = jobs.generation(0, str(tmp_path / "one"), None)
    assert all(tokens == expected for tokens in ranks(axes, jobs.generation, str(tmp_path / "mesh"), axes, options))


@pytest.mark.sweep
def test_generation_on_stages_is_refused(ranks, tmp_path):
    axes, options = ON["pp"]
    with pytest.raises(AssertionError, match=r"ModelError: (\S+): "):
        ranks(axes, jobs.generation, str(tmp_path), axes, options)


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", ON)
def test_moving_averages_work(ranks, tmp_path, mesh):
    axes, options = ON[mesh]
    expected = jobs.moving_average(0, str(tmp_path / "one"), None)
    actual = ranks(axes, jobs.moving_average, str(tmp_path / "mesh"), axes, options)
    assert (sum(actual) if mesh == "pp" else actual[0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", ["ZeRO 2", "tp"])
def test_a_scaler_of_accelerate_works(ranks, tmp_path, mesh):
    axes, options = ON[mesh]
    expected = jobs.run_trainer(0, str(tmp_path / "one"), None)
    outcome = ranks(axes, jobs.scaled, str(tmp_path / "mesh"), axes, options)[0]
    assert_same(outcome, {name: expected[name] for name in outcome})
