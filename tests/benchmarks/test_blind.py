"""The planner's score: rows are read whatever their spelling, and figures are what they say."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from benchmarks.blind import predictions
from benchmarks.blind_rows import LeftOutError, case_of, cases, read_rows
from benchmarks.blind_score import score
from parallelize.tools.analysis.cost.machine import load_machine
from tests.benchmarks.test_benchmarks import run

ROW = dict(
    id="1", source="a source", system="Megatron-LM", model="gpt-x", layers="24", hidden="2048", ffn="8192", heads="16",
    kv_heads="16", vocab="51200", gpu="A100-SXM4-80GB", gpus="8", tp="2", sp="1", pp="2", vpp="1", cp="1", ep="1",
    dp="2", zero="1", mbs="2", gbs="32", microbatches="8", seq="2048", precision="bf16", recompute="none", kernels="TE",
    outcome="ok", step_s="1.0", mem_gb="", mem_kind="", notes="",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kernels": "TransformerEngine 1.9"}, {"kernels": "fused-dropout"}),  # what Megatron-LM trains GPT with
        ({"kernels": "TransformerEngine 1.9", "model": "Llama3-8B"}, {"kernels": "fused"}),
        ({"kernels": "TE", "system": "NeMo 24.07"}, {"kernels": "fused", "system": "nemo", "overlap": "auto"}),
        ({"kernels": "no torch.compile, flash attention"}, {"kernels": "flash-2023"}),
        ({"kernels": "torch.compile", "system": "torchtitan"}, {"kernels": "compiled-flash-2", "system": "fsdp2"}),
        ({"kernels": "torch.compile, cuDNN attention", "system": "torchtitan"}, {"kernels": "compiled"}),
        ({"kernels": "eager (no compile)", "system": "torchtitan"}, {"kernels": "eager-flash-2"}),
        ({"kernels": "flash attention (triton)", "precision": "bf16 (PURE)"}, {"kernels": "flash-pure"}),
        ({"kernels": "flash attention 2", "precision": "bf16 (PURE)"}, {"kernels": "flash-2-pure"}),
        ({"sp": "", "system": "NeMo"}, {"sequence_parallel": True}),
        ({"sp": ""}, {"sequence_parallel": False}),
        ({"kernels": "TE", "system": "Megatron-Bridge, FSDP"}, {"system": "nemo"}),
        ({"system": "NeMo Automodel (FSDP2)", "pp": "1", "dp": "4"}, {"system": "fsdp2"}),
        ({"recompute": "selective: moe_act, layernorm"}, {"recompute": "selective", "attention_again": False}),
        ({"recompute": "selective: core_attn, mlp"}, {"recompute": "off", "attention_again": True}),
        ({"recompute": "none (the recipe's default)"}, {"recompute": "off"}),
        (
            {"recompute": "selective op", "system": "torchtitan"},
            {"recompute": "selective", "matmuls_again": True, "loss_parallel": True},
        ),
        ({"zero": "3", "system": "torchtitan"}, {"zero": 2, "defer": True}),  # whole over a step of a pipeline
        ({"zero": "3", "system": "torchtitan", "pp": "1", "dp": "4"}, {"zero": 3, "defer": False}),
        ({"cp": "2", "dp": "1", "notes": "cp mode all_gather"}, {"gathers_keys": True, "ulysses": 1}),
        ({"precision": "FP8 (E4M3)"}, {"matmul_dtype": "float8"}),
        (
            {"zero": "3 within node (HSDP)", "system": "FSDP", "tp": "1", "pp": "1", "dp": "16", "gpus": "16"},
            {"zero": 3},
        ),
        ({"recompute": "selective (core attention)"}, {"recompute": "off", "attention_again": True}),
        ({"recompute": "full, block of 3 layers"}, {"recompute": "full", "recompute_every": 4}),
        ({"vpp": "6"}, {"schedule": "interleaved_1f1b", "stages_per_rank": 6}),
    ],
)
def test_spellings(changes, expected):
    setting = case_of({**ROW, **changes}).setting
    assert {name: getattr(setting, name) for name in expected} == expected


def test_networks_and_gpus():
    assert case_of({**ROW, "gpu": "A100-SXM4-80GB, 400Gbps"}).machine.between.bytes_per_s == pytest.approx(
        400e9 / 8 / 8
    )
    assert case_of({**ROW, "gpu": "a100_40gb"}).machine.name == "A100 40GB SXM"
    assert case_of({**ROW, "gpu": "GB200 NVL72"}).machine.node_ranks == 72
    assert case_of({**ROW, "gpu": "DGX-GB300"}).machine.memory_bytes > 1.4 * load_machine("gb200").memory_bytes


@pytest.mark.parametrize("missing", [{"hidden": ""}, {"seq": ""}, {"mbs": "", "gbs": ""}, {"step_s": ""}])
def test_a_row_without_a_fact_is_left_out_with_the_reason(missing):
    with pytest.raises(LeftOutError):
        case_of({**ROW, **missing})
    [(_, reason)] = cases([{**ROW, **missing}])
    assert isinstance(reason, str) and reason


def test_figures():
    rows = [
        {**ROW, "id": str(n), "tp": tp, "dp": dp} for n, (tp, dp) in enumerate([("1", "4"), ("2", "2"), ("4", "1")])
    ]
    found = list(predictions(list(cases(rows))))
    exact = [replace(row, case=replace(row.case, measured_s=row.step_s)) for row in found]
    figures = score(exact)
    assert figures["median"]["value"] == 0 and figures["tau"]["value"] == 1 and figures["regret_most"]["value"] == 0
    assert figures["coverage"]["value"] == 1
    turned = [replace(row, case=replace(row.case, measured_s=1 / row.step_s)) for row in found]
    figures = score(turned)
    assert figures["tau"]["value"] == -1 and figures["regret_most"]["value"] > 0


@pytest.mark.processes
def test_the_command(tmp_path):
    path, out, picture = tmp_path / "rows.csv", tmp_path / "out.json", tmp_path / "rows.svg"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows([ROW, {**ROW, "id": "2", "outcome": "oom", "step_s": ""}, {**ROW, "id": "3", "hidden": ""}])
    assert len(read_rows(path)) == 3
    done = run("benchmarks.blind", str(path), "--json", str(out), "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    assert "no sizes of the model" in done.stdout
    result = json.loads(out.read_text())["result"]
    assert result["a source"]["rows"] == 2 and sum(result["a source"]["verdicts"].values()) == 2
    assert picture.read_text().startswith("<svg")
