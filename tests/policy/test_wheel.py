"""What an installed wheel has: its plans, and types for the scripts of its users."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.processes, pytest.mark.torch_free, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the tracked files alone."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(source)], check=True, timeout=120, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_carries_its_plans(wheel, tmp_path):
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


SCRIPT = """
from parallelize import MeshSpec, Plan, load_plan, parallelize_model, parallelize_module

plan: Plan = load_plan("llama")
print(plan.name, MeshSpec(tp=8).groups("tp"))
reveal_type(parallelize_module)
parallelize_module(None, sequence_paralel=True)  # misspelled
parallelize_model(None, None, zero="2")  # not a number
MeshSpec(tp=8).no_such_method()
"""


@pytest.mark.sweep
def test_a_script_of_a_user_is_type_checked(wheel, tmp_path):
    """`py.typed` is in the wheel, and type checkers see the public names with their signatures."""
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(tmp_path / "venv" / "bin" / "python")]
    command += [
        "--ignore-missing-imports",
        "--follow-imports=silent",
        "--cache-dir",
        str(tmp_path / "cache"),
        "script.py",
    ]
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120).stdout
    lines = out.splitlines()
    assert [line.split(":")[1] for line in lines if ": error:" in line] == ["7", "8", "9"], out
    assert "sequence_parallel: bool | None" in out and "import-untyped" not in out, out
