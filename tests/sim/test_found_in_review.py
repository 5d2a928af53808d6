"""Each was wrong once, in silence: kept as tests of their own."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import (
    ModelError,
    ParallelizeError,
    ShapeError,
    build_mesh,
    clip_grad_norm_,
    cross_entropy,
    full_gradients,
    full_parameter,
    local_optimizer,
    parallelize_module,
)
from tests.sim.test_hot_path import BOTH, grads, pair, step
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks


def planned(models, rank, **options):
    return parallelize_module(models[rank], build_mesh("cpu", tp=2), **{**BOTH, **options})


def test_an_optimiser_step_with_a_closure_trains():
    model, models = pair()
    plain = torch.optim.SGD(model.parameters(), 0.1)

    def closure(net, optimizer):
        def run():
            optimizer.zero_grad()
            return step(net)

        return run

    for _ in range(2):
        plain.step(closure(model, plain))

    def body(rank):
        net = planned(models, rank)
        optimizer = local_optimizer(torch.optim.SGD(net.parameters(), 0.1))
        for _ in range(2):
            assert optimizer.step(closure(net, optimizer)) > 0
        return {name: full_parameter(net, name).detach() for name, _ in net.named_parameters()}

    for got in run_ranks(2, body):
        assert worst(got, {n: p.detach() for n, p in model.named_parameters()})[0] < 1e-12


def test_a_failed_optimiser_step_puts_everything_back():
    _, models = pair()

    def body(rank):
        net = planned(models, rank)
        optimizer = local_optimizer(torch.optim.AdamW(net.parameters(), 0.1))
        step(net)
        optimizer.param_groups[0]["betas"] = "nonsense"
        with pytest.raises((ValueError, TypeError)):
            optimizer.step()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], net.parameters(), strict=True))
        optimizer.zero_grad()
        assert all(p.grad is None for p in net.parameters())
        with pytest.raises(ModelError) as error:
            local_optimizer(optimizer)
        assert error.value.slugs == ("already-local",)

    run_ranks(2, body)


def test_schedulers_work_on_a_local_optimiser():
    _, models = pair()

    def body(rank):
        net = planned(models, rank)
        optimizer = local_optimizer(torch.optim.SGD(net.parameters(), 0.1))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        step(net)
        optimizer.step()
        schedule.step()
        return optimizer.param_groups[0]["lr"]

    assert run_ranks(2, body) == [0.05, 0.05]


def test_half_precision_norms_do_not_overflow():
    parameters = [nn.Parameter(torch.zeros(8, 8, dtype=torch.float16)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 100.0)
    assert abs(clip_grad_norm_(parameters, 1.0) - 1131.4) < 1
    assert parameters[0].grad[0, 0] > 0.08


def test_norms_count_shared_heads_once_through_wrappers_and_moves():
    model, models = pair("llama", num_key_value_heads=1)
    step(model)
    want = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])

    def body(rank):
        net = planned(models, rank)
        net.float()
        net.double()
        step(net)
        wrapper = nn.ModuleDict({"inside": net})
        return [clip_grad_norm_(wrapper, 1e9), clip_grad_norm_(net, 1e9), clip_grad_norm_(net.parameters(), 1e9)]

    for norms in run_ranks(2, body):
        assert all(abs(norm - want) < 1e-6 * want for norm in norms), (norms, want)


def test_infinity_norm_of_an_empty_shard():
    models = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)) for _ in range(4)]

    def body(rank):
        net = parallelize_module(models[rank], build_mesh("cpu", tp=4), {"0": "colwise", "1": "rowwise"})
        net(torch.ones(1, 2)).sum().backward()
        return clip_grad_norm_(net, 1.0, float("inf"))

    assert len({float(norm) for norm in run_ranks(4, body)}) == 1


def test_hooks_on_parameters_fire_with_dtensor_gradients():
    _, models = pair()

    def body(rank):
        net = planned(models, rank)
        calls = []
        net.model.norm.weight.register_hook(lambda grad: grad * 0)
        net.model.norm.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
        step(net)
        assert calls == [True] and net.model.norm.weight.grad.to_local().abs().max() == 0

    run_ranks(2, body)
    model = tiny_model("llama")
    model.model.norm.weight.register_hook(lambda grad: grad)
    with pytest.raises(ModelError) as error:
        run_ranks(1, lambda rank: parallelize_module(model, build_mesh("cpu", tp=1)))
    assert error.value.slugs == ("hook-on-parameter",)


def test_functional_call_differentiates_through():
    model, models = pair()
    ids, labels = tiny_batch()

    def losses(net):
        scaled = {n: p * 1.5 for n, p in net.named_parameters()}
        logits = torch.func.functional_call(net, scaled, kwargs={"input_ids": ids}).logits
        if hasattr(logits, "vocabulary"):
            return cross_entropy(logits, labels)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    losses(model).backward()

    def body(rank):
        net = planned(models, rank)
        losses(net).backward()
        return full_gradients(net)

    for got in run_ranks(2, body):
        assert worst(got, grads(model))[0] < 1e-12


def test_a_second_derivative_is_refused():
    _, models = pair()

    def body(rank):
        net = planned(models, rank, sequence_parallel=False, loss_parallel=False)
        embeds = torch.randn(2, 5, 48, dtype=torch.float64, requires_grad=True)
        out = net(inputs_embeds=embeds).logits.square().sum()
        with pytest.raises(ModelError) as error:
            torch.autograd.grad(out, embeds, create_graph=True)
        assert error.value.slugs == ("double-backward",)

    run_ranks(2, body)


def test_a_learned_logit_scale_gets_its_whole_gradient():
    model, models = pair("llama")
    ids, labels = tiny_batch()

    def run(net):
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        cross_entropy(net(input_ids=ids).logits * scale, labels).backward()
        return scale.grad

    want = run(model)
    for got in run_ranks(2, lambda rank: run(planned(models, rank))):
        assert abs(got - want) < 1e-12


def test_ids_and_targets_beyond_the_vocabulary_are_refused():
    _, models = pair("llama")

    def body(rank):
        net = planned(models, rank)
        with pytest.raises(ShapeError) as error:
            net(input_ids=torch.tensor([[1, 67]]))
        assert error.value.slugs == ("id-out-of-range",)
        ids, labels = tiny_batch()
        with pytest.raises(ShapeError):
            cross_entropy(net(input_ids=ids).logits, labels.clamp(min=0) + 60)

    run_ranks(2, body)


def test_a_block_outside_the_region_is_refused():
    _, models = pair("llama")

    def body(rank):
        net = planned(models, rank)
        for _ in range(2):
            with pytest.raises(ModelError) as error:
                net.model.layers[0].mlp(torch.randn(2, 9, 48, dtype=torch.float64))
            assert error.value.slugs == ("outside-region",)
            step(net)

    run_ranks(2, body)


def test_parts_of_a_model_give_their_state_in_original_order():
    model, models = pair("gpt2")
    want = model.transformer.state_dict()

    def body(rank):
        net = planned(models, rank)
        state = net.transformer.state_dict()
        for name, value in state.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(value, want[name]), name
        net.transformer.load_state_dict(copy.deepcopy(dict(want)))
        assert torch.equal(full_parameter(net, "transformer.h.0.attn.c_attn.weight"), want["h.0.attn.c_attn.weight"])

    run_ranks(2, body)


def test_a_wrapper_materialises_buffers_too():
    model = tiny_model("llama")
    with torch.device("meta"):
        models = [tiny_model("llama") for _ in range(2)]

    def body(rank):
        planned(models, rank)
        nn.ModuleDict({"inside": models[rank]}).to_empty(device="cpu")
        assert torch.equal(models[rank].model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)

    run_ranks(2, body)


def test_moving_a_model_lets_go_of_old_storage():
    _, models = pair("llama")

    def body(rank):
        net = planned(models, rank)
        step(net)
        net.zero_grad()
        old = [weakref.ref(p.to_local().untyped_storage()) for p in net.parameters()]
        net.to(torch.bfloat16)
        gc.collect()
        return sum(storage() is not None for storage in old)

    assert run_ranks(2, body) == [0, 0]


def test_what_cannot_be_planned_is_refused_by_name():
    attention = nn.MultiheadAttention(8, 2)
    with pytest.raises(ParallelizeError) as error:
        run_ranks(1, lambda rank: parallelize_module(attention, build_mesh("cpu", tp=1), {"out_proj": "replicate"}))
    assert set(error.value.slugs) == {"reads-child-parameters"}
    _, models = pair("llama")

    def body(rank):
        net = planned(models, rank)
        with pytest.raises(ParallelizeError) as error:
            parallelize_module(
                nn.ModuleDict({"model": net.model}), build_mesh("cpu", tp=2), {"model.norm": "replicate"}
            )
        assert error.value.slugs[0] == "already-parallelized"
        with pytest.raises(RuntimeError, match="DistributedDataParallel"):
            nn.parallel.DistributedDataParallel(net)
        with pytest.raises(ModelError) as error:
            net(input_ids=tiny_batch()[0], output_attentions=True)
        assert error.value.slugs == ("attentions-are-shards",)

    run_ranks(2, body)
