"""Grouped matmuls of any width: results and gradients are those of one matmul for each group."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallelize.ops.experts.padded_grouped_matmul import AnyWidth
from tests.support.parity import worst


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize(("inputs", "outputs"), [(10, 16), (16, 9), (9, 10)])
def test_results_and_gradients(inputs, outputs, dtype, bound):
    torch.manual_seed(0)
    tensors = {"x": torch.randn(7, inputs), "weights": torch.randn(3, outputs, inputs)}
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)  # one group has no rows

    def run(op, dtype):
        x, weights = leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors.values()]
        out = op(x, weights.transpose(1, 2))
        out.sin().sum().backward()
        return {"out": out.detach().float(), **dict(zip(tensors, (leaf.grad.float() for leaf in leaves), strict=True))}

    def by_group(x, weights):
        return torch.cat([rows @ weight for rows, weight in zip(x.split([2, 0, 5]), weights, strict=True)])

    with pytest.raises(RuntimeError, match="16 bytes"):  # else the op needs no padding any more
        F.grouped_mm(tensors["x"].to(dtype), tensors["weights"].to(dtype).transpose(1, 2), offs=offs).sum()
        run(lambda x, weights: F.grouped_mm(x, weights, offs=offs), dtype)
    with AnyWidth():
        actual = run(lambda x, weights: F.grouped_mm(x, weights, offs=offs), dtype)
    assert worst(actual, run(by_group, torch.float32))[0] <= bound
