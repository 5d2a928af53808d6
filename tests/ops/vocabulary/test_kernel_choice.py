"""Which logits get this package's kernels, and what is said where they should and cannot. On a GPU: *_cuda.py beside
this file."""

from __future__ import annotations

import sys

import pytest
import torch

from parallelize.ops.vocabulary import kernel_choice
from parallelize.ops.vocabulary.kernel_choice import kernels_for


class OnGpu:
    """What `kernels_for` reads of logits on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, dtype=torch.bfloat16, numel=6, stride=1):
        self.dtype, self._numel, self._stride = dtype, numel, stride

    def numel(self) -> int:
        return self._numel

    def stride(self, dim: int) -> int:
        return self._stride


@pytest.fixture
def plain(monkeypatch):
    """Stand-ins count as tensors; the kernels are an object."""
    monkeypatch.setattr(kernel_choice, "_PLAIN", (OnGpu,))
    monkeypatch.setattr(kernel_choice, "_tried_kernels", lambda device, dtype: kernel_choice)


def test_logits_of_a_gpu(plain, monkeypatch):
    assert kernels_for(OnGpu()) is kernel_choice
    others = [OnGpu(torch.float64), OnGpu(numel=0), OnGpu(stride=3), torch.randn(2, 3)]
    assert [kernels_for(z) for z in others] == [None] * 4
    monkeypatch.setattr(kernel_choice, "traces_graph", lambda: True)
    assert kernels_for(OnGpu()) is None


def test_a_tensor_without_storage_gets_none(monkeypatch):
    monkeypatch.setattr(kernel_choice, "_tried_kernels", lambda device, dtype: kernel_choice)
    assert kernels_for(OnGpu()) is None


def test_kernels_that_cannot_run_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "parallelize.ops.vocabulary.logit_kernels", raising=False)
    with pytest.warns(RuntimeWarning, match="losses run PyTorch's kernels, which take more time and memory.*triton"):
        assert kernel_choice._tried_kernels.__wrapped__(torch.device("cpu"), torch.float32) is None
