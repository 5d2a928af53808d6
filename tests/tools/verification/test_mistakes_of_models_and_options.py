"""Mistakes in the model, its inputs and the options of `verify` are problems, not tracebacks."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib

import pytest
import torch
from torch import nn

from parallelize import verify
from parallelize.base.errors import HandshakeError, MeshError, ModelError, ParallelizeError
from parallelize.cli import main
from tests.tools.verification.towers import RULES, Tower, tower


def says_no():
    raise ValueError("the factory says no")


class Fails(Tower):
    def forward(self, x):
        raise RuntimeError("the forward says no")


class Counts(Tower):
    calls = itertools.count(1)

    def forward(self, x):
        return super().forward(x) * next(self.calls)


class NotANumber(Tower):
    def forward(self, x):
        return super().forward(x) * float("nan")


def frozen():
    made = tower()
    made["model"].requires_grad_(False)
    return made


def time_first():
    made = tower()
    made["inputs"] = lambda b, n: {"x": torch.randn(n, b, 12), "targets": torch.randint(0, 7, (n, b))}
    return made


@pytest.mark.parametrize(
    ("model", "options", "slug", "text"),
    [
        (says_no, {}, "factory-failed", "the factory says no"),
        (lambda: None, {}, "bad-factory", "NoneType"),
        (lambda: tower(cls=Fails), {}, "reference-failed", "the forward says no"),
        (lambda: tower(loss=lambda output, targets: 1 / 0), {}, "reference-failed", "division by zero"),
        (lambda: {**tower(), "inputs": lambda b, n: 1 / 0}, {}, "inputs-failed", "division by zero"),
        (lambda: {**tower(), "inputs": lambda b, n: None}, {}, "inputs-failed", "NoneType"),
        (frozen, {}, "nothing-trains", "gradient"),
        (time_first, {"mesh": "dp=2"}, "bad-inputs", "rows were asked for"),
        (lambda: tower(cls=Counts), {}, "not-deterministic", "other numbers each time"),
        (lambda: tower(cls=NotANumber), {}, "not-finite", "not finite"),
        ("llama", {"overrides": {"num_attention_heads": 0}, "plan": None}, "bad-config", "at least 1"),
        ("llama", {"overrides": {"hidden_size": "wide"}, "plan": None}, "bad-config", "hidden_size"),
        (tower, {"seed": "one"}, "bad-seed", "no seed"),
        (tower, {"gain": 0}, "bad-gain", "no gain"),
        (tower, {"timeout_s": 0}, "bad-timeout", "0"),
        (tower, {"num_microbatches": 0}, "bad-option", "0"),
        (lambda: tower(), {"backend": "gloo"}, "not-picklable", "package.module:function"),
    ],
)
def test_mistakes_are_problems(model, options, slug, text):
    arguments = {"plan": RULES, "mesh": "tp=2", **options}
    with pytest.raises(ModelError) as error:
        verify(model, **arguments)
    assert error.value.slugs == (slug,) and text in str(error.value) and "Traceback" not in str(error.value)
    if slug == "factory-failed":
        assert f"{pathlib.Path(__file__).name}:" in str(error.value)


def test_other_ways_to_give_a_model(tmp_path):
    assert verify(functools.partial(tower, 12), RULES, "tp=2").model == "tower"
    plain = nn.Sequential()
    plain.add_module("emb", nn.Embedding(11, 8))
    plain.add_module("out", nn.Linear(8, 11))
    before = [p.detach().clone() for p in plain.parameters()]
    assert verify(plain, {"emb": "replicate", "out": "replicate"}, "tp=2").ok
    assert all(torch.equal(a, b) for a, b in zip(before, plain.parameters(), strict=True))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1}))
    assert verify(tmp_path, None, "tp=2", sequence_parallel=False).ok
    for wrong in (4, [1]):
        with pytest.raises(MeshError, match="bad-mesh"):
            verify(tower, RULES, wrong)


def test_torchrun_without_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeshError, match="no-torchrun"):
        verify(tower, RULES, "tp=2", backend="torchrun")


def test_only_rank_0_prints_json(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert main(["verify", "llama", "--mesh", "tp=banana", "--json"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and "bad-mesh" in printed.err


def test_errors_of_verify_are_parallelize_errors():
    assert issubclass(HandshakeError, ParallelizeError)
