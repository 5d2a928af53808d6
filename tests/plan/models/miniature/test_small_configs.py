"""Small configs: ratios and sizes as they were asked for, widths that agree in all parts, and layers of every kind."""

from __future__ import annotations

import pytest
import torch

from parallelize.base.errors import ModelError
from parallelize.plan.attribute_paths import dotted
from parallelize.plan.models.miniature.attempts import small_versions
from parallelize.plan.models.miniature.rates import without_dropout
from parallelize.plan.models.miniature.roles import Role, role_of
from parallelize.plan.models.miniature.rules import Rules, fewer_heads
from parallelize.plan.models.miniature.small_config import small_config
from parallelize.plan.models.model_source import read_model

transformers = pytest.importorskip("transformers")
FAMILY = Rules(ratios_kept=False)
PROPORTIONAL = Rules(distinct=False, head_width=16)


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (Role.HEADS, "num_attention_heads n_head encoder_attention_heads swa_num_attention_heads num_heads"),
        (Role.KV_HEADS, "num_key_value_heads num_kv_heads n_head_kv num_global_key_value_heads"),
        (Role.STATE, "mamba_n_heads linear_num_key_heads linear_key_head_dim n_groups"),
        (Role.TOKEN, "image_token_id eos_token_id image_token_index boi_token_id"),
        (Role.DEPTH, "num_hidden_layers n_layer depth encoder_layers"),
        (Role.INNER, "intermediate_size decoder_ffn_dim d_ff n_inner ffn_hidden_size"),
        (Role.EXPERT_INNER, "moe_intermediate_size shared_expert_intermediate_size"),
        (Role.EXPERTS, "num_experts n_routed_experts num_local_experts moe_num_experts"),
        (Role.CHOICES, "num_experts_per_tok top_k_experts"),
        (Role.WIDTH, "projection_dim output_size laurel_rank conv_dim"),
        (Role.OTHER, "image_size num_channels num_labels max_length index_n_heads num_kv_shared_layers"),
    ],
)
def test_names_of_one_role(role, names):
    assert {name: role_of(name) for name in names.split()} == dict.fromkeys(names.split(), role)


# -- heads and widths --------------------------------------------------------------------------------------------------


def test_heads_of_a_rank():
    for heads, kv, tp in ((32, 8, 2), (32, 8, 4), (64, 8, 2), (16, 16, 4), (40, 40, 8)):
        few, few_kv = fewer_heads(heads, kv, tp)
        assert few_kv // tp == 2 and few % tp == 0 and (few > few_kv) == (heads > kv)
    assert fewer_heads(32, 8, 8)[1] == 8 and fewer_heads(64, 8, 16)[1] == 8 and fewer_heads(8, 1, 4)[1] == 1


@pytest.mark.parametrize("kv", [None, 8, 1])
def test_the_ratio_of_heads_is_that_of_the_model_or_three_to_one(kv):
    sizes = {} if kv is None else {"num_key_value_heads": kv}
    config = transformers.Qwen3Config(num_attention_heads=32, hidden_size=4096, head_dim=128, **sizes)
    kept, family = small_config(config, Rules(tp=4)), small_config(config, Rules(tp=4, ratios_kept=False))
    real = config.num_attention_heads // config.num_key_value_heads
    assert kept.num_attention_heads // kept.num_key_value_heads == min(real, 32 if kv == 1 else 4)
    assert (family.num_attention_heads, family.num_key_value_heads) == (24, 8)


def test_a_model_that_no_mesh_divides_stays_one_and_a_family_is_not_of_it():
    config = read_model("gpt2").config
    assert small_config(config, Rules(tp=8)).n_head == 12
    assert small_config(config, Rules(tp=8, ratios_kept=False)).n_head == 32


