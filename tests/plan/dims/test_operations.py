"""What each operation does to dims, and which dims it needs in full. How to read the texts: recorded.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallelize.plan.dims.factors import size_of
from parallelize.plan.dims.operations import RULES
from tests.plan.dims.recorded import recorded

X = "b=2 t=5 h=6"
IDS = torch.tensor([[1, 2, 0], [3, 1, 1]])
Q, K, V = "b=2 h=4 q=3 d=8", "B=2 H=4 k=5 D=8", "c=2 i=4 l=5 e=8"
ZEROS = torch.zeros(2, 5, 3, dtype=torch.long)

SHAPES = [
    (lambda x: x.view(2, 5, 2, 3), (X,), "b t h0 h1", ""),
    (lambda x: x.view(10, 6), (X,), "b*t h", ""),
    (lambda x: x.reshape(4, 15), (X,), "new new", "b h t"),  # cuts across dims
    (lambda x: x.unflatten(-1, (2, 3)).flatten(-2), (X,), "b t h0*h1", ""),
    (lambda x: x.expand(2, 5, 7, 6), ("b=2 t=5 o=1 h=6",), "b t new h", ""),
    (lambda x: x.expand(3, 5, 6), ("t=5 h=6",), "new t h", ""),
    (lambda x: x.repeat(1, 3, 1), (X,), "b new*t h", ""),
    (lambda x: x.repeat_interleave(3, dim=1), (X,), "b t*new h", ""),
    (lambda x: x.permute(2, 0, -2), (X,), "h b t", ""),
    (lambda x: x.transpose(-1, 1), (X,), "b h t", ""),
    (lambda x: x.t(), ("a=2 b=3",), "b a", ""),
    (lambda x: x.unsqueeze(-1), (X,), "b t h -", ""),
    (lambda x: x.unsqueeze(1), (X,), "b - t h", ""),
    (lambda x: x.squeeze(1), ("b=2 o=1 h=6",), "b h", ""),
    (lambda x: x.squeeze(), ("b=2 o=1 h=6",), "b h", ""),
    (lambda x: x.squeeze(0), (X,), "b t h", ""),
    (lambda x: x[:, 0], (X,), "b h", "t"),
    (lambda x: x.unbind(0), (X,), "t h | t h", "b"),
    (lambda x: x.split([1, 5], -1), (X,), "b t - | b t new", ""),
    (lambda x: x.chunk(3, -1), (X,), "b t new | b t new | b t new", ""),
    (lambda x: x[..., 2:4], (X,), "b t new", ""),
    (lambda x: x[..., ::2], (X,), "b t new", "h"),
    (lambda x: x[..., :6], (X,), "b t h", ""),
    (lambda x: F.glu(x, 2), (X,), "b t new", ""),
    (lambda x, y: torch.cat([x, y], -1), (X, "B=2 T=5 H=7"), "b t new", ""),
    (lambda x, y: torch.stack([x, y], 1), (X, "B=2 T=5 H=6"), "b new t h", "new"),
    (lambda x: F.pad(x, (0, 0, 1, 0)), (X,), "b new h", "new t"),
    (
        lambda x, y: torch.linalg.solve_triangular(x, y, upper=False, unitriangular=True),
        ("b=2 h=4 r=3 c=3", "B=2 H=4 R=3 d=5"),
        "b h R d",
        "R c d r",
    ),
    (torch.view_as_complex, ("b=2 d=5 c=2",), "b d", "c"),
    (torch.view_as_real, (torch.randn(2, 5, dtype=torch.complex64),), "x0 x1 new", "new"),
]
POINTWISE = [
    (lambda x, y: x + y, (X, "B=2 T=5 H=6"), "b t h", ""),
    (lambda x, y: x * y, (X, "H=6"), "b t h", ""),
    (lambda x: F.gelu(x) * 2 + 1, (X,), "b t h", ""),
    (lambda x, y: torch.where(x > 0, x, y), (X, "T=5 o=1"), "b t h", ""),
    (lambda x, y: x.masked_fill(y > 0, 0.0), (X, "H=6"), "b t h", ""),
    (lambda x: x.clone().double(), (X,), "b t h", ""),
    (lambda x: torch.native_dropout(x, 0.5, True)[0], (X,), "b t h", ""),
    (lambda x: torch.zeros_like(x), (X,), "b t h", ""),
    (lambda x, y: x.clone().copy_(y), (X, "H=6"), "b t h", ""),
    (lambda x: x + torch.zeros(6), (X,), "b t h", ""),
    (lambda x: x + torch.arange(6), (X,), "b t h", "h"),  # the elements differ, so that a shard is not the first ones
    (lambda x: x + torch.rand(6), (X,), "b t h", "h"),
    (lambda x: x * x.sum().item(), (X,), "b t h", "b h t"),
]
ALONG = [
    (lambda x: x.softmax(-1), (X,), "b t h", "h"),
    (lambda x: x.log_softmax(1), (X,), "b t h", "t"),
    (lambda x: x.cumsum(1), (X,), "b t h", "t"),
    (lambda x: x.sort(dim=1), (X,), "b t h | b t h", "t"),
    (lambda x: x.topk(2), (X,), "b t new | b t new", "h"),
    (lambda x: x.topk(2, 1), (X,), "b new h | b new h", "t"),
    (lambda x: x.flip(1), (X,), "b t h", "t"),
    (lambda x: x.roll(1, 2), (X,), "b t h", "h"),
    (lambda x: x.roll(1), (X,), "b t h", "b h t"),
    (lambda x: x.tril(), (X,), "b t h", "h t"),
    (lambda x: x.sum(), (X,), "", "b h t"),
    (lambda x: x.sum(-1), (X,), "b t", "h"),
    (lambda x: x.mean(-1, keepdim=True), (X,), "b t -", "h"),
    (lambda x: x.amax((0, 1)), (X,), "h", "b t"),
    (lambda x: x.max(1), (X,), "b h | b h", "t"),
    (lambda x: torch.var_mean(x, -1), (X,), "b t | b t", "h"),
    (lambda x: x.argmax(-1), (X,), "b t", "h"),
    (lambda x: torch.linalg.vector_norm(x, dim=-1), (X,), "b t", "h"),
    (lambda x: x.logsumexp(1), (X,), "b h", "t"),
    (lambda x, w, b: F.layer_norm(x, (6,), w, b), (X, "W=6", "B=6"), "b t h", "h"),
    (lambda x, w: F.rms_norm(x, (6,), w), (X, "W=6"), "b t h", "h"),
    (lambda x: F.group_norm(x, 2), ("b=2 c=4 s=7",), "b c0*c1 s", "c1 s"),
    (lambda x, w: F.batch_norm(x, None, None, w, training=True), ("b=2 c=4 s=7", "W=4"), "b c s", "b s"),
]
MATMULS = [
    (lambda x, y: x @ y, ("a=2 k=3", "K=3 c=5"), "a c", ""),
    (lambda x, y: x @ y, ("a=2 k=3", "K=3"), "a", ""),
    (lambda x, w, b: F.linear(x, w, b), (X, "o=7 H=6", "O=7"), "b t o", ""),
    (lambda x, y: x @ y, ("b=2 h=4 q=3 k=5", "B=2 H=4 K=5 c=7"), "b h q c", ""),
    (torch.baddbmm, ("e=2 f=3 g=7", "b=2 q=3 k=5", "B=2 K=5 c=7"), "e f g", ""),
    (lambda x, y: torch.einsum("bqhd,bkhd->bhqk", x, y), ("b=2 q=3 h=4 d=5", "B=2 k=7 H=4 D=5"), "b h q k", ""),
    (torch.outer, ("a=2", "b=3"), "a b", ""),
    (lambda x, w, b: F.conv1d(x, w, b), ("b=2 c=4 s=7", "o=6 i=4 k=3", "B=6"), "b o new", "k new s"),
    (F.scaled_dot_product_attention, (Q, K, V), "b h q e", "d k"),
]
BY_INDEX = [
    (lambda w: F.embedding(IDS, w), ("v=4 h=6",), "new new h", ""),
    (lambda x, i: x.index_select(1, i), (X, torch.tensor([1, 0, 2])), "b y0 h", "t"),
    (lambda x, i: x.gather(2, i), (X, ZEROS), "b t y2", "h"),
    (lambda x, i: x[i], ("v=4 h=6", IDS), "y0 y1 h", "v"),
    (lambda x, i: x[:, i], (X, torch.tensor([1, 2, 3])), "b y0 h", "t"),
    (lambda x, i: x[i], ("v=4 h=6", torch.tensor([True, False, True, True])), "new new", "h v"),
    (lambda x, i, j: x[i, :, j], (X, torch.tensor([1, 0]), torch.tensor([1, 0])), "new new", "b h t"),
    (lambda x, i, s: x.scatter(2, i, s), (X, ZEROS, "p=2 q=5 r=3"), "b t h", "b h p q r t y0 y1 y2"),
]
OF_NO_RULE = [
    (torch.fft.fft, (X,), "new new new", "b h t"),
    (lambda x: x.diagonal(), ("a=3 b=3",), "new", "a b"),
    (lambda x: F.pixel_shuffle(x, 2), ("b=2 c=4 h=3 w=5",), "new - new new", "b c h w"),
]


@pytest.mark.parametrize(
    ("function", "operands", "out", "needed"),
    [*SHAPES, *POINTWISE, *ALONG, *MATMULS, *BY_INDEX, *OF_NO_RULE],
)
def test_dims_of_results(function, operands, out, needed):
    result = recorded(function, *operands)
    assert (result.out, result.needed) == (out, needed)


def test_operands_of_one_operation_have_the_same_dims():
    assert recorded(lambda x, y: x + y, X, "B=2 T=5 H=6").operands == "b t h | b t h"
    assert recorded(F.linear, X, "o=7 H=6").operands == "b t h | o h"
    assert recorded(F.scaled_dot_product_attention, Q, K, V).operands == "b h q d | b h k d | b h k e"
    assert recorded(lambda x, w: F.layer_norm(x, (6,), w), X, "W=6").operands == "b t h | h"


def test_factors_of_sums_that_do_not_fit_are_needed():
    """[2, 3] and [3, 2] are both 6, and no shard of one is a shard of the other."""
    result = recorded(lambda x, y: x.view(2, 6) + y.view(2, 6), "b=2 h=2 w=3", "B=2 a=3 c=2")
    assert result.needed == "a c h w"


def test_query_heads_are_groups_of_the_key_value_heads():
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    grouped = recorded(attention, "b=2 h=12 q=3 d=8", "B=2 g=4 k=5 D=8", "c=2 i=4 l=5 e=8")
    assert grouped.operands == "b h0*h1 q d | b h0 k d | b h0 k e" and grouped.out == "b h0*h1 q e"
    assert [size_of(dim) for dim in grouped.record.repeats] == [3]


def test_a_mask_has_the_dims_of_the_scores():
    masked = recorded(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), Q, K, V, "m=4 n=3 o=5")
    assert masked.operands.endswith("| h q k") and masked.out == "b h q e"


@pytest.mark.parametrize(
    ("function", "weights", "expected"),
    [
        (lambda w, x: F.linear(x, w), 1, "weights.0"),
        (lambda w, x: x @ w.t().exp(), 1, "weights.0"),  # of the weight alone
        (lambda w, x: x @ x.transpose(1, 2), 1, ""),
        (lambda v, w, x: x @ (v + w).t(), 2, ""),  # of several
    ],
)
def test_a_matmul_knows_its_weight(function, weights, expected):
    result = recorded(function, *["o=7 h=6"] * weights, "b=2 t=6 h=6", weights=weights)
    assert [contraction.weight for contraction in result.record.contractions] == [expected]


def test_rows_of_a_table_are_looked_up():
    result = recorded(lambda w, i: F.embedding(i, w), "v=4 h=6", IDS, weights=1)
    assert [(size_of(lookup.dim), lookup.table) for lookup in result.record.lookups] == [(4, "weights.0")]


def test_slices_say_where_they_are():
    record = recorded(lambda x: (x.split([1, 5], -1), x[..., -2:], x.narrow(1, 1, 3)), X).record
    assert [(size_of(cut.dim), cut.start, cut.stop) for cut in record.slices] == [
        (6, 0, 1),
        (6, 1, 6),
        (6, 4, 6),
        (5, 1, 4),
    ]


def test_operations_without_a_rule_are_named():
    assert list(recorded(torch.fft.fft, X).record.unknown) == ["_fft_r2c"]


def test_each_name_of_a_rule_is_an_operation():
    assert not [name for name in RULES if not hasattr(torch.ops.aten, name) and not name.endswith("_overrideable")]
