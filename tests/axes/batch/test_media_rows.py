"""Which images of a batch belong to which text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallelize import ShapeError
from parallelize.axes.batch.media_rows import MediaForm
from tests.support.refused import refused

TOKEN = 9
# tokens of images: 2 and 2 | none | 4 | 2
IDS = torch.tensor([[9, 9, 1, 9, 9], [1, 1, 1, 1, 1], [9, 9, 9, 9, 1], [1, 1, 9, 9, 1]])


class _Model(nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(image_token_id=TOKEN, **config)


def bounds(inputs, ids=IDS, **config):
    rows = MediaForm(_Model(**config)).of_batch(inputs := {"input_ids": ids, **inputs})
    return {name: found.rows for name, found in rows.bounds(inputs, {}).items()}


def test_patches_by_grids():
    grids = torch.tensor([[1, 2, 4], [1, 4, 2], [1, 4, 4], [2, 2, 2]])
    inputs = {"pixel_values": torch.zeros(40, 3), "image_grid_thw": grids}
    found = bounds(inputs, vision_config=SimpleNamespace(spatial_merge_size=2))
    assert found == {"image_grid_thw": (0, 2, 2, 3, 4), "pixel_values": (0, 16, 16, 32, 40)}


def test_images_by_their_sizes():
    sizes = torch.tensor([[8, 4], [4, 8], [8, 8], [4, 8]])
    inputs = {"pixel_values": torch.zeros(4, 3, 8, 8), "image_sizes": sizes}
    found = bounds(inputs, vision_config=SimpleNamespace(patch_size=4))
    assert found == dict.fromkeys(inputs, (0, 2, 2, 3, 4))


def test_one_image_for_each_run_of_tokens():
    assert bounds({"pixel_values": torch.zeros(4, 3, 8, 8)}) == {"pixel_values": (0, 2, 2, 3, 4)}


def test_one_image_for_each_text_with_tokens():
    ids = IDS.clone()
    ids[0, 2] = TOKEN
    assert bounds({"pixel_values": torch.zeros(3, 3, 8, 8)}, ids) == {"pixel_values": (0, 1, 1, 2, 3)}


def test_images_of_as_many_tokens():
    assert bounds({"pixel_values": torch.zeros(5, 3, 8, 8)}) == {"pixel_values": (0, 2, 2, 4, 5)}


def test_images_of_a_text_in_a_row_of_their_own():
    """None are passed with texts that have none, although rows of zeros are."""
    pixels = torch.zeros(4, 2, 3, 8, 8)
    rows = MediaForm(_Model()).of_batch({"input_ids": IDS, "pixel_values": pixels})
    each = rows.bounds({"input_ids": IDS, "pixel_values": pixels}, {})["pixel_values"]
    assert each.rows_between(pixels, 1, 2) is None
    assert each.rows_between(pixels, 1, 3).shape[0] == 2


@pytest.mark.parametrize("images", [1, 2, 7])
def test_images_of_an_unknown_text_are_refused(images):
    with refused(ShapeError, "unclear-images", "pixel_values"):
        bounds({"pixel_values": torch.zeros(images, 3, 8, 8)})


def test_a_model_without_tokens_for_images_has_none():
    model = nn.Linear(2, 2)
    assert MediaForm(model).of_batch({"input_ids": IDS, "pixel_values": torch.zeros(4, 3)}).tokens == {}
