"""What real ranks run in the tests of exports: collectives and live bytes are counted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parallelize import build_mesh, parallelize_model
from parallelize.base.torch_private.torch_tensors import plain_local
from parallelize.checkpoint.export.export_weights import WeightExporter
from parallelize.comm.groups import Group
from tests.support.live import Live
from tests.support.models import tiny_model


class PeakLive(Live):
    """The largest number of bytes that were live at once, other than those of a model."""

    def __init__(self, model: Any):
        super().__init__()
        stored = [plain_local(tensor) for tensor in (*model.parameters(), *model.buffers())]
        self.own, self.peak = {tensor.untyped_storage()._cdata for tensor in stored}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        live = self.allocated.items()
        self.allocated = {k: entry for k, entry in live if k not in self.own and not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.allocated.values()))
        return out


def peak_and_calls(rank: int, axes: dict[str, int], options: dict[str, Any], bucket: int) -> tuple[int, int, int, int]:
    """(buckets, exchanges, peak bytes besides the model, bytes of the model) of one export in which every rank asks."""
    parallel = parallelize_model(tiny_model("llama"), build_mesh("cpu", **axes), **options)
    exporter = WeightExporter(parallel, bucket=bucket)
    calls = []
    stock = dist.batch_isend_irecv, Group.all_gather_into
    dist.batch_isend_irecv = lambda ops: (calls.append("messages"), stock[0](ops))[1]
    Group.all_gather_into = lambda *args: (calls.append("gather"), stock[1](*args))[1]
    try:
        buckets = exporter.export()
        with PeakLive(parallel.module) as live:
            for weights in buckets:
                del weights
    finally:
        dist.batch_isend_irecv, Group.all_gather_into = stock
    num_bytes = sum(metadata.num_bytes for metadata in exporter.metadata())
    return len(buckets), len(calls), live.peak, num_bytes


def devices_and_types(rank: int) -> bool:
    """Whether an export in bfloat16 gives the rounded weights, and one of names of the model its own."""
    base = tiny_model("gpt2")
    parallel = parallelize_model(tiny_model("gpt2"), build_mesh("cpu", tp=2))
    rounded, own = {}, {}
    for bucket in WeightExporter(parallel, dtype=torch.bfloat16, device="cpu").export():
        rounded |= {name: tensor.clone() for name, tensor in bucket.tensors.items()}
    for bucket in WeightExporter(parallel, names="model").export():
        own |= {name: tensor.clone() for name, tensor in bucket.tensors.items()}
    state = dict(base.named_parameters())
    same = set(own) == set(state) and all(torch.equal(own[name], value) for name, value in state.items())
    return same and all(torch.equal(rounded[name], state[name].bfloat16()) for name in rounded)
