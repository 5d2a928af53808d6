"""The load-balancing loss of stock mixtures over ranks: the gradients of routers equal those of the unsharded model.

The value alone proves nothing: the mean of the losses of the ranks is within a percent of it, with gradients several
times off.
"""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from parallelize import ModelError, build_mesh, full_gradients, parallelize_model, parallelize_module, shard_data
from parallelize.axes.zero.router_loss import FUNCTION
from parallelize.tools.verification.precision import InFloat64
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

COEFFICIENT = 0.5  # large, so that a wrong gradient of the loss is not hidden by that of the tokens
BATCH, LENGTH = 4, 7


def mixture(family="mixtral", **more):
    asked = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT, "num_hidden_layers": 2}
    return tiny_model(family, torch.float64, **asked | more)


def batch():
    ids, _ = tiny_batch(batch=BATCH, length=LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return ids, labels, mask


def alone(model, mask=None):
    """(loss, gradients) of the unsharded model, by its own code."""
    model = copy.deepcopy(model)
    ids, labels, _ = batch()
    with InFloat64():
        loss = model(input_ids=ids, labels=labels, attention_mask=mask).loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_mesh(model, sizes, mask, **options):
    """(loss, full gradients) of each rank, by `step`."""
    ids, labels, _ = batch()
    models = [copy.deepcopy(model) for _ in range(torch.tensor(list(sizes.values())).prod())]

    def body(rank):
        mesh = build_mesh("cpu", **sizes)
        parallel = parallelize_model(models[rank], mesh, **options)
        ranks = sizes.get("dp", 1)
        data_rank = mesh.get_local_rank("dp") if "dp" in sizes else 0
        rows = slice(data_rank * BATCH // ranks, (data_rank + 1) * BATCH // ranks)
        inputs = {} if mask is None else {"attention_mask": mask[rows]}
        with InFloat64():
            loss = parallel.step(ids[rows], labels=labels[rows], **inputs)
        return loss, full_gradients(models[rank]) if {"tp", "ep"} & {*sizes, *options} else gradients_of(models[rank])

    return run_ranks(len(models), body)


def gradients_of(model):
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in gradients.items()}


def united(results):
    """The gradients of all pipeline stages; those of ranks with the same parameters are equal."""
    every = {}
    for _, gradients in results:
        for name, gradient in gradients.items():
            assert name not in every or (every[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max()
            every[name] = gradient
    return every


ONE = {"num_microbatches": 1}


@pytest.mark.parametrize("family", ["qwen2_moe", "olmoe"])
def test_other_families(family):
    model = mixture(family)
    loss, expected = alone(model)
    for actual, gradients in on_mesh(model, {"dp": 2, "tp": 2}, None, sequence_parallel=True):
        assert abs(actual - loss) <= 1e-12 * abs(loss)
        assert worst(gradients, expected)[0] <= 1e-12


BALANCED = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "minimax_m2", "phimoe", "ernie4_5_moe", "granitemoe"),
    *("granitemoeshared", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "jamba", "minimax", "dbrx", "granitemoehybrid"),
)
"""The shipped families whose models have such a loss, beside JetMoe."""


@pytest.mark.variants(every=1000)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp": 2}, {"ep": 2}),
        ({"dp": 2, "tp": 2}, {"ep": 4, "zero": 2, "sequence_parallel": True}),
        ({"tp": 2}, {"sequence_parallel": True, "loss_parallel": True}),
        ({"pp": 2, "dp": 2}, {"ep": 2, **ONE}),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", BALANCED)
def test_every_family_on_folded_meshes(family, sizes, options):
    """DBRX counts its loss with a coefficient of its own."""
    model, mask = mixture(family, tie_word_embeddings=False), batch()[2]
    if family == "phimoe":  # in training its router draws
        model.eval()
    plain = copy.deepcopy(model)
    plain.config.output_router_logits = False
    loss, expected = alone(model, mask)
    assert loss - alone(plain, mask)[0] > 0.01
    results = on_mesh(model, sizes, mask, **options)
    assert all(abs(actual - loss) <= 1e-12 * abs(loss) for actual, _ in results)
    gradients = {name: gradient for name, gradient in united(results).items() if name in expected}
    assert worst(gradients, expected)[0] <= 1e-12 and len(gradients) == len(expected)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}], ids=str)
def test_routers_of_attention_that_each_rank_runs_in_full(sizes):
    """Beside those of shards. The coefficient of JetMoe has another name."""
    model = mixture("jetmoe", aux_loss_coef=COEFFICIENT)
    mask = batch()[2]
    loss, expected = alone(model, mask)
    for actual, gradients in on_mesh(model, sizes, mask, **({"sequence_parallel": True} if "tp" in sizes else {})):
        assert abs(actual - loss) <= 1e-12 * abs(loss)
        assert worst(gradients, expected)[0] <= 1e-12


