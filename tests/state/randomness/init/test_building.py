"""Modules are built on a device and with parameters of a dtype, whatever their class."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from parallelize import ModelError, build_mesh, build_on_meta, building, initialize, parallelize_module
from parallelize.tools.verification.threads import run_ranks
from tests.support.models import tiny_model


class Odd(nn.Module):
    """Names its own dtypes, ties, reuses a parameter object, and computes a table."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.full((4,), 1 / 3), requires_grad=False)
        self.scale.kind = "scale"
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.count = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
        self.register_buffer("table", torch.arange(1000) / 7, persistent=False)
        self.absent = None
        self.register_parameter("bias", None)


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_parameters_have_the_dtype_and_buffers_their_own(device):
    with building(device, torch.bfloat16):
        model = Odd()
    outside = Odd()
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.bfloat16}
    assert model.head.weight is model.embed.weight and model.count.dtype == torch.int64 and model.bias is None
    assert model.scale.kind == "scale" and not model.scale.requires_grad
    assert model.table.dtype == torch.float32 and {p.device.type for p in model.parameters()} == {device or "cpu"}
    assert outside.scale.dtype == torch.float32 and outside.embed.weight.dtype == torch.float64


def test_values_are_those_that_pytorch_draws_in_that_dtype():
    torch.manual_seed(0)
    expected = nn.Linear(64, 64, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with building(dtype=torch.bfloat16):
        torch.nn.Linear(1, 1)
    torch.manual_seed(0)
    with building(dtype=torch.bfloat16):
        model = nn.Linear(64, 64)
    assert torch.equal(model.weight, expected.weight) and torch.equal(model.bias, expected.bias)


def test_contexts_nest_end_with_errors_and_hold_for_their_thread():
    built = []
    with building(dtype=torch.float64):
        with pytest.raises(ZeroDivisionError), building("meta", torch.float16):
            assert nn.Linear(1, 1).weight.dtype == torch.float16 and nn.Linear(1, 1).weight.is_meta
            raise ZeroDivisionError
        other = threading.Thread(target=lambda: built.append(nn.Linear(1, 1).weight.dtype))
        other.start()
        other.join()
        built.append(nn.Linear(1, 1).weight.dtype)
    assert built == [torch.float32, torch.float64]
    with pytest.raises(ModelError) as caught, building(dtype=torch.int8):
        pass
    assert caught.value.slugs == ("not-floating-point",)


def test_a_model_built_on_meta_is_initialized_in_the_dtype():
    config = tiny_model("llama").config
    with building(dtype=torch.float64):
        full = initialize(build_on_meta(LlamaForCausalLM, config), 5)

    def body(rank: int) -> None:
        with building(dtype=torch.float64):
            model = build_on_meta(LlamaForCausalLM, config)
        model = initialize(parallelize_module(model, build_mesh("cpu", tp=2)), 5)
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float64
            assert torch.equal(parameter.full_tensor(), full.get_parameter(name)), name

    run_ranks(2, body)


class Kept(nn.Parameter):
    """A class of its own."""


class Shares(nn.Module):
    """Uses its parameter by another name, and under two modules, after it was assigned."""

    def __init__(self):
        super().__init__()
        weight = Kept(torch.randn(4, 3))
        weight.register_hook(lambda grad: grad * 2)
        weight.register_post_accumulate_grad_hook(lambda parameter: self.seen.append(parameter))
        self.seen: list[nn.Parameter] = []
        self.a, self.b = nn.Module(), nn.Module()
        self.a.weight = weight
        self.b.weight = weight
        nn.init.constant_(weight, 7.0)


def test_a_parameter_stays_the_object_that_it_is():
    with building(dtype=torch.bfloat16):
        model = Shares()
    weight = model.a.weight
    assert weight is model.b.weight and type(weight) is Kept and weight.dtype == torch.bfloat16
    assert weight.unique().tolist() == [7.0]
    weight.sum().backward()
    assert weight.grad.unique().tolist() == [2.0] and weight.grad.dtype == torch.bfloat16
    assert len(model.seen) == 1 and model.seen[0] is weight


def test_of_nested_contexts_only_the_innermost_converts():
    torch.manual_seed(0)
    expected = torch.randn(4, 3)
    torch.manual_seed(0)
    with building(dtype=torch.bfloat16), building(dtype=torch.float32), building("cpu"):
        module = nn.ParameterList([torch.randn(4, 3)])
    assert torch.equal(module[0], expected), "rounded by the outer context"
    with building(dtype=torch.bfloat16), building("meta"):
        assert nn.Linear(1, 1).weight.dtype == torch.bfloat16


def test_lazy_modules_get_their_shape_in_the_dtype():
    with building(dtype=torch.bfloat16):
        lazy = nn.LazyLinear(3)
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert lazy(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16 == lazy.weight.dtype
    assert lazy.weight.shape == (3, 4)


def test_a_parameter_keeps_its_names_values_class_and_hooks():
    class Special(nn.Parameter):
        pass

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            shared = Special(torch.empty(3))
            shared.register_hook(lambda grad: grad * 2)
            self.a, self.b = shared, shared
            nn.init.constant_(shared, 7)

    with building(dtype=torch.bfloat16):
        module = Module()
    assert module.a is module.b and type(module.a) is Special and module.a.dtype == torch.bfloat16
    assert module.a.tolist() == [7.0] * 3
    module.a.sum().backward()
    assert module.a.grad.tolist() == [2.0] * 3


def test_the_innermost_of_nested_contexts_counts():
    with building(dtype=torch.bfloat16), building(dtype=torch.float32):
        inner = nn.Linear(2, 2)
    with building(dtype=torch.bfloat16), building("meta"):
        on_meta = nn.Linear(2, 2)
    assert inner.weight.dtype == torch.float32 and on_meta.weight.dtype == torch.bfloat16
    assert not torch.equal(inner.weight, inner.weight.bfloat16().float())


def test_lazy_modules_get_the_dtype_when_they_get_a_shape():
    with building(dtype=torch.bfloat16):
        module = nn.LazyLinear(3)
    module(torch.ones(1, 2, dtype=torch.bfloat16))
    assert module.weight.dtype == torch.bfloat16 and module.weight.shape == (3, 2)
