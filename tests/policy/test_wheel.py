"""What an installed wheel or source distribution has: plans, programs, the first example, types for type checkers."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.policy.test_documents import losses_in, printed_losses, write_example

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.processes, pytest.mark.torch_free, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The tracked files alone."""
    folder = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in tracked:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(source)], check=True, timeout=120, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory) -> Path:
    """The Python of a fresh environment, with the package from its source distribution, and what else is installed
    here."""
    folder = tmp_path_factory.mktemp("installed")
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, timeout=120, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # a path: its own .pth files are not read
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-build-isolation", str(archive)], check=True, timeout=240, capture_output=True)
    return python


def used(installed: Path, folder: Path, *command: str) -> str:
    """What a program of the environment prints, in a folder elsewhere. Raises: AssertionError with its output."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    places = alone | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [str(installed.with_name(command[0])), *command[1:]],
        cwd=folder,
        env=places,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.sweep
def test_what_a_source_distribution_installs_is_used(installed, tmp_path):
    places = used(installed, tmp_path, "python", "-c", "import parallelize; print(parallelize.__file__)")
    package = Path(places.strip()).parent
    assert package.is_relative_to(installed.parents[1])
    assert {path.name for path in (ROOT / "tp_plans").iterdir()} <= {p.name for p in (package / "tp_plans").iterdir()}
    assert (package / "launch" / "config" / "run.schema.json").exists()
    assert "usage: parallelize" in used(installed, tmp_path, "parallelize", "--help")
    plan = package / "tp_plans" / "llama.yaml"
    assert "no mistakes" in used(installed, tmp_path, "parallelize", "lint", str(plan))
    assert "tp=8" in used(installed, tmp_path, "parallelize", "explain", "llama-3-8b", "--mesh", "tp=8")


@pytest.mark.sweep
def test_the_first_example_runs_with_what_is_installed(installed, tmp_path):
    write_example("README.md", tmp_path)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "first.py"]
    losses = losses_in(used(installed, tmp_path, "python", *launch))
    assert losses == pytest.approx(printed_losses("README.md"), rel=0.02)


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
