"""Only the Conv1D of `transformers`, its copies and subclasses have a weight [in, out]: an attribute `nf` of any other
module means nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from parallelize import build_mesh, derive_plan, full_gradients, parallelize_module, quantize
from parallelize.plan.block_formats import is_conv1d
from parallelize.plan.model_facts import describe
from parallelize.plan.plan_file import parse_plan
from tests.support.threads import run_ranks


class _Filters(nn.Linear):
    """A linear that notes its number of filters, which is also the width of its input where it is square."""

    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.nf = inner


class _Mlp(nn.Module):
    def __init__(self, linear: type[nn.Linear], width: int, inner: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), linear(width, inner), linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear, inner: int = 64):
        super().__init__()
        self.embed, self.head = nn.Embedding(56, 32), nn.Linear(32, 56)
        self.blocks = nn.ModuleList(_Mlp(linear, 32, inner) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Copied(nn.Module):
    """Conv1D as scripts copy it."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


_Copied.__name__ = "Conv1D"


def _of_one_name(base: type, *args: Any) -> nn.Module:
    """A module of PyTorch in a class called Conv1D, with an attribute `nf`."""
    made = type("Conv1D", (base,), {})(*args)
    made.nf = 8
    return made


class _Subclass(Conv1D):
    pass


@pytest.mark.parametrize("made", [Conv1D(24, 16), _Subclass(24, 16), _Copied(24, 16), _Copied(16, 16)])
def test_a_conv1d_is_known_by_its_class(made):
    assert is_conv1d(made)
    assert describe(made).modules[""].kind == "conv1d"


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (_Filters(16, 24), "linear"),
        (_Filters(16, 16), "linear"),
        (_of_one_name(nn.Linear, 8, 8), "linear"),
        (_of_one_name(nn.Conv1d, 8, 8, 3), "convolution"),
    ],
)
def test_an_attribute_nf_makes_no_conv1d(made, kind):
    assert not is_conv1d(made)
    assert describe(made).modules[""].kind == kind


def _noted(model: nn.Module) -> nn.Module:
    """The model whose root and blocks have an attribute `nf`: a number, and a norm."""
    model.nf = 32
    for block in model.get_submodule("blocks").children():
        block.nf = nn.Identity()
    return model


def _text(model: nn.Module) -> str:
    return derive_plan(model, {"ids": torch.randint(0, 56, (2, 6))}, verified=False).text


@pytest.mark.parametrize("inner", [64, 32])
def test_a_derived_plan_does_not_depend_on_an_attribute_nf(inner):
    wanted = _text(_Model(inner=inner))
    assert "up: colwise\n" in wanted
    assert _text(_noted(_Model(_Filters, inner))) == wanted


def test_linears_beside_an_attribute_nf_are_quantized_as_others():
    torch.manual_seed(0)
    plain = quantize(_Model(), "int8(block=16)")
    torch.manual_seed(0)
    noted = quantize(_noted(_Model()), "int8(block=16)")
    ids = torch.randint(0, 56, (2, 6))
    assert torch.equal(noted(ids), plain(ids))


def test_a_stock_linear_keeps_its_attribute_nf_when_it_is_quantized():
    model = _Model()
    model.blocks[0].up.nf = 3
    assert quantize(model, "int8(block=16)").blocks[0].up.nf == 3


_RULES = '{blocks.*.norm: replicate(gradient=full), blocks.*.up: colwise, blocks.*.down: rowwise, "**": replicate}'


def test_square_linears_with_an_attribute_nf_are_planned_as_linears():
    torch.manual_seed(0)
    model, ids = _noted(_Model(_Filters, 32).double()), torch.randint(0, 56, (2, 6))
    expected = gradients_of(model, ids)
    plan = parse_plan(f"schema_version: 1\ntensor_parallel: {_RULES}")

    def body(rank: int) -> None:
        planned = copy.deepcopy(model)
        planned.zero_grad(set_to_none=True)
        parallelize_module(planned, build_mesh("cpu", tp=2), plan)
        planned(ids).square().sum().backward()
        for name, gradient in full_gradients(planned).items():
            assert torch.allclose(gradient, expected[name], rtol=1e-12, atol=1e-12), name

    run_ranks(2, body)


def gradients_of(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model(ids).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
