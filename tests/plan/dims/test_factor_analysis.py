"""Which factors may be sharded, in which form, and why others may not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize.plan.dims.factor_analysis import FactorAnalysis
from parallelize.plan.dims.trace import record_forward
from parallelize.tools.derivation.draft import Drafting

WIDTH, INNER = 12, 30
TABLE = torch.linspace(0, 1, INNER)


class Block(nn.Module):
    """`up`, a function of the block and the result, `down`. `parts`: more modules and attributes, by name."""

    def __init__(self, between=lambda block, x: x.relu(), inner=INNER, out=INNER, **parts):
        super().__init__()
        self.between = between
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(out, WIDTH)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.down(self.between(self, self.up(x)))


def analysis_of(model, x=None):
    return FactorAnalysis(record_forward(model, (torch.randn(2, 5, WIDTH) if x is None else x,)), model)


def draft_of(model, x=None, without=()):
    analysis = analysis_of(model, x)
    return Drafting(model, analysis, analysis.choose(without), {}, "").run()


def whole_of(model):
    draft = draft_of(model)
    assert not set(draft.styles) & {"up", "down"}
    return draft.whole


class Queries(nn.Module):
    """Attention whose queries are learned, as those of a detector: `to_q` is called on a parameter, and `bias` is added
    to heads."""

    def __init__(self):
        super().__init__()
        self.learned, self.bias = nn.Parameter(torch.randn(3, WIDTH)), nn.Parameter(torch.randn(3, 5))
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q = self.to_q(self.learned).unflatten(-1, (4, 3)).transpose(0, 1)
        k, v = (linear(x).unflatten(-1, (4, 3)).transpose(1, 2) for linear in (self.to_k, self.to_v))
        scores = q @ k.transpose(-2, -1) + self.bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_column_linear_that_is_called_on_a_parameter_sums_its_gradient():
    draft = draft_of(Queries())
    assert draft.styles["to_q"] == "colwise(heads)" and draft.styles["out"] == "rowwise(heads)"
    assert "learned" not in draft.styles and draft.styles["bias"] == "replicate(gradient=partial)"


class LearnedInput(nn.Module):
    """The first layer of a decoder whose input is learned: also its row linear is called on nothing but parameters."""

    def __init__(self):
        super().__init__()
        self.learned, self.block = nn.Parameter(torch.randn(1, 5, WIDTH)), Block()

    def forward(self, x):
        return x + self.block(self.learned.expand(2, 5, WIDTH))


def test_a_row_linear_that_is_called_on_what_is_made_of_parameters():
    assert draft_of(LearnedInput()).styles == {"block.up": "colwise", "block.down": "rowwise"}


def test_a_column_and_a_row_linear():
    draft = draft_of(Block())
    assert draft.styles == {"up": "colwise", "down": "rowwise"} and draft.whole == {} and draft.default == ""


@pytest.mark.parametrize(
    ("block", "styles", "local"),
    [
        # chunks of one view: [3, heads, width]
        (
            lambda: Block(lambda _, x: x.view(2, 5, 3, 4, 5).unbind(2)[0].flatten(2), inner=60, out=20),
            {"up": "colwise(heads + heads + heads)", "down": "rowwise(heads)"},
            {},
        ),
        # an attribute counts the heads, whose units must not be split
        (
            lambda: Block(lambda b, x: x.view(2, 5, 3, b.n, 5).unbind(2)[0].flatten(2), inner=60, out=20, n=4),
            {"up": "colwise(heads + heads + heads)", "down": "rowwise(heads)"},
            {"": {"n": "heads"}},
        ),
        # equal parts of a split
        (
            lambda: Block(lambda _, x: torch.mul(*x.chunk(2, -1)), inner=60),
            {"up": "colwise(chunks=2)", "down": "rowwise"},
            {},
        ),
        # parts that the forward finds by slices
        (
            lambda: Block(lambda _, x: x[..., :30] * x[..., 30:].sigmoid(), inner=60),
            {"up": "colwise(chunks=2)", "down": "rowwise"},
            {},
        ),
        (lambda: Block(lambda _, x: F.glu(x), inner=60), {"up": "colwise(chunks=2)", "down": "rowwise"}, {}),
    ],
    ids=["view", "view by an attribute", "chunk", "slices", "glu"],
)
def test_packed_weights(block, styles, local):
    draft = draft_of(block())
    assert (draft.styles, draft.local) == (styles, local)


class Packed(nn.Module):
    """q, k and v of one weight, with fewer heads of k and v."""

    def __init__(self, heads=6, kv_heads=2, size=4):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.qkv = nn.Linear(WIDTH, (heads + 2 * kv_heads) * size)
        self.out = nn.Linear(heads * size, WIDTH)

    def forward(self, x):
        widths = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.qkv(x).split(widths, -1))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def test_packed_parts_of_unequal_sizes_and_grouped_heads():
    draft = draft_of(Packed())
    assert draft.styles == {"qkv": "colwise(heads + heads_2 + heads_2)", "out": "rowwise(heads)"}
    assert draft.sizes == {"heads": 6, "heads_2": 2}
    assert draft.local == {"": {"heads": "heads", "kv_heads": "heads_2"}}


class Convolved(nn.Module):
    """Queries, keys and values that are concatenated for one convolution, and split again. `between`: of the
    concatenation and its result."""

    def __init__(self, between=lambda x: x.relu(), heads=4, size=3, width=5):
        super().__init__()
        self.between, self.size, self.width = between, size, width
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * each) for each in (size, size, width))
        self.sizes = [heads * size, heads * size, heads * width]
        self.conv = nn.Conv1d(sum(self.sizes), sum(self.sizes), 3, padding=1, groups=sum(self.sizes))
        self.out = nn.Linear(heads * width, WIDTH)

    def forward(self, x):
        x = torch.cat([self.q(x), self.k(x), self.v(x)], -1).transpose(1, 2)
        q, k, v = self.between(self.conv(x).transpose(1, 2)).split(self.sizes, -1)
        q, k = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (q, k))
        v = v.unflatten(-1, (-1, self.width)).transpose(1, 2)
        return self.out((q @ k.transpose(-2, -1) @ v).transpose(1, 2).flatten(2))


def test_parts_that_are_concatenated_and_split_again():
    draft = draft_of(Convolved())
    packed = "heads*3 + heads*3 + heads*5"
    linears = dict.fromkeys("qkv", "colwise(heads)")
    assert draft.styles == {**linears, "conv": f"shard(0, unit={packed})", "out": "rowwise(heads)"}


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda x: x.softmax(-1), "softmax in the model"),
        (lambda x: torch.cat([x[..., 2:], x[..., :2]], -1), "a concatenation along it in the model"),
    ],
    ids=["softmax", "other parts"],
)
def test_what_needs_all_of_a_concatenation_needs_all_of_its_parts(between, reason):
    draft = draft_of(Convolved(between))
    assert {draft.whole[name] for name in "qkv"} == {reason} and not draft.styles


class SplitTwice(nn.Module):
    """A gate and three parts, which are split after an operation on them together."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 + 8 + 12 + 4), nn.Linear(8, WIDTH)

    def forward(self, x):
        gate, others, time = self.up(x).split([8, 20, 4], -1)
        x, b = others.relu().split([8, 12], -1)
        x, b = x.unflatten(-1, (4, 2)), b.unflatten(-1, (4, 3))
        x = x * b.sum(-1, keepdim=True) * time[..., None]
        return self.down(x.flatten(2) * gate.sigmoid())


