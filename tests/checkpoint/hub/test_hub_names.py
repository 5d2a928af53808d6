"""Tensors are read and written as the boxes that transformers uses: bit-equal to from_pretrained and
save_pretrained."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    PermuteForRope,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
)

from parallelize.base.boxes import Part, shape_of, slices_of
from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.hub import hf_conversions
from parallelize.checkpoint.hub.names import ComputedTensor, ModelTensor, find_sources, parts_to_save
from parallelize.checkpoint.hub.traced import Traced, WritesInPlaceError, named
from parallelize.plan.model_facts import describe

SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=32)
HEADS = dict(num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0)
LLAMA = SIZES | HEADS
EXPERTS = LLAMA | dict(moe_intermediate_size=12, num_experts=3, num_experts_per_tok=2, head_dim=4)
KINDS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA | dict(tie_word_embeddings=False)),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", LLAMA | dict(tie_word_embeddings=True)),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(n_embd=16, n_layer=2, n_head=4, vocab_size=32, n_positions=32)),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", LLAMA),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA | dict(head_dim=4)),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA | dict(head_dim=4)),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", LLAMA | dict(num_local_experts=3)),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        EXPERTS | dict(shared_expert_intermediate_size=20, mlp_only_layers=[0]),
    ),
    # more than ten experts: they are ordered by number, not alphabetically
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS | dict(num_experts=11)),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", LLAMA | dict(head_dim=4, num_local_experts=3)),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES | dict(max_position_embeddings=32)),
    # Transpose(check_dims), which queries the model for shapes
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        dict(
            text_config=EXPERTS | dict(rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 0])),
            vision_config=dict(
                depth=1,
                hidden_size=16,
                intermediate_size=24,
                num_heads=2,
                out_hidden_size=16,
                deepstack_visual_indexes=[0],
            ),
        ),
    ),
}


def build(kind):
    """A tiny model with random parameters."""
    model_class, config_class, settings = KINDS[kind]
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    return model


def model_tensors(model):
    facts = describe(model)
    tensors = [ModelTensor(fact.fqn, fact.names, fact.shape, False) for fact in facts.parameters.values()]
    return tensors + [ModelTensor(name, (name,), tuple(value.shape), True) for name, value in model.named_buffers()]


def read(folder):
    data = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            data |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    return data, {name: ("F32", tuple(value.shape)) for name, value in data.items()}


def box_values(part: Part, within, data):
    """A box of the target, read from the box of the source only."""
    value = data[part.source][slices_of(part.source_box(within))]
    dims = [dim for dim in part.dims if dim is not None]
    value = value.reshape([size for size, dim in zip(value.shape, part.dims, strict=True) if dim is not None])
    value = value.permute([dims.index(dim) for dim in sorted(dims)])
    return value.reshape(shape_of(within))


def assemble(shape, parts, data):
    """The target, box by box; each in two halves, as two ranks read it."""
    target, counts = torch.full(shape, float("nan")), torch.zeros(shape)
    for part in parts:
        start, stop = part.target[-1] if part.target else (0, 1)
        for low, high in {(start, (start + stop) // 2), ((start + stop) // 2, stop)}:
            within = (*part.target[:-1], (low, high)) if part.target else ()
            if low < high:
                target[slices_of(within)] = box_values(part, within, data)
                counts[slices_of(within)] += 1
    assert (counts == 1).all()
    return target


def values_of(source, shape, data):
    if isinstance(source, ComputedTensor):
        return source.compute({name: data[name] for name in source.sources})
    return assemble(shape, source, data)


def check_in(model, folder, reference, **settings):
    """Each tensor of `model`, read from the folder, equals that of `reference`."""
    data, checkpoint = read(folder)
    tensors = model_tensors(model)
    sources = find_sources(model, tensors, checkpoint, **settings)
    state = reference.state_dict()
    assert state and {name for tensor in tensors if tensor.name in sources.by_name for name in tensor.names} == set(
        state
    )
    for tensor in tensors:
        if tensor.name in sources.by_name:
            value = values_of(sources.by_name[tensor.name], tensor.shape, data)
            assert all(torch.equal(value, state[name]) for name in tensor.names), tensor.name
    return sources


@pytest.mark.parametrize("kind", KINDS)
def test_loads_what_from_pretrained_loads(kind, tmp_path):
    model = build(kind)
    model.save_pretrained(tmp_path)
    reference = type(model).from_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(model)(model.config)
    sources = check_in(empty, tmp_path, reference)
    assert not sources.twins and not any(isinstance(source, ComputedTensor) for source in sources.by_name.values())
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name])


@pytest.mark.parametrize("kind", KINDS)
def test_writes_what_save_pretrained_writes(kind, tmp_path):
    model = build(kind)
    model.save_pretrained(tmp_path)
    check_out(model, tmp_path)


def test_what_the_class_does_not_save_is_not_written(tmp_path):
    model = build("llama")
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    model.save_pretrained(tmp_path)
    assert "model.norm.weight" not in read(tmp_path)[0]
    check_out(model, tmp_path)


def check_out(model, folder):
    data, checkpoint = read(folder)
    state = model.state_dict()
    written = parts_to_save(model, model_tensors(model))
    assert {name: shape for name, (shape, _) in written.items()} == {
        name: shape for name, (_, shape) in checkpoint.items()
    }
    for name, (shape, parts) in written.items():
        assert torch.equal(assemble(shape, parts, state), data[name]), name


def test_merged_experts_are_boxes_of_each_expert(tmp_path):
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    _, checkpoint = read(tmp_path)
    sources = find_sources(model, model_tensors(model), checkpoint)
    parts = sources.by_name["model.layers.1.mlp.experts.gate_up_proj"]
    last = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    assert len(parts) == 6
    assert Part(last, ((2, 3), (24, 48), (0, 16)), (0, 0), (1, 2)) in parts
    shape, out = parts_to_save(model, model_tensors(model))[last]
    full = ((0, 24), (0, 16))
    assert shape == (24, 16) and out == (
        Part("model.layers.1.mlp.experts.gate_up_proj", full, (2, 24, 0), (None, 0, 1)),
    )
    assert out[0].source_box(((3, 5), (0, 16))) == ((2, 3), (27, 29), (0, 16))


def test_an_empty_stage_reads_the_same(tmp_path):
    """Shapes come from the list of tensors: in a pipeline, the module lacks most of them."""
    for kind in ("qwen3_vl_moe", "gpt2"):
        model = build(kind)
        model.save_pretrained(tmp_path / kind)
        _, checkpoint = read(tmp_path / kind)
        tensors = model_tensors(model)
        expected, written = find_sources(model, tensors, checkpoint), parts_to_save(model, tensors)
        for inner in model.modules():
            inner._parameters |= dict.fromkeys(inner._parameters)
            inner._buffers |= dict.fromkeys(inner._buffers)
        assert find_sources(model, tensors, checkpoint) == expected
        assert parts_to_save(model, tensors) == written


def test_base_checkpoint_into_a_head_model(tmp_path):
    model = build("llama tied")
    model.model.save_pretrained(tmp_path)
    assert "layers.0.mlp.up_proj.weight" in read(tmp_path)[0]
    check_in(model, tmp_path, type(model).from_pretrained(tmp_path))


def test_head_checkpoint_into_a_base_model(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    reference = transformers.LlamaModel.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        check_in(model.model, tmp_path, reference)
    assert caught.value.slugs == ("unexpected-tensor",) and "lm_head.weight" in str(caught.value)
    check_in(model.model, tmp_path, reference, allow_unexpected=True)


def test_legacy_names_are_renamed(tmp_path):
    """transformers' own renaming of old checkpoints: LayerNorm.gamma and LayerNorm.beta."""
    model = build("bert")
    _, checkpoint = read_saved(model, tmp_path)
    old = {re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name): value for name, value in checkpoint.items()}
    assert old.keys() != checkpoint.keys()
    parts = find_sources(model, model_tensors(model), old).by_name["bert.embeddings.LayerNorm.weight"]
    assert [part.source for part in parts] == ["bert.embeddings.LayerNorm.gamma"]


