"""Which modules are the Conv1D of `transformers`: a linear whose weight is [in, out], as GPT-2 stores it.

Torch-free.
"""

from __future__ import annotations

from typing import Any

_OF_TORCH = frozenset({"Linear", "_ConvNd"})


def is_conv1d(module: Any) -> bool:
    """Whether a module is a Conv1D, of `transformers`, of a copy of it, or of a subclass.

    The class is asked: any module may have an attribute `nf`. A class of that name that is PyTorch's linear or convolution stores its weight
    as those do.
    """
    names = {cls.__name__ for cls in type(module).__mro__}
    return "Conv1D" in names and names.isdisjoint(_OF_TORCH) and "nf" in vars(module)
