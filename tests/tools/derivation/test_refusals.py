"""Models, inputs and arguments of which no plan can be derived: each is refused by a slug, and no file is left."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn

from parallelize import derive_plan
from parallelize.base.errors import MeshError, ModelError
from parallelize.base.terminal.console import ENVIRONMENT
from parallelize.tools.derivation import small_model
from tests.support.refused import WIDTH, Block, refused, refused_command

HERE = __name__


@pytest.fixture
def refusal(capsys):
    return partial(refused_command, capsys, "plans", "derive")


def inputs():
    return {"hidden": torch.randn(2, 3, WIDTH)}


def wrong_name():
    return {"x": torch.randn(2, 3, WIDTH)}


def wrong_size():
    return (torch.randn(2, 3, WIDTH + 1),)


def number():
    return 3


def fails():
    raise ValueError("no such data set")


def build():
    return Block()


def build_one():
    return nn.Linear(3, 4)


def test_inputs_that_nobody_knows(refusal):
    slugs, output = refusal(f"{HERE}:build")
    assert slugs == ["unknown-inputs"]
    assert "how the forward of Block is called" in output and "--inputs module:function" in output


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("wrong_name", ("unexpected keyword argument 'x'", "x [2, 3, 8]")),
        ("wrong_size", ("mat1 and mat2 shapes cannot be multiplied", "#1 [2, 3, 9]")),
    ],
)
def test_a_forward_that_fails(function, expected, refusal):
    slugs, output = refusal(f"{HERE}:build", "--inputs", f"{HERE}:{function}")
    assert slugs == ["untraceable-model"]
    assert all(text in output for text in ("the forward of Block failed", *expected))


@pytest.mark.sweep
def test_a_config_of_which_no_small_model_runs(monkeypatch):
    monkeypatch.setattr(small_model, "record_forward", lambda *_: 1 / 0)
    with refused(ModelError, "untraceable-model", "no small version of gpt2 runs: ZeroDivisionError: division by zero"):
        derive_plan("gpt2")


def test_a_model_that_has_no_values():
    with torch.device("meta"):
        model = Block()
    with refused(ModelError, "untraceable-model", "Block is on the device meta", "on the CPU"):
        derive_plan(model, inputs())


def test_a_model_that_is_too_large(monkeypatch):
    monkeypatch.setattr(small_model, "MAX_PARAMETERS", 200)
    with refused(ModelError, "too-large-to-run", "Block has 212 parameters", "give its config"):
        derive_plan(Block(), inputs())


def test_nothing_to_shard(refusal):
    slugs, output = refusal(f"{HERE}:build_one", "--inputs", f"{HERE}:one_input")
    assert slugs == ["nothing-to-shard"]
    assert "no linear of" in output and "an output of the model" in output and "data parallelism" in output, output


class Flagged(Block):
    """Sets a flag that only inputs which are no activations have."""

    def forward(self, hidden):
        hidden = hidden[:, :]
        hidden.requires_grad = True
        return super().forward(hidden)


class Infinite(Block):
    def forward(self, hidden):
        return super().forward(hidden) / 0.0


@pytest.mark.parametrize(("model", "slug"), [(Flagged, "reference-failed"), (Infinite, "not-finite")])
def test_a_model_that_nothing_can_be_compared_with(model, slug):
    """The error is of the model: to leave linears whole does not mend it."""
    with refused(ModelError, slug, "unsharded"):
        derive_plan(model(), inputs())


def test_a_model_that_cannot_be_copied():
    model = Block()
    model.lock = threading.Lock()
    with refused(ModelError, "reference-failed", "Block cannot be copied for each rank", "_thread.lock"):
        derive_plan(model, inputs())


def one_input():
    return {"input": torch.randn(2, 3)}


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("tp=2,dp=2", "a plan is derived for tp, and tp=2,dp=2 has other axes"),
        ("dp=2", "and dp=2 has other axes"),
        ("two", "cannot read 'two'"),
        ("tp=1", "nothing is split over tp=1"),
    ],
)
def test_a_mesh_of_other_axes(mesh, expected, refusal):
    slugs, output = refusal(f"{HERE}:build", "--inputs", f"{HERE}:inputs", "--mesh", mesh)
    assert slugs == ["bad-mesh"] and expected in output


def test_one_rank_proves_nothing():
    with refused(MeshError, "bad-mesh", "tp=1"):
        derive_plan(Block(), inputs(), tp=1)


@pytest.mark.parametrize(
    ("function", "slug", "expected"),
    [
        ("plain", "no-such-factory", "plain is no function"),
        ("no_such_module:f", "no-such-factory", "No module named 'no_such_module'"),
        (f"{HERE}:absent", "no-such-factory", "has no attribute 'absent'"),
        (f"{HERE}:HERE", "no-such-factory", "is no function"),
        (f"{HERE}:number", "bad-inputs", "returned: int"),
        (f"{HERE}:fails", "bad-inputs", "failed: ValueError: no such data set"),
    ],
)
def test_inputs_that_are_none(function, slug, expected, refusal):
    slugs, output = refusal(f"{HERE}:build", "--inputs", function)
    assert slugs == [slug] and expected in output


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def never_derived(monkeypatch):
    """Deriving takes its time: what cannot be written is found before."""
    monkeypatch.setattr("parallelize.cli.derived_plans.derive_plan", lambda *_, **__: pytest.fail("it was derived"))


@pytest.mark.parametrize("existing", ["plan.yaml", "page.html"])
def test_a_file_that_exists(existing, tmp_path, refusal, never_derived):
    (tmp_path / existing).write_text("mine")
    slugs, output = refusal(f"{HERE}:build", "-o", tmp_path / "plan.yaml", "--html", tmp_path / "page.html")
    assert slugs == ["file-exists"] and existing in output and "--force" in output
    assert [path.name for path in tmp_path.iterdir()] == [existing] and (tmp_path / existing).read_text() == "mine"


def test_a_folder_that_does_not_exist(tmp_path, refusal, never_derived):
    slugs, output = refusal(f"{HERE}:build", "-o", tmp_path / "absent" / "plan.yaml", status=ENVIRONMENT)
    assert slugs == ["file-error"] and "absent" in output and not list(tmp_path.iterdir())


@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_no_file(force, tmp_path, refusal):
    options = ["--force"] if force else []
    slugs, _ = refusal(f"{HERE}:build", "-o", tmp_path / "plan.yaml", "--html", tmp_path / "page.html", *options)
    assert slugs == ["unknown-inputs"] and not list(tmp_path.iterdir())
