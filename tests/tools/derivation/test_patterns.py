"""Names as patterns: what they match is what had the style, and the file is one that a person would write."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelize.plan.pattern import alternatives, matches
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.derivation.patterns import braces, nested, pattern_rules
from parallelize.tools.derivation.plan_text import Heading, Sections, plan_text

pytestmark = pytest.mark.torch_free

NAMES = [
    "embed",
    *(
        f"layers.{i}{name}"
        for i in range(3)
        for name in ("", ".norm", ".attn", ".attn.q_proj", ".attn.k_proj", ".attn.o_proj")
    ),
    *(f"layers.{i}.mlp.{j}" for i in range(3) for j in range(3)),
    "head",
]


def styles_of(*words, style="colwise"):
    return {name: style for name in NAMES if name.endswith(words)}


@pytest.mark.parametrize(
    ("styles", "expected"),
    [
        (styles_of("embed"), {"embed": "colwise"}),
        (styles_of("_proj"), {"layers.*.attn.{q,k,o}_proj": "colwise"}),
        (
            styles_of("q_proj", "k_proj") | styles_of("o_proj", style="rowwise"),
            {"layers.*.attn.{q,k}_proj": "colwise", "layers.*.attn.o_proj": "rowwise"},
        ),
        ({"layers.0.norm": "sequence", "layers.2.norm": "sequence"}, {"layers.{0,2}.norm": "sequence"}),
        ({"layers.1.norm": "sequence"}, {"layers.1.norm": "sequence"}),
        (
            {f"layers.{i}.mlp.1": "rowwise" for i in range(3)},
            {"layers.*.mlp.1": "rowwise"},
        ),  # all layers, one of a list
        (
            {"layers.0.mlp.0": "colwise", "layers.1.mlp.1": "colwise"},
            {"layers.0.mlp.0": "colwise", "layers.1.mlp.1": "colwise"},
        ),
        (
            {"layers.0.attn": "gather", "layers.2.attn": "colwise"}
            | {f"layers.1.mlp.{i}": "colwise" for i in range(3)},
            {"layers.0.attn": "gather", "layers.2.attn": "colwise", "layers.1.mlp.*": "colwise"},
        ),
        ({"layers.0.mlp.1": "rowwise", "layers.2.mlp.1": "rowwise"}, {"layers.{0,2}.mlp.1": "rowwise"}),
        (styles_of("embed", "head"), {"embed": "colwise", "head": "colwise"}),  # whose key would need quotes
        (styles_of("norm", "attn", style="gather"), {"layers.*.norm": "gather", "layers.*.attn": "gather"}),
    ],
)
def test_rules_of_names(styles, expected):
    assert pattern_rules(styles, NAMES) == expected


def test_stages_with_few_layers():
    """Of a stage that has fewer layers than another, all of them: a larger model's has more."""
    names = [f"stages.{stage}.{layer}" for stage, layers in enumerate((2, 3, 2, 3)) for layer in range(layers)]
    styles = {name: "colwise" if name < "stages.1" else "rowwise" for name in names}
    assert pattern_rules(styles, names)["stages.0.*"] == "colwise"
    few = {name: "colwise" for name in names if name.endswith((".0", ".1"))}
    assert pattern_rules(few, names) == {"stages.*.{0,1}": "colwise"}
    assert pattern_rules({name: few[name] for name in few if name[7] in "02"}, names) == {"stages.{0,2}.*": "colwise"}


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["colwise", "rowwise", "gather"]), max_size=12))
def test_patterns_match_what_had_the_style_and_nothing_else(styles):
    rules = pattern_rules(styles, NAMES)
    matched = {name: [style for pattern, style in rules.items() if matches(pattern, name)] for name in NAMES}
    assert {name: found for name, found in matched.items() if found} == {
        name: [style] for name, style in styles.items()
    }
    assert all(any(matches(part, name) for name in NAMES) for pattern in rules for part in alternatives(pattern))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["up"], "up"),
        (["q_proj", "k_proj"], "{q,k}_proj"),
        (["norm1", "norm2"], "norm{1,2}"),
        (["ln_1", "ln_2"], "ln_{1,2}"),
        (["w1", "w3"], "w{1,3}"),
        (["query", "key", "value"], "{query,key,value}"),
        (["up", "up_proj"], "{up,up_proj}"),
    ],
)
def test_braces(names, expected):
    assert braces(names) == expected
    assert sorted(alternatives(expected)) == sorted(names)


@settings(max_examples=150)
@given(st.sets(st.from_regex(r"[a-c]{1,2}(_[a-c1-2]{1,2}){0,2}", fullmatch=True), min_size=1, max_size=4))
def test_braces_expand_to_the_names(names):
    assert sorted(alternatives(braces(sorted(names)))) == sorted(names)


def test_rules_of_a_layer_stand_together():
    rules = {"embed": "a", "layers.*.attn.q": "b", "layers.*.norm": "c", "head": "d", "blocks.{0,2}.x": "e"}
    assert nested(rules) == {
        "embed": "a",
        "layers.*": {"attn.q": "b", "norm": "c"},
        "head": "d",
        "blocks.{0,2}.x": "e",  # alone
    }


