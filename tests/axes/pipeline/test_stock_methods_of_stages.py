"""Methods of a stock model that need all of it are refused on each stage, and a full state is written as it is."""

from __future__ import annotations

import copy

import pytest
from safetensors.torch import load_file

from parallelize import build_mesh, full_state_dict, parallelize_model
from parallelize.base.errors import ModelError
from tests.support.models import tiny_model
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks


@pytest.mark.parametrize("tied", [False, True])
def test_methods_that_need_the_full_model(tmp_path, tied):
    base = tiny_model("llama", tie_word_embeddings=tied)

    def body(rank):
        model = parallelize_model(copy.deepcopy(base), build_mesh("cpu", pp=2)).module
        with refused(ModelError, "reads-full-parameters", "pipeline stages", "resize before the plan"):
            model.resize_token_embeddings(70)
        with refused(ModelError, "reads-full-parameters", "pipeline stages", "parallelize.save_pretrained"):
            model.save_pretrained(tmp_path)
        state = full_state_dict(model)
        if rank == 0:
            model.save_pretrained(tmp_path, state_dict=state)

    run_ranks(2, body)
    saved = load_file(tmp_path / "model.safetensors")
    want = {name: value for name, value in base.state_dict().items() if not (tied and name == "lm_head.weight")}
    assert worst(saved, want)[0] == 0
