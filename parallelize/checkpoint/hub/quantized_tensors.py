"""Weights that are quantized while they are read: each rank reads the elements of its own blocks, a part at a time.

A Hugging Face folder has the weight of a linear, and the model has its codes and scales. A block has all its elements
on one rank, so that its codes are those of quantizing the full weight, on any mesh. Neither that weight nor this rank's
shard of it is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallelize.base.boxes import (
    Box,
    Part,
    intersection,
    relative_to,
    shape_of,
    slices_of,
    starts,
    volume,
)
from parallelize.base.errors import CheckpointError, Problem
from parallelize.checkpoint.format.header import FLOATS
from parallelize.checkpoint.hub.folder import HubFolder
from parallelize.checkpoint.hub.names import ComputedTensor, ModelTensor, TensorSources
from parallelize.checkpoint.run.local_tensors import LocalTensor, ModelOnMesh
from parallelize.plan.block_formats import BlockFormat
from parallelize.state.quantization.block_codes import quantize_rows
from parallelize.state.quantization.quantized_experts import QuantizedExperts
from parallelize.state.quantization.quantized_linear import QuantizedLinear

T = torch.Tensor
PART_BYTES = 1 << 20
"""Bytes of a weight that are read, and then quantized, at a time."""


@dataclass(frozen=True)
class QuantizedTensors:
    """The codes and scales of one linear.

    Attributes:
        name: of the weight that they stand for, which a folder contains.
        form, dtype: the format, and the dtype in which the weight is read before it is quantized.
        codes, scales: the names of the parameters.
        is_transposed: the folder has the weight as [in, out].
    """

    name: str
    form: BlockFormat
    dtype: torch.dtype
    codes: str
    scales: str
    is_transposed: bool = False

    def weight(self, codes: ModelTensor) -> ModelTensor:
        """The weight as a tensor of the unsharded model."""
        shape = (*codes.shape[:-1], codes.shape[-1] * self.form.codes_per_byte)
        shape = shape[::-1] if self.is_transposed else shape
        key = self.name.rpartition(".")[2]
        names = tuple(f"{name.rpartition('.')[0]}.{key}" for name in codes.names)
        return ModelTensor(self.name, names, shape, False)


def quantized_tensors(on_mesh: ModelOnMesh) -> list[QuantizedTensors]:
    """Those of this rank's quantized linears, in the order of the model."""
    tensors = []
    for name, module in on_mesh.module.named_modules():
        stacked: Mapping[str, tuple[str, str]] = {}
        if isinstance(module, QuantizedLinear):
            stacked = {"weight": ("weight_codes", "weight_scales")}
        elif isinstance(module, QuantizedExperts):
            stacked = module.stacked
        quantized: Any = module
        is_transposed = isinstance(module, QuantizedLinear) and module.is_transposed
        for key, names in stacked.items():
            codes, scales = (f"{name}.{part}" for part in names)
            tensors.append(
                QuantizedTensors(f"{name}.{key}", quantized.form, quantized.dtype, codes, scales, is_transposed)
            )
    return tensors


def with_weights(tensors: Sequence[ModelTensor], quantized: Sequence[QuantizedTensors]) -> list[ModelTensor]:
    """The tensors of a model, with the weights that codes and scales stand for in their place."""
    by_codes, scales = {item.codes: item for item in quantized}, {item.scales for item in quantized}
    kept = (tensor for tensor in tensors if tensor.name not in scales)
    return [by_codes[t.name].weight(t) if t.name in by_codes else t for t in kept]


def refuse_quantized(on_mesh: ModelOnMesh, call: str) -> None:
    """Raises: CheckpointError `quantized-base` for a model whose weights a folder of Hugging Face's layout cannot
    have."""
    quantized = quantized_tensors(on_mesh)
    if quantized:
        what = f"{call} writes weights under the names of the Hub, and {len(quantized)} linears have quantized ones"
        fix = (
            "save_adapter(model, folder), as the base is what it was read from; codes: Checkpointer, "
            "export_weights(names='model')"
        )
        raise CheckpointError(Problem("quantized-base", what, fix=fix))


