"""How a weight is quantized by block: the word that a user writes, and its arithmetic. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from parallelize.base.errors import ModelError, Problem

_WORDS = ("nf4", "int8")
_BITS = {"nf4": 4, "fp4": 4, "int8": 8}
_TEXT = re.compile(r"\s*(\w+)\s*(?:\(\s*(?:block\s*=\s*)?(\d+)\s*\))?\s*\Z")
_SCALE_BYTES = {"bfloat16": 2, "float32": 4}
LEAST_BLOCK = 8
BLOCK = 64
"""Elements that share a scale, where the user names no number. Source: Dettmers et al., QLoRA, 2023, section 3."""


@dataclass(frozen=True)
class BlockFormat:
    """Codes of 4 or 8 bits, and a scale for each block of consecutive elements of a row of the weight.

    Attributes:
        word: "nf4" (the 16 quantiles of a normal distribution) or "int8" (127 steps on each side of zero). Of weights
            that another library has quantized also "fp4" (8 magnitudes and a sign).
        block: elements that share a scale: a power of two, 8 or more.
        scales: the dtype of the scales, "bfloat16" or, of weights that another library has quantized, "float32".
    """

    word: str
    block: int = BLOCK
    scales: str = "bfloat16"

    def __str__(self) -> str:
        options = [f"block={self.block}"] if self.block != BLOCK else []
        options += [f"scales={self.scales}"] if self.scales != "bfloat16" else []
        return f"{self.word}({', '.join(options)})" if options else self.word

    @property
    def codes_per_byte(self) -> int:
        """Elements that one byte of codes stands for."""
        return 8 // _BITS[self.word]

    @property
    def scale_packs(self) -> int:
        """Elements that one byte of scales stands for."""
        return self.block // _SCALE_BYTES[self.scales]


def block_format(text: object) -> BlockFormat:
    """The format that a text names: `nf4`, `int8`, or with another block, `nf4(block=32)`.

    Raises: ModelError `unknown-format`.
    """
    if isinstance(text, BlockFormat):
        return text
    parsed = _TEXT.match(text) if isinstance(text, str) else None
    word, block = (parsed[1], int(parsed[2] or BLOCK)) if parsed is not None else ("", BLOCK)
    if word not in _WORDS or block < LEAST_BLOCK or block & (block - 1):
        what = f"{text!r} is no format of quantized weights"
        fix = f"{' or '.join(_WORDS)}, with blocks of {BLOCK} elements; or another power of two: nf4(block=32)"
        raise ModelError(Problem("unknown-format", what, fix=fix))
    return BlockFormat(word, block)


# -- transposed linear -----------------------------------------------------------------------------------------------
# Which modules are the Conv1D of `transformers`: a linear whose weight is [in, out], as GPT-2 stores it. Torch-free.


_OF_TORCH = frozenset({"Linear", "_ConvNd"})


def is_conv1d(module: Any) -> bool:
    """Whether a module is a Conv1D, of `transformers`, of a copy of it, or of a subclass.

    The class is asked: any module may have an attribute `nf`. A class of that name that is PyTorch's linear or
    convolution stores its weight as those do.
    """
    names = {cls.__name__ for cls in type(module).__mro__}
    return "Conv1D" in names and names.isdisjoint(_OF_TORCH) and "nf" in vars(module)
