"""Plans that fit names and shapes, and would compute something else: each is refused before anything runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from parallelize import ModelError, ParallelizeError, PlanError, load_plan
from parallelize.axes.tensor.layers.norms import check_rms_norm
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.resolve import resolve
from parallelize.plan.styles.notation import parse_style
from tests.support.models import tiny_model

LAYER = "model.layers.*."
SWAPS = [
    ("phi3", LAYER + "self_attn.qkv_proj", "colwise(heads + kv_heads + kv_heads, output=full)", "packed-edge"),
    ("phi3", LAYER + "mlp.gate_up_proj", "colwise(chunks=2, output=full)", "packed-edge"),
    ("phi3", LAYER + "mlp.gate_up_proj", "colwise", "widths-do-not-meet"),
    ("phi3", LAYER + "self_attn.qkv_proj", "colwise(chunks=3)", "unused-size"),
    ("gpt2", "transformer.h.*.attn.c_attn", "colwise", "units-do-not-meet"),
    ("llama", LAYER + "self_attn.{k,v}_proj", "replicate", "unused-size"),
    ("llama", LAYER + "input_layernorm", "replicate", "replicated-in-region"),
    ("llama", LAYER + "input_layernorm", "replicate(gradient=partial)", "partial-without-shards"),
    ("llama", LAYER + "input_layernorm", "shard", "shard-on-module"),
    ("llama", "model.norm", "shard", "shard-on-module"),
    ("llama", LAYER + "mlp.down_proj", "colwise", None),
    ("llama", "lm_head", "colwise", "no-vocabulary-output"),
    ("qwen3", LAYER + "self_attn.{q,k}_norm", "replicate", "unclear-gradient"),
    ("qwen3", LAYER + "self_attn.{q,k}_norm", "sequence", "unclear-gradient"),
    ("olmo2", LAYER + "self_attn.q_norm", "shard", "shard-on-module"),
    ("gpt2", "transformer.wpe", "shard", "shard-on-module"),
    ("gpt2", "transformer.wpe", "replicate(gradient=partial)", "partial-without-shards"),
    ("bert", "bert.embeddings.{position_embeddings,token_type_embeddings,LayerNorm}", "shard", "shard-on-module"),
]


def swapped(family: str, pattern: str, style: str):
    plan = load_plan(family)
    assert any(rule.pattern == pattern for rule in plan.rules), pattern
    rules = tuple(replace(r, style=parse_style(style)) if r.pattern == pattern else r for r in plan.rules)
    return replace(plan, rules=rules)


@pytest.mark.parametrize(("family", "pattern", "style", "slug"), [s for s in SWAPS if s[3]])
def test_a_swapped_style_is_named(family, pattern, style, slug):
    chosen = swapped(family, pattern, style).with_options(
        sequence_parallel=slug != "partial-without-shards", loss_parallel=True
    )
    with pytest.raises(ParallelizeError) as error:
        resolve(chosen, describe(tiny_model(family)), MeshSpec(tp=2))
    assert slug in error.value.slugs, error.value


def test_a_count_that_does_not_become_local():
    plan = replace(load_plan("bert"), local=())
    with pytest.raises(PlanError) as error:
        resolve(plan, describe(tiny_model("bert")), MeshSpec(tp=2))
    assert set(error.value.slugs) == {"count-left-whole"} and "num_attention_heads: heads" in str(error.value)


def test_the_order_of_packed_units_is_that_of_the_forward():
    """Keys and values may come before queries, which the row linear sums over: the trace of the forward tells."""
    resolve(
        swapped("phi3", LAYER + "self_attn.qkv_proj", "colwise(kv_heads + kv_heads + heads)"),
        describe(tiny_model("phi3")),
        MeshSpec(tp=2),
    )


def test_packed_units_of_which_none_is_that_of_the_rows():
    text = """schema_version: 1
