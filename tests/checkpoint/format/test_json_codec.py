"""Plain values as JSON and back: exact, deterministic, and strict about its input."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import math
import struct
import tracemalloc
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.format.json_codec import INLINE_BYTES, decode, encode
from parallelize.checkpoint.format.json_forms import BY_TAG, SAVED_DTYPES
from parallelize.state.randomness.streams import Streams

DTYPES = [dtype for _, dtype in sorted(SAVED_DTYPES.items())]


def through_text(written):
    return json.loads(json.dumps(written, allow_nan=False))


def returned(value):
    return decode(through_text(encode(value)))


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(a, b):
    """Equal to the bit, and of the same types all the way down."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert len(a) == len(b)
        for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True):
            assert_same(ka, kb)
            assert_same(va, vb)
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    elif isinstance(a, complex):
        assert_same((a.real, a.imag), (b.real, b.imag))
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape) and bits(a) == bits(b)
    elif isinstance(a, numpy.ndarray | numpy.generic):
        assert (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    elif isinstance(a, set | frozenset):
        assert_same(*(sorted(members, key=lambda member: json.dumps(encode(member))) for members in (a, b)))
    else:
        assert a == b


def refused(value, *words: str, slug: str = "unsavable-value", **keywords):
    with pytest.raises(CheckpointError) as caught:
        encode(value, "user", **keywords)
    assert caught.value.slugs == (slug,)
    for word in words:
        assert word in str(caught.value), caught.value


def bad(value, *words: str, tensors=None):
    with pytest.raises(CheckpointError) as caught:
        decode(value, tensors)
    assert caught.value.slugs == ("bad-value",)
    for word in words:
        assert word in str(caught.value), caught.value


# -- round trips -------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(), max_size=6)  # lone surrogates too
HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary(max_size=4)
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
FLOATS = st.floats().filter(lambda number: number == number or math.copysign(1, number) > 0) | st.just(math.nan)
LEAVES = (
    HASHABLE
    | FLOATS.map(lambda number: math.nan if number != number else number)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.qint8, torch.int4])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")])
    | st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size)
    | st.sampled_from(
        [Path("a/b"), PurePosixPath("/a/../b"), PureWindowsPath("c:\\x y"), Path("nul\0"), Path("\udc80")]
    )
    | st.sets(HASHABLE, max_size=3)
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXT | st.just("$"), inner, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(lambda items: collections.defaultdict(list, items))
        | st.dictionaries(HASHABLE, st.integers(), max_size=3).map(collections.Counter)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(TREES)
@example({"$": "int", "hex": "ff"})
@example({"$": {"$": "tuple", "items": []}})
@example({1: 2, "1": 3, (1, "a"): 4, None: 5, b"x": 6})
@example("\ud83d\ude00")
@example([-0.0, 0.0, 5e-324, 1e308, 0.1, 1e22, math.inf, -math.inf, math.nan])
@example([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**5000])
@example([True, 1, 1.0, complex(-0.0, math.nan), {1: "a"}, {True: "a"}])
def test_a_tree_comes_back_exactly(tree):
    assert_same(returned(tree), tree)


@pytest.mark.parametrize("factory", [None, dict, float, int, list, set])
def test_defaultdicts_keep_their_factory(factory):
    result = returned(collections.defaultdict(factory, a=1))
    assert_same(result, collections.defaultdict(factory, a=1))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_to_the_bit(dtype, shape):
    raw = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.uint8) * 37 + 5
    raw = raw % 2 if dtype is torch.bool else raw
    value = raw.view(dtype).reshape(shape)
    assert_same(returned(value), value)
    stored = {}
    assert_same(decode(encode(value, "v", tensors=stored.setdefault), stored.__getitem__), value)
    assert not stored  # small tensors are written into the JSON


