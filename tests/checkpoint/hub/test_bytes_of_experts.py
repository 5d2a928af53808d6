"""Of a folder of `transformers` a rank reads its experts alone, whether the file has one tensor for each expert or all
in one."""

from __future__ import annotations

import pytest

from parallelize import load_pretrained
from tests.checkpoint.hub.pretrained_jobs import loaded_on_mesh
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

FUSED = ("gpt_oss", "qwen3_5_moe_text", "granitemoe", "dbrx", "gemma4_text", "jetmoe")
OF_EACH = ("mixtral", "deepseek_v3", "ernie4_5_moe", "nemotron_h", "jamba")
MESHES = [({"dp": 2}, {"ep": 2, "zero": 0}), ({"dp": 4}, {"ep": 2, "zero": 3}), ({"dp": 2}, {"etp": 2, "zero": 0})]


@pytest.mark.sweep
@pytest.mark.parametrize(("axes", "options"), MESHES, ids=str)
@pytest.mark.parametrize("family", [*FUSED, *OF_EACH])
def test_bytes_read_are_those_of_the_shards(family, axes, options, tmp_path):
    if family == "dbrx" and "etp" in options:
        pytest.skip("refused: experts-not-splittable")
    tiny_model(family).save_pretrained(tmp_path)

    def body(rank):
        parallel = loaded_on_mesh(str(tmp_path), axes, options, initialize=str(tmp_path))
        report = load_pretrained(parallel, str(tmp_path))
        return report.bytes_read / report.bytes_held

    for ratio in run_ranks(axes["dp"], body):
        assert ratio <= 1.02