sizes: {kv_heads: 2, heads: 4}
tensor_parallel: {up: colwise(kv_heads + kv_heads), down: rowwise(heads)}
"""
    with pytest.raises(PlanError) as error:
        resolve(
            parse_plan(text), describe(nn.ModuleDict(dict(up=nn.Linear(8, 16), down=nn.Linear(16, 8)))), MeshSpec(tp=2)
        )
    assert "units-do-not-meet" in error.value.slugs


class OneNumberForEachHead(nn.Module):
    """As many heads as they are wide: 4 of 4."""

    def __init__(self):
        super().__init__()
        self.head_dim = 4
        self.decay = nn.Parameter(torch.ones(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


def test_numbers_for_heads_that_are_as_many_as_they_are_wide():
    """As in Mamba 2 of 1.3 billion parameters: 64 heads of 64. A rule of `heads` alone is refused."""
    text = """schema_version: 1
sizes: {heads: 4}
tensor_parallel: {up: colwise(heads), down: rowwise(heads), decay: "shard(0, unit=heads*1)"}
"""
    rows = resolve(parse_plan(text), describe(OneNumberForEachHead()), MeshSpec(tp=2)).parameters
    assert rows["decay"].layout.local_shape(1) == (2,)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.odd = 4, 6
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.down(self.up(x) * self.scale)


def slugs(text: str, model: nn.Module, tp: int = 2, **options) -> set[str]:
    plan = parse_plan("schema_version: 1\n" + text, "p.yaml")
    with pytest.raises(ParallelizeError) as error:
        resolve(
            plan.with_options(**{"sequence_parallel": None, "loss_parallel": None, **options}),
            describe(model),
            MeshSpec(tp=tp),
        )
    return set(error.value.slugs)


def test_contraction_over_shared_units():
    text = (
        "sizes: {kv: {from: 2, below_tp: replicate}}\ntensor_parallel: {up: colwise(kv), down: rowwise(kv), scale: "
        "'shard(0, unit=kv)'}"
    )
    assert slugs(text, Block(), tp=4) == {"shared-contraction"}
    resolve(parse_plan("schema_version: 1\n" + text), describe(Block()), MeshSpec(tp=2))


def test_an_attribute_that_does_not_divide():
    text = (
        "sizes: {h: 4}\ntensor_parallel: {up: colwise(h), down: rowwise(h), scale: 'shard(0, unit=h)'}\nlocal: {b: "
        "{odd: h}}"
    )
    model = nn.ModuleDict({"b": Block()})
    text = text.replace("up:", "b.up:").replace("down:", "b.down:").replace("scale:", "b.scale:")
    assert slugs(text, model, tp=4) == {"uneven-attribute"}


@pytest.mark.parametrize(
    "inside", [{"up": "colwise", "down": "rowwise"}, {"scale": "replicate(gradient=partial)"}, {"up": "replicate"}]
)
def test_a_gathered_block_in_which_nothing_is_sharded(inside):
    """The gradient of its input would be summed over ranks of which each has all of it."""
    model = nn.ModuleDict({"b": nn.ModuleDict({"c": Block()})})
    styles = {"up": "replicate", "down": "replicate", "scale": "replicate", **inside}
    rules = "".join(f"  b.c.{name}: {style}\n" for name, style in styles.items())
    plan = parse_plan(f"schema_version: 1\ntensor_parallel:\n  b: gather\n{rules}")
    if "replicate" not in inside.values():
        resolve(plan, describe(model), MeshSpec(tp=2))
        return
    with pytest.raises(PlanError) as error:
        resolve(plan, describe(model), MeshSpec(tp=2))
    assert error.value.slugs == ("gather-without-shards",)


@pytest.mark.parametrize(("up", "down"), [("colwise", "rowwise"), ("replicate", "replicate")])
def test_a_parameter_of_a_block_that_has_shards_may_have_a_partial_gradient(up, down):
    model = nn.ModuleDict({"b": Block()})
    plan = parse_plan(
        f"schema_version: 1\ntensor_parallel: {{b: replicate(gradient=partial), b.up: {up}, b.down: {down}}}"
    )
    if up == "colwise":
        assert resolve(plan, describe(model), MeshSpec(tp=2)).parameters["b.scale"].partial
        return
    with pytest.raises(PlanError, match="partial-without-shards"):
        resolve(plan, describe(model), MeshSpec(tp=2))


def test_a_region_whose_first_module_converts_its_own_input():
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])})
    text = (
        "sequence_parallel: {layers: layers}\ntensor_parallel: {layers.*: gather, layers.*.up: colwise, layers.*.down: "
        "rowwise, layers.*.scale: shard}"
    )
    assert slugs(text, model, sequence_parallel=True) == {"region-on-edge"}


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1))
        self.power = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("activation", [nn.PReLU, Learned])
@pytest.mark.parametrize("gather", ["b: gather, ", ""])
@pytest.mark.parametrize("style", ["replicate", "sequence"])
def test_a_learned_activation_between_shards_must_say_what_its_gradient_is(activation, gather, style):
    model = nn.ModuleDict({"b": nn.ModuleDict({"up": nn.Linear(8, 16), "act": activation(), "down": nn.Linear(16, 8)})})
    text = "tensor_parallel: {" + gather + "b.up: colwise, b.down: rowwise, b.act: "
    assert slugs(f"{text}{style}}}", model) == {"unclear-gradient"}
    for gradient in ("partial", "full"):
        plan = parse_plan(f"schema_version: 1\n{text}replicate(gradient={gradient})}}")
        resolve(plan, describe(model), MeshSpec(tp=2))


def test_a_linear_or_norm_beside_shards_outside_of_a_gather_needs_no_word_on_its_gradient():
    model = nn.ModuleDict(
        {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "head": nn.Linear(8, 3)}
    )
    text = "schema_version: 1\ntensor_parallel: {'{norm,head}': replicate, up: colwise, down: rowwise}"
    resolve(parse_plan(text), describe(model), MeshSpec(tp=2))


def test_a_parameter_among_sharded_siblings_without_a_rule_in_a_translated_plan():
    plan = replace(
        parse_plan("schema_version: 1\ntensor_parallel: {up: colwise, down: rowwise}"), on_unclaimed="replicate"
    )
    model = nn.Module()
    model.b = Block()
    plan = replace(plan, rules=tuple(replace(r, pattern="b." + r.pattern) for r in plan.rules))
    with pytest.raises(PlanError) as error:
        resolve(plan, describe(model), MeshSpec(tp=2))
    assert error.value.slugs == ("unclaimed-between-shards",)


def test_a_norm_with_another_formula_is_not_taken_for_rms():
    check_rms_norm(nn.RMSNorm(8), "n")
    for norm in (tiny_model("gemma2").model.norm, EpsInCode(8), EpsOutside(8)):
        with pytest.raises(ModelError) as error:
            check_rms_norm(norm, "n")
        assert error.value.slugs == ("not-rms-norm",)


class EpsInCode(nn.RMSNorm):
    """A number that no attribute has: on small inputs it is most of the norm."""

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight


class EpsOutside(nn.RMSNorm):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6) * self.weight


@pytest.mark.parametrize("query", ["colwise(heads)", "replicate"])
def test_a_row_linear_in_a_list_sums_over_the_shards_beside_it(query):
    """`to_out.0` is beside the norm as `to_out` would be, so that the norm's gradient may be partial."""
    model = nn.Module()
    model.to_q, model.norm, model.to_out = nn.Linear(8, 12), nn.LayerNorm(3), nn.ModuleList([nn.Linear(12, 8)])
    is_sharded = query != "replicate"
    rules = {"to_q": query, "norm": "replicate(gradient=partial)"}
    rules["to_out.0"] = "rowwise(heads)" if is_sharded else "replicate"
    text = "".join(f"  {name}: {style}\n" for name, style in rules.items())
    head = "schema_version: 1\n" + ("sizes: {heads: 4}\n" if is_sharded else "")
    plan = parse_plan(f"{head}tensor_parallel:\n{text}", "p.yaml")
    if is_sharded:
        resolve(plan, describe(model), MeshSpec(tp=2))
    else:
        with pytest.raises(ParallelizeError, match="partial-without-shards"):
            resolve(plan, describe(model), MeshSpec(tp=2))
