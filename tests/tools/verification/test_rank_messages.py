"""What ranks of a verification tell each other through a store: exact, and without code of whoever reaches the
store."""

from __future__ import annotations

import math
import os
import pickle
import socket
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist

from parallelize.base.errors import HandshakeError
from parallelize.tools.verification import processes
from parallelize.tools.verification.compare import Errors
from parallelize.tools.verification.module_trace import ErrorRecord, ModuleCall, ModuleTrace
from parallelize.tools.verification.rank_messages import errors_from, errors_message, traces_from, traces_message
from parallelize.tools.verification.runner import _exchange


def test_errors_come_back_as_they_were():
    errors = [Errors({"loss": (math.inf, "x"), "gradients": (1e-300, "")}, {"a.weight": math.nan}, "failed"), Errors()]
    back = errors_from(errors_message(errors), 0)
    assert back[0].worst == errors[0].worst and math.isnan(back[0].wrong["a.weight"]) and back[1] == Errors()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_traces_come_back_as_they_were(dtype):
    large = torch.arange(3000.0).to(dtype)
    call = ModuleCall("layer", 1, 2, 3, 4, torch.tensor([[1.5, math.inf]], dtype=dtype), large, None, 5, 6)
    trace = ModuleTrace([call], {"weight": torch.zeros(2, 0)}, ErrorRecord("layer", "Error: a", "slug", "clipping"))
    back, empty = traces_from(traces_message([trace, ModuleTrace()]), 0)
    for field in fields(ModuleCall):
        value, other = getattr(call, field.name), getattr(back.calls[0], field.name)
        if isinstance(value, torch.Tensor):
            assert other.dtype == dtype and torch.equal(value, other)
        else:
            assert value == other
    assert back.error == trace.error and back.gradients["weight"].shape == (2, 0) and empty == ModuleTrace()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_what_another_puts_into_the_store_is_not_run(tmp_path):
    messages = [
        pickle.dumps(Evil(str(tmp_path / "ran"))),
        b"[1]",
        b'[{"worst": {}, "other": 1}]',
        b"\xff",
        b"[[[" * 9999,
    ]
    for message in messages:
        for read in (errors_from, traces_from):
            with pytest.raises(HandshakeError, match="bad-message: rank 3 sent no result"):
                read(message, 3)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert _exchange(dist.HashStore(), "errors/0", b"[]", 5.0) == [b"[]"]
    finally:
        dist.destroy_process_group()
    assert not (tmp_path / "ran").exists()


def test_the_store_of_own_processes_listens_to_this_machine_alone():
    store = processes._loopback_store()
    store.set("a", "b")
    assert dist.TCPStore("127.0.0.1", store.port, is_master=False).get("a") == b"b"
    with open("/proc/net/tcp") as file:
        addresses = {line.split()[1] for line in file if line.split()[1].endswith(f":{store.port:04X}")}
        everywhere = [address for address in addresses if address.startswith("00000000")]
    assert addresses and not everywhere
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", store.port), timeout=2):
        pass
