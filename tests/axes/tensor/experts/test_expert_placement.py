"""Experts placed by recorded routes: ranks store what the order says, loads are even, checkpoints know no order."""

from __future__ import annotations

import copy

import torch

from parallelize import (
    Checkpointer,
    LoadRecord,
    build_mesh,
    explain,
    full_gradients,
    full_state_dict,
    parallelize_model,
    record_routes,
    routing_load,
    shard_info,
)
from parallelize.plan.models.model_source import ModelSource
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

NAME = "model.layers.0.mlp.experts"
PLACEMENT = {"model.layers.*.mlp.experts": [4, 1, 3, 0, 2, 5]}


def mixture():
    return tiny_model("qwen3_moe", torch.float64, mlp_only_layers=[])


def test_ranks_store_the_experts_of_the_order():
    model = mixture()
    full = {name: p.detach().clone() for name, p in model.named_parameters()}

    def job(rank: int):
        placed = parallelize_model(copy.deepcopy(model), build_mesh("cpu", dp=2), ep=2, expert_placement=PLACEMENT)
        weight = dict(placed.module.named_parameters())[f"{NAME}.gate_up_proj"]
        info = shard_info(placed.module)[f"{NAME}.gate_up_proj"]
        return weight.to_local().clone(), info.layout.owned, full_state_dict(placed.module)

    for rank, (local, owned, state) in enumerate(run_ranks(2, job)):
        experts = [1, 3, 4] if rank == 0 else [0, 2, 5]
        assert torch.equal(local, full[f"{NAME}.gate_up_proj"][experts])
        assert [n for start, stop in owned[rank] for n in range(start, stop)] == experts
        assert all(torch.equal(value, full[name]) for name, value in state.items() if rank == 0 and name in full)


def test_a_checkpoint_goes_from_any_order_to_any(tmp_path):
    """With the optimizer's state, to another order, to none and to another mesh; the runs go on as one."""
    model, (ids, labels) = mixture(), tiny_batch()

    def job(rank: int, placement, resumed: bool, ep: int = 2):
        parallel = parallelize_model(
            copy.deepcopy(model), build_mesh("cpu", dp=2), ep=ep, zero=1, expert_placement=placement
        )
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
        rows = slice(rank * len(ids) // 2, (rank + 1) * len(ids) // 2)
        with Checkpointer(str(tmp_path), parallel, optimizer=optimizer) as checkpoints:
            if resumed:
                assert checkpoints.resume() == 1
            for step in range(2):
                if resumed or step == 0:
                    optimizer.zero_grad()
                    parallel.step(input_ids=ids[rows], labels=labels[rows])
                    optimizer.step()
                if not resumed and step == 0:
                    checkpoints.save(1)
        return full_state_dict(parallel.module, every_rank=True)

    run_ranks(2, lambda rank: job(rank, PLACEMENT, False))
    reversed_order = {"model.layers.*": [5, 4, 3, 2, 1, 0]}
    reversed_order = {"model.layers.*.mlp.experts": reversed_order["model.layers.*"]}
    expected = run_ranks(2, lambda rank: job(rank, PLACEMENT, True))[0]
    for placement, ep in ((None, 2), (reversed_order, 2), (None, 1)):
        actual = run_ranks(2, lambda rank, p=placement, n=ep: job(rank, p, True, n))[0]
        assert worst(actual, expected)[0] < 1e-12, (placement, ep)


def test_recorded_routes_make_even_ranks():
    """The imbalance that is measured with the placement is the one that `explain` predicts for it."""
    model, (ids, labels) = mixture(), tiny_batch()
    with torch.no_grad():  # hot experts, side by side
        for layer in model.model.layers:
            layer.mlp.gate.weight[:2] *= 6
    with record_routes(model) as routes, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    source = ModelSource("a small mixture", lambda config: mixture())
    record = LoadRecord(lengths=[8] * 4, routes=routes.gather(), samples=4)
    balance = explain(source, mesh="dp=2,tp=1", ep=2, sequence=16, transport="gloo", record=record).balance
    assert set(balance.expert_placement) == {name for name in balance.expert_placement if name.endswith("mlp.experts")}
    assert balance["experts"].after > balance["experts"].before + 0.02
    assert balance["experts"].after <= balance["experts"].best + 1e-12

    def job(rank: int, placement):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", dp=2), ep=2, expert_placement=placement)
        rows = slice(rank * len(ids) // 2, (rank + 1) * len(ids) // 2)
        with routing_load(parallel) as load:
            parallel.step(input_ids=ids[rows], labels=labels[rows])
        return load.imbalance()["rank"], full_gradients(parallel.module)

    (before, gradients), _ = run_ranks(2, lambda rank: job(rank, None))
    (after, placed), _ = run_ranks(2, lambda rank: job(rank, balance.expert_placement))
    assert worst(placed, gradients)[0] < 1e-12
    counts = [[int((routes.gather()[:, n] == e).sum()) for e in range(6)] for n in range(routes.gather().shape[1])]
    orders = list(balance.expert_placement.values())

    def largest(orders):
        return max(
            max(sum(layer[e] for e in order[:3]), sum(layer[e] for e in order[3:])) * 2 / sum(layer)
            for layer, order in zip(counts, orders, strict=True)
        )

    assert abs(after - largest(orders)) < 1e-9 and abs(before - largest([range(6)] * len(counts))) < 1e-9
    assert after < before
