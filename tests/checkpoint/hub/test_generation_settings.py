"""How a model generates comes with its weights, and goes with them."""

from __future__ import annotations

import copy
import json

import pytest

from parallelize import build_mesh, load_pretrained, parallelize_model, save_pretrained
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

SETTINGS = {"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": True}
UNWRITABLE = {
    "eos_token_id": [2, 7],
    "temperature": 0.6,
    "do_sample": False,
}  # transformers only warns when it reads them


def settings_of(folder):
    saved = json.loads((folder / "generation_config.json").read_text())
    return {name: saved.get(name) for name in SETTINGS}


@pytest.mark.variants(every=1)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("settings", [SETTINGS, UNWRITABLE], ids=["sampled", "unwritable"])
def test_settings_are_loaded_and_written(tmp_path, settings, axes):
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(settings))

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", **axes))
        save_pretrained(parallel, tmp_path / "never loaded", carry=tmp_path / "source")
        load_pretrained(parallel, tmp_path / "source")
        generation = parallel.module.generation_config
        assert {name: getattr(generation, name) for name in settings} == settings
        save_pretrained(parallel, tmp_path / "loaded")
        save_pretrained(parallel, tmp_path / "carried", carry=tmp_path / "source")
        generation.eos_token_id = 3
        save_pretrained(parallel, tmp_path / "changed", carry=tmp_path / "source")

    run_ranks(2, body)
    for folder in ("never loaded", "loaded", "carried"):
        assert settings_of(tmp_path / folder) == settings, folder
    assert settings_of(tmp_path / "changed") == settings | {"eos_token_id": 3}
