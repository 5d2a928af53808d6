"""Chunks of several widths, chunks that repeat, attributes that are sums, and sections for some of the models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize import PlanError
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.resolve import resolve


class Config:
    heads, head_dim, groups, state, packed, shared = 4, 6, 2, 5, True, False


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.width = 4 * 6 + 2 * 5
        self.up, self.down = nn.Linear(8, self.width + 4), nn.Linear(24, 8)


class Model(nn.Module):
    def __init__(self, **values):
        super().__init__()
        self.config = Config()
        vars(self.config).update(values)
        self.mixer = Mixer()


SIZES = "sizes: {heads: heads, head_dim: head_dim, groups: {from: groups, below_tp: replicate}, state: state}\n"
UP = "mixer.up: colwise(heads*head_dim + groups*state + heads)"
LOCAL = "local: {mixer: {width: heads*head_dim + groups*state}}\n"


def resolved(text: str, tp: int, **values):
    plan = parse_plan(f"schema_version: 1\n{text}", "p.yaml")
    with torch.device("meta"):
        return resolve(plan, describe(Model(**values)), MeshSpec(tp=tp), Options(sequence_parallel=False))


def rules(up: str = UP) -> str:
    return SIZES + f"tensor_parallel:\n  {up}\n  mixer.down: rowwise(heads)\n"


def test_each_chunk_has_its_own_width():
    rows = resolved(rules() + LOCAL, 2)
    assert rows.parameters["mixer.up.weight"].layout.owned[1] == ((12, 24), (29, 34), (36, 38))
    assert rows.attributes == {"mixer": {"width": 2 * 6 + 5}}


def test_groups_that_several_ranks_store():
    rows = resolved(rules() + LOCAL, 4)
    layout = rows.parameters["mixer.up.weight"].layout
    assert layout.owned[1] == ((6, 12), (24, 29), (35, 36)) and layout.owned[2][1] == (29, 34)
    assert layout.shared(1) == ((6, 11, (0, 1)),) and rows.attributes == {"mixer": {"width": 6 + 5}}


def of_up(style: str, sizes: tuple[str, ...] = ("heads", "head_dim")) -> str:
    """A plan with a style of `up`, which has 38 features, and with the sizes that it names."""
    named = ", ".join(f"{name}: {name}" for name in sizes if name in style)
    return f"sizes: {{{named}}}\ntensor_parallel:\n  mixer.up: {style}\n  mixer.down: replicate\n"


@pytest.mark.parametrize(
    ("style", "owned"),
    [
        ("colwise(heads*head_dim + rest)", ((12, 24), (31, 38))),
        ("colwise(rest + heads*head_dim)", ((7, 14), (26, 38))),
        ("colwise(heads*head_dim + rest + rest)", ((12, 24), (28, 31), (35, 38))),  # 4 and 3 of each seven
        ("colwise(heads + rest)", ((2, 4), (21, 38))),  # one feature for each head
        ("colwise(heads*3 + rest, chunks=2)", ((3, 6), (13, 19), (22, 25), (32, 38))),
        ("colwise(rest)", ((19, 38),)),
    ],
)
def test_the_rest_of_a_dim_is_a_chunk(style, owned):
    assert resolved(of_up(style), 2).parameters["mixer.up.weight"].layout.owned[1] == owned


@pytest.mark.parametrize(
    ("style", "slug"),
    [
        ("colwise(heads*10 + rest)", "indivisible-units"),  # 40 of 38
        ("colwise(heads*7 + rest + rest + rest)", "indivisible-units"),  # 10 in three
        ("colwise(heads*rest)", "unknown-size"),
    ],
)
def test_a_rest_that_is_none(style, slug):
    with pytest.raises(PlanError) as error:
        resolved(of_up(style), 2)
    assert slug in error.value.slugs, str(error.value)


def test_a_size_called_rest_counts():
    text = of_up("colwise(rest)").replace("sizes: {}", "sizes: {rest: 19}")
    with pytest.raises(PlanError, match="uneven-heads"):
        resolved(text, 2)


def test_a_row_linear_over_the_rest_meets_columns_without_units():
    text = "sizes: {heads: heads}\ntensor_parallel:\n  mixer.up: colwise\n  mixer.down: rowwise(heads*2 + rest)\n"
    layout = resolved(text, 2).parameters["mixer.down.weight"].layout
    assert layout.owned == (((0, 4), (8, 16)), ((4, 8), (16, 24)))


def test_chunks_that_repeat_have_a_part_of_all_units():
    text = "sizes: {h: 8}\ntensor_parallel:\n  mixer.up: replicate\n  mixer.down: rowwise(h, chunks=2)\n"
    assert resolved(text, 2).parameters["mixer.down.weight"].layout.owned[0] == ((0, 6), (12, 18))
    text = text.replace("h: 8", "h: 6")
    with pytest.raises(PlanError, match="uneven-heads"):  # three heads in each chunk, over two ranks
        resolved(text, 2)


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        (rules(UP.replace(" + heads)", ")")), "indivisible-units"),
        (rules() + LOCAL.replace("*state", "*head_dim"), "uneven-attribute"),
        (rules() + LOCAL.replace("width:", "with:"), "missing-attribute"),
        (rules().replace("state: state", "state: nowhere"), "missing-size"),
        (rules() + "local_inputs:\n  mixr:\n    bias: shard(0, unit=heads)\n", "unmatched-rule"),
        (rules() + "local: {mixer.act: {width: 'heads, elsewhere=full'}}\n", "unmatched-rule"),
        (rules() + "when: {packed: {tensor_parallel: {mixer.up.bias: replicate}}}", "overlapping-rules"),
    ],
)
def test_mistakes_in_a_model(text, slug):
    with pytest.raises(PlanError) as error:
        resolved(text, 2)
    assert slug in error.value.slugs, str(error.value)


class Gated(nn.Module):
    """Attention of six heads of six features, so that six features may be a head, or a gate of each head."""

    def __init__(self):
        super().__init__()
        self.head_dim = 6
        self.q, self.o, self.gate = nn.Linear(8, 36), nn.Linear(36, 8), nn.Linear(8, 6)
        self.sinks = nn.Parameter(torch.ones(6))


@pytest.mark.parametrize("name", ["gate", "sinks"])
@pytest.mark.parametrize(
    ("unit", "slug"), [("heads", "uneven-heads"), ("heads*1", ""), ("heads*2", "indivisible-units")]
)
def test_one_feature_for_each_head_has_a_width_in_its_rule(name, unit, slug):
    styles = {"gate": "colwise(heads*1)", "sinks": "shard(0, unit=heads*1)"}
    styles[name] = styles[name].replace("heads*1", unit)
    rules = ", ".join(f"a.{key}: '{style}'" for key, style in styles.items())
    text = f"sizes: {{heads: 6}}\ntensor_parallel: {{a.q: colwise(heads), a.o: rowwise(heads), {rules}}}"
    model = describe(nn.ModuleDict({"a": Gated()}))
    plan = parse_plan(f"schema_version: 1\n{text}", "p.yaml")
    if slug:
        with pytest.raises(PlanError, match=slug):
            resolve(plan, model, MeshSpec(tp=2))
        return
    key = "a.gate.weight" if name == "gate" else "a.sinks"
    assert resolve(plan, model, MeshSpec(tp=2)).parameters[key].layout.owned[1] == ((3, 6),)


CASES = (
    SIZES
    + """tensor_parallel:
  mixer.down: rowwise(heads)