def test_views_gradients_and_conjugates_are_saved_as_values():
    value = torch.arange(12.0).reshape(3, 4).t()[1:, ::2]
    assert_same(returned(value), value.contiguous())
    assert_same(returned(value.requires_grad_()), value.detach().contiguous())
    wave = torch.tensor([1 + 2j, -0.5j]).conj()
    assert_same(returned(wave), wave.resolve_conj())
    assert_same(returned(wave.imag), wave.imag.resolve_neg())


def test_large_tensors_go_to_the_sink_with_their_path():
    value = {"ema": [torch.arange(INLINE_BYTES // 8 + 1), torch.arange(INLINE_BYTES // 8)]}
    stored = {}

    def sink(where, tensor):
        stored[f"key of {where}"] = tensor
        return f"key of {where}"

    written = through_text(encode(value, "user", sink))
    assert list(stored) == ["key of user.ema[0]"]
    assert_same(decode(written, stored.__getitem__), value)
    assert_same(returned(value), value)  # without a sink, in the JSON
    bad(written, "user.ema[0]", "does not exist", tensors={}.__getitem__)
    bad(written, "no stored tensors")
    bad(written, "int32", tensors=lambda key: stored[key].int())
    bad(written, "[511]", tensors=lambda key: stored[key][:511])


def test_the_paths_by_which_stored_tensors_are_named_never_change():
    large, stored = torch.arange(INLINE_BYTES), []
    value = {None: large, "a b": {"ab" * 20: large}, 3: (large,), 1e19: {(1, 2): large}}
    encode(value, "user", lambda where, tensor: stored.append(where) or where)
    assert stored == ["user[NoneType]", f"user['a b'].{'ab' * 20}", "user[3][0]", "user[float][tuple]"]
    encode({"a " * 20: large}, "user", lambda where, tensor: stored.append(where) or where)
    assert stored[-1] == f"user[{('a ' * 20)[:29] + '...'!r}]"


@pytest.mark.parametrize(
    "value",
    [
        numpy.float64(-0.0),
        numpy.bool_(True),
        numpy.uint16(65535),
        numpy.complex64(1 - 2j),
        numpy.arange(6, dtype=numpy.int16).reshape(2, 3)[:, ::-1],
        numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        numpy.zeros(()),
        numpy.zeros((0, 3), dtype=bool),
        numpy.float16([1.5, numpy.nan]),
    ],
    ids=repr,
)
def test_numpy_comes_back_as_numpy(value):
    assert_same(returned(value), value)


def test_the_state_of_random_streams_survives():
    streams = Streams(seed=5)
    streams.declare("a")
    with streams("a"):
        torch.rand(3), numpy.random.rand(3)
    stored = {}
    state = streams.state_dict()
    written = through_text(
        encode(state, "streams", lambda where, tensor: stored.setdefault(where, tensor) is None or where)
    )
    fresh = Streams(seed=0)
    fresh.load_state_dict(decode(written, stored.__getitem__))
    assert_same(fresh.state_dict(), state)
    with streams("a"):
        expected = torch.rand(4), numpy.random.rand(4)
    with fresh("a"):
        assert_same((torch.rand(4), numpy.random.rand(4)), expected)


def test_equal_values_are_written_equally():
    forward, backward = set(range(0, 24, 8)), set(range(16, -1, -8))
    assert list(forward) != list(backward)  # numbers in one hash slot keep their order of insertion
    assert json.dumps(encode(forward)) == json.dumps(encode(backward))
    assert json.dumps(encode({"b": 1, "a": 2})) == '{"b": 1, "a": 2}'


# -- refusals ----------------------------------------------------------------------------------------------------------


class Thing:
    def __repr__(self):
        raise AssertionError("objects are not printed")


def nested(depth: int, inner=0):
    for _ in range(depth):
        inner = [inner]
    return inner


def test_functions_and_objects_are_refused_by_path():
    refused({"ema": {"decay_fn": nested}}, "user.ema.decay_fn is a function")
    refused([1, (2, lambda: 0)], "user[1][1] is a lambda")
    refused({"a b": len}, "user['a b'] is a function")
    refused({3: Thing().__init__}, "user[3] is a")
    refused({Thing(): 1}, "the key Thing of user is a", "Thing")
    refused(functools.partial(len), "user is a functools.partial")
    refused({"net": nn.Linear(2, 2)}, "user.net is a torch.nn.modules.linear.Linear", "state_dict()")
    refused(torch.Generator(), "get_state()")
    refused(nn.Parameter(torch.zeros(2)), "is a Parameter", "detach()")
    refused(collections.defaultdict(lambda: 0), "is a defaultdict of")
    refused(collections.namedtuple("Pair", "a b")(1, 2), "Pair")
    refused(bytearray(b"a"), "bytearray")


def test_tensors_that_are_not_plain_values_are_refused():
    refused(torch.zeros(2, device="meta"), "meta")
    refused(torch.eye(2).to_sparse(), "sparse")
    refused({torch.zeros(1): 1}, "identity")
    refused({(1, (torch.zeros(1),))}, "identity")
    refused(torch.zeros((1,) * 65), "65 dims")
    refused(torch.empty(2, dtype=torch.int4), "int4")
    refused(numpy.array(["a"]), "<U1")
    refused(numpy.zeros(2, dtype=">f4"), ">f4")
    refused(numpy.ma.masked_array([1]), "MaskedArray")


def test_dtensors_are_refused_by_name(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        value = distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)))
        refused({"m": value}, "user.m is a DTensor", "full_tensor()")
    finally:
        dist.destroy_process_group()


def test_cycles_and_depth_are_refused_and_64_levels_are_not():
    cycle: dict = {"a": []}
    cycle["a"].append(cycle)
    refused(cycle, "user.a[0] is inside itself")
    shared = [1]
    assert_same(returned([shared, shared]), [[1], [1]])
    for inner in (math.nan, complex(0, math.inf), torch.zeros(1), 2**70, Path("a"), numpy.float32(1)):
        assert_same(returned(nested(64, inner)), nested(64, inner))
        deep = functools.reduce(lambda value, _: {1: value}, range(64), inner)
        assert_same(returned(deep), deep)
    refused(nested(65), "more than 64")
    refused(nested(5000), "more than 64")
    bad(nested(66), "more than 64")


# -- hostile JSON ------------------------------------------------------------------------------------------------------

TENSOR = {"$": "tensor", "dtype": "float32", "shape": [1], "base64": "AAAAAA=="}


@pytest.mark.parametrize(
    "value",
    [
        {"$": "pickle", "base64": ""},
        {"$": ["int"]},
        {"$": None},
        {"$": "int"},
        {"$": "int", "hex": "ff", "more": 1},
        {"$": "int", "hex": "0x1f"},
        {"$": "int", "hex": 3},
        {"$": "int", "hex": "1_0"},
        {"$": "float", "value": "1.5"},
        {"$": "float", "value": []},
        {"$": "complex", "items": [1.0]},
        {"$": "complex", "items": [1, 2]},
        {"$": "complex", "items": 7},
        {"$": "str", "base64": "/w=="},
        {"$": "bytes", "base64": "a"},
        {"$": "bytes", "base64": "é"},
        {"$": "bytes", "base64": None},
        {"$": "tuple", "items": "ab"},
        {"$": "tuple", "items": {"a": 1}},
        {"$": "set", "items": [[1]]},
        {"$": "set", "items": [1, 1]},
        {"$": "frozenset", "items": [TENSOR]},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "dict", "items": [[1, 2], [1, 3]]},
        {"$": "dict", "items": ["ab"]},
        {"$": "dict", "items": [[TENSOR, 1]]},
        {"$": "counter", "items": 3},
        {"$": "defaultdict", "factory": "eval", "items": []},
        {"$": "defaultdict", "factory": ["int"], "items": []},
        {**TENSOR, "shape": [-1]},
        {**TENSOR, "shape": [-1, -1]},
        {**TENSOR, "shape": [2]},
        {**TENSOR, "shape": [1.0]},
        {**TENSOR, "shape": [True]},
        {**TENSOR, "shape": [2**62]},
        {**TENSOR, "shape": [2**63, 2**63]},
        {**TENSOR, "shape": [0, 2**62, 2**62], "base64": ""},
        {**TENSOR, "shape": [1] * 65},
        {**TENSOR, "shape": {"a": 1}},
        {**TENSOR, "base64": ""},
        {**TENSOR, "shape": [2**30], "base64": ""},
        {**TENSOR, "base64": "AAAA"},
        {**TENSOR, "base64": "AAAAAAAAAAA="},
        {**TENSOR, "base64": 7},
        {**TENSOR, "dtype": "float31"},
        {**TENSOR, "dtype": "qint32"},
        {**TENSOR, "dtype": []},
        {**TENSOR, "dtype": "bool", "base64": "Ag=="},
        {**TENSOR, "dtype": "nn"},
        {"$": "stored_tensor", "dtype": "float32", "shape": [1], "key": "../../etc/passwd"},
        {"$": "stored_tensor", "dtype": "float32", "shape": [1], "key": [1]},
        {"$": "ndarray", "value": 3},
        {"$": "ndarray", "value": {**TENSOR, "dtype": "bfloat16", "base64": "AAA="}},
        {"$": "numpy_scalar", "value": TENSOR},
        {"$": "dtype", "name": "Tensor"},
        {"$": "dtype", "name": {}},
        {"$": "device", "name": "cuda:99999999999999"},
        {"$": "device", "name": "moon"},
        {"$": "device", "name": 3},
        {"$": "size", "items": [2**63]},
        {"$": "size", "items": ["a"]},
        {"$": "size", "items": 4},
        {"$": "path", "kind": "Path", "value": "a"},
        {"$": "path", "kind": "native", "value": ["a"]},
        {"$": "path", "kind": [], "value": "a"},
        math.nan,
        (1, 2),
        {1: 2},
        b"a",
    ],
    ids=lambda value: repr(value)[:60],
)
def test_what_was_never_written_is_refused(value):
    bad(value, "value")
    bad({"a": [value]}, "value.a[0]")
    bad({"$": "tuple", "items": [value]}, "value[0]")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["AAAAAA==", "float32"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.sampled_from(sorted(BY_TAG)).flatmap(
            lambda tag: st.fixed_dictionaries({"$": st.just(tag), **dict.fromkeys(BY_TAG[tag].fields, inner)})
        )
    ),
    max_leaves=10,
)


