"""Heads that carry a state: few of them, with counts that no other field has."""

from __future__ import annotations

import pytest

from parallelize.plan.models.miniature.rules import Rules
from parallelize.plan.models.miniature.small_config import small_config
from parallelize.plan.models.model_source import read_model

pytest.importorskip("transformers")


@pytest.mark.parametrize("tp", [2, 4])
def test_state_heads_have_counts_of_their_own(tp):
    small = small_config(read_model("zamba2").config, Rules(tp=tp, ratios_kept=False))
    heads, groups = small.n_mamba_heads, small.mamba_ngroups
    assert groups % tp == 0 and heads in (2 * groups, 3 * groups, 4 * groups)
    assert heads * small.mamba_headdim == small.mamba_expand * small.hidden_size
    assert not {heads, groups} & {small.num_attention_heads, small.num_key_value_heads, small.hidden_size}


def test_heads_of_linear_attention_keep_their_ratio():
    small = small_config(read_model("qwen3_next").config, Rules(ratios_kept=False))
    assert small.linear_num_value_heads == 2 * small.linear_num_key_heads
    sizes = (small.linear_num_key_heads, small.linear_key_head_dim, small.linear_value_head_dim)
    assert len({*sizes, small.num_attention_heads, small.num_key_value_heads}) == 5


def test_counts_of_other_parts_are_not_taken():
    """A plan finds fields by their values: heads of a tower are not those of linear attention, nor their width."""
    small = small_config(read_model("qwen3_5").config, Rules(ratios_kept=False))
    text, tower = small.text_config, small.vision_config
    linear = {text.linear_num_key_heads, text.linear_num_value_heads, text.linear_key_head_dim}
    assert not {tower.num_heads, tower.hidden_size, text.num_attention_heads} & linear


def test_scans_stay_in_groups_and_as_wide_as_their_input():
    small = small_config(read_model("mamba2").config, Rules(tp=4))
    wide = small.expand * small.hidden_size
    assert (small.n_groups, small.num_heads, small.num_heads * small.head_dim) == (8, 16, wide)


def test_state_heads_that_tp_does_not_divide_stay():
    config = read_model("mamba2", {"hidden_size": 4032, "num_heads": 126, "n_groups": 7}).config
    assert small_config(config, Rules(tp=4)).num_heads == 126
