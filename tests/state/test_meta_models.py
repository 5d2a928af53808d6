"""Meta models: planned without weights, materialized with every buffer right, filled from a whole state dict."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallelize import ModelError, build_mesh, build_on_meta, full_gradients, materialize, parallelize_module
from parallelize.plan.plan_file import parse_plan
from tests.support.models import FAMILIES, tiny_batch, tiny_model
from tests.support.parity import loss_of, worst
from tests.support.threads import run_ranks


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_materialized_and_loaded_equals_unsharded(family):
    model = tiny_model(family)
    with torch.device("meta"):
        models = [tiny_model(family) for _ in range(2)]
    full_state = model.state_dict()
    ids, labels = tiny_batch()
    loss = loss_of(model(input_ids=ids).logits, labels)
    loss.backward()
    buffers = dict(model.named_buffers())

    def body(rank):
        net = models[rank]
        parallelize_module(net, build_mesh("cpu", tp=2), sequence_parallel=True, loss_parallel=True)
        assert all(p.is_meta for p in net.parameters())
        net.to_empty(device="cpu")
        assert not any(t.is_meta for t in [*net.parameters(), *net.buffers()])
        for name, buffer in net.named_buffers():
            if name in full_state:  # loaded below
                continue
            assert torch.equal(buffer, buffers[name]), name
        net.load_state_dict(copy.deepcopy(full_state))
        planned_loss = loss_of(net(input_ids=ids).logits, labels)
        planned_loss.backward()
        return planned_loss.detach(), full_gradients(net)

    for planned_loss, actual in run_ranks(2, body):
        assert abs(planned_loss - loss.detach()) < 5e-6 * loss.detach()
        assert worst(actual, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})[0] < 5e-6


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.down(self.up(x + self.table))


PLAN = "schema_version: 1\ntensor_parallel: {up: colwise, down: rowwise}"


def test_a_buffer_that_nobody_can_rebuild_is_named_and_can_be_given():
    with torch.device("meta"):
        models = [Table() for _ in range(2)]

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), parse_plan(PLAN))
        with pytest.raises(ModelError) as error:
            models[rank].to_empty(device="cpu")
        assert error.value.slugs == ("unknown-buffers",) and "table" in str(error.value)
        assert all(p.is_meta for p in models[rank].parameters())
        materialize(models[rank], "cpu", rebuild={"table": lambda: torch.arange(4.0)})
        assert torch.equal(models[rank].table, torch.arange(4.0))

    run_ranks(2, body)


def test_dtype_and_device_are_given():
    models = [tiny_model("llama") for _ in range(2)]

    def body(rank):
        net = parallelize_module(models[rank], build_mesh("cpu", tp=2), weights_dtype=torch.bfloat16, device="cpu")
        assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
        assert {p.to_local().dtype for p in net.parameters()} == {torch.bfloat16}
        return net(input_ids=tiny_batch()[0]).logits.dtype

    assert run_ranks(2, body) == [torch.bfloat16] * 2


@pytest.mark.parametrize("source", [0, 1, None])
def test_src_data_rank_says_whose_weights_count(source):
    models = [tiny_model("llama", seed=rank) for rank in range(2)]
    heads = [model.model.embed_tokens.weight.detach().clone() for model in models]

    def body(rank):
        check = None if source is not None else False
        parallelize_module(models[rank], build_mesh("cpu", tp=2), src_data_rank=source, check_replicated=check)
        return models[rank].model.embed_tokens.weight.to_local()

    for rank, local in enumerate(run_ranks(2, body)):
        assert torch.equal(local, heads[rank if source is None else source].chunk(2)[rank])


class Masked(nn.Module):
    """Buffers that no checkpoint has: a mask of a constructor, constants, and random numbers."""

    def __init__(self, is_random: bool = False):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(5, 5).tril().view(1, 1, 5, 5), persistent=False)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        if is_random:
            self.register_buffer("noise", torch.randn(3), persistent=False)


def test_buffers_of_a_constructor_are_those_that_were_recorded():
    model = materialize(build_on_meta(Masked), "cpu")
    assert torch.equal(model.mask, Masked().mask) and torch.equal(model.scale, torch.full((3,), 2.0))
    with pytest.raises(ModelError, match="unknown-buffers") as error:
        materialize(build_on_meta(Masked, True), "cpu")
    assert [name for name, _ in error.value.problems[0].rows] == ["noise"]
