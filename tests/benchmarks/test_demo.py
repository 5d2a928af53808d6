"""The demo's comparison: differences beyond rounding are a failure."""

from __future__ import annotations

import copy

import torch
from torch import nn

from benchmarks.demo import ROUNDING, batch, compare, english_text


def test_the_comparison_can_fail(capsys):
    model = nn.Linear(3, 2)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: torch.ones_like(p) for name, p in weights.items()}
    same = ([2.0, 1.0], gradients, weights, [2.0, 1.0], gradients, model)
    assert compare(*same)
    for index in range(3):
        worse = copy.deepcopy(list(same[:3]))
        if index == 0:
            worse[0][1] += 3 * ROUNDING["loss"]
        else:
            worse[index]["weight"][0, 0] += 3e-4
        assert not compare(*worse, *same[3:])
    assert "DIFFERS" in capsys.readouterr().out


def test_batches_are_text_and_repeat():
    text = english_text()
    ids, following = batch(text, 3)
    assert torch.equal(ids[:, 1:], following[:, :-1]) and torch.equal(ids, batch(text, 3)[0])
    assert bytes(text[:2000].tolist()).decode().isascii()
