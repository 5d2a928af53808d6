"""Pipelines and ZeRO over NCCL, against the unsharded model on one device. Skipped, with the reason, without two GPUs."""

from __future__ import annotations

import copy
import os
import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device a rank, and there are not two"),
]


def _rank(rank: int, port: int, axes: dict[str, int], options: dict[str, Any]) -> None:
    import torch.distributed as dist

    from parallelize import build_mesh, parallelize_model
    from tests.support.models import tiny_batch, tiny_model
    from tests.support.parity import loss_of, worst

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    model = tiny_model("llama", num_hidden_layers=4).cuda()
    unsharded = copy.deepcopy(model)
    parallel = parallelize_model(model, build_mesh("cuda", **axes), num_microbatches=4, **options)
    ids, labels = (tensor.cuda() for tensor in tiny_batch(batch=8, length=7))
    place = parallel.mesh.get_local_rank("dp") if "dp" in axes else 0
    rows = 8 // axes.get("dp", 1)
    local_rows = slice(rows * place, rows * (place + 1))
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.05)
    for _ in range(2):
        loss = parallel.step(ids[local_rows], targets=labels[local_rows])
        expected = loss_of(unsharded(ids).logits, labels)
        assert float((loss - expected).abs()) < 1e-3
        optimizer.step()
        optimizer.zero_grad()
        expected.backward()
        torch.optim.SGD(unsharded.parameters(), 0.05).step()
        unsharded.zero_grad()
    stepped = dict(unsharded.named_parameters())
    actual = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}
    assert worst(actual, {n: stepped[n].detach() for n in actual})[0] < 1e-3
    dist.destroy_process_group()


CASES = [
    ({"dp": 2}, {"zero": 0}),
    ({"dp": 2}, {"zero": 1}),
    ({"dp": 2}, {"zero": 2}),
    ({"dp": 2}, {"zero": 3}),
    ({"pp": 2}, {"schedule": "1f1b"}),
    ({"pp": 2}, {"schedule": "zbv"}),
]


@pytest.mark.parametrize(("axes", "options"), CASES, ids=str)
def test_two_devices_equal_one(axes, options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(_rank, (port, axes, options), nprocs=2)
