"""What a recorded forward says besides its operations: attributes that give sizes, modules that are called, fixed
dims."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallelize.plan.dims.factors import leaves, size_of
from parallelize.plan.dims.trace import _Watched, record_forward

X = torch.randn(2, 5, 12)


class Reads(nn.Module):
    """Calls a function with itself, so that it reads attributes."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def reads_of(function, **attributes):
    """(attribute, its value, the size that it gave) of each."""
    record = record_forward(Outer(Reads(function, **attributes)), (X,))
    assert {read.module for read in record.reads} <= {"inner"}
    return sorted({(read.attribute, read.value, size_of(read.dim)) for read in record.reads})


@pytest.mark.parametrize(
    ("function", "attributes", "expected"),
    [
        (lambda m, x: x.view(2, 5, m.heads, -1), dict(heads=4), [("heads", 4, 4)]),
        (
            lambda m, x: x.reshape(*x.shape[:2], m.heads, m.size),
            dict(heads=4, size=3),
            [("heads", 4, 4), ("size", 3, 3)],
        ),
        (lambda m, x: x.split(m.width, dim=-1), dict(width=4), [("width", 4, 4)]),
        (lambda m, x: x.view(2, 5, m.heads * m.size), dict(heads=4, size=3), [("heads", 4, 12), ("size", 3, 12)]),
        (
            lambda m, x: x.view(2, 5, m.width // m.heads, -1),
            dict(width=12, heads=3),
            [("width", 12, 4)],  # and not what it is divided by, which may be as large
        ),
        (lambda m, x: x[..., : m.part], dict(part=4), [("part", 4, 4)]),
        (lambda m, x: x[..., m.part :], dict(part=8), [("part", 8, 4)]),
        (lambda m, x: x[:, :, : m.part], dict(part=4), [("part", 4, 4)]),
        (lambda m, x: x[..., : m.all], dict(all=12), []),  # which cuts nothing
        (lambda m, x: x.unflatten(-1, (m.heads, 3)), dict(heads=4), [("heads", 4, 4)]),
        (lambda m, x: x * m.scale, dict(scale=7), []),  # not the size of a dim
        (lambda m, x: x.view(2, 5, m.one, 12), dict(one=1), []),
        (lambda m, x: x.view(2, 5, m._heads, -1), dict(_heads=4), [("_heads", 4, 4)]),
        (lambda m, x: x.view(2, 5, *m.sizes), dict(sizes=(4, 3)), [("sizes.0", 4, 4), ("sizes.1", 3, 3)]),
        (
            lambda m, x: m.view(x),
            dict(view=partial(torch.Tensor.unflatten, dim=2, sizes=(4, 3))),
            [("view.sizes.0", 4, 4), ("view.sizes.1", 3, 3)],
        ),
        (
            lambda m, x: x.view(2, 5, m.config.heads, -1),
            dict(config=SimpleNamespace(heads=4)),
            [("config.heads", 4, 4)],
        ),
    ],
)
def test_attributes_that_give_sizes(function, attributes, expected):
    assert reads_of(function, **attributes) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x[..., :9].unflatten(-1, (m.heads, m.width)),
        lambda m, x: x.split(m.width, -1)[0],
        lambda m, x: x.narrow(-1, 2, m.width),
    ],
)
def test_sizes_that_coincide_are_told_apart_by_what_an_operation_made(function):
    """Three heads of three features, and three tokens."""
    results = []

    def kept(module, x):
        results.extend([x[:, :3], function(module, x[:, :3])])
        return results[1]

    record = record_forward(Reads(kept, heads=3, width=3), (X,))
    tokens, (*_, heads, width) = leaves(record.dims(results[0])[1]), map(leaves, record.dims(results[1]))
    read = {(each.attribute, *leaves(each.dim)) for each in record.reads}
    assert ("width", *width) in read and not read & {("heads", *width), ("width", *heads), ("width", *tokens)}


