"""Which parameters of a model are matrices to an optimizer, and which boxes of a parameter are one matrix each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from parallelize.base.boxes import Box, full_box
from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import Chunk
from parallelize.state.records import pipeline_cut, record_of

Shape = tuple[int, ...]
IsMatrix = Callable[[str], bool]
SPLITS = ("chunks", "heads")


def matrix_names(module: nn.Module, shapes: Mapping[str, Shape]) -> set[str]:
    """Names of hidden matrices: weights of linears, and weights of experts that are stacked in one tensor.

    Not so embeddings, heads (what is tied to an embedding, or has as many outputs as one has rows), convolutions and
    biases.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    rows = _rows_of_embeddings(module)
    head = _head_weight(module)
    names = set()
    for name, shape in shapes.items():
        prefix, _, key = name.rpartition(".")
        owner = modules.get(prefix)
        stacked = len(shape) == 3 and not isinstance(owner, nn.modules.conv._ConvNd)
        is_linear = len(shape) == 2 and key == "weight" and not isinstance(owner, nn.Embedding)
        is_head = is_linear and (shape[0] in rows or getattr(owner, "weight", None) is head)
        if stacked or (is_linear and not is_head):
            names.add(name)
    return names


def _rows_of_embeddings(module: nn.Module) -> set[int]:
    """Of all embeddings of the model: of a pipeline, the stage with the head may have none."""
    cut = pipeline_cut(module)
    if cut is None:
        return {inner.weight.shape[0] for inner in module.modules() if isinstance(inner, nn.Embedding)}
    embeddings = [name for name, inner in cut.facts.modules.items() if inner.kind == "embedding"]
    keys = (cut.facts.parameter_fqns.get(f"{name}.weight".lstrip(".")) for name in embeddings)
    return {cut.facts.parameters[key].shape[0] for key in keys if key is not None}


def _head_weight(module: nn.Module) -> Any:
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return getattr(head, "weight", head)  # None equals no weight of a linear


def matrices_of(module: nn.Module, name: str, shape: Shape, split: Mapping[str, str]) -> list[Box]:
    """The boxes of a parameter that are orthogonalized separately; each is a matrix, with sizes of 1 before its two
    dims.

    Args:
        split: pattern of names -> "chunks" for the chunks of a packed weight (q, k and v), or "heads" for their heads.

    Raises: ModelError `no-chunks`.
    """
    boxes = [full_box(shape)]
    if len(shape) == 3:
        boxes = [((expert, expert + 1), *full_box(shape[1:])) for expert in range(shape[0])]
    by = next((by for pattern, by in split.items() if fnmatchcase(name, pattern)), None)
    if by is None:
        return boxes
    dim, chunks = _chunks_of(module, name)
    intervals = list(_intervals(chunks, by == "heads"))
    return [(*box[:dim], interval, *box[dim + 1 :]) for box in boxes for interval in intervals]


def _chunks_of(module: nn.Module, name: str) -> tuple[int, tuple[Chunk, ...]]:
    record = record_of(module)
    row = record.resolved.parameters.get(name) if record is not None else None
    if row is None or row.layout.dim is None or not row.layout.chunks:
        what = f"the plan says nothing of chunks of {name}, which `split` names"
        raise ModelError(Problem("no-chunks", what, fix="name packed weights of the plan, or leave the matrix whole"))
    return row.layout.dim, row.layout.chunks


def _intervals(chunks: tuple[Chunk, ...], by_heads: bool) -> Iterator[tuple[int, int]]:
    start = 0
    for chunk in chunks:
        count = (chunk.units or 1) if by_heads else 1
        width = chunk.size // count
        for number in range(count):
            yield start + number * width, start + (number + 1) * width
        start += chunk.size


def matrix_shape_of(box: Box) -> tuple[int, int]:
    """The two dims of a box that is one matrix."""
    rows, columns = (stop - start for start, stop in box[-2:])
    assert math.prod(stop - start for start, stop in box[:-2]) == 1
    return rows, columns


# -- orthogonalize ---------------------------------------------------------------------------------------------------
# The orthogonalization of Muon: Newton-Schulz iterations in bfloat16, operation by operation those of
# `torch.optim.Muon`. Sources: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks"; "Muon is
# Scalable for LLM Training", arXiv:2502.16982, for the learning rate that matches AdamW's.


T = torch.Tensor
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial, chosen for its slope at zero."""
LEARNING_RATES = ("original", "match_rms_adamw")


def orthogonalized(matrix: T, coefficients: Sequence[float], num_steps: int, eps: float) -> T:
    """[m, n] -> [m, n] in bfloat16: about U V^T of the singular value decomposition U S V^T.

    Args:
        matrix: in bfloat16; it is not changed.
        coefficients: of the polynomial. num_steps: iterations of it.
        eps: the smallest norm by which the matrix is divided.
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x.div(x.norm().clamp(min=eps))
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def adjusted_lr(lr: float, adjust: str | None, shape: Sequence[int]) -> float:
    """The learning rate of a matrix of this shape. adjust: one of `LEARNING_RATES`; None: "original"."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))


def cost_of_matrix(box: Box, num_steps: int) -> int:
    """The operations of the orthogonalization of a matrix, by which matrices are divided among ranks."""
    short, long = sorted(matrix_shape_of(box))
    return num_steps * (4 * short * short * long + 2 * short**3)
