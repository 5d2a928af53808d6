"""The benchmarks run, agree with each other, and write what they say; the slow link is taken down again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# one worker: they count network namespaces, and measure a link
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("ranks")]
ROOT = Path(__file__).parent.parent.parent
CAN_EMULATE = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")


def run(*command: str, timeout_s: float = 120.0, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def two_ranks(*command: str) -> subprocess.CompletedProcess:
    return run("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *command)


@pytest.mark.sweep
def test_collective_matmul(tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    done = two_ranks(
        *("benchmarks.collective_matmul", "--rounds", "2", "--chunks", "2", "--shape", "64", "32", "32"),
        *("--json", str(out), "--plot", str(plot)),
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["result"]
    assert len(results["results"]) == 6 and results["profile"]["flops"] > 0
    for result in results["results"]:
        assert result["limit_ms"] > 0 and {"link", "compute", "sync", "chunked/2", "auto"} <= set(result["ms"])
    assert plot.read_text().startswith("<svg") and "PyTorch" in plot.read_text()


@pytest.mark.sweep
def test_experts_equal_those_of_transformers_and_send_less(tmp_path):
    out = tmp_path / "out.json"
    small = ("--hidden", "256", "--width", "16", "--experts", "16", "--layers", "1", "--length", "64", "--rounds", "2")
    done = two_ranks("benchmarks.experts", *small, "--balanced", "--json", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["result"]
    assert set(results["ms"]) == {"transformers", "ours", "overlapped"}
    assert results["bytes ours/transformers"] < 0.27
    assert {"block by hand", "block by us"} <= set(results["block ms"])


@pytest.mark.sweep
def test_the_recipe_prints_the_same_losses_with_folded_experts():
    losses = []
    for mesh in (("--ep", "2"), ("--tp", "2", "--ep", "2", "--sequence-parallel"), ("--pp", "2")):
        small = ("--model", "qwen3_moe", "--steps", "3", "--layers", "2", "--context", "32", "--microbatches", "2")
        done = two_ranks("benchmarks.train", *small, *mesh)
        assert done.returncode == 0, done.stderr
        losses.append(re.findall(r"loss ([\d.]+)|expert_imbalance ([\d.]+)", done.stdout))
    assert len(losses[0]) == 6 and losses[0] == losses[1] == losses[2]


@pytest.mark.sweep
def test_a_training_step_is_the_same_in_every_variant(tmp_path):
    out = tmp_path / "out.json"
    done = two_ranks(
        *("benchmarks.llama_step", "--hidden", "64", "--layers", "1", "--length", "64", "--rounds", "2"),
        *("--json", str(out)),
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(out.read_text())["result"]["results"][0]["ms"]) == {"stock", "sync", "chunked", "auto"}


@pytest.mark.sweep
@pytest.mark.parametrize("form", [(), ("--flat",), ("--dict",)], ids=["nested", "flat", "dict"])
def test_a_step_of_microbatches_is_the_same_in_every_variant(tmp_path, form):
    out = tmp_path / "out.json"
    small = ("--hidden", "64", "--layers", "1", "--length", "64", "--rounds", "2", "--microbatches", "2")
    done = two_ranks("benchmarks.microbatch_step", *small, *form, "--json", str(out))
    assert done.returncode == 0, done.stderr
    variants = {"stock", "hand", "sync", "chunked", "paired", "compute", "unbound"}
    assert set(json.loads(out.read_text())["result"]["results"][0]["ms"]) == variants


@pytest.mark.sweep
def test_timeline(tmp_path):
    drawn = tmp_path / "timeline.svg"
    sizes = ("--rows", "64", "--features", "32", "--outs", "32", "--svg", str(drawn))
    done = two_ranks("benchmarks.timeline", *sizes)
    assert done.returncode == 0, done.stderr
    assert "rank 1" in done.stdout and "rows of another rank" in drawn.read_text()


@pytest.mark.sweep
def test_the_timeline_of_a_step(tmp_path):
    drawn = tmp_path / "step.svg"
    small = ("--hidden", "64", "--layers", "1", "--length", "64", "--microbatches", "2", "--svg", str(drawn))
    done = two_ranks("benchmarks.step_timeline", *small, "--period", "0.001")
    assert done.returncode == 0, done.stderr
    assert "PyTorch: " in done.stdout and "in pairs, thread 2" in drawn.read_text()


@pytest.mark.skipif(bool(CAN_EMULATE), reason="this machine can emulate a slow link")
def test_without_root_or_tc_it_says_so():
    done = run("benchmarks.slow_link", "--", "-c", "print(1)")
    assert done.returncode == 3 and "slow_link:" in done.stderr


def test_without_tools_it_says_so(tmp_path):
    done = run("benchmarks.slow_link", "--", "-c", "print(1)", PATH=str(tmp_path))
    assert done.returncode == 3
    assert "ip and tc not found" in done.stderr or "need Linux and root" in done.stderr


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


needs_root = pytest.mark.skipif(not CAN_EMULATE, reason="network namespaces need Linux, root, ip and tc")
EXCHANGE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1 << 19)
dist.barrier(); began = time.perf_counter()
dist.broadcast(x, 0)
dist.barrier()
os.write(1, f"seconds {time.perf_counter() - began} {len(os.sched_getaffinity(0))}\\n".encode())  # in one piece
"""


