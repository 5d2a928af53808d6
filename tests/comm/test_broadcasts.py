"""One rank's tensors arrive on every rank, in few messages of bounded size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallelize import build_mesh, full_state_dict, parallelize_module
from parallelize.comm.broadcasts import broadcast_together, messages
from parallelize.comm.groups import Group
from parallelize.state.records import mark_of
from parallelize.tools.verification.threads import ThreadGroup
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

ALONE = Group.alone()


@pytest.mark.parametrize(
    ("most_bytes", "expected"),
    [
        (1 << 20, [[0, 1, 3, 4], [2]]),
        (44, [[0, 1], [2], [3], [4]]),
        (43, [[0], [1], [2], [3], [4]]),
    ],
)
def test_messages_have_one_dtype_and_at_most_so_many_bytes(most_bytes, expected):
    """A tensor that is larger than a message is alone."""
    sizes = (10, 1, 3, 100, 5)
    tensors = [torch.zeros(size, dtype=torch.float64 if size == 3 else torch.float32) for size in sizes]
    assert messages(tensors, [ALONE] * 5, most_bytes) == expected


def test_messages_have_one_group_and_no_subclass():
    groups = [ALONE, Group.alone(), ALONE, ALONE]
    groups[1].pg = "another"  # type: ignore[assignment]
    tensors = [torch.zeros(3), torch.zeros(3), nn.Parameter(torch.zeros(3)), torch.zeros(3)]
    assert messages(tensors, groups) == [[0, 3], [1], [2]]


@pytest.mark.parametrize("number", [1, 3])
def test_values_are_those_of_the_source(number):
    """Of any strides and sizes; the given tensors stay as they are."""

    def values_of(rank: int) -> list[torch.Tensor]:
        made = [torch.arange(12.0).view(3, 4).T, torch.tensor(2.0), torch.zeros(0, 5)]
        return [tensor + 100 * rank for tensor in made[:number]]

    def body(rank: int) -> Any:
        given = values_of(rank)
        sent = broadcast_together(given, Group(dist.group.WORLD), 1, "cpu")
        assert all(tensor.is_contiguous() for tensor in sent)
        return given, sent

    for rank, (given, sent) in enumerate(run_ranks(3, body)):
        for tensor, own, received, expected in zip(given, values_of(rank), sent, values_of(1), strict=True):
            assert torch.equal(tensor, own)
            assert torch.equal(received, expected)


@pytest.mark.parametrize("source", [0, 1, None])
def test_a_model_is_sent_in_one_message_of_each_dtype(source, monkeypatch):
    """The values of one rank count. Each parameter has memory of its own, with flags and attributes as before."""
    sent: list[list[torch.Tensor]] = []
    broadcast = ThreadGroup.broadcast

    def counted(self: ThreadGroup, tensors: Any, options: Any = None) -> Any:
        if self._rank == 0:
            sent.append(tensors)
        return broadcast(self, tensors, options)

    monkeypatch.setattr(ThreadGroup, "broadcast", counted)
    models = [tiny_model("llama", seed=seed) for seed in range(2)]
    for model in models:
        model.model.norm.double()
        model.model.embed_tokens.weight.requires_grad_(False).note = "frozen"
    expected = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]

    def body(rank: int) -> dict[str, torch.Tensor]:
        options = {"check_replicated": False, "trace": False}
        model = parallelize_module(models[rank], build_mesh("cpu", tp=2), src_data_rank=source, **options)
        parameters = dict(model.named_parameters())
        frozen: Any = parameters.pop("model.embed_tokens.weight")
        assert not frozen.requires_grad and frozen.note == "frozen" and mark_of(frozen).own
        assert all(p.requires_grad and p.is_leaf and isinstance(p, nn.Parameter) for p in parameters.values())
        local = [p.to_local() for p in parameters.values()]
        assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in local)
        return full_state_dict(model)

    first, _ = run_ranks(2, body)  # gathered from the shards of both
    assert len(sent) == (0 if source is None else 2), sent
    for name, value in (first if source is not None else {}).items():
        assert torch.equal(value, expected[source][name]), name
