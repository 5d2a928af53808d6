"""Folders of `transformers`: each rank reads its own bytes; what is written again is what was read."""

from __future__ import annotations

import io

import pytest
import torch

from parallelize.progress_line import Progress
from tests.dist import pretrained_jobs as jobs

pytestmark = pytest.mark.processes
MESHES = [
    ({"tp": 4}, {}),
    ({"pp": 2, "tp": 2}, {}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 4}, {"zero": 1, "dtype": torch.bfloat16}),
]
FAMILIES = ["llama", "gpt2", "phi3", "gemma3", "gpt_neox", "bert"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    made = {}

    def of(family):
        if family not in made:
            made[family] = str(tmp_path_factory.mktemp(family) / "source")
            jobs.write_source(family, made[family])
        return made[family]

    return of


@pytest.mark.parametrize(("axes", "options"), MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(four_processes, sources, tmp_path, family, axes, options):
    if family == "bert" and "pp" in axes:
        pytest.skip("BERT's plan says nothing of a pipeline")
    for wrong in four_processes.run(jobs.there_and_back, sources(family), axes, options, str(tmp_path / "out")):
        assert not wrong


@pytest.mark.parametrize(
    ("axes", "options"), [({"dp": 4}, {"zero": 3}), ({"dp": 4}, {"zero": 0}), ({"pp": 2, "dp": 2}, {})]
)
def test_experts_are_stacked_and_unstacked(four_processes, sources, tmp_path, axes, options):
    for wrong in four_processes.run(jobs.there_and_back, sources("mixtral"), axes, options, str(tmp_path / "out")):
        assert not wrong


def test_folders_that_are_not_what_they_should_be(two_processes, sources, tmp_path):
    for found in two_processes.run(jobs.refusals, sources("llama"), str(tmp_path)):
        assert found == {
            "as it is": (),
            "tensor missing": ("missing-tensor",),
            "file missing": ("missing-file",),
            "file cut off": ("truncated-file",),
            "other shape": ("bad-index", "wrong-shape")[1:],
            "index of other files": ("bad-index",),
        }


def test_memory_is_the_shards_and_no_more(tmp_path, monkeypatch):
    """Two fresh processes, 4 layers of 17 MB: what is held beside the shards is smaller than the largest tensor."""
    import transformers

    from tests.support.processes import Pool

    for key, value in {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}.items():
        monkeypatch.setenv(key, value)
    sizes = dict(hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=8)
    config = transformers.LlamaConfig(**sizes, vocab_size=4096, num_hidden_layers=4)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    pool = Pool(2)
    try:
        for grown, held, largest in pool.run(jobs.peak_memory, str(tmp_path / "source")):
            assert grown <= held + largest, (grown, held, largest)
    finally:
        pool.close()


def test_progress_is_shown_on_terminals_alone():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown, said in [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)]:
        with Progress("loading", shown, 2_000_000, stream) as progress:
            progress(2_000_000)
        assert ("loading 100%: 2.0 MB of 2.0 MB" in stream.getvalue()) == said
