"""What a stage shows of the modules on other stages: shape and dtype of parameters in forwards, and where they are in
`print`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import Cuts, PipelineError, build_mesh, full_gradients, parallelize_model
from tests.support.models import shipped_source, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks


def loss(out, targets):
    return F.cross_entropy(out.logits, targets, reduction="sum")


@pytest.mark.parametrize("family", ["vit", pytest.param("dinov2", marks=pytest.mark.sweep)])
def test_the_loss_and_gradients_of_stages_are_those_of_one_process(family):
    model = shipped_source(family).build("cpu", dtype=torch.float64)
    images, targets = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    reference = copy.deepcopy(model)
    expected_loss = loss(reference(pixel_values=images), targets) / len(targets)
    expected_loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}

    def body(rank):
        mesh = build_mesh("cpu", pp=2, tp=2)
        parallel = parallelize_model(copy.deepcopy(model), mesh, loss=loss, count=len)
        value = parallel.step(pixel_values=images, targets=targets)
        assert abs(value - expected_loss) < 1e-12
        return {name: grad for name, grad in full_gradients(parallel.module).items() if grad is not None}

    gradients = run_ranks(4, body)
    assert {name for own in gradients for name in own} == expected.keys()
    for own in gradients:
        assert worst(own, {name: expected[name] for name in own})[0] < 1e-12


class TableLast(nn.Module):
    """Its table of positions comes last in the model, and is read first, by a slice."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.position = nn.Embedding(16, 8)

    def forward(self, ids):
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def test_a_first_stage_that_reads_a_parameter_of_the_last_is_refused_by_its_name():
    model, ids, targets = TableLast().double(), torch.randint(11, (4, 6)), torch.randint(11, (4, 6))
    F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}

    def body(rank):
        mesh, options = build_mesh("cpu", pp=2), {"num_microbatches": 2}
        parallel = parallelize_model(copy.deepcopy(model), mesh, **options)
        with pytest.raises(PipelineError) as error:
            parallel.step(ids, targets=targets)
        cuts = Cuts("blocks", first=("embed", "position"), last=("head",))
        parallel = parallelize_model(copy.deepcopy(model), mesh, cuts=cuts, **options)
        parallel.module.zero_grad()
        parallel.step(ids, targets=targets)
        return str(error.value), worst(full_gradients(parallel.module), expected)[0]

    for text, error in run_ranks(2, body):
        assert "absent-module-used" in text and "reads position.weight of another stage" in text
        assert error < 1e-12


class Tower(nn.Module):
    """Its text is embedded before the tower runs, inside of a part that comes after it."""

    def __init__(self, is_early=True):
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.text = Text()
        self.is_early = is_early

    def forward(self, ids, x):
        text = self.text.embed(ids) if self.is_early else 0.0
        for block in self.tower:
            x = block(x).tanh()
        return self.text(x + text)


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, x):
        return self.head(x)


def test_a_module_that_runs_before_its_stage_is_refused_by_its_name():
    ids, targets = torch.randint(11, (4, 6)), torch.randint(11, (4, 6))
    x = torch.randn(4, 6, 8)

    def body(rank):
        options = {"cuts": Cuts("tower", last=("text",)), "num_microbatches": 2, "check_replicated": False}
        mesh = build_mesh("cpu", pp=2)
        parallelize_model(Tower(is_early=False), mesh, **options).step(ids, x, targets=targets)
        parallel = parallelize_model(Tower(), mesh, **options)
        with pytest.raises(PipelineError) as error:
            parallel.step(ids, x, targets=targets)
        return str(error.value)

    for text in run_ranks(2, body):
        assert "unit-order: text.embed is called before its stage begins at tower." in text


def test_a_stage_is_printed():
    """Norms of `transformers` print the shape of their weight, which is None where another stage has it."""
    model = tiny_model("llama")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", pp=2))
        copy.deepcopy(parallel.module)
        return repr(parallel.module)

    first, last = run_ranks(2, body)
    assert "LlamaRMSNorm(on another stage)" in first and "(lm_head): Linear(on another stage)" in first
    assert "(embed_tokens): Embedding(on another stage)" in last and "(lm_head): Linear(in_features" in last
