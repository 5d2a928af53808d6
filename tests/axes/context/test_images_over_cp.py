"""Models of texts with images or sounds over `cp`: the text's tokens are sharded, and towers have all images. Loss and
gradients are those of one process, also where a text has several images, or none."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from parallelize import ModelError, PlanError, build_mesh, next_tokens, parallelize_model
from tests.support import images
from tests.support.image_steps import error_of_step, plan_of
from tests.support.refused import refused, small_mesh
from tests.support.threads import run_ranks

EVERY = [
    ({"cp": 2}, {}),
    ({"cp": 2}, {"ulysses": 2}),
    ({"cp": 2}, {"labels": True, "num_microbatches": 2}),
    ({"cp": 4}, {"ulysses": 2}),
]
PLANNED = [
    ({"cp": 2, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True}),
    ({"dp": 2, "cp": 2}, {"zero": 3}),
    ({"dp": 2, "cp": 2}, {"zero": 0}),
    ({"dp": 2, "cp": 2}, {"zero": 1, "ulysses": 2}),
    ({"dp": 2, "cp": 2}, {"zero": 2}),
    ({"dp": 2, "cp": 2, "tp": 2}, {"zero": 3, "sequence_parallel": True}),
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


def positions_of(family, batch, mask=None):
    names = ("input_ids", "image_grid_thw", "mm_token_type_ids")
    model = images.build(family).model
    return model.get_rope_index(**{name: batch[name] for name in names}, attention_mask=mask)[0]


@pytest.mark.parametrize("passes_positions", [False, True])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_right_padding_and_positions_of_three_axes(family, passes_positions):
    batch = images.batch(family)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, -7:] = mask[3, -2:] = 0
    batch["attention_mask"] = mask
    if passes_positions:
        batch["position_ids"] = positions_of(family, batch, mask)
    assert error_of_step(family, {"cp": 2}, batches=[batch]) < 1e-13


def test_documents_by_the_first_of_four_axes():
    batch = images.batch("qwen2_vl")
    positions = positions_of("qwen2_vl", batch)
    documents = torch.cat([torch.arange(30), torch.arange(10)]).expand(1, 4, -1)
    packed = {**batch, "position_ids": torch.cat([documents, positions])}
    assert error_of_step("qwen2_vl", {"cp": 2}, batches=[packed]) < 1e-13


def test_a_batch_of_as_many_texts_as_axes():
    """Three texts, whose positions [3, 3, tokens] are no batch of three."""
    batch = images.batch("qwen2_vl", 3)
    batch["position_ids"] = positions_of("qwen2_vl", batch)
    assert error_of_step("qwen2_vl", {"cp": 2}, batches=[batch], num_microbatches=3) < 1e-13


@pytest.mark.parametrize(
    "arguments", [{"use_cache": True}, {"logits_to_keep": 1}], ids=["a cache", "logits of the last tokens"]
)
def test_what_is_refused_in_a_forward(arguments):
    model = images.build("llava")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", cp=2))
        with torch.no_grad(), refused(ModelError, "cache-over-cp" if "use_cache" in arguments else "one-row"):
            parallel.module(**images.batch("llava"), **arguments)

    run_ranks(2, body)


def test_masks_of_images_over_a_ring_are_refused():
    """Attention of images' tokens to each other needs masks of all tokens, which a ring does not take."""
    model, gathered = images.build("gemma3"), plan_of("gemma3")
    plan = replace(gathered, attention=tuple(replace(rule, kind="causal") for rule in gathered.attention))

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", cp=2), plan)
        with refused(ModelError, "given-mask"):
            parallel.module(**images.batch("gemma3"))

    run_ranks(2, body)


def test_the_named_part_must_be_in_the_model():
    plan = replace(plan_of("gemma3"), sequences="model.text")
    with small_mesh(cp=2) as mesh, refused(PlanError, "unknown-module", "model.text"):
        parallelize_model(images.build("gemma3"), mesh, plan)


@pytest.mark.parametrize("drops", [False, True])
def test_a_tower_runs_once_for_each_image(drops):
    """Each rank has two of four images; all of them where a tower has dropout."""
    model, batch = images.build("llava"), images.batch("llava")
    for layer in model.model.vision_tower.encoder.layers:
        layer.self_attn.dropout = 0.1 * drops

    def body(rank):
        seen = []
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", cp=2))
        tower = parallel.module.get_submodule("model.vision_tower.encoder")
        tower.register_forward_pre_hook(
            lambda _, args, given: seen.append(len(given["inputs_embeds"])), with_kwargs=True
        )
        parallel.step(**batch, targets=next_tokens(batch["input_ids"]))
        return seen

    assert run_ranks(2, body) == [[4 if drops else 2]] * 2
