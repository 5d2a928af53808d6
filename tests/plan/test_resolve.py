"""Resolving a plan on a model: every mistake is reported before anything is changed, with names and fixes."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallelize import PlanError
from parallelize.base.mesh import MeshSpec
from parallelize.plan.choose import choose_plan, plan_of
from parallelize.plan.model_facts import describe
from parallelize.plan.pattern import generic
from parallelize.plan.plan_file import load_plan, parse_plan, shipped_plans
from parallelize.plan.resolve import resolve
from tests.support.models import FAMILIES, SHIPPED, shipped_source, tiny_model


class Net(nn.Module):
    def __init__(self, heads: int = 4):
        super().__init__()
        self.heads, self.head_dim = heads, 3
        self.q, self.o = nn.Linear(8, 3 * heads), nn.Linear(3 * heads, 8)
        self.norm = nn.LayerNorm(8)


def plan(rules: str, more: str = ""):
    return parse_plan(f"schema_version: 1\ntensor_parallel:\n{rules}\n{more}", "p.yaml")


def slugs(text: str, model: nn.Module | None = None, tp: int = 2, more: str = "", **options) -> list[str]:
    with pytest.raises(PlanError) as error:
        chosen = plan(text, more).with_options(**{"sequence_parallel": None, "loss_parallel": None, **options})
        resolve(chosen, describe(model or Net()), MeshSpec(tp=tp))
    assert all(problem.what for problem in error.value.problems)
    return sorted(set(error.value.slugs))


ALL = "  q: colwise\n  o: rowwise\n  norm: replicate\n"


def test_mistakes_are_named():
    heads = ALL.replace("colwise", "colwise(h)")
    assert slugs(ALL + "  p: colwise") == ["unmatched-rule"]
    assert slugs(ALL + "  '{q,z}': colwise") == ["unmatched-rule"]
    assert slugs("  q: colwise\n  o: rowwise") == ["unclaimed-parameter"]
    assert slugs(ALL + "  '*': replicate") == ["overlapping-rules"]
    assert slugs(ALL + "  q.weight: shard") == ["overlapping-rules"]
    assert slugs(ALL.replace("norm: replicate", "norm: colwise")) == ["unclaimed-parameter", "wrong-module-for-style"]
    assert slugs(heads, tp=3, more="sizes: {h: heads}") == ["uneven-heads"]
    assert slugs(heads, more="sizes: {h: nowhere}") == ["missing-size"]
    assert slugs(heads, more="sizes: {h: 5}") == ["uneven-heads"]
    assert slugs(heads, more="sizes: {h: 10}") == ["indivisible-units"]
    assert slugs(ALL.replace("colwise", "colwise(chunks=5)")) == ["indivisible-units"]
    assert slugs(ALL, sequence_parallel=True) == ["no-region"]
    assert slugs(ALL, sequence_parallel=True, more="sequence_parallel: {layers: nope}") == ["no-region"]
    assert slugs(ALL, more="sizes: {h: heads}\nlocal: {norm: {x: h}}") == ["missing-attribute"]
    assert slugs(ALL, more="sizes: {h: heads}\nlocal: {nrm: {x: h}}") == ["unmatched-rule"]


def test_layers_that_are_skipped_at_random_may_not_reach_the_boundaries_of_a_region():
    model = Net()
    model.layers, model.config = nn.ModuleList([Net()]), SimpleNamespace(encoder_layerdrop=0.1)
    rules = "  layers.*.q: colwise\n  layers.*.o: rowwise\n  layers.*.norm: sequence\n  '**': replicate"
    region = "sequence_parallel: {layers: layers}"
    assert slugs(rules, model, more=region, sequence_parallel=True) == ["skipped-layers"]
    model.config.encoder_layerdrop = 0.0
    options = {"sequence_parallel": True, "loss_parallel": None}
    assert resolve(plan(rules, region).with_options(**options), describe(model), MeshSpec(tp=2)).regions


@pytest.mark.parametrize(
    ("family", "lists"), [("t5", ("encoder.block", "decoder.block")), ("llama", ("model.layers",))]
)
def test_an_encoder_and_a_decoder_have_a_region_each(family, lists):
    model = shipped_source(family).build("meta") if family in SHIPPED else tiny_model(family, torch.float32)
    with_regions = choose_plan(model)[0].with_options(sequence_parallel=True)
    resolved = resolve(with_regions, describe(model), MeshSpec(tp=2))
    assert [region.enter for region in resolved.regions] == [f"{name}.0" for name in lists]
    assert (with_regions.layers_region is None) == (len(lists) > 1)  # of which none has the layers of a pipeline
    if family == "t5":
        model.decoder = None
        alone = resolve(with_regions, describe(model), MeshSpec(tp=2))
        assert [region.enter for region in alone.regions] == ["encoder.block.0"]


def test_a_rule_without_heads_must_not_split_a_head():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Net(heads=5)

    text = "  attn.q: colwise\n  attn.o: rowwise\n  attn.norm: replicate"
    assert slugs(text, Parent()) == ["uneven-heads"]


def test_misspelt_rules_suggest_the_right_name():
    with pytest.raises(PlanError, match=r"did you mean norm"):
        resolve(plan(ALL.replace("norm:", "nrom:")), describe(Net()), MeshSpec(tp=2))


def test_optional_rules_may_match_nothing():
    resolve(plan(ALL + "  p?: colwise"), describe(Net()), MeshSpec(tp=2))


def test_rules_of_tied_parameters_must_agree():
    model = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    assert slugs("  embed: embedding_colwise\n  head: colwise", model) == ["broken-tie"]
    rows = resolve(plan("  embed: embedding\n  head: colwise"), describe(model), MeshSpec(tp=3)).parameters
    assert rows["embed.weight"].fact.names == ("embed.weight", "head.weight")


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_plans_resolve_on_meta_models(family, tp):
    with torch.device("meta"):
        model = tiny_model(family)
    resolved = resolve(
        load_plan(family).with_options(sequence_parallel=True, loss_parallel=True), describe(model), MeshSpec(tp=tp)
    )
    assert set(resolved.parameters) == {name for name, _ in model.named_parameters()}
    sharded = sum(p.numel() for n, p in model.named_parameters() if resolved.parameters[n].layout.dim is not None)
    assert sharded > 0.8 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bare_base_model_is_served_too(family):
    model = tiny_model(family)
    base = getattr(model, model.base_model_prefix)
    resolve(load_plan(family), describe(base), MeshSpec(tp=2))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_dropped_is_noticed(family):
    """Negative control: without any one of its rules a shipped plan no longer resolves, or resolves to something
    else."""
    from dataclasses import replace

    model = describe(tiny_model(family, num_key_value_heads=2) if family in ("llama", "phi3") else tiny_model(family))
    plan = load_plan(family).with_options(sequence_parallel=True, loss_parallel=None)
    expected = resolve(plan, model, MeshSpec(tp=4))
    for rule in plan.rules:
        fewer = replace(plan, rules=tuple(r for r in plan.rules if r is not rule))
        try:
            actual = resolve(fewer, model, MeshSpec(tp=4))
        except PlanError:
            continue
        assert rule.optional or {n: r.contract for n, r in actual.modules.items()} != {
            n: r.contract for n, r in expected.modules.items()
        }


def test_plans_are_chosen_by_model():
    assert choose_plan(tiny_model("qwen3"))[0].name == "qwen3"

    class Config:
        model_type = "lama"

    class Unknown(nn.Module):
        config = Config()

    with pytest.raises(PlanError) as error:
        choose_plan(Unknown())
    assert error.value.slugs == ("no-plan-for-model",) and "llama" in str(error.value)


def test_a_model_of_ones_own_without_a_plan_is_told_of_derivation():
    with pytest.raises(PlanError) as error:
        choose_plan(Net())
    text = str(error.value)
    assert 'plan="auto"' in text and "plans derive" in text and not any(kind in text for kind in ("None", "convnext"))


def test_every_model_type_has_one_plan():
    seen = [kind for name in shipped_plans() for kind in load_plan(name).model_types]
    assert len(seen) == len(set(seen))


def test_resolving_changes_nothing():
    model = tiny_model("phi3")
    before = copy.deepcopy({k: v for k, v in vars(model.model.layers[0].self_attn).items() if isinstance(v, int)})
    resolve(load_plan("phi3"), describe(model), MeshSpec(tp=2))
    assert before == {k: v for k, v in vars(model.model.layers[0].self_attn).items() if isinstance(v, int)}


class Towers(nn.Module):
    """Two towers, of which a plan shards a part, and a head that is tied to the first table."""

    def __init__(self):
        super().__init__()
        self.vision = nn.ModuleDict({"patch": nn.Conv2d(3, 8, 2), "net": Net(), "norm": nn.LayerNorm(8)})
        self.text = nn.ModuleDict({"table": nn.Embedding(10, 8), "net": Net()})
        self.scale, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, 10, bias=False)
        self.head.weight = self.text["table"].weight


TEXT = "  text.table: embedding\n  head: colwise(output=full)\n  text.net.q: colwise\n  text.net.o: rowwise\n"


def styles_of(rules: str) -> dict[str, str]:
    """The style of each parameter."""
    resolved = resolve(plan(rules).with_options(), describe(Towers()), MeshSpec(tp=2))
    return {name: str(row.rule.style) for name, row in resolved.parameters.items()}


def test_a_default_rule_claims_what_no_other_rule_does():
    styles = styles_of(TEXT + "  '**': replicate\n  text.**: sequence\n")
    assert styles.pop("text.table.weight") == "embedding"
    assert styles.pop("text.net.q.weight") == styles.pop("text.net.q.bias") == "colwise"
    assert styles.pop("text.net.o.weight") == styles.pop("text.net.o.bias") == "rowwise"
    assert styles.pop("text.net.norm.weight") == styles.pop("text.net.norm.bias") == "sequence"  # the inner default
    assert set(styles.values()) == {"replicate"} and {"scale", "vision.patch.weight"} <= styles.keys()


def test_default_rules_that_claim_nothing_are_mistakes_unless_optional():
    rest = "  vision.**: replicate\n  scale: replicate\n  text.net.norm: replicate\n"
    assert slugs(TEXT + rest + "  text.**: replicate", Towers()) == ["unmatched-rule"]
    assert slugs(TEXT + rest + "  audio.**: replicate", Towers()) == ["unmatched-rule"]
    assert "sequence" not in styles_of(TEXT + rest + "  text.**?: sequence\n").values()
    assert slugs(TEXT + "  vision.**: replicate", Towers()) == ["unclaimed-parameter"]
    assert slugs(TEXT + "  '**.norm': replicate", Towers()) == ["bad-pattern"]
    untied = TEXT.replace("  head: colwise(output=full)\n", "")
    # no default for a part of a sharded table
    assert slugs(untied + "  '**': replicate", Towers()) == ["unplanned-tie"]


def test_a_pattern_of_a_default_rule_may_have_alternatives_and_wildcards():
    styles = styles_of(TEXT + "  '{vision,text}.**': replicate\n  scale: replicate\n")
    assert styles["vision.net.q.weight"] == "replicate"
    assert styles_of(TEXT + "  'v*.**': replicate\n  text.*.norm: replicate\n  scale: replicate\n") == styles


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_wrapped_model_is_named(depth):
    model = Net()
    for _ in range(depth):
        model = Wrapper(model)
    assert slugs(ALL, model) == ["wrapped-model"]
    inner = ".".join(["inner"] * depth)
    with pytest.raises(PlanError, match=f"is for {inner}, which a Wrapper wraps"):
        resolve(plan(ALL).with_options(), describe(model), MeshSpec(tp=2))
    assert slugs(ALL, Wrapper(nn.Linear(2, 2))) == ["wrong-plan"]


def in_order(**styles: str):
    """A list of parts of an `nn.Sequential`, with rules by their position, resolved."""
    parts = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.PReLU(), nn.Linear(12, 8), nn.PReLU())
    rules = {name.removeprefix("_"): style for name, style in styles.items()}
    wrapped = {f"1.{name}": style for name, style in rules.items()}
    for model, named in ((parts, rules), (nn.Sequential(nn.Linear(8, 8), parts), wrapped)):
        yield resolve(plan_of(model, named), describe(model), MeshSpec(tp=2))


def test_what_a_dict_leaves_out_of_a_sequential_is_judged_by_its_place():
    """A norm before the column linear runs on full activations; an activation with a weight after it does not."""
    for resolved in in_order(_1="colwise", _2="replicate(gradient=partial)", _3="rowwise"):
        assert sum(row.partial for row in resolved.parameters.values()) == 1
    for styles in ({"_1": "colwise", "_3": "rowwise"}, {"_1": "colwise", "_3": "rowwise", "_0": "replicate"}):
        with pytest.raises(PlanError, match=r"unclaimed-between-shards: no rule claims 2\.weight") as error:
            list(in_order(**styles))
        assert len(error.value.problems) == 1


def test_modules_that_have_numbers_alone_are_named_by_them():
    assert generic("layers.3.mlp.up.weight") == "layers.*.mlp.up.weight" and generic("1.0.weight") == "1.0.weight"