def test_two_names_for_one_tensor_are_a_problem(tmp_path):
    model = build("bert")
    _, checkpoint = read_saved(model, tmp_path)
    checkpoint["bert.embeddings.LayerNorm.gamma"] = checkpoint["bert.embeddings.LayerNorm.weight"]
    (problem,) = problems_of(model, checkpoint).values()
    assert problem.slug == "unexpected-tensor" and "has bert.embeddings.LayerNorm.weight twice" in problem.what


def read_saved(model, folder):
    model.save_pretrained(folder)
    return read(folder)


def problems_of(model, checkpoint, **settings):
    with pytest.raises(CheckpointError) as caught:
        find_sources(model, model_tensors(model), checkpoint, **settings)
    return {problem.where: problem for problem in caught.value.problems}


def test_all_problems_at_once_with_near_names(tmp_path):
    model = build("llama")
    _, checkpoint = read_saved(model, tmp_path)
    checkpoint["model.layers.1.mlp.up_porj.weight"] = checkpoint.pop("model.layers.1.mlp.up_proj.weight")
    checkpoint["model.norm.weight"] = ("F32", (17,))
    problems = problems_of(model, checkpoint)
    missing, unexpected = problems["model.layers.1.mlp.up_proj.weight"], problems["model.layers.1.mlp.up_porj.weight"]
    assert (missing.slug, dict(missing.rows)["near"]) == ("missing-tensor", "model.layers.1.mlp.up_porj.weight")
    assert unexpected.slug == "unexpected-tensor"
    assert dict(unexpected.rows)["near"].startswith("model.layers.1.mlp.up_proj.weight")
    assert problems["model.norm.weight"].slug == "wrong-shape"
    assert "[16]" in str(problems["model.norm.weight"]) and "[17]" in str(problems["model.norm.weight"])
    assert len(problems) == 3
    assert problems_of(model, checkpoint, allow_missing=True, allow_unexpected=True).keys() == {"model.norm.weight"}
    checkpoint["model.norm.weight"] = ("F32", (16,))
    sources = find_sources(model, model_tensors(model), checkpoint, allow_missing=True, allow_unexpected=True)
    assert {tensor.name for tensor in model_tensors(model)} - sources.by_name.keys() == {
        "model.layers.1.mlp.up_proj.weight",
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
    }