def test_parts_of_parts():
    draft = draft_of(SplitTwice())
    assert draft.styles == {"up": "colwise(heads*2 + heads*2 + heads*3 + heads*1)", "down": "rowwise(heads)"}


class Latents(nn.Module):
    """Attention whose keys and values are made of one latent, with a part of the key that all heads have; two of them
    in a layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([LatentAttention(), LatentAttention()])])

    def forward(self, x):
        return x + self.layers[0][1](x + self.layers[0][0](x))


class LatentAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.latent, self.norm = nn.Linear(WIDTH, 4 * 5), nn.Linear(WIDTH, 8), nn.LayerNorm(6)
        self.kv, self.out = nn.Linear(6, 4 * 7), nn.Linear(4 * 4, WIDTH)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 5)).transpose(1, 2)
        latent, shared = self.latent(x).split([6, 2], -1)
        k, v = self.kv(self.norm(latent)).unflatten(-1, (4, 7)).transpose(1, 2).split([3, 4], -1)
        k = torch.cat([k, shared[:, None].expand(-1, 4, -1, -1)], -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_what_all_heads_share_has_its_gradient_in_part_in_a_block_that_converts_its_input():
    styles = draft_of(Latents()).styles
    for block in ("layers.0.0", "layers.0.1"):
        assert styles[block] == "gather" and styles[f"{block}.kv"] == "colwise(heads)"
        assert styles[f"{block}.latent"] == styles[f"{block}.norm"] == "replicate(gradient=partial)"


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.factor


def test_a_parameter_of_full_activations_beside_sharded_linears_is_said_to_be_full():
    block = Block(input=Doubled())
    block.register_forward_pre_hook(lambda block, args: (block.input(*args),))
    styles = draft_of(block).styles
    assert styles == {"up": "colwise", "down": "rowwise", "input": "replicate(gradient=full)"}


class Rms(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class EpsInCode(Rms):
    """The style would compute with another eps."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-4) * self.weight


