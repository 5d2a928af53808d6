"""The balance of a recorded load: operations by length are those of a recording, sums by hand, and what bounds them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from parallelize import LoadRecord, ModelError, ShapeError, explain
from parallelize.cli import main
from parallelize.plan.models.model_source import source_of
from parallelize.tools.analysis.cost.load_balance import (
    LoadMesh,
    UnitLoad,
    balance_load,
    placed,
    read_record,
    token_counts,
)
from parallelize.tools.analysis.cost.setting import make_setting
from parallelize.tools.analysis.recorded_load import _operations, unit_costs
from parallelize.tools.analysis.show.terminal_report import as_text
from parallelize.tools.analysis.subject import Subject
from tests.training.data.test_balanced_deal import drawn_lengths

ONE = LoadMesh(data_ranks=2, shared=1, ep=1, microbatches=1, stage_ranks=(0,), starts=(0,), num_first=0, num_layers=1)
UNIT = [UnitLoad("model", token=2.0, pair=0.5)]


@pytest.mark.parametrize("options", [{}, {"mesh": "tp=2", "sequence_parallel": True}, {"recompute": "full"}], ids=str)
def test_operations_of_other_lengths(options):
    """Two recordings tell those of any length: attention is quadratic, everything else linear."""
    options = {"mesh": "dp=2", **options}
    subject = Subject(source_of("llama"))
    setting = subject.complete(make_setting(options.pop("mesh"), {"sequence": 256, **options}))
    costs = unit_costs(subject, setting, {})
    for length in (64, 200, 1024):
        recorded, _ = _operations(subject, replace(setting, sequence=length))
        for unit in costs:
            expected = unit.token * length + unit.pair * length**2
            assert abs(recorded[unit.unit] - expected) <= 1e-9 * max(expected, 1), (unit.unit, length)
    assert sum(unit.pair for unit in costs) > 0


def test_equal_tokens_are_not_equal_costs():
    """One row of 8 costs 16 + 32, two of 4 cost 8 + 8 each: ranks with the same tokens differ."""
    record = LoadRecord(lengths=[8, 4, 4, 4, 4, 8], samples=6, joined=True)
    line = balance_load(record, UNIT, {}, ONE, 6)["rows"]
    assert line.before == pytest.approx((48 + 16 + 16 + 16 + 16 + 48) / 2 / 80)
    assert line.after == 1.0 and line.best == 1.0 and line.bound == ""


def test_a_sample_that_is_too_long_bounds_the_balance():
    record = LoadRecord(lengths=[40, 4, 4, 4], samples=4, joined=True)
    line = balance_load(record, UNIT, {}, ONE, 4)["rows"]
    mean = (880 + 3 * 16) / 2
    assert line.after == line.best == pytest.approx(mean / 880)
    assert line.bound == f"the longest sample, 40 tokens, costs {880 / mean:.2f} of a rank's mean: more samples, or cp"


def test_stages_are_cut_by_costs_for_the_lengths():
    """Four layers, and a head that costs as much as two: by parameters it would be beside two layers."""
    units = [UnitLoad(f"layers.{n}", 1.0, 0.0) for n in range(4)] + [UnitLoad("head", 2.0, 0.0)]
    mesh = replace(ONE, data_ranks=1, stage_ranks=(0, 1), starts=(0, 2), num_layers=4)
    balance = balance_load(LoadRecord(lengths=[3]), units, {}, mesh, 1)
    assert balance["stages"].before == pytest.approx(0.75) and balance["stages"].after == 1.0
    assert balance.stage_costs == {"layers.0": 3, "layers.1": 3, "layers.2": 3, "layers.3": 3, "head": 6}
    assert balance["all together"].after == 1.0


def test_experts_by_hand():
    """Layer 0: hot experts 0 and 1 go to two ranks. Layer 1: one expert has 70 of 100, which no placement divides."""
    counts = [[40, 40, 10, 10], [70, 10, 10, 10]]
    units = [UnitLoad(f"layers.{n}", 10.0, 0.0, expert=5.0, layers=(n,)) for n in range(2)]
    experts = {f"layers.{n}.experts": 4 for n in range(2)}
    mesh = replace(ONE, ep=2, num_layers=2)
    balance = balance_load(LoadRecord(lengths=[5, 5], routes=counts), units, experts, mesh, 2)
    line = balance["experts"]
    assert line.before == pytest.approx((0.5 + 0.5) / (0.8 + 0.8)) and line.after == pytest.approx(1 / (0.5 + 0.8))
    assert line.best == pytest.approx(line.after) and "one expert of layer 1 with experts gets 0.700" in line.bound
    for order, layer in zip(balance.expert_placement.values(), counts, strict=True):
        assert max(sum(layer[e] for e in order[:2]), sum(layer[e] for e in order[2:])) == min(
            100 - 20, max(50, max(layer) + 10)
        )
    # dense 5 a token and layer on both ranks, experts by the shares of both layers together
    shares = [
        sum(
            layer[e]
            for layer, order in zip(counts, balance.expert_placement.values(), strict=True)
            for e in order[a : a + 2]
        )
        / 100
        for a in (0, 2)
    ]
    ranks = [2 * 5 * 5 + 5 * 5 * 2 * share for share in shares]
    assert balance["all together"].after == pytest.approx(sum(ranks) / 2 / max(ranks))


def test_experts_over_data_ranks_are_no_cost_of_a_row():
    units = [UnitLoad("layers.0", 10.0, 0.1, expert=8.0, layers=(0,))]
    for shared, token in ((1, 2.0), (4, 10.0)):  # within tp ranks they compute the tokens of their data rank
        mesh = replace(ONE, ep=2, shared=shared)
        balance = balance_load(LoadRecord(lengths=[5, 5]), units, {"layers.0.experts": 4}, mesh, 2)
        assert (balance.row_costs.token, balance.row_costs.pair) == (token, 0.1)


def test_orders_even_out_over_layers():
    """The rank that gets most in one layer gets least in the next."""
    counts = [[60.0, 20.0, 10.0, 10.0]] * 2
    first, second = placed(counts, 2)
    assert set(first[:2]) != set(second[:2])
    assert placed([[1.0] * 6], 4) == [(0, 1, 2, 3, 4, 5)], "ep does not divide them"


def test_routes_as_choices_or_numbers():
    choices = torch.tensor([[[0, 1]], [[0, 2]], [[-1, 2]]])
    assert token_counts(choices, {"experts": 3}) == [[2, 1, 2]] == token_counts([[2, 1, 2]], {"experts": 3})


@pytest.mark.parametrize(
    ("record", "error", "slug"),
    [
        (LoadRecord(lengths=[4] * 3), ModelError, "bad-record"),
        (LoadRecord(lengths=[4, 0, 4, 4]), ModelError, "bad-record"),
        (LoadRecord(lengths=[4] * 4, routes=[[1, 2, 3]]), ModelError, "bad-record"),
        (LoadRecord(lengths=[4] * 4, samples=3), ShapeError, "indivisible-batch"),
        ([4, 4], ModelError, "bad-record"),
    ],
    ids=["few", "empty", "routes of a dense model", "samples", "no record"],
)
def test_wrong_records(record, error, slug):
    with pytest.raises(error) as caught:
        explain("llama", mesh="dp=2", sequence=64, batch=2, record=record)
    assert caught.value.slugs == (slug,)


def test_explain_shows_the_balance_and_its_stage_costs_cut_the_model():
    record = LoadRecord(lengths=drawn_lengths(128, most=2048), samples=128, joined=True, lockstep=True)
    explanation = explain("llama", mesh="pp=2,dp=4", sequence=256, num_microbatches=2, record=record)
    balance, text = explanation.balance, as_text(explanation)
    assert "compute over ranks" in text and "all together" in text
    assert balance["rows"].after > 0.99 and balance["microbatches"].after > 0.99 > balance["rows"].before
    cut = explain("llama", mesh="pp=2,dp=4", sequence=256, num_microbatches=2, record=record, costs=balance.stage_costs)
    assert cut.balance["stages"].before == pytest.approx(balance["stages"].after)
    assert explanation.as_dict()["balance"]["lines"][0]["name"] == "rows"


def test_a_record_is_read_from_a_file(tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"lengths": drawn_lengths(64, most=512), "samples": 32, "joined": True}))
    command = ["explain", "llama", "--mesh", "dp=4", "--sequence", "128", "--record", str(path), "--quiet"]
    assert main(command) == 0 and "balance of" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["balance"]["lines"]
    assert [line["name"] for line in lines] == ["rows", "all together"] and lines[0]["after"] > lines[0]["before"]
    path.write_text('{"length": [4]}')
    assert main(command) == 2 and "bad-record" in capsys.readouterr().err
    path.write_text("[4, 4, 4, 4]")
    assert read_record(path) == LoadRecord(lengths=[4, 4, 4, 4])
