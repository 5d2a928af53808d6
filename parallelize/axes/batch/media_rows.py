"""Which rows of images, videos and sounds belong to which text of a batch.

Models of `transformers` take the images of all texts in one tensor [images, ..], or their patches in one [patches, ..]
beside a grid for each image. Which text an image belongs to is said by the ids alone: the tokens whose place its
features take, in the order of the batch. A text may have several images, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import Problem, ShapeError
from parallelize.plan.models.wrapped_models import stock_model

T = torch.Tensor
Bounds = tuple[int, ...]
"""For each sequence the index of its first row, and one past the last row of all."""

TOWER_OUTPUTS = ("image_hidden_states", "video_hidden_states", "audio_hidden_states")
"""Fields of a model's output with what a tower returns, which has no dim of tokens."""


@dataclass(frozen=True)
class _Medium:
    """One kind of what texts contain, by the names of `transformers`.

    Attributes:
        tokens: fields of the config with the id of its tokens.
        features: the input that a tower reads. grid, sizes: of patches, or pixels, of each image.
        others: inputs with a row for each image, or for each of `features`.
    """

    tokens: tuple[str, ...]
    features: str
    grid: str = ""
    sizes: str = ""
    others: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.features, self.grid, self.sizes, *self.others)))


_MEDIA = (
    _Medium(
        ("image_token_id", "image_token_index"),
        "pixel_values",
        "image_grid_thw",
        "image_sizes",
        ("pixel_attention_mask", "image_position_ids"),
    ),
    _Medium(
        ("video_token_id", "video_token_index"),
        "pixel_values_videos",
        "video_grid_thw",
        others=("second_per_grid_ts", "video_position_ids"),
    ),
    _Medium(
        ("audio_token_id", "audio_token_index"),
        "input_features",
        others=("feature_attention_mask", "input_features_mask"),
    ),
)


class MediaRows:
    """Finds the rows of images, videos and sounds of each text. module: the root of the model."""

    def __init__(self, module: nn.Module):
        self.config: Any = getattr(stock_model(module), "config", None)

    def bounds(self, inputs: Mapping[str, Any], skipped: Mapping[str, bool]) -> dict[str, Bounds]:
        """The bounds of each input of a batch that has rows of images.

        Args:
            inputs: of the model, by name. skipped: names that the caller has said how to split.

        Raises: ShapeError `unclear-images`.
        Cost: on an accelerator it waits for the ids, where there is such an input.
        """
        ids = inputs.get("input_ids")
        found: dict[str, Bounds] = {}
        if not isinstance(ids, T) or ids.ndim != 2 or ids.is_meta:
            return found
        for medium in _MEDIA:
            token = next((id for name in medium.tokens if type(id := getattr(self.config, name, None)) is int), None)
            rows = {name: value for name in medium.inputs if isinstance(value := inputs.get(name), T)}
            if token is None or medium.features not in rows or rows.keys() & skipped.keys():
                continue
            found |= self._of_medium(medium, rows, ids.eq(token).sum(1).tolist())
        return found

    def _of_medium(self, medium: _Medium, rows: Mapping[str, T], tokens: list[int]) -> dict[str, Bounds]:
        """The bounds of each input of one medium. tokens: of each text, how many stand for its images."""
        features, grid = rows[medium.features], rows.get(medium.grid)
        if features.ndim == 5 and len(features) == len(tokens):  # [batch, images of a text, ..]
            return {}
        of_images = self._tokens_of_images(medium, rows, sum(tokens))
        images = _bounds_of_texts(of_images, tokens)
        if images is None:
            what = f"{medium.features} {list(features.shape)} has images of {of_images[:8]} tokens, and texts have {tokens[:8]}"
            fix = 'whole={"%s": False} if there is one image a text, in order' % medium.features
            raise ShapeError(Problem("unclear-images", what, fix=fix))
        patches = images
        if grid is not None:
            starts = (0, *accumulate(grid.prod(-1).tolist()))
            patches = tuple(starts[image] for image in images)
        return {
            name: images if len(value) == images[-1] else patches
            for name, value in rows.items()
            if len(value) in (images[-1], patches[-1])
        }

    def _tokens_of_images(self, medium: _Medium, rows: Mapping[str, T], total: int) -> list[int]:
        """The number of tokens of each image: by its grid or size, else the same for all."""
        vision = getattr(self.config, "vision_config", None)
        merged = int(getattr(vision, "spatial_merge_size", None) or getattr(self.config, "spatial_merge_size", 1))
        if medium.grid in rows:
            return [count // merged**2 for count in rows[medium.grid].prod(-1).tolist()]
        side = merged * int(getattr(vision, "patch_size", 1)) if medium.sizes in rows else 0
        if side:
            by_size = [(height // side) * (width // side) for height, width in rows[medium.sizes].tolist()]
            if sum(by_size) == total:
                return by_size
        images = len(rows.get(medium.sizes, rows[medium.features]))
        return [total // images] * images if images else []


def _bounds_of_texts(of_images: Sequence[int], tokens: Sequence[int]) -> Bounds | None:
    """The index of the first image of each text; None: texts and images do not have the same tokens."""
    bounds, image = [0], 0
    for count in tokens:
        while count > 0 and image < len(of_images):
            count -= of_images[image]
            image += 1
        if count:
            return None
        bounds.append(image)
    return tuple(bounds) if image == len(of_images) else None


def rows_between(value: T, bounds: Bounds, start: int, stop: int) -> T | None:
    """The rows of the texts from `start` to `stop`; None where they have none."""
    first, last = bounds[start], bounds[stop]
    return value.narrow(0, first, last - first) if last > first else None