def test_structure_is_kept_with_distinct_sizes():
    config = small_config(read_model("llama-3-70b").config, Rules(tp=16))
    # fewer key/value heads than tp ranks
    assert (config.num_attention_heads // config.num_key_value_heads, config.num_key_value_heads) == (8, 8)
    assert config.vocab_size % 16 and config.intermediate_size % 16 == 0
    sizes = [config.hidden_size, config.intermediate_size, config.vocab_size, config.num_attention_heads]
    assert len(set(sizes)) == len(sizes)
    gemma = small_config(read_model("gemma3_text", {"num_hidden_layers": 12}).config, Rules(tp=2, stages=4))
    assert len(gemma.layer_types) == gemma.num_hidden_layers == 4 and len(set(gemma.layer_types)) == 2
    assert gemma.hidden_size != gemma.num_attention_heads * gemma.head_dim and gemma.sliding_window < 11


def test_structure_of_mixtures_is_kept():
    config = small_config(read_model("deepseek-v3").config, Rules(tp=2, ep=4))
    assert config.n_routed_experts % 4 == config.n_routed_experts % config.n_group == 0
    assert config.num_experts_per_tok <= config.topk_group * config.n_routed_experts // config.n_group
    assert 2 * config.topk_group == config.n_group  # half of the groups, as in the real model
    assert config.head_dim == config.qk_rope_head_dim == config.qk_head_dim - config.qk_nope_head_dim
    assert config.qk_nope_head_dim == config.v_head_dim == 2 * config.qk_rope_head_dim
    widths = [config.hidden_size, config.intermediate_size, config.moe_intermediate_size]
    widths += [config.q_lora_rank, config.kv_lora_rank, config.vocab_size]
    assert len(set(widths)) == len(widths) and max(widths) < 100
    qwen = small_config(read_model("qwen3-235b-a22b").config, Rules(tp=2, ep=3))
    assert qwen.num_experts % 3 and qwen.num_experts > 2 * 3  # 128, which 3 does not divide
    assert qwen.moe_intermediate_size % 2 == 0 and qwen.moe_intermediate_size != qwen.intermediate_size
    odd = read_model("qwen3_moe", {"moe_intermediate_size": 1535}).config
    assert small_config(odd, Rules(tp=2)).moe_intermediate_size % 2


def test_a_width_becomes_the_same_number_in_every_part():
    config = transformers.CLIPConfig()
    for rules in (Rules(), FAMILY, PROPORTIONAL):
        small = small_config(config, rules)
        for part, real in ((small.text_config, config.text_config), (small.vision_config, config.vision_config)):
            assert part.hidden_size % part.num_attention_heads == 0 and part.hidden_size < real.hidden_size / 2
            assert part.num_hidden_layers == 3 and part.hidden_size != part.intermediate_size
        assert config.text_config.hidden_size == config.projection_dim
        assert small.text_config.hidden_size == small.projection_dim
        with torch.device("meta"):
            transformers.CLIPModel(small)


def test_heads_and_their_width_are_the_hidden_size_in_proportion_alone():
    config = transformers.Qwen3Config(num_attention_heads=32, num_key_value_heads=8, hidden_size=2048, head_dim=128)
    distinct, proportional = small_config(config, Rules()), small_config(config, PROPORTIONAL)
    assert distinct.num_attention_heads * distinct.head_dim != distinct.hidden_size
    assert proportional.num_attention_heads * proportional.head_dim == proportional.hidden_size


def test_widths_in_other_parts_that_only_the_code_ties():
    vision = transformers.CONFIG_MAPPING["unlimited_ocr"]().vision_config
    small = small_config(vision, PROPORTIONAL)
    assert vision.sam_config.downsample_channels[-1] == vision.encoder_config.hidden_size
    assert small.sam_config.downsample_channels[-1] == small.encoder_config.hidden_size < 256


# -- layers ------------------------------------------------------------------------------------------------------------


def test_every_kind_of_layer_and_a_third_layer():
    gemma = small_config(read_model("gemma3_text").config, Rules())
    assert len(set(gemma.layer_types)) == 2 and gemma.num_hidden_layers == 3
    assert small_config(read_model("llama-3-8b").config, Rules(tp=8)).num_hidden_layers == 3
    sparse = small_config(read_model("deepseek_v32").config, Rules(tp=1)).mlp_layer_types
    assert set(sparse) == {"dense", "sparse"} and len(sparse) == 3


def test_listed_layers_are_layers_that_there_are():
    """Of 27 layers the outputs of three go into the text, by their indexes: mergers of layers that are no more would
    not run."""
    config = transformers.Qwen3VLConfig()
    assert list(config.vision_config.deepstack_visual_indexes) == [8, 16, 24]
    for rules in (FAMILY, PROPORTIONAL):
        small = small_config(config, rules)
        assert small.vision_config.depth == 3 and list(small.vision_config.deepstack_visual_indexes) == [2]
    some = small_config(transformers.Qwen3VLVisionConfig(deepstack_visual_indexes=[1, 8]), Rules())
    assert list(some.deepstack_visual_indexes) == [1]


# -- stages and images -------------------------------------------------------------------------------------------------


def test_groups_of_channels_stay_as_many():
    """Of which four ranks divide each number, as of the real model."""
    config = transformers.RegNetConfig(groups_width=16)
    small = small_config(config, Rules(tp=4))
    assert small.hidden_sizes != config.hidden_sizes
    for real, few in zip(config.hidden_sizes, small.hidden_sizes, strict=True):
        assert few // small.groups_width == real // config.groups_width and few % (4 * small.groups_width) == 0


def test_heads_and_widths_of_stages():
    swin = small_config(read_model("swin").config, Rules(tp=3))
    assert (tuple(swin.num_heads), swin.embed_dim, tuple(swin.depths)) == ((3, 6, 12, 24), 18, (2, 2, 2, 2))
    convnext = read_model("convnext", {"hidden_sizes": [96, 192, 384, 770]}).config
    small = small_config(convnext, Rules(tp=4)).hidden_sizes
    assert [width % 4 == 0 for width in small] == [True, True, True, False] and len({*small}) == 4


@pytest.mark.parametrize("name", ["Swinv2", "Swin2SR"])
def test_heads_of_stages_whose_widths_follow_from_one(name):
    small = small_config(getattr(transformers, f"{name}Config")(), FAMILY)
    assert all(heads % 4 == 0 for heads in small.num_heads) and small.embed_dim == 4 * small.num_heads[0]
    with torch.device("meta"):
        getattr(transformers, f"{name}Model")(small)


def test_heads_that_a_list_gives_for_each_stage():
    """Four times as many, which a plan names by their place in the list."""
    config = transformers.SegformerConfig()
    small = small_config(config, FAMILY)
    assert list(small.num_attention_heads)[:3] == [4, 8, 20] and list(config.num_attention_heads) == [1, 2, 5, 8]
    assert all(w % h == 0 for w, h in zip(small.hidden_sizes, small.num_attention_heads, strict=True))
    assert dotted(small, "num_attention_heads.2") == 20 and dotted(small, "num_attention_heads.7") is None


def test_images_of_which_each_pixel_is_a_patch_are_smaller():
    small = small_config(transformers.Swin2SRConfig(), PROPORTIONAL)
    assert small.image_size == 16 and {*small.depths} == {2} and len(small.num_heads) == len(small.depths)
    for patch, side in ((1, 16), (2, 64), (4, 64), (16, 64)):
        assert small_config(transformers.ViTConfig(patch_size=patch), PROPORTIONAL).image_size == side
    assert {config.image_size for config in small_versions(transformers.Swin2SRConfig(), FAMILY)} <= {12, 16, 64}


# -- attempts and dropout ----------------------------------------------------------------------------------------------


def test_each_attempt_is_another_config_without_dropout():
    config = transformers.BertConfig()
    versions = list(small_versions(config, FAMILY))
    assert config.hidden_dropout_prob > 0 and all(small.hidden_dropout_prob == 0 for small in versions)
    assert versions[-1].hidden_size == config.hidden_size and versions[-1].num_hidden_layers == 4
    without_dropout(config)
    assert config.attention_probs_dropout_prob == 0


@pytest.mark.parametrize("model_type", ["dots1", "nemotron", "esm"])
def test_numbers_that_a_config_leaves_open_are_those_of_a_family_alone(model_type):
    """Whose default config its own class does not build, which `verify` is to say."""
    source = read_model(model_type)
    source.with_config(small_config(source.config, FAMILY)).build("meta")
    with pytest.raises(ModelError, match="unbuildable-model"):
        source.with_config(small_config(source.config, Rules())).build("meta")


def test_ids_of_a_small_vocabulary_are_its_last_ones_and_stay_apart():
    small = small_config(transformers.Qwen2VLConfig(), Rules(tp=4))
    ids = [small.image_token_id, small.video_token_id, small.vision_start_token_id, small.vision_end_token_id]
    assert len({*ids}) == 4 and max(ids) < small.text_config.vocab_size == 67 and min(ids) > 33
    assert small_config(transformers.Qwen2VLConfig(), Rules(tp=4, even=True)).text_config.vocab_size == 68


def test_a_tower_returns_what_the_text_reads():
    config = transformers.Qwen2_5_VLConfig()
    config.vision_config.out_hidden_size = 3584  # as default configs have it, whatever their text
    for rules in (Rules(), FAMILY, PROPORTIONAL):
        small = small_config(config, rules)
        assert small.vision_config.out_hidden_size == small.text_config.hidden_size != small.vision_config.hidden_size
        sections = small.text_config.rope_parameters["mrope_section"]
        assert 2 * sum(sections) == small.text_config.hidden_size // small.text_config.num_attention_heads


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["Llava", "Qwen2VL", "CLIP"])
def test_towers_have_other_numbers_of_heads_than_the_text_of_a_family(name, tp):
    """A plan finds fields by their values: the heads of a tower are not the key/value heads of the text."""
    config = getattr(transformers, f"{name}Config")()
    small = small_config(config, Rules(tp, ratios_kept=False))
    text, tower = small.text_config, small.vision_config
    heads = getattr(tower, "num_heads", None) or tower.num_attention_heads
    assert heads % (2 * tp) == 0
    assert heads not in (text.num_attention_heads, getattr(text, "num_key_value_heads", None))