def test_equal_sizes_are_told_apart_by_their_position():
    record = record_forward(Reads(lambda m, x: x.view(2, 5, m.heads, 3, m.size), heads=2, size=2), (X,))
    fast, slow = ([read for read in record.reads if read.attribute == name] for name in ("size", "heads"))
    assert len(fast) == len(slow) == 1 and leaves(fast[0].dim) != leaves(slow[0].dim)


def test_a_quotient_of_attributes_is_known():
    record = record_forward(
        Reads(lambda m, x: x.view(2, 5, m.groups, m.heads // m.groups + 2), heads=6, groups=3), (X,)
    )
    assert [(r.dividend, r.divisor) for r in record.ratios] == [(("", "heads", 6), ("", "groups", 3))]


def test_attributes_are_as_before():
    config = SimpleNamespace(heads=4)
    model = Outer(Reads(lambda m, x: x.view(2, 5, m.heads, -1), heads=4, config=config))
    record_forward(model, (X,))
    with pytest.raises(RuntimeError, match="invalid for input"):
        record_forward(model, (X[..., :5],))
    assert type(model.inner.heads) is int and type(config.heads) is int
    assert not model._forward_hooks and not model.inner._forward_pre_hooks


def test_attributes_of_modules_of_torch_are_not_watched():
    seen = {}

    class Linear(nn.Linear):
        def forward(self, x):
            seen["own"] = type(self.out_features)
            return super().forward(x)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.stock = Linear(12, 7), nn.Linear(7, 2)

        def forward(self, x):
            seen["stock"] = type(self.stock.in_features)
            return self.stock(self.own(x))

    record_forward(Block(), (X,))
    assert seen == {"own": _Watched, "stock": int}


def test_a_watched_integer_is_an_integer():
    value = _Watched(6, frozenset([("m", "heads", 6)]))
    assert value == 6 and value / 2 == 3.0 and type(value / 2) is float and [0] * value == [0] * 6
    for result in (value * 2, 2 * value, value + 1, 1 + value, value - 1, 13 - value, value // 2, 12 // value):
        assert type(result) is _Watched and result.sources == value.sources
    assert type(copy.deepcopy(value)) is int and type(pickle.loads(pickle.dumps(value))) is int


def test_dims_of_inputs_outputs_buffers_and_constants_are_fixed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 7)
            self.register_buffer("scale", torch.ones(12))
            self.constant = torch.ones(12)

        def forward(self, x):
            return {"out": self.linear(x * self.scale * self.constant)}

    record = record_forward(Model(), {"x": X})
    reasons = {what: set() for _, what in record.fixed}
    for dim, what in record.fixed:
        reasons[what].add(size_of(dim))
    assert reasons == {
        "an input of the model": {2, 5, 12},
        "the buffer scale": {12},
        "a constant of the model's code": {12},
        "an output of the model": {2, 5, 7},
    }


def test_tied_parameters_are_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    record = record_forward(Tied(), (X,))
    assert record.parameters["a.weight"] is record.parameters["b.weight"]
    assert list(record.parameters) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_modules_and_what_they_are_called_with():
    class Keyword(nn.Module):
        def forward(self, mask, hidden=None):
            return (hidden * 2, mask)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(12, 7), Keyword()

        def forward(self, x):
            return self.second(None, hidden=self.first(x))[0].sum(-1)

    record = record_forward(Model(), (X,))
    calls = {call.module: call for call in record.calls}
    assert [call.module for call in record.calls] == ["", "first", "second"]
    assert calls["first"].argument == (0, "input") and calls["second"].argument == (1, "hidden")
    assert (calls["first"].shape, calls["first"].out) == ((2, 5, 12), (2, 5, 7))
    assert calls["second"].source == calls["first"].result and calls["second"].out == (2, 5, 7)
    assert [contraction.module for contraction in record.contractions] == ["first"]
    assert {mix.module for mix in record.mixes} == {""}  # the sum, after the modules were left