def test_layers_that_miss_the_same_are_one_problem(tmp_path):
    model = build("llama")
    _, checkpoint = read_saved(model, tmp_path)
    checkpoint = {name: value for name, value in checkpoint.items() if "up_proj" not in name}
    (problem,) = problems_of(model, checkpoint).values()
    assert dict(problem.rows)["also"] == "model.layers.1.mlp.up_proj.weight"


def test_an_incomplete_list_of_experts_is_a_problem(tmp_path):
    model = build("mixtral")
    _, checkpoint = read_saved(model, tmp_path)
    expert = "model.layers.0.block_sparse_moe.experts.1."
    del checkpoint[f"{expert}w1.weight"]
    problems = problems_of(model, checkpoint)
    assert problems.keys() == {"model.layers.0.mlp.experts.gate_up_proj"}
    (problem,) = problems.values()
    assert problem.slug == "wrong-shape" and "MergeModulelist" in problem.what and "5 tensors" in problem.what
    del checkpoint[f"{expert}w3.weight"]
    (problem,) = problems_of(model, checkpoint).values()
    assert problem.slug == "wrong-shape" and "[2, 48, 16]" in str(problem)


def test_no_conversions_show_as_problems(tmp_path, monkeypatch):
    """A version of transformers without these functions: the tensors are reported."""
    model = build("mixtral")
    _, checkpoint = read_saved(model, tmp_path)
    monkeypatch.setattr(hf_conversions, "_machinery", lambda: None)
    slugs = {problem.slug for problem in problems_of(model, checkpoint).values()}
    assert slugs == {"missing-tensor", "unexpected-tensor"}


def test_what_the_class_ignores_is_no_problem(tmp_path):
    model = build("llama")
    _, checkpoint = read_saved(model, tmp_path)
    del checkpoint["model.norm.weight"]
    checkpoint |= {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (2,)), "model.mtp.weight": ("F32", (2,))}
    assert problems_of(model, checkpoint).keys() == {"model.norm.weight", "model.mtp.weight"}
    model._keys_to_ignore_on_load_missing, model._keys_to_ignore_on_load_unexpected = {r"norm\.weight"}, {r"mtp\."}
    assert "model.norm.weight" not in find_sources(model, model_tensors(model), checkpoint).by_name


