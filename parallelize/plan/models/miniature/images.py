"""Small images: a few patches along each side, and the numbers of tokens that follow from them."""

from __future__ import annotations

from parallelize.plan.models.miniature.roles import ConfigPart, Role

PATCHES = 4
"""Patches along each side of an image."""

_SMALL = 64  # pixels along each side of an image of a convolutional model
_FEW = 16  # of a model of which each pixel is a patch
_UNITS = "masked_unit_size"  # of patches, in every stage
_WINDOW = 3  # patches along each side of a window, in a model of stages


def shrink_images(parts: list[ConfigPart]) -> None:
    """Change the sizes of images in the parts of a config."""
    sizes = [_patch(part) for part in parts]
    patch = next((size for size in sizes if size > 4), max(sizes, default=0))
    side = PATCHES * patch if patch > 4 else _FEW if patch == 1 else _SMALL
    for part in parts:
        if _UNITS in part.real:
            continue
        own = _side_of_windows(part) or side
        for name in ("image_size", "img_size", "input_size", "max_image_size"):
            value = part.real.get(name)
            if type(value) is int and value > own:
                part[name] = own
            elif isinstance(value, (list, tuple)) and len(value) == 2 and min(value) > own:
                part[name] = [own, own] if isinstance(value, list) else (own, own)
        if part.number("mm_tokens_per_image"):
            part["mm_tokens_per_image"] = (PATCHES // 2) ** 2


def _side_of_windows(part: ConfigPart) -> int:
    """The pixels along each side of one window in the last stage, where images are half as wide after each; 0: there
    are no windows."""
    stages = next((len(depths) for _, depths in part.lists(Role.DEPTHS)), 0)
    window, patch = part.number("window_size"), part.number("patch_size")
    if not stages or not window or patch < 2 or not part.number("image_size"):
        return 0
    part["window_size"] = min(window, _WINDOW)
    return patch * min(window, _WINDOW) * 2 ** (stages - 1)


def _patch(part: ConfigPart) -> int:
    size = part.real.get("patch_size")
    size = size[0] if isinstance(size, (list, tuple)) and size else size
    return size if type(size) is int else 0
