"""`parallelize profile` writes a profile that `explain` reads, whose measured constants say so."""

from __future__ import annotations

import json

import pytest

from parallelize.cli import main
from parallelize.tools.analysis.cost.machine import load_machine


@pytest.mark.parametrize("base", [None, "h100-sxm"])
def test_a_profile_of_this_machine(tmp_path, capsys, base):
    path = tmp_path / "mine.yaml"
    arguments = ["profile", str(path), "--device", "cpu", "--json", *(["--base", base] if base else [])]
    assert main(arguments) == 0
    found, machine = json.loads(capsys.readouterr().out), load_machine(path)
    assert found["kernel_us"] > 0
    for key in ("memory_efficiency", "matmul_efficiency", "kernel_us"):
        assert getattr(machine, key) == pytest.approx(found[key], rel=1e-3)
        assert "measured by" in machine.sources[key]
    shipped = load_machine(base or "cpu")
    assert machine.memory_bytes == shipped.memory_bytes and machine.between.bytes_per_s == shipped.between.bytes_per_s
    assert machine.not_scored