def test_buffers_that_are_computed_are_ignored(tmp_path):
    """With and without the prefix of the base model."""
    model = build("llama")
    _, checkpoint = read_saved(model, tmp_path)
    buffer = ("F32", (2,))
    for name in ("model.rotary_emb.original_inv_freq", "rotary_emb.original_inv_freq"):
        find_sources(model, model_tensors(model), checkpoint | {name: buffer})
        base = {key: value for key, value in checkpoint.items() if key.startswith("model.")} | {name: buffer}
        find_sources(model.model, model_tensors(model.model), base)
    assert problems_of(model, checkpoint | {"original_inv_freq": buffer}).keys() == {"original_inv_freq"}


class TiedTheOtherWay(transformers.LlamaForCausalLM):
    """The embedding is tied to the head, although its name comes first."""

    _tied_weights_keys = {"model.embed_tokens.weight": "lm_head.weight"}


def test_the_name_that_others_are_tied_to_is_preferred(tmp_path):
    model = TiedTheOtherWay(build("llama tied").config)
    _, checkpoint = read_saved(model, tmp_path)
    assert "lm_head.weight" in checkpoint and "model.embed_tokens.weight" not in checkpoint
    assert model_tensors(model)[0].names == ("model.embed_tokens.weight", "lm_head.weight")
    check_out(model, tmp_path)
    checkpoint["model.embed_tokens.weight"] = checkpoint["lm_head.weight"]
    assert find_sources(model, model_tensors(model), checkpoint).twins == (
        ("lm_head.weight", "model.embed_tokens.weight"),
    )


@pytest.mark.parametrize(
    ("kind", "source", "tied"),
    [
        ("llama tied", "model.embed_tokens.weight", "lm_head.weight"),
        ("bert", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ],
)
def test_ties_have_one_source(kind, source, tied, tmp_path):
    model = build(kind)
    _, checkpoint = read_saved(model, tmp_path)
    assert source in checkpoint and tied not in checkpoint
    checkpoint[tied] = checkpoint[source]
    sources = find_sources(model, model_tensors(model), checkpoint)
    first = next(tensor.name for tensor in model_tensors(model) if source in tensor.names)
    assert sources.twins == ((source, tied),) and sources.by_name[first][0].source == source
    del checkpoint[source]
    sources = find_sources(model, model_tensors(model), checkpoint)
    assert not sources.twins and sources.by_name[first][0].source == tied
    checkpoint[source] = ("F32", (31, 16))
    assert [problem.slug for problem in problems_of(model, checkpoint).values()] == ["wrong-shape"]
    del checkpoint[tied], checkpoint[source]
    (problem,) = problems_of(model, checkpoint).values()
    assert problem.slug == "missing-tensor" and dict(problem.rows)["or as"]


def test_a_tie_of_the_config_alone(tmp_path):
    """transformers ties them when it loads: both are read from the tensor that exists."""
    model = build("llama tied")
    _, checkpoint = read_saved(model, tmp_path)
    model.lm_head.weight = nn.Parameter(torch.zeros(32, 16))
    by_name = find_sources(model, model_tensors(model), checkpoint).by_name
    assert by_name["lm_head.weight"] == by_name["model.embed_tokens.weight"]


@pytest.fixture
def llama_converts(monkeypatch):
    """Set the conversions of llama checkpoints, for transformers and for this package."""

    def set_conversions(*conversions):
        conversion_mapping.get_checkpoint_conversion_mapping("llama")
        monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "llama", list(conversions))

    return set_conversions


def square_llama():
    KINDS["llama square"] = ("LlamaForCausalLM", "LlamaConfig", LLAMA | dict(num_key_value_heads=4))
    try:
        return build("llama square")
    finally:
        del KINDS["llama square"]