def bytes_to_read(item: QuantizedTensors, scales: LocalTensor) -> int:
    """The bytes of this rank's blocks of a weight, in the dtype in which it is read."""
    elements = sum(volume(pair.box) for pair in scales.stored.slices)
    return elements * item.form.scale_packs * item.dtype.itemsize


def quantize_while_reading(
    hub: HubFolder,
    item: QuantizedTensors,
    sources: TensorSources,
    codes: tuple[LocalTensor, T],
    scales: tuple[LocalTensor, T],
    progress: Callable[[int], None],
) -> None:
    """Fill the local codes and scales of one linear.

    Args:
        codes, scales: the tensor of the model, and what is filled: memory of the shape of its local tensor.
        progress: called with the bytes of each part that was read.

    Raises: CheckpointError of `HubFolder.read`; ModelError `not-finite-weight`.
    """
    source = sources.by_name[item.name]
    full = None
    if isinstance(source, ComputedTensor):  # not made of boxes
        full = source.compute({name: hub.read_full(name) for name in source.sources})
    for in_codes, in_scales in zip(codes[0].stored.slices, scales[0].stored.slices, strict=True):
        into_codes, into_scales = codes[1][in_codes.local], scales[1][in_scales.local]
        for box, rows in _boxes(in_scales.box, item):
            box = box[::-1] if item.is_transposed else box
            weight = full[slices_of(box)].to(item.dtype) if full is not None else _read(hub, source, box, item.dtype)
            weight = weight.T if item.is_transposed else weight
            weight = weight.reshape(-1, weight.shape[-1])  # of experts, one
            quantize_rows(weight, item.form, into_codes[rows], into_scales[rows])
            progress(weight.numel() * weight.element_size())


def _boxes(scales: Box, item: QuantizedTensors) -> Iterator[tuple[Box, Any]]:
    """Boxes of a weight of at most `PART_BYTES`, for a box of its scales, and the part of that box that each one is:
    rows, of an expert."""
    if len(scales) == 3:
        first_expert, stop = scales[0]
        for expert in range(first_expert, stop):
            for box, rows in _boxes(scales[1:], item):
                yield ((expert, expert + 1), *box), (expert - first_expert, rows)
        return
    (first, last), blocks = scales
    columns = (blocks[0] * item.form.scale_packs, blocks[1] * item.form.scale_packs)
    step = max(1, PART_BYTES // max(1, (columns[1] - columns[0]) * item.dtype.itemsize))
    for start in range(first, last, step):
        stop = min(start + step, last)
        yield ((start, stop), columns), slice(start - first, stop - first)


def _read(hub: HubFolder, parts: Any, box: Box, dtype: torch.dtype) -> T:
    """A box of a weight, from the tensors of the folder that it is made of."""
    weight = torch.empty(shape_of(box), dtype=dtype)
    for part in parts:
        shared = intersection(box, part.target)
        if shared is not None:
            view = weight[slices_of(relative_to(shared, starts(box)))]
            hub.read(part.source, part.source_box(shared), in_source_order(view, part))
    return weight


def check_floating(hub: HubFolder, names: Sequence[str]) -> None:
    """Raises: CheckpointError `wrong-dtype` for weights of the folder that are not floating-point."""
    wrong = [name for name in names if hub.tensors[name][0] not in FLOATS]
    if wrong:
        what = f"{wrong[0]} is {hub.tensors[wrong[0]][0]}, and a weight to be quantized is floating-point"
        raise CheckpointError(Problem("wrong-dtype", what, str(hub.folder)))


# -- part views ------------------------------------------------------------------------------------------------------
# Views of what is filled, with the dims of the tensor that is read into them.


def in_source_order(view: T, part: Part) -> T:
    """A view of a part of the target, with the dims of the source in their order."""
    used = [dim for dim in part.dims if dim is not None]
    for dim in reversed(range(view.ndim)):
        if dim not in used:
            view = view.squeeze(dim)
    order = sorted(used)
    view = view.permute([order.index(dim) for dim in used])
    for source_dim, target_dim in enumerate(part.dims):
        if target_dim is None:
            view = view.unsqueeze(source_dim)
    return view
