"""A `compute_loss` of the user's is a part of the mean over data ranks, or refused; stages, which would not call it,
refuse it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from parallelize.base.errors import ModelError
from parallelize.comm.mesh_view import MeshView
from parallelize.training.trainers.own_losses import checked_parts, is_multiple, own_compute_loss, reads_count
from parallelize.training.trainers.served_options import refuse_own_losses
from tests.support.refused import small_mesh

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Multiple(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


class Mean(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return model(**inputs).logits.mean()


class Counted(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).logits.sum() / num_items_in_batch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        logits = self.linear(x)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=logits.square().mean(), logits=logits)


def trainer_of(cls, mesh, function=None):
    trainer = object.__new__(cls)
    trainer.mesh_view, trainer.model, trainer.compute_loss_func = MeshView(mesh), Model(), function
    return trainer


def loss_in(trainer, count=7):
    with checked_parts(trainer, count):
        return trainer.compute_loss(trainer.model, {"x": torch.ones(3, 2)}, num_items_in_batch=count)


def test_a_multiple_of_the_models_loss_and_a_counted_sum_are_parts():
    with small_mesh(dp=2) as mesh:
        for cls in (Multiple, Counted):
            trainer = trainer_of(cls, mesh)
            loss_in(trainer).backward()
            assert "compute_loss" not in vars(trainer) and trainer.model.linear.weight.grad is not None
        loss_in(trainer_of(Multiple, mesh), None)


def test_a_mean_of_the_users_is_refused_over_data_ranks():
    with small_mesh(dp=2) as mesh, pytest.raises(ModelError, match="trainer-option: compute_loss of Mean is a mean"):
        loss_in(trainer_of(Mean, mesh))
    with small_mesh(tp=2) as mesh:
        loss_in(trainer_of(Mean, mesh))


def func(outputs, labels, num_items_in_batch=None):
    return outputs.logits.mean()


def counted_func(outputs, labels, num_items_in_batch=None):
    return outputs.logits.sum() / num_items_in_batch


def test_a_function_that_ignores_its_count_is_refused_over_data_ranks():
    with small_mesh(dp=2) as mesh:
        with checked_parts(trainer_of(transformers.Trainer, mesh, counted_func), 7):
            pass
        for ignoring in (func, partial(func)):
            trainer = trainer_of(transformers.Trainer, mesh, ignoring)
            with pytest.raises(ModelError, match="compute_loss_func of Trainer is a mean"), checked_parts(trainer, 7):
                pass


def test_what_a_function_reads():
    assert reads_count(Counted.compute_loss) and reads_count(counted_func) and reads_count(print)
    assert not reads_count(Multiple.compute_loss) and not reads_count(Mean.compute_loss)
    assert reads_count(lambda self, **kwargs: kwargs["num_items_in_batch"])


def test_what_is_a_multiple():
    loss = torch.tensor(3.0, requires_grad=True) * 1
    other = torch.tensor(2.0, requires_grad=True)
    assert is_multiple(2 * loss, [loss]) and is_multiple(loss / 3 + other, [loss, other])
    assert not is_multiple(loss + other, [loss]) and not is_multiple(loss**2, [loss]) and not is_multiple(other, [None])


@pytest.mark.parametrize("form", ["method", "attribute"])
def test_stages_do_not_call_a_loss_of_the_users(form):
    with small_mesh(pp=2) as mesh:
        trainer = trainer_of(Mean if form == "method" else transformers.Trainer, mesh)
        trainer.has_stages, trainer.args = True, transformers.TrainingArguments("nowhere", use_cpu=True)
        if form == "attribute":
            trainer.compute_loss = func
        assert own_compute_loss(trainer) is not None
        with pytest.raises(ModelError, match="trainer-option: a compute_loss of its own on a mesh with pp") as caught:
            refuse_own_losses(trainer)
        assert "loss=a function" in str(caught.value)
        assert own_compute_loss(trainer_of(transformers.Trainer, mesh)) is None
