"""The bias that balances experts: the same bits on every rank and every mesh, from the counts of the whole batch."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from parallelize import Checkpointer, ModelError, balance_experts, build_mesh, parallelize_model
from parallelize.axes.tensor.experts.expert_bias import biases_of
from parallelize.tools.verification.precision import InFloat64
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

BATCH, LENGTH, STEPS, RATE = 4, 7, 3, 0.01


def batches():
    """(ids, labels, mask) of each step; two sequences are padded."""
    for step in range(STEPS):
        ids, _ = tiny_batch(batch=BATCH, length=LENGTH)
        ids = (ids + 5 * step) % ids.max()
        mask = torch.ones_like(ids)
        mask[1, :3] = mask[2, 5:] = 0
        yield ids, ids.masked_fill(mask == 0, -100), mask


def by_hand(model):
    """The biases after some steps of the unsharded model: counts of one layer after the other, from its routers'
    choices."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    biases, chosen = biases_of(model), {}
    for name in biases:
        keep = partial(lambda name, _, args: chosen.__setitem__(name, args[1]), name)
        model.get_submodule(name).register_forward_pre_hook(keep)
    for ids, labels, mask in batches():
        chosen.clear()
        with InFloat64():
            model(input_ids=ids, labels=labels, attention_mask=mask).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, bias in biases.items():
            choices = chosen[name][mask.flatten() == 1]
            counts = torch.bincount(choices.flatten(), minlength=bias.numel()).double()
            with torch.no_grad():
                bias += (RATE * (counts.mean() - counts).sign()).view(bias.shape)
    return {name: bias.detach().clone() for name, bias in biases.items()}


def on_mesh(model, sizes, **options):
    models = [copy.deepcopy(model).train() for _ in range(torch.tensor(list(sizes.values())).prod())]

    def body(rank):
        mesh = build_mesh("cpu", **sizes)
        parallel = parallelize_model(models[rank], mesh, **options)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        balance = balance_experts(models[rank], optimizer, RATE)
        ranks, data_rank = sizes.get("dp", 1), mesh.get_local_rank("dp") if "dp" in sizes else 0
        rows = slice(data_rank * BATCH // ranks, (data_rank + 1) * BATCH // ranks)
        for ids, labels, mask in batches():
            with InFloat64():
                parallel.step(ids[rows], labels=labels[rows], attention_mask=mask[rows])
            optimizer.step()
            optimizer.zero_grad()
        biases = balance.biases.items()
        return {name: b.full_tensor() if hasattr(b, "full_tensor") else b.detach() for name, b in biases}

    return run_ranks(len(models), body)


MESHES = [
    ({"tp": 2}, {"sequence_parallel": True, "recompute": "full"}),
    ({"dp": 2}, {"zero": 3}),
    ({"dp": 2, "tp": 2}, {"ep": 4, "zero": 2}),
    ({"cp": 2}, {}),
    ({"pp": 2}, {"num_microbatches": 2}),
    ({"pp": 2, "dp": 2}, {"zero": 1, "recompute": "full", "num_microbatches": 2}),
]


@pytest.mark.variants(every=3)
@pytest.mark.parametrize(("sizes", "options"), MESHES)
@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_biases_have_the_same_bits_on_every_mesh(family, sizes, options):
    model = tiny_model(family, torch.float64)
    expected = by_hand(model)
    assert expected and all(float(bias.abs().max()) >= RATE for bias in expected.values())
    every = {}
    for actual in on_mesh(model, sizes, **options):
        assert all(torch.equal(bias, expected[name]) for name, bias in actual.items())
        every |= actual
    assert every.keys() == expected.keys()


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_biases_are_saved_with_the_model_and_loaded_on_another_mesh(family, tmp_path):
    model = tiny_model(family)

    def on(sizes, loads, **options):
        models = [copy.deepcopy(model).train() for _ in range(2)]

        def body(rank):
            parallel = parallelize_model(models[rank], build_mesh("cpu", **sizes), **options)
            optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
            biases = balance_experts(models[rank], optimizer, RATE).biases
            with Checkpointer(tmp_path, parallel, optimizer=optimizer) as checkpoints:
                if loads:
                    checkpoints.resume()
                else:
                    ids, labels = tiny_batch(batch=BATCH, length=LENGTH)
                    parallel.step(ids[2 * rank : 2 * rank + 2], labels=labels[2 * rank : 2 * rank + 2])
                    optimizer.step()
                    checkpoints.save(1)
            return {n: b.full_tensor() if hasattr(b, "full_tensor") else b.detach().clone() for n, b in biases.items()}

        return run_ranks(2, body)

    saved = on({"dp": 2}, loads=False, ep=2, zero=1)[0]
    assert saved and all(float(bias.abs().max()) > 0 for bias in saved.values())
    for loaded in on({"tp": 2}, loads=True, ep=2, sequence_parallel=True):
        assert all(torch.equal(bias, saved[name]) for name, bias in loaded.items())


def test_forwards_without_training_do_not_count():
    model = tiny_model("deepseek_v3")
    balance = balance_experts(model)
    ids, _ = tiny_batch(batch=BATCH, length=LENGTH)
    with torch.no_grad():
        model.train()(input_ids=ids)
    model.eval()(input_ids=ids)
    assert all(int(counts.sum()) == 0 for counts in balance.load.local.values())
    model.train()(input_ids=ids)
    assert all(int(counts.sum()) > 0 for counts in balance.load.local.values())


def test_a_router_without_a_bias_is_refused():
    with pytest.raises(ModelError, match="no-expert-bias: no router of MixtralForCausalLM has a bias"):
        balance_experts(tiny_model("mixtral"))