def test_a_norm_of_the_features_between_two_linears():
    """Its style takes the mean over ranks. A norm of what other norms have too, as the residual, is left alone."""
    block = Block(lambda block, x: block.norm(x), norm=Rms(INNER))
    assert draft_of(block).styles == {"up": "colwise", "norm": "rms_norm", "down": "rowwise"}
    draft = draft_of(Block(lambda block, x: block.norm(x), norm=EpsInCode(INNER)))
    assert draft.styles == {} and draft.whole["up"].startswith("a norm over it in norm: EpsInCode is not x * rsqrt(")
    twice = Block(lambda block, x: block.second(block.norm(x)), norm=Rms(INNER), second=Rms(INNER))
    assert whole_of(twice)["up"] == "mean in norm"


class Repeated(nn.Module):
    """Key/value heads that are repeated by an expand, whose size is an attribute."""

    def __init__(self):
        super().__init__()
        self.times, self.size = 3, 4
        self.q, self.k, self.out = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 8), nn.Linear(24, WIDTH)

    def forward(self, x):
        k = self.k(x).view(2, 5, -1, self.size)
        k = k[:, :, :, None].expand(2, 5, k.shape[2], self.times, self.size).flatten(2)
        return self.out(self.q(x) * k)


def test_an_attribute_that_is_the_ratio_of_heads_is_local():
    """The query heads are 6 and the key heads 2; below two ranks a head, the ratio is that of the local heads."""
    draft = draft_of(Repeated())
    assert draft.styles == {"q": "colwise(heads)", "k": "colwise(heads_2)", "out": "rowwise(heads)"}
    assert draft.local == {"": {"times": "heads/heads_2"}}


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda _, x: x.softmax(-1), "softmax in the model"),
        (lambda _, x: x.flip(-1), "flip in the model"),
        (lambda _, x: x + torch.arange(INNER), "arange, whose elements differ in the model"),
        (lambda _, x: torch.fft.fft(x).real, "_fft_r2c, for which there is no rule in the model"),
        (lambda _, x: x + TABLE, "a constant of the model's code"),
        (lambda _, x: x @ x.transpose(1, 2) @ x, "a matmul over it in the model"),
        (lambda block, x: x @ block.gate.weight, "a matmul over it in the model"),  # which its module does not run
        (lambda _, x: x[..., 3:].repeat(1, 1, 2)[..., :INNER], "a slice in the model"),  # a part of it is dropped
    ],
)
def test_what_needs_all_of_a_dim(between, reason):
    assert whole_of(Block(between, gate=nn.Linear(INNER, INNER)))["up"] == reason


