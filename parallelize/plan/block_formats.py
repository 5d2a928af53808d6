"""How a weight is quantized by block: the word that a user writes, and its arithmetic. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass

from parallelize.errors import ModelError, Problem

_BITS = {"nf4": 4, "int8": 8}
_TEXT = re.compile(r"\s*(\w+)\s*(?:\(\s*(?:block\s*=\s*)?(\d+)\s*\))?\s*\Z")
_SCALE_BYTES = 2
LEAST_BLOCK = 8
BLOCK = 64
"""Elements that share a scale, where the user names no number. Source: Dettmers et al., QLoRA, 2023, section 3."""


@dataclass(frozen=True)
class BlockFormat:
    """Codes of 4 or 8 bits, and a scale for each block of consecutive elements of a row of the weight.

    Attributes:
        word: "nf4" (the 16 quantiles of a normal distribution) or "int8" (127 steps on each side of zero).
        block: elements that share a scale: a power of two, 8 or more.
    """

    word: str
    block: int = BLOCK

    def __str__(self) -> str:
        return self.word if self.block == BLOCK else f"{self.word}(block={self.block})"

    @property
    def codes_per_byte(self) -> int:
        """Elements that one byte of codes stands for."""
        return 8 // _BITS[self.word]

    @property
    def scale_packs(self) -> int:
        """Elements that one byte of scales stands for."""
        return self.block // _SCALE_BYTES

    @property
    def bytes_per_element(self) -> float:
        """Bytes of codes and scales for each element of the weight."""
        return 1 / self.codes_per_byte + _SCALE_BYTES / self.block


def block_format(text: object) -> BlockFormat:
    """The format that a text names: `nf4`, `int8`, or with another block, `nf4(block=32)`.

    Raises: ModelError `unknown-format`.
    """
    if isinstance(text, BlockFormat):
        return text
    parsed = _TEXT.match(text) if isinstance(text, str) else None
    word, block = (parsed[1], int(parsed[2] or BLOCK)) if parsed is not None else ("", BLOCK)
    if word not in _BITS or block < LEAST_BLOCK or block & (block - 1):
        what = f"{text!r} is no format of quantized weights"
        fix = f"{' or '.join(_BITS)}, with blocks of {BLOCK} elements; or another power of two: nf4(block=32)"
        raise ModelError(Problem("unknown-format", what, fix=fix))
    return BlockFormat(word, block)
