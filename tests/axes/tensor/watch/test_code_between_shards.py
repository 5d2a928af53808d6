"""Blocks whose code computes something else on shards of features: refused by name, by plan and by PyTorch's dicts."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parallelize import ParallelizeError, build_mesh, parallelize_module
from parallelize.plan.plan_file import parse_plan
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

WIDTH = 8


class Block(nn.Module):
    """A column linear `up`, a row linear `down`, and what a subclass does between them."""

    def __init__(self, between: nn.Module | None = None, inner: int = 16, summed: int = 16):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(summed, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.act = between or nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x)))) * self.scale


class Chunked(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class SplitByFunction(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        gate, up = torch.split(h, h.shape[-1] // 2, 2)
        return self.down(F.silu(gate) * up)


class Gated(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.glu(self.act(self.up(x))))


class Sliced(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h[..., : h.shape[-1] // 2])


class Softmax(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.softmax(self.act(self.up(x)), dim=-1))


class Normalized(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(x))
        h = F.normalize(h, dim=-1) + h
        return self.down(h)


class Centered(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = h - h.mean(-1, keepdim=True)
        return self.down(h)


class Normed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(F.layer_norm(h, h.shape[-1:]))


class Heads(Block):
    """Norms and parts of each head alone, of which a rank has all features: right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).view(*x.shape[:-1], -1, 4)
        first, second = F.normalize(h, dim=-1).chunk(2, dim=-1)
        return self.down(torch.cat((second, first), -1).flatten(-2))


class After(Block):
    """The same functions on what the row linear returns: right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = self.down(h)
        first, second = F.softmax(h, dim=-1).chunk(2, dim=-1)
        return torch.cat((second, first), -1) * self.scale


class Never(Block):
    """Code that does not run in this model."""

    packed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.packed:
            first, second = h.chunk(2, dim=-1)
            h = torch.cat((second, first), -1)
        return self.down(h)


class Scaled(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.scale)


class NormedHeads(Block):
    """As `q_norm` of some attentions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x).view(*x.shape[:-1], -1, WIDTH)).flatten(-2))


STYLES = {"b.up": ColwiseParallel(), "b.down": RowwiseParallel()}
WORDS = {"b.up": "colwise", "b.down": "rowwise", "b.norm": "replicate", "b.act": "replicate", "b.scale": "replicate"}
FORMS = {"dict of styles": STYLES, "plan": WORDS}


def without_empty(plan, model: nn.Module):
    """A plan without a rule for an activation that has no parameters."""
    if not isinstance(plan, dict) or any(name.startswith("b.act.") for name, _ in model.named_parameters()):
        return plan
    return {name: style for name, style in plan.items() if name != "b.act"}


def outcome(make, plan, backward: bool = True):
    """The slugs of the error of each rank; or None, after a comparison of outputs with the unsharded model."""
    torch.manual_seed(0)
    reference = nn.ModuleDict({"b": make()}).double()
    state, x = reference.state_dict(), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    expected = reference["b"](x)

    def body(rank: int):
        model = nn.ModuleDict({"b": make()}).double()
        model.load_state_dict(state)
        try:
            parallelize_module(model, build_mesh("cpu", tp=2), without_empty(plan, model))
            with nullcontext() if backward else torch.no_grad():
                out = model["b"](x)
        except ParallelizeError as error:
            return error.slugs
        assert (out - expected).abs().max() < 1e-12
        return None

    first, second = run_ranks(2, body)
    assert first == second
    return first


BY_HEADS = """
schema_version: 1
sizes: {heads: 4}
tensor_parallel: {b.up: colwise(heads), b.down: rowwise(heads), "b.{norm,scale}": replicate}
"""


@pytest.mark.parametrize("plan", [STYLES, parse_plan(BY_HEADS)], ids=["dict of styles", "plan by heads"])
@pytest.mark.parametrize("block", [Chunked, SplitByFunction, Gated, Sliced])
def test_features_that_are_cut_into_parts_are_refused(block, plan):
    assert outcome(lambda: block(summed=8), plan)[:1] == ("divided-features",)


@pytest.mark.parametrize("plan", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("block", [Softmax, Normalized, Centered, Normed])
def test_functions_over_all_features_are_refused(block, plan):
    assert outcome(block, plan)[:1] == ("mixed-features",)


@pytest.mark.parametrize("block", [Block, Heads, After, Never])
def test_what_is_right_on_shards_is_not_refused(block):
    assert outcome(block, STYLES) is None
    assert outcome(block, WORDS) is None


def test_packed_rules_are_not_refused():
    assert outcome(lambda: Chunked(summed=8), {**WORDS, "b.up": "colwise(chunks=2)"}) is None


@pytest.mark.parametrize(
    "make",
    [Scaled, NormedHeads, lambda: Block(nn.PReLU()), lambda: Block(nn.Sequential(nn.Tanh(), nn.PReLU()))],
    ids=["scale", "norm of heads", "activation", "activation inside"],
)
def test_parameters_between_shards_that_no_style_names_serve_for_inference_only(make):
    assert outcome(make, STYLES) == ("unclaimed-between-shards",)
    assert outcome(make, STYLES, backward=False) is None
    assert "unclear-gradient" in outcome(make, WORDS)


def test_frozen_parameters_between_shards_are_not_refused():
    def make():
        block = Scaled()
        block.scale.requires_grad_(False)
        return block

    assert outcome(make, STYLES) is None and outcome(make, WORDS) is None


class Inner(nn.Module):
    """Its row linear sums over the features that it gets, and adds its bias to the sum."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 12), nn.Linear(12, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def test_a_row_linear_in_a_child_between_shards_is_not_refused():
    words = {name: style for name, style in WORDS.items() if name != "b.act"}
    rules = {**words, "b.act.first": "rowwise", "b.act.second": "colwise"}
    assert outcome(lambda: Block(Inner()), rules) is None


def test_the_children_of_a_sequence_are_called_in_order():
    styles = {"b.0": ColwiseParallel(), "b.2": RowwiseParallel()}

    def make():
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.PReLU(), nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH))

    assert outcome(make, styles) == ("unclaimed-between-shards",)
    assert outcome(make, styles, backward=False) is None


def test_stock_models():
    attention = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    attention["model.layers.*.self_attn.o_proj"] = RowwiseParallel()
    packed = {"model.layers.*.mlp.gate_up_proj": ColwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()}

    models = {family: [tiny_model(family) for _ in range(2)] for family in ("qwen3", "phi3", "llama")}

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", tp=2)
        with pytest.raises(ParallelizeError) as error:
            parallelize_module(models["qwen3"][rank], mesh, attention)(input_ids=tiny_batch()[0])
        assert error.value.slugs == ("unclaimed-between-shards",) and "q_norm" in str(error.value)
        with pytest.raises(ParallelizeError) as error:
            parallelize_module(models["phi3"][rank], mesh, packed)
        assert error.value.slugs == ("divided-features",) and "gate_up_proj" in str(error.value)
        parallelize_module(models["llama"][rank], mesh, attention)(input_ids=tiny_batch()[0])

    run_ranks(2, body)
