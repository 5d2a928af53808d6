"""Small images: a few patches along each side, and the numbers of tokens that follow from them."""

from __future__ import annotations

from typing import Any

PATCHES = 4
"""Patches along each side of an image."""

_SMALL = 64  # pixels along each side of an image of a convolutional model
_FEW = 16  # of a model of which each pixel is a patch


def side_of(patch: int, patches: int) -> int:
    """The pixels along each side of a small image of so many patches of this size; 0: of a model without patches."""
    return patches * patch if patch > 4 else _FEW if patch == 1 else _SMALL


def shrink_images(parts: list[Any]) -> None:
    """Change the sizes of images in a config and its parts, given as a list."""
    sizes = [_patch(part) for part in parts]
    patch = next((size for size in sizes if size > 4), max(sizes, default=0))
    side = side_of(patch, PATCHES)
    for part in parts:
        for name in ("image_size", "img_size", "input_size"):
            value = vars(part).get(name)
            if type(value) is int and value > side:
                setattr(part, name, side)
            elif isinstance(value, (list, tuple)) and len(value) == 2 and min(value) > side:
                setattr(part, name, [side, side] if isinstance(value, list) else (side, side))
        if type(vars(part).get("mm_tokens_per_image")) is int:
            part.mm_tokens_per_image = (PATCHES // 2) ** 2


def _patch(part: Any) -> int:
    size = vars(part).get("patch_size")
    size = size[0] if isinstance(size, (list, tuple)) and size else size
    return size if type(size) is int else 0
