"""Models of texts with images or sounds over `pp`: towers are in the first stage, images go to the microbatch of their
text, and features for later layers are sent on."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import ShapeError, build_mesh, next_tokens, parallelize_model
from parallelize.plan.model_facts import describe
from parallelize.plan.stages import cut_stages
from tests.support import images
from tests.support.image_steps import error_of_step
from tests.support.refused import refused
from tests.support.threads import run_ranks

EVERY = [
    ({"pp": 2}, {"num_microbatches": 4}),
    ({"pp": 3}, {"num_microbatches": 2, "labels": True}),
    ({"pp": 2, "cp": 2}, {"num_microbatches": 2}),
    ({"pp": 2, "cp": 2}, {"num_microbatches": 4, "ulysses": 2}),
]
PLANNED = [
    ({"pp": 2, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True, "num_microbatches": 2}),
    ({"dp": 2, "pp": 2}, {"zero": 3, "num_microbatches": 2}),
    ({"dp": 2, "pp": 2}, {"zero": 1, "num_microbatches": 2}),
    ({"pp": 2, "cp": 2, "tp": 2}, {"sequence_parallel": True, "num_microbatches": 2}),
]


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("axes, options", EVERY, ids=str)
@pytest.mark.parametrize("family", images.FAMILIES)
def test_every_family(family, axes, options):
    assert error_of_step(family, axes, **options) < 1e-13


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("axes, options", PLANNED, ids=str)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_data_rank_whose_texts_have_no_image(family, axes, options):
    batches = [images.batch(family, 2), images.texts_alone(family)] if "dp" in axes else None
    assert error_of_step(family, axes, batches=batches, **options) < 1e-13


def test_a_model_without_a_plan_is_cut_between_the_layers_of_its_text():
    """Not between those of its tower, which may be more."""
    stages = cut_stages(None, describe(images.build("qwen3_vl")), 2)
    units, num_first, skips = stages.units, stages.num_first, stages.cuts.skips
    assert units[num_first : num_first + 3] == tuple(f"model.language_model.layers.{layer}" for layer in range(3))
    assert set(units[:num_first]) == {"model.visual", "model.language_model.embed_tokens"}
    assert skips == (("model.visual", "model.language_model.layers.1"),)


def test_images_that_belong_to_no_text_are_refused():
    """Before anything runs."""
    batch = images.batch("qwen2_vl")
    batch["input_ids"][1, 5] = images.IMAGE  # a token too many
    model = images.build("qwen2_vl")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", pp=2), num_microbatches=2)
        with refused(ShapeError, "unclear-images", "pixel_values"):
            parallel.step(**batch, targets=next_tokens(batch["input_ids"]))
        assert all(p.grad is None for p in parallel.module.parameters())

    run_ranks(2, body)


def test_what_the_tower_returned_is_not_in_the_output_of_a_later_stage():
    seen, model = [], images.build("llava")

    def loss(output, targets):
        seen.append(output.image_hidden_states)
        return output.logits.sum() + 0.0 * targets.sum()

    def body(rank):
        options = {"num_microbatches": 2, "loss": loss, "count": lambda _: 1}
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", pp=2), **options)
        batch = images.batch("llava")
        assert torch.isfinite(parallel.step(**batch, targets=next_tokens(batch["input_ids"])))

    run_ranks(2, body)
    assert seen == [None, None]