def test_tensors_that_are_not_boxes_are_computed(tmp_path, llama_converts):
    """As in kimi_k25: q and k are permuted, v is a plain chunk."""
    targets = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    permute = PermuteForRope(permute_layer_names=["q_proj", "k_proj"])
    llama_converts(WeightConverter(["self_attn.qkv.weight"], targets, operations=[Chunk(dim=0), permute]))
    model = square_llama()
    model.save_pretrained(tmp_path)
    assert "model.layers.0.self_attn.qkv.weight" in read(tmp_path)[0]
    sources = check_in(model, tmp_path, type(model).from_pretrained(tmp_path))
    computed = {name for name, source in sources.by_name.items() if isinstance(source, ComputedTensor)}
    assert computed == {f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qk"}
    with pytest.raises(CheckpointError) as caught:
        parts_to_save(model, model_tensors(model))
    first, _ = caught.value.problems
    assert first.slug == "unwritable-conversion" and first.where == "model.layers.0.self_attn.qkv.weight"
    assert "PermuteForRope" in first.what and "layers.0.self_attn.q_proj.weight" in str(first)


def test_a_name_that_is_right_is_not_renamed(tmp_path, llama_converts):
    model = build("llama")
    model.save_pretrained(tmp_path)
    llama_converts(WeightRenaming(r"norm\.weight", "normed.weight"))
    check_in(model, tmp_path, type(model).from_pretrained(tmp_path))


class InPlace(Concatenate):
    """An operation that writes into its inputs."""

    def convert(self, input_dict, **settings):
        made = super().convert(input_dict, **settings)
        return {name: value.add_(1) for name, value in made.items()}


def test_tensors_of_ops_in_place_are_computed(tmp_path, llama_converts):
    model = build("llama")
    model.save_pretrained(tmp_path)
    llama_converts(WeightConverter("norm.weight", "norm.weight", operations=[InPlace()]))
    sources = check_in(model, tmp_path, type(model).from_pretrained(tmp_path))
    assert isinstance(sources.by_name["model.norm.weight"], ComputedTensor)
    assert not isinstance(sources.by_name["model.embed_tokens.weight"], ComputedTensor)


@pytest.mark.parametrize("loaded", [False, True])
def test_prefixes_are_written_as_they_were_read(tmp_path, llama_converts, loaded):
    """transformers restores a prefix only if it removed it on loading."""
    model = build("llama")
    (tmp_path / "old").mkdir()
    state = {f"backbone.{name}": value for name, value in model.state_dict().items()}
    llama_converts(PrefixChange(prefix_to_remove="backbone"), WeightRenaming("input_layernorm", "input_layernorm"))
    model.save_pretrained(tmp_path / "old", state_dict=state, save_original_format=False)
    check_in(model, tmp_path / "old", type(model).from_pretrained(tmp_path / "old"))
    model = type(model).from_pretrained(tmp_path / "old") if loaded else model
    model.save_pretrained(tmp_path / "new")
    assert all(name.startswith("backbone.") == loaded for name in read(tmp_path / "new")[0])
    check_out(model, tmp_path / "new")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("table", torch.zeros(3), persistent=False)


def test_a_plain_module_keeps_its_names():
    model = Plain()
    names = {"first.bias": (4,), "second.bias": (4,), "scale": ()}
    checkpoint = {name: ("F32", shape) for name, shape in names.items()}
    for name in ("first.weight", "second.weight"):
        sources = find_sources(model, model_tensors(model), checkpoint | {name: ("F32", (4, 4))})
        assert sources.by_name.keys() == {"first.weight", *names}
        assert sources.by_name["first.weight"][0].source == name
    assert problems_of(model, checkpoint | {"table": ("F32", (3,))}).keys() == {"first.weight"}
    written = parts_to_save(model, model_tensors(model))
    assert {name: shape for name, (shape, _) in written.items()} == names | {"first.weight": (4, 4)}


@pytest.mark.sweep
@pytest.mark.processes
def test_a_plain_module_imports_no_transformers():
    code = (
        "import sys; from torch import nn; from parallelize.checkpoint.hub.names import *\n"
        "tensors = [ModelTensor('weight', ('weight',), (2, 2), False)]; module = nn.Linear(2, 2, bias=False)\n"
        "assert find_sources(module, tensors, {'weight': ('F32', (2, 2))}).by_name and parts_to_save(module, tensors)\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


OPS = {
    "stack": lambda a, b: torch.stack([a, b], dim=-1),
    "cat": lambda a, b: torch.cat([a, b.transpose(0, 1).transpose(-2, -3), a], dim=-1),
    "chunk of cat": lambda a, b: torch.cat([a, b], dim=1).chunk(3, dim=1)[1],
    "uneven split": lambda a, b: torch.cat([a, b]).split([1, 5, 2])[1],
    "split": lambda a, b: torch.cat([a, b]).split(3)[-1],
    "slice": lambda a, b: torch.stack([a, b])[1:, :-1, 2:5],
    "select": lambda a, b: torch.stack([a, b], dim=1)[2, 1],
    "negative select": lambda a, b: torch.stack([a, b], dim=1).select(-1, -2),
    "unbind": lambda a, b: torch.cat([a, b], dim=1).unbind(1)[-1],
    "permute": lambda a, b: torch.stack([a, b]).permute(3, 0, -2, 1).contiguous(),
    "transpose after select": lambda a, b: torch.stack([a, b], dim=1)[:, 1].transpose(0, -1),
    "stack after select": lambda a, b: torch.stack([a[1], b[0]], dim=1),
    "unsqueeze": lambda a, b: torch.cat([a, b], dim=1).unsqueeze(-1).squeeze(0).transpose(-1, 0),
    "squeeze": lambda a, b: a[:1].squeeze(0).t(),
    "same view": lambda a, b: a.reshape(a.shape).clone().detach(),
}


@pytest.mark.parametrize("op", OPS)
def test_traced_tensors_follow_boxes(op):
    data = {"a": torch.rand(4, 6, 5), "b": torch.rand(4, 6, 5)}
    if op == "squeeze":
        data = {name: value[..., 0].contiguous() for name, value in data.items()}
        data["a"] = data["a"].unsqueeze(1).repeat(1, 3, 1)
    expected = OPS[op](data["a"], data["b"])
    traced = OPS[op](named("a", data["a"].shape), named("b", data["b"].shape))
    assert isinstance(traced, Traced) and traced.parts and traced.shape == expected.shape
    assert torch.equal(assemble(tuple(expected.shape), traced.parts, data), expected)


def test_traced_tensors_of_other_ops_have_no_parts():
    a, b = named("a", (4, 6)), named("b", (4, 6))
    for traced in (a.reshape(2, 12), a[::2], a.repeat(1, 2), a + 0, a.view(2, 2, 6).transpose(0, 1)):
        assert traced.parts is None and traced.sources == ("a",)
    mixed = torch.cat([b, a.flip(0)], dim=1)
    assert mixed.parts is None and mixed.sources == ("b", "a") and mixed.shape == (4, 12)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([a, named("c", (4, 5))])
    with pytest.raises(WritesInPlaceError):
        a[0].zero_()


def test_conversions_of_many_to_many_are_boxes():
    data = {f"{kind}.{expert}": torch.rand(3, 5) for kind in ("gate", "up") for expert in range(4)}
    fuse = ErnieFuseAndSplitTextVisionExperts(stack_dim=0, concat_dim=1)

    def run(op, tensors, sources, targets):
        return op.convert(tensors, source_patterns=sources, target_patterns=targets, config=None)

    def grouped(make):
        return {kind: [make(f"{kind}.{expert}") for expert in range(4)] for kind in ("gate", "up")}

    expected = run(fuse, grouped(data.get), ["gate", "up"], ["text", "vision"])
    traced = run(fuse, grouped(lambda name: named(name, (3, 5))), ["gate", "up"], ["text", "vision"])
    for name in ("text", "vision"):
        assert torch.equal(assemble((2, 6, 5), traced[name].parts, data), expected[name])
    back = run(
        fuse.reverse_op,
        {name: [named(name, (2, 6, 5))] for name in expected},
        ["text", "vision"],
        ["gate.*", "up.*"],
    )
    for name, value in data.items():
        assert torch.equal(assemble((3, 5), back[name].parts, expected), value)
