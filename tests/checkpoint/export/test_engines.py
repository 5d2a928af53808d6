"""Exports through the interfaces of vLLM and verl, with stand-ins of their documented signatures."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from parallelize import build_mesh, parallelize_model
from parallelize.checkpoint.export.engines import (
    named_tensors,
    verl_per_tensor_param,
    vllm_update_info,
    vllm_weight_source,
)
from parallelize.checkpoint.export.export_weights import WeightExporter
from tests.support.models import tiny_model
from tests.support.threads import run_ranks


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """vLLM's abstract class."""


class Client:
    """The four calls of vLLM's `VLLMWeightSyncClient`: it receives what a worker would."""

    def __init__(self):
        self.calls, self.expected = [], []

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict) -> None:
        self.calls.append("update")
        rows = zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True)
        self.expected += [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in rows]

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


class TrainerEngine:
    """`send_weights` of a trainer's engine, as vLLM's documents write it; the wire is a dict."""

    def __init__(self, client, source, is_sender):
        assert isinstance(source, WeightSource)
        self.client, self.source, self.is_sender, self.wire = client, source, is_sender, {}

    def send_weights(self) -> None:
        metadata = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                raise AssertionError("a rank that does not send is given no tensors")
            return
        self.client.start_weight_update()
        names, dtypes = [m.name for m in metadata], [str(m.dtype).split(".")[-1] for m in metadata]
        self.client.update_weights({"names": names, "dtype_names": dtypes, "shapes": [list(m.shape) for m in metadata]})
        for (name, tensor), declared in zip(self.source, metadata, strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == (declared.name, declared.dtype, declared.shape)
            self.wire[name] = tensor.clone()
        self.client.finish_weight_update()


@pytest.fixture
def vllm(monkeypatch):
    module = ModuleType("vllm.distributed.weight_transfer")
    module.ParamMeta, module.WeightSource = ParamMeta, WeightSource
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(scope="module")
def base():
    return tiny_model("gemma3")


def saved_names(base):
    return [name for name, _ in base.named_parameters()]


def test_a_trainer_engine_of_vllm_sends_every_round(vllm, base):
    def body(rank):
        model = parallelize_model(deepcopy(base), build_mesh("cpu", tp=2))
        exporter = WeightExporter(model, bucket="30KB", receive=rank == 0)
        client = Client()
        engine = TrainerEngine(client, vllm_weight_source(exporter), rank == 0)
        for _ in range(2):
            engine.send_weights()
        assert isinstance(engine.source.metadata()[0], ParamMeta)
        return client.calls, client.expected[: len(client.expected) // 2], engine.wire

    (calls, expected, wire), (no_calls, _, nothing) = run_ranks(2, body)
    assert calls == ["start", "update", "finish"] * 2 and no_calls == [] and nothing == {}
    assert [row[0] for row in expected] == list(wire) and set(wire) == set(saved_names(base))
    assert all(torch.equal(wire[name], value) for name, value in base.named_parameters())


def test_requests_of_vllm_without_its_package(base):
    exporter = WeightExporter(deepcopy(base))
    info = vllm_update_info(exporter)
    assert set(info) == {"names", "dtype_names", "shapes", "packed"} and set(info["dtype_names"]) == {"float32"}
    sent = [(name, list(tensor.shape)) for name, tensor in named_tensors(exporter)]
    assert sent == list(zip(info["names"], info["shapes"], strict=True))
    source = vllm_weight_source(exporter, only=lambda name: "norm" in name)
    assert [m.name for m in source.metadata()] == [name for name, _ in source]


def test_an_engine_of_verl_gives_every_rank_all_tensors(base):
    class Engine:
        """verl's `BaseEngine`: the method that its rollout workers call."""

        def __init__(self, exporter):
            self.exporter = exporter

        def get_per_tensor_param(self, **kwargs):
            return verl_per_tensor_param(self.exporter)

    def body(rank):
        model = parallelize_model(deepcopy(base), build_mesh("cpu", dp=2), zero=3)
        params, peft_config = Engine(WeightExporter(model, bucket="30KB")).get_per_tensor_param()
        assert peft_config is None
        return {name: tensor.clone() for name, tensor in params}

    for received in run_ranks(2, body):
        assert all(torch.equal(received[name], value) for name, value in base.named_parameters())


def test_a_sender_that_fails_ends_the_ranks_that_only_take_part(base):
    def body(rank):
        model = parallelize_model(deepcopy(base), build_mesh("cpu", tp=2))
        exporter = WeightExporter(model, bucket="30KB", receive=rank == 0)
        if rank:
            return len(list(named_tensors(exporter)))
        try:
            for number, _ in enumerate(named_tensors(exporter)):
                if number == 3:
                    raise ConnectionError("the engine is gone")
        except ConnectionError:
            return "failed"

    assert run_ranks(2, body) == ["failed", 0]