def test_a_layer_with_a_style_of_its_own_has_no_rules_below():
    rules = {"layers.*": "sequence", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
    assert nested(rules) == rules


# -- the file ----------------------------------------------------------------------------------------------------------


def text_of(styles, **sections):
    values = dict(sizes={}, replicated_below_tp=[], local={}, whole={}) | sections
    return plan_text(Heading(("derived",), class_name="Model"), Sections(styles, **values), NAMES)


def test_a_file():
    styles = styles_of("q_proj", "k_proj", style="colwise(heads)") | styles_of("o_proj", style="rowwise(heads)")
    styles |= styles_of("norm", style="sequence")
    text = text_of(
        styles,
        sizes={"heads": "n_heads", "kv_heads": 2},
        replicated_below_tp=["kv_heads"],
        local={f"layers.{i}.attn": {"n": "heads", "m": "heads"} for i in range(3)},
        whole={f"layers.{i}.mlp.{j}": f"softmax in layers.{i}" for i in range(3) for j in range(2)}
        | {"head": "an output"},
        regions=[{"layers": "layers", "leave": "head"}],
    )
    assert (
        text
        == """\
# derived
schema_version: 1
classes: Model
sizes:
  heads: n_heads
  kv_heads: {from: 2, below_tp: replicate}
sequence_parallel: {layers: layers, leave: head}
tensor_parallel:
  layers.*:
    norm: sequence
    attn.{q,k}_proj: colwise(heads)
    attn.o_proj: rowwise(heads)
  # whole: layers.*.mlp.*: softmax in layers.*
  # whole: head: an output
  "**": replicate
local:
  layers.*.attn: {m: heads, n: heads}
"""
    )


@settings(max_examples=80)
@given(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["colwise", "rowwise", "sequence", "gather"]), max_size=12)
)
def test_each_file_can_be_read(styles):
    plan = parse_plan(text_of(styles), "derived", name="derived")
    read = {
        name: rule.style.word
        for name in NAMES
        for rule in plan.rules
        if matches(rule.pattern, name) and rule.pattern != "**"
    }
    assert read == styles


ODD = [
    "",
    "no",
    "null",
    "true",
    "1",
    "0x1",
    "1_0",
    "1e5",
    "2001-01-01",
    "a-b",
    "\u00e9",
    "on.yes",
    "1.off",
    "a-b.0",
    "no.0",
]
"""Names that YAML reads as something else than text, or that have other characters than letters, digits and `_`."""
UNREADABLE = ["q,k", "a b", "x: y", "# z", "*", "{u}", "'", '"', "?", "line\nbreak", "a//b", "=", "<<"]


def _odd_text(styles, local=(), sizes=(), regions=(), whole=(), name="Model"):
    sections = Sections(
        styles,
        dict(sizes),
        list(dict(sizes)),
        {module: {attribute: next(iter(sizes), "heads")} for module, attribute in local},
        dict(whole),
        regions=[dict(zip(("layers", "leave"), pair, strict=True)) for pair in regions],
    )
    return plan_text(Heading((), class_name=name, base=name), sections, [*ODD, *UNREADABLE])


_odd = st.sampled_from(ODD)
_any = st.sampled_from([*ODD, *UNREADABLE])
_words = st.sampled_from(["colwise", "rowwise", "colwise(output=full)"])


@settings(max_examples=150)
@given(
    st.dictionaries(_odd, _words, min_size=1, max_size=8),
    st.lists(st.tuples(_odd, st.sampled_from(["no", "h", "true"])), max_size=3),
    st.dictionaries(st.sampled_from(["no", "heads", "y"]), st.sampled_from([4, "on", "no", "n_heads"]), min_size=1),
    st.lists(st.tuples(_any.filter(bool), _any.filter(bool)), max_size=2),
    st.dictionaries(_any, _any),
    st.sampled_from(["True", "No", "Model", "Null"]),
)
def test_names_that_yaml_reads_otherwise_are_read_as_they_are(styles, local, sizes, regions, whole, name):
    plan = parse_plan(_odd_text(styles, local, sizes, regions, whole, name), "derived")
    rules = [rule for rule in plan.rules if rule.pattern != "**"]
    assert {name: str(rule.style) for name in ODD for rule in rules if matches(rule.pattern, name)} == styles
    assert {item.pattern for item in plan.local} >= {module for module, _ in local if module.count(".") == 0}
    assert {size: source.source for size, source in plan.sizes.items()} == sizes
    assert [(region.layers, region.leave) for region in plan.regions] == regions
    assert plan.classes == (name,) and plan.base == name


@settings(max_examples=60)
@given(st.dictionaries(_any, st.just("colwise"), min_size=1, max_size=12))
def test_a_name_that_no_pattern_has_is_matched_by_what_is_written(styles):
    plan = parse_plan(_odd_text(styles), "derived")
    assert all(any(matches(rule.pattern, name) for rule in plan.rules if rule.pattern != "**") for name in styles)


def test_a_pattern_is_no_longer_than_what_a_file_may_have():
    names = [f"layers.{index}.up" for index in range(600)]
    few = dict.fromkeys(names[::2], "colwise")
    siblings = dict.fromkeys((f"table_of_{index:03}_words" for index in range(200)), "embedding")
    text = plan_text(Heading((), "opt"), Sections(few | siblings, {}, [], {}, {}), [*names, *siblings])
    rules = [rule for rule in parse_plan(text, "derived").rules if rule.pattern != "**"]
    matched = {name for rule in rules for name in [*names, *siblings] if matches(rule.pattern, name)}
    assert matched == few.keys() | siblings.keys()


def test_a_file_of_a_type_says_so():
    text = plan_text(
        Heading((), model_type="opt", base="model"), Sections(styles_of("embed"), {}, [], {}, {}, default=""), NAMES
    )
    assert text == "schema_version: 1\nmodel_type: opt\nbase: model\ntensor_parallel:\n  embed: colwise\n"


def test_a_check_that_is_turned_off_is_named():
    assert "\nallow: reads-sequence  # such a line" in text_of(styles_of("embed"), allow="reads-sequence")


def test_a_list_of_one_layer_serves_models_with_more():
    names = ["layers.0", "layers.0.out", "layers.0.out.0", "layers.0.out.1"]
    assert pattern_rules({"layers.0.out.0": "rowwise"}, names) == {"layers.*.out.0": "rowwise"}