@settings(max_examples=400)
@given(JSON)
def test_any_json_is_read_or_refused(value):
    """A value that was read is written and read back unchanged."""
    try:
        decoded = decode(value, {}.__getitem__)
    except CheckpointError as error:
        assert error.slugs == ("bad-value",)
    else:
        assert_same(decode(through_text(encode(decoded))), decoded)


@settings(max_examples=200)
@given(TREES, st.randoms(use_true_random=False))
def test_damaged_json_is_read_or_refused(tree, chance):
    """One value anywhere replaced by another."""
    root = [through_text(encode(tree))]
    positions = []

    def walk(container):
        for key in container if isinstance(container, dict) else range(len(container)):
            positions.append((container, key))
            if isinstance(container[key], dict | list):
                walk(container[key])

    walk(root)
    container, key = chance.choice(positions)
    container[key] = chance.choice([None, -1, 2**80, 1.5, "", "x", [], [[]], {}, {"$": "tuple"}, [1, 2], True])
    try:
        decode(root)
    except CheckpointError as error:
        assert error.slugs == ("bad-value",)


def test_huge_claims_take_no_memory():
    claims = [
        {**TENSOR, "shape": [2**40]},
        {**TENSOR, "shape": [2**20] * 3},
        {**TENSOR, "shape": [0, 2**61], "base64": ""},
    ]
    tracemalloc.start()
    for claim in claims:
        with contextlib.suppress(CheckpointError):
            assert decode(claim).numel() == 0
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
