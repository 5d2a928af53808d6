"""A built wheel finds its plans where only the wheel is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.torch_free
def test_the_wheel_carries_its_plans(tmp_path):
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, timeout=120, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    alone = tmp_path / "alone"
    zipfile.ZipFile(wheel).extractall(alone)
    code = "import parallelize; from parallelize.cli import main; print(parallelize.__file__); main(['plans'])"
    environment = {**os.environ, "PYTHONPATH": str(alone)}
    out = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=60,
    ).stdout
    assert str(alone) in out and "llama" in out and "bert" in out
    assert (alone / "parallelize" / "tp_plans" / "schema.json").exists()
