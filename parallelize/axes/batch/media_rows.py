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


@dataclass(frozen=True)
class Bounds:
    """The rows of each text in an input.

    Attributes:
        rows: for each text the index of its first row, and one past the last row of all.
        tokens: the same of the tokens that stand for them.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    def rows_between(self, value: T, start: int, stop: int) -> T | None:
        """The rows of the texts from `start` to `stop`; None where they have none."""
        if self.tokens[start] == self.tokens[stop]:
            return None
        return value.narrow(0, self.rows[start], self.rows[stop] - self.rows[start])


TOWER_OUTPUTS = ("image_hidden_states", "video_hidden_states", "audio_hidden_states")
"""Fields of a model's output with what a tower returns, which has no dim of tokens."""


@dataclass(frozen=True)
class Medium:
    """One kind of what texts contain, by the names of `transformers`.

    Attributes:
        method: of a model, which returns its features.
        tokens: fields of the config with the id of its tokens.
        features: the input that a tower reads. grid, sizes: of patches, or pixels, of each image.
        others: inputs with a row for each image, or for each of `features`.
    """

    method: str
    tokens: tuple[str, ...]
    features: str
    grid: str = ""
    sizes: str = ""
    others: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.features, self.grid, self.sizes, *self.others)))


MEDIA = (
    Medium(
        "get_image_features",
        ("image_token_id", "image_token_index"),
        "pixel_values",
        "image_grid_thw",
        "image_sizes",
        ("pixel_attention_mask", "image_position_ids"),
    ),
    Medium(
        "get_video_features",
        ("video_token_id", "video_token_index"),
        "pixel_values_videos",
        "video_grid_thw",
        others=("second_per_grid_ts", "video_position_ids"),
    ),
    Medium(
        "get_audio_features",
        ("audio_token_id", "audio_token_index"),
        "input_features",
        others=("feature_attention_mask", "input_features_mask"),
    ),
)


class MediaForm:
    """How a model takes images, videos and sounds. module: its root."""

    def __init__(self, module: nn.Module):
        config: Any = getattr(stock_model(module), "config", None)
        self.vision = getattr(config, "vision_config", None)
        merged = getattr(self.vision, "spatial_merge_size", None) or getattr(config, "spatial_merge_size", None)
        self.merged = int(merged or 1)
        named = ((medium, (getattr(config, name, None) for name in medium.tokens)) for medium in MEDIA)
        ids = ((medium, next((id for id in values if type(id) is int), None)) for medium, values in named)
        self.token_ids = {medium: id for medium, id in ids if id is not None}

    def of_batch(self, inputs: Mapping[str, Any]) -> MediaRows:
        """What the texts of a batch contain. inputs: of the model, by name.

        Cost: on an accelerator it waits for the ids, where there are images or sounds.
        """
        ids = inputs.get("input_ids")
        tokens, runs = {}, {}
        if isinstance(ids, T) and ids.ndim == 2 and not ids.is_meta:
            for medium, token in self.token_ids.items():
                if isinstance(inputs.get(medium.features), T):
                    stands = ids.eq(token)
                    begins = stands[:, 1:] & ~stands[:, :-1]
                    counts = torch.stack([stands.sum(1), begins.sum(1) + stands[:, 0]]).tolist()
                    tokens[medium], runs[medium] = map(tuple, counts)
        return MediaRows(self, tokens, runs)