def test_in_a_loop_of_ones_own():
    model = mixture()
    _, expected = alone(model)
    ids, labels, _ = batch()
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        mesh = build_mesh("cpu", dp=2)
        shard_data(models[rank], mesh)
        rows = slice(rank * 2, rank * 2 + 2)
        with InFloat64():
            models[rank](input_ids=ids[rows], labels=labels[rows]).loss.backward()
        return gradients_of(models[rank])

    for actual in run_ranks(2, body):
        assert worst(actual, expected)[0] <= 1e-12


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2}, {}),
        ({"pp": 2}, {}),
        ({"pp": 2}, {"schedule": "interleaved_1f1b"}),
        ({"pp": 2}, {"schedule": "interleaved_zero_bubble"}),
    ],
)
def test_microbatches_have_a_loss_each_and_the_step_their_mean(sizes, options):
    model = mixture(num_hidden_layers=4)
    ids, labels, _ = batch()
    unsharded = copy.deepcopy(model)
    count = (labels[:, 1:] != -100).sum()
    for rows in (slice(0, 2), slice(2, 4)):
        with InFloat64():
            out = unsharded(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=count)
        (out.loss - COEFFICIENT * out.aux_loss / 2).backward()
    expected = {name: p.grad for name, p in unsharded.named_parameters() if p.grad is not None}
    assert worst(united(on_mesh(model, sizes, None, num_microbatches=2, **options)), expected)[0] <= 1e-12


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"tp": 2}])
def test_a_loss_of_ones_own_need_not_add_it(sizes):
    """The sums that stages send then have no gradient."""
    model = mixture()
    ids, labels, _ = batch()

    def without(output, targets):
        return cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")

    unsharded = copy.deepcopy(model)
    with InFloat64():
        (without(unsharded(input_ids=ids), labels) / (labels != -100).sum()).backward()
    expected = {name: p.grad for name, p in unsharded.named_parameters() if p.grad is not None}
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", **sizes), loss=without, num_microbatches=2)
        with InFloat64():
            parallel.step(ids, targets=labels)
        return 0.0, full_gradients(models[rank]) if "tp" in sizes else gradients_of(models[rank])

    assert worst(united(run_ranks(2, body)), expected)[0] <= 1e-12


def test_models_without_a_plan_keep_the_function_of_transformers():
    model = mixture()
    before = alone(model)[0]
    on_mesh(model, {"dp": 2}, None)
    assert alone(model)[0] == before


def test_evaluation_has_no_balancing_loss():
    model = mixture()
    ids, labels, _ = batch()

    def body(rank):
        with InFloat64():
            return parallelize_model(copy.deepcopy(model), build_mesh("cpu", tp=2)).evaluate(ids, labels=labels)

    quiet = copy.deepcopy(model)
    quiet.config.output_router_logits = False
    with InFloat64():
        expected = quiet(input_ids=ids, labels=labels).loss
    for loss in run_ranks(2, body):
        assert abs(loss - expected) <= 1e-12 * abs(expected)


def test_another_formula_is_refused(monkeypatch):
    def pooled_by_layer(gate_logits, num_experts):
        raise AssertionError

    model = mixture()
    monkeypatch.setattr(sys.modules[type(model).__module__], FUNCTION, pooled_by_layer)
    with pytest.raises(
        ModelError, match=r"router-loss: load_balancing_loss_func\(gate_logits, num_experts\) of Mixtral"
    ):
        on_mesh(model, {"dp": 2}, None)
    with pytest.raises(ModelError, match="router-loss"):
        on_mesh(model, {"pp": 2}, None)
    copies = [copy.deepcopy(model) for _ in range(2)]
    with pytest.raises(ModelError, match="router-loss"):
        run_ranks(2, lambda rank: shard_data(copies[rank], build_mesh("cpu", dp=2)))


def test_asked_for_in_a_call():
    model = mixture()
    model.config.output_router_logits = False
    ids, labels, _ = batch()
    unsharded = copy.deepcopy(model)
    with InFloat64():
        expected = unsharded(input_ids=ids, labels=labels, output_router_logits=True)

    def body(rank):
        planned = copy.deepcopy(model)
        parallelize_module(planned, build_mesh("cpu", tp=2), sequence_parallel=True)
        with InFloat64():
            return planned(input_ids=ids, labels=labels, output_router_logits=True)

    for out in run_ranks(2, body):
        assert abs(out.aux_loss - expected.aux_loss) <= 1e-12 * expected.aux_loss
        assert abs(out.loss - expected.loss) <= 1e-12 * expected.loss