when:
  packed and not shared:
    tensor_parallel:
      mixer.up: colwise(heads*head_dim + groups*state + heads)
  shared:
    tensor_parallel:
      mixer.up: colwise(output=full)
      mixer.down.bias: replicate
"""
)


def test_sections_for_some_of_the_models():
    assert str(resolved(CASES, 2).modules["mixer.up"].rule.style).startswith("colwise(heads*head_dim")
    with pytest.raises(PlanError, match="overlapping-rules"):
        resolved(CASES, 2, shared=True)
    with pytest.raises(PlanError, match="unclaimed-parameter"):
        resolved(CASES, 2, packed=False)


@pytest.mark.parametrize(
    ("text", "slug", "position"),
    [
        ("when: {'a or b': {}}", "bad-condition", ":3:8"),
        ("when: {a: {pipeline: {}}}", "unknown-key", ":3:12"),
        ("when: {a: {tensor_parallel: {b: colwise(h)}}}", "unknown-size", ":3:"),
        ("local_inputs: {a: {b: replicate}}", "bad-value", ":3:23"),
        ("local_inputs: {a: {b: 'shard(0, unit=h)'}}", "unknown-size", ":3:23"),
        ("local_inputs: {a: {b: 'width(h)'}}", "unknown-size", ":3:23"),
        ("local_inputs: {a: {b: 'width(h, 2)'}}", "bad-value", ":3:23"),
        ("local_inputs: {a: {b: 'width(h, elsewhere=full)'}}", "unknown-size", ":3:23"),
        ("local_inputs: {a: {b: 'width(h, elsewhere=local)'}}", "bad-value", ":3:23"),
        ("local: {a: {n: 'h, elsewhere=full'}}", "unknown-size", ":3:16"),
        ("local: {a: {n: h*w + g}}", "unknown-size", ":3:16"),
    ],
)
def test_mistakes_in_a_file(text, slug, position):
    with pytest.raises(PlanError) as error:
        parse_plan(f"schema_version: 1\ntensor_parallel: {{a: colwise}}\n{text}\n", "p.yaml")
    problem = next(problem for problem in error.value.problems if problem.slug == slug)
    assert problem.where.startswith("p.yaml" + position)