@pytest.mark.sweep
@needs_root
def test_the_link_is_as_slow_as_asked():
    """2 MiB at 100 Mbit/s take 0.147 s once the bucket of 256 KiB is empty."""
    before = namespaces()
    done = run("benchmarks.slow_link", "--rate", "100mbit", "--", "-c", EXCHANGE)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("seconds")]
    assert len(lines) == 2 and all(float(line[1]) > 0.14 and line[2] == "1" for line in lines), done.stdout
    assert namespaces() == before


@needs_root
def test_a_failing_rank_ends_the_other_and_leaves_nothing():
    before = namespaces()
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    done = run("benchmarks.slow_link", "--", "-c", code, timeout_s=30)
    assert done.returncode == 7 and namespaces() == before


@needs_root
def test_a_signal_leaves_nothing():
    before = namespaces()
    command = [
        sys.executable,
        "-m",
        "benchmarks.slow_link",
        "--",
        "-c",
        "import os, time; os.write(1, b'up\\n'); time.sleep(60)",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait(30) == 128 + 15
    assert namespaces() == before


@pytest.mark.sweep
def test_checkpoints_are_timed_against_their_peers(tmp_path):
    out = tmp_path / "out.json"
    sizes = ("--hidden", "64", "--layers", "1", "--vocab", "64", "--rounds", "2", "--folder", str(tmp_path))
    done = two_ranks("benchmarks.checkpoint", *sizes, "--json", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["result"]
    assert {"ours", "pytorch", "safetensors"} <= set(results["save"]["ms"])
    assert {"ours, checked", "ours, unchecked", "pytorch"} <= set(results["load"]["ms"])
    assert {"shared", "own node", "other node"} <= set(results["nodes"]["ms"])
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.sweep
def test_what_is_timed_of_loading_is_right(tmp_path):
    import argparse

    from benchmarks.load import write_source

    write_source(argparse.Namespace(hidden=64, layers=1, vocab=64), tmp_path)
    sizes = ("--hidden", "64", "--layers", "1", "--vocab", "64")
    done = two_ranks("benchmarks.load", *sizes, "--only", "ours", "--check", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    times = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("times")).removeprefix("times")
    )
    assert times["written"] > times["returns"] > 0 and times["bytes_read"] == times["bytes_held"]


@pytest.mark.sweep
def test_generation_gives_the_same_tokens_in_every_variant(tmp_path):
    out = tmp_path / "out.json"
    sizes = ("--hidden", "64", "--layers", "1", "--vocab", "201", "--new", "6", "--rounds", "2")
    done = two_ranks("benchmarks.generate", *sizes, "--json", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["result"]
    assert [row["batch"] for row in results["rows"]] == [1, 8]
    assert all({"stock loop", "ours"} <= set(row["ms"]["decode"]) for row in results["rows"])
    assert all(
        "ours / stock loop" in row["ratios"][phase] for row in results["rows"] for phase in ("prefill", "decode")
    )


@pytest.mark.sweep
def test_log_probs_of_generation_are_near_those_of_training(tmp_path):
    out = tmp_path / "out.json"
    done = two_ranks("benchmarks.generation_log_probs", "--rows", "4", "--new", "20", "--json", str(out))
    assert done.returncode == 0, done.stderr
    for row in json.loads(out.read_text())["result"]["rows"]:
        distances = row["distances"]
        assert distances["the same forward again"]["equal"] == 1.0
        assert 0 < distances["decoding"]["largest"] < {"float32": 1e-4, "bfloat16": 0.5}[row["dtype"]]


@pytest.mark.sweep
def test_a_quantized_base_takes_a_quarter_of_the_bytes(tmp_path):
    out = tmp_path / "out.json"
    small = ("--hidden", "128", "--layers", "1", "--tokens", "8", "--rounds", "2")
    done = two_ranks("benchmarks.quantized", *small, "--json", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["result"]
    assert results["bytes a weight"] == {"nf4": 0.53125, "bfloat16": 2.0}
    assert results["bytes"]["nf4"]["read"] == results["bytes"]["bfloat16"]["read"]


@pytest.mark.sweep
def test_exports_give_the_same_tensors_in_every_variant(tmp_path):
    out = tmp_path / "out.json"
    done = two_ranks("benchmarks.export", "--tensors", "40", "--hidden", "8", "--rounds", "2", "--json", str(out))
    assert done.returncode == 0, done.stderr
    ratios = json.loads(out.read_text())["result"]["ratios"]
    assert set(ratios) == {"buckets", "export_weights", "export_weights, first call"}