def test_full_activations_with_a_gradient_beside_shards_are_refused():
    """Their gradient would be a sum over ranks that nobody makes."""

    class Beside(nn.Module):
        def __init__(self, gate):
            super().__init__()
            self.norm, self.gate = nn.LayerNorm(WIDTH), gate
            self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

        def forward(self, x):
            x = self.norm(x)
            return self.down(self.up(x) * self.gate(x))

    whole = whole_of(Beside(nn.Linear(WIDTH, 1)))
    assert whole["up"] == "mul in the model reads it beside a full tensor that has a gradient"
    assert draft_of(Beside(nn.Linear(WIDTH, INNER))).styles == {"gate": "colwise", "up": "colwise", "down": "rowwise"}


class Scaled(nn.Module):
    """Parameters among the shards: `by_head` has the sharded dim, `by_width` has not."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.by_head, self.by_width = nn.Parameter(torch.ones(6, 1)), nn.Parameter(torch.ones(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        x = self.up(x).view(2, 5, 6, 4)
        return self.down((self.norm(x) * self.by_head * self.by_width).flatten(2))


def test_parameters_among_shards():
    model = Scaled()
    analysis = analysis_of(model)
    choice = analysis.choose()
    assert choice.partial == {"by_width", "norm.weight", "norm.bias"}
    draft = Drafting(model, analysis, choice, {}, "").run()
    assert draft.styles["by_head"] == "shard(0, unit=heads*1)" and draft.styles["norm"] == "replicate(gradient=partial)"


def test_a_linear_is_a_column_or_a_row_linear():
    """Of three linears in a row the largest pair is sharded."""
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, WIDTH))
    draft = draft_of(model)
    assert draft.styles == {"2": "colwise", "4": "rowwise"}
    assert draft.whole == {"0": "no row linear sums over its output"}


def test_linears_that_are_not_to_be_sharded():
    draft = draft_of(Block(), without={"up"})
    assert draft.styles == {}
    assert draft.whole == {"up": "the proof failed with it sharded", "down": "the proof failed with up sharded"}


@pytest.mark.parametrize(
    ("groups", "styles"),
    [(1, {"up": "colwise", "conv": "rowwise"}), (2, {"up": "colwise", "conv": "shard(0)", "down": "rowwise"}), (3, {})],
)
def test_a_convolution_is_a_linear_over_channels(groups, styles):
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
            self.conv = nn.Conv1d(INNER, INNER, 3, padding=1, groups=groups)

        def forward(self, x):
            return self.down(self.conv(self.up(x).transpose(1, 2)).transpose(1, 2))

    draft = draft_of(Convolution())
    assert draft.styles == styles and (styles or draft.whole["up"] == "tp=2 does not divide its 3 units")


@pytest.mark.parametrize(("banned", "expected"), [(set(), "experts"), ({"experts"}, None)])
def test_stacked_weights_are_experts(banned, expected):
    class Experts(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.is_transposed = False  # an attribute that stacked experts of `transformers` have
            self.up, self.down = nn.Parameter(torch.ones(count, WIDTH, 8)), nn.Parameter(torch.ones(count, 8, WIDTH))

        def forward(self, x):
            return (x[:, None] @ self.up @ self.down).sum(1)

    model = nn.Sequential(Block())
    model.experts = Experts(6)
    model.token = nn.Parameter(torch.ones(1, 1, WIDTH))
    model.position = nn.Parameter(torch.ones(1, 5, WIDTH))
    analysis = analysis_of(model)
    draft = Drafting(model, analysis, analysis.choose(), {}, "", banned).run()
    assert draft.styles.get("experts") == expected and "" not in draft.styles
