"""`explain --why-not MESH`: the same tokens on another mesh, part by part."""

from __future__ import annotations

import pytest

from parallelize.base.errors import ModelError
from parallelize.base.mesh import MeshSpec
from parallelize.cli import main
from parallelize.tools.analysis.cost.setting import Setting

SMALL = ["--set", "num_hidden_layers=4", "--set", "hidden_size=256", "--set", "vocab_size=512", "--sequence", "128"]


def test_another_mesh_gets_the_same_sequences():
    chosen = Setting(MeshSpec(dp=8), batch=4, num_microbatches=2).complete()
    other = Setting(MeshSpec(pp=2, dp=4)).with_tokens_of(chosen)
    assert (other.batch, other.num_microbatches) == (8, 4) and other.tokens == chosen.tokens
    with pytest.raises(ModelError) as caught:
        Setting(MeshSpec(dp=3)).with_tokens_of(chosen)
    assert caught.value.slugs == ("indivisible-batch",)


def test_its_parts_are_shown(capsys):
    assert main(["explain", "llama", "--mesh", "dp=4", "--why-not", "pp=2,dp=2", "--batch", "2", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "between stages" in shown and "step (estimate)" in shown and "the other one" in shown
