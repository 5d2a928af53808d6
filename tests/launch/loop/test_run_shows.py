"""What a run shows: a profiled step by axis, the page, the memory report."""

from __future__ import annotations

import math
import xml.dom.minidom

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallelize import build_mesh
from parallelize.launch.config.run_config_file import parse_run_config
from parallelize.launch.loop import run_metrics
from parallelize.launch.loop.memory_report import is_out_of_memory, used_bytes, write_memory_report
from parallelize.launch.loop.profiled_step import ProfiledStep, compare_ranks, covered, profiled
from parallelize.launch.loop.run_metrics import RunPage
from parallelize.launch.preflight.prediction import Summary
from tests.support import device


def profiled_axes(rank: int) -> tuple[dict[str, float], list[str], float]:
    """A step with one collective along each axis."""
    mesh, module = build_mesh("cpu", dp=2, tp=2), nn.Sequential(nn.Linear(4, 4))
    with profiled(module, mesh) as profile:
        x = module(torch.ones(2, 4)).detach()
        dist.all_reduce(x, group=mesh.get_group("tp"))
        dist.all_reduce(x, group=mesh.get_group("dp"), async_op=True).wait()
        dist.all_reduce(x)
    compare_ranks(profile)
    assert 0 < profile.busy_s < profile.step_s
    return profile.largest, [name for _, name, _, _ in profile.spans], profile.imbalance


def test_time_in_flight_is_that_of_the_union():
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4.0 and covered([]) == 0.0


@pytest.mark.xdist_group("ranks")
def test_collectives_are_timed_by_axis(four_processes):
    results = four_processes.run(profiled_axes)
    assert all(result == results[0] or result[0] == results[0][0] for result in results)
    largest, spans, imbalance = results[0]
    assert set(largest) == {"tp", "dp", "dp*tp"} and all(seconds > 0 for seconds in largest.values())
    backend = "gloo" if device.CHOSEN == "cpu" else "nccl"
    assert "0" in spans and f"{backend}:all_reduce" in spans and imbalance >= 0


def test_the_page_is_a_page(tmp_path):
    page = RunPage("llama <tiny>", notes=["a & b"])
    for step in range(2000):
        page.log(
            {
                "loss": 3.0 if step % 500 else math.nan,
                "tokens_per_s": 100.0 + step,
                "memory_gib": 0.5,
                "comm_tp_ms": 1.0,
            },
            step,
        )
    page.peaks.append(("rank 0", 2e6, 1e6))
    spans = [("modules 0", "model", 0.0, 0.05), ("tp", "gloo:all_reduce", 0.05, 0.06)]
    page.profiled = ProfiledStep(step_s=0.1, spans=spans)
    page.write(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    xml.dom.minidom.parseString(text.split("\n", 1)[1])
    for shown in (
        "llama &lt;tiny&gt;",
        "Loss",
        "Tokens per second",
        "2 MB",
        "1 MB",
        "gloo:all_reduce: 10.000 ms",
        "NaN",
        "comm_tp_ms",
    ):
        assert shown in text, shown
    assert len(text) < 2_000_000 and len(list(tmp_path.iterdir())) == 1


def test_a_memory_report_has_tensors_and_the_prediction(tmp_path):
    big = torch.zeros(30_000_000)  # more than what other tests of the process keep
    predicted = Summary("dp=2", 1.0, {0: {"peak": 5_000_000, "parameters": 2_000_000, "buffers": 0}}, {})
    path = write_memory_report(tmp_path / "reports", 3, "cpu", predicted, 1)
    text = path.read_text()
    assert path.name == "out-of-memory-rank-3.txt" and "predicted by `explain` (dp=2): 5 MB" in text
    assert "parameters: 2 MB" in text and f"{list(big.shape)} torch.float32" in text and "buffers" not in text
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50, dtype=torch.uint8)
    try:
        raise ValueError("of the stage") from raised.value
    except ValueError as error:
        assert is_out_of_memory(error)
    assert not is_out_of_memory(ValueError("other")) and used_bytes("cpu") > 1e6


def test_a_run_that_goes_on_is_the_same_one_at_weights_and_biases(tmp_path, monkeypatch):
    ids = []
    monkeypatch.setattr(run_metrics, "WandbLogger", lambda project, config, run_id: ids.append(run_id) or Closed())
    for folder in ("a", "a", "b", ""):
        text = (
            f"model: llama\ndata: {{function: 'tests.launch.some_rows:rows'}}\nmetrics: {{wandb: p}}\ncheckpoints: "
            f"{{folder: '{folder and tmp_path / folder}'}}"
        )
        run_metrics.RunMetrics(parse_run_config(text), 1, 1.0, 1.0, "heading", enabled=True).close()
    assert ids[0] and ids[0] == ids[1] != ids[2] and ids[3] is None


class Closed:
    def close(self):
        pass