@dataclass(frozen=True)
class MediaRows:
    """The images, videos and sounds of a batch.

    Attributes:
        tokens: by medium, how many tokens of each text stand for them.
        runs: by medium, in how many runs of each text they do.
    """

    form: MediaForm
    tokens: Mapping[Medium, tuple[int, ...]]
    runs: Mapping[Medium, tuple[int, ...]]

    def tokens_between(self, start: int, stop: int) -> tuple[int, ...]:
        """Of each medium, the tokens of the texts from `start` to `stop`."""
        return tuple(sum(counts[start:stop]) for counts in self.tokens.values())

    def bounds(self, inputs: Mapping[str, Any], skipped: Mapping[str, bool]) -> dict[str, Bounds]:
        """The bounds of each input that has rows of images.

        Args:
            inputs: of the model, by name. skipped: names of which the caller has said how they are split.

        Raises: ShapeError `unclear-images`.
        """
        found: dict[str, Bounds] = {}
        for medium, tokens in self.tokens.items():
            rows = {name: value for name in medium.inputs if isinstance(value := inputs.get(name), T)}
            if not rows.keys() & skipped.keys():
                found |= self._of_medium(medium, rows, tokens)
        return found

    def _of_medium(self, medium: Medium, rows: Mapping[str, T], tokens: Sequence[int]) -> dict[str, Bounds]:
        """The bounds of each input of one medium. tokens: of each text, how many stand for its images."""
        features = rows[medium.features]
        before = (0, *accumulate(tokens))
        if features.ndim == 5 and len(features) == len(tokens):  # [batch, images of a text, ..]
            each = Bounds(tuple(range(len(tokens) + 1)), before)
            return {name: each for name, value in rows.items() if len(value) == len(tokens)}
        images = self._images_of_texts(medium, rows)
        if images is None:
            what = f"it is not clear which of {medium.features} {list(features.shape)} belong to which text"
            fix = "features of all images in the order of their texts; or one microbatch"
            raise ShapeError(Problem("unclear-images", what, rows=(("tokens", str(list(tokens[:8]))),), fix=fix))
        starts = starts_of_images(medium, rows)
        return {name: Bounds(tuple(first[image] for image in images), before) for name, first in starts.items()}

    def _images_of_texts(self, medium: Medium, rows: Mapping[str, T]) -> tuple[int, ...] | None:
        """For each text the index of its first image, and the number of all; None: that is not clear.

        By the tokens of each image, where they are known; else there is one for each text that has any, or for each run
        of tokens; else all have as many.
        """
        tokens, runs = self.tokens[medium], self.runs[medium]
        count = number_of_images(medium, rows)
        bounds = _bounds_of_texts(self._tokens_of_images(medium, rows), tokens)
        if medium.grid in rows:
            return bounds
        for of_texts in ([int(number > 0) for number in tokens], runs):
            if bounds is None and sum(of_texts) == count:
                bounds = (0, *accumulate(of_texts))
        if bounds is None and count and not sum(tokens) % count:
            bounds = _bounds_of_texts([sum(tokens) // count] * count, tokens)
        return bounds

    def _tokens_of_images(self, medium: Medium, rows: Mapping[str, T]) -> list[int]:
        """The number of tokens of each image by its grid or size; nothing where it has none."""
        merged = self.form.merged
        if medium.grid in rows:
            return [count // merged**2 for count in rows[medium.grid].prod(-1).tolist()]
        if medium.sizes in rows:
            side = merged * int(getattr(self.form.vision, "patch_size", 1))
            return [(height // side) * (width // side) for height, width in rows[medium.sizes].tolist()]
        return []


def number_of_images(medium: Medium, rows: Mapping[str, T]) -> int:
    """The number of images in the inputs of one medium."""
    return len(rows.get(medium.grid, rows.get(medium.sizes, rows[medium.features])))


def starts_of_images(medium: Medium, rows: Mapping[str, T]) -> dict[str, Sequence[int]]:
    """Of each input with a row for each image, or for each patch, the first row of each image, and the number of rows.

    Cost: on an accelerator it waits for the grids.
    """
    images = range(number_of_images(medium, rows) + 1)
    patches = images if medium.grid not in rows else (0, *accumulate(rows[medium.grid].prod(-1).tolist()))
    starts: dict[int, Sequence[int]] = {patches[-1]: patches, images[-1]: images}
    return {name: starts[len(value)] for name, value in rows.items() if len(value) in starts}


def _bounds_of_texts(of_images: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...] | None:
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
