"""Folders of `transformers`: each rank reads its own bytes, and the written folder equals the one that was read."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from parallelize.base.terminal.console import Progress
from tests.checkpoint.hub import pretrained_jobs as jobs

pytestmark = pytest.mark.processes
MESHES = [
    ({"tp": 4}, {}),
    ({"pp": 2, "tp": 2}, {}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 4}, {"zero": 1, "dtype": torch.bfloat16}),
]
FAMILIES = ["llama", "gpt2", "phi3", "gemma3", "gpt_neox", "bert", "mixtral", "deepseek_v3"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    paths = {}

    def path_of(family):
        if family not in paths:
            paths[family] = str(tmp_path_factory.mktemp(family) / "source")
            jobs.write_source(family, paths[family])
        return paths[family]

    return path_of


@pytest.mark.variants(every=8)
@pytest.mark.parametrize(("axes", "options"), MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loading_and_saving_gives_the_same_folder(four_processes, sources, tmp_path, family, axes, options):
    if family == "bert" and "pp" in axes:
        pytest.skip("the plan of BERT has no pipeline")
    for wrong in four_processes.run(jobs.load_and_save, sources(family), axes, options, str(tmp_path / "out")):
        assert not wrong


@pytest.mark.variants(every=1)
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 4}, {"zero": 3}),
        ({"dp": 4}, {"zero": 0}),
        ({"pp": 2, "dp": 2}, {}),
        ({"dp": 4}, {"zero": 3, "ep": 2}),
        ({"dp": 2, "tp": 2}, {"zero": 1, "ep": 4}),
        ({"dp": 4}, {"zero": 2, "ep": 2, "etp": 2}),
        ({"pp": 2, "dp": 2}, {"zero": 0, "ep": 2}),
    ],
)
def test_experts_are_stacked_and_unstacked(four_processes, sources, tmp_path, axes, options):
    for wrong in four_processes.run(jobs.load_and_save, sources("mixtral"), axes, options, str(tmp_path / "out")):
        assert not wrong


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the test reads where files are mapped")
@pytest.mark.on_cpus("the weights of files are mapped in the memory of the host")
@pytest.mark.variants(every=6)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 1}], ids=["tp", "dp"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "mixtral"])
def test_mapped_weights_are_those_of_the_files_and_never_written_to_them(two_processes, sources, family, axes):
    assert two_processes.run(jobs.load_mapped, sources(family), axes) == [[]] * 2


@pytest.mark.on_cpus("the weights of files are mapped in the memory of the host")
@pytest.mark.parametrize("reason", ["zero", "values", "device"])
def test_what_cannot_be_mapped_is_refused_on_every_rank(two_processes, sources, reason):
    assert two_processes.run(jobs.slug_of_mapped, sources("llama"), reason) == [("not-mappable", True)] * 2


def test_damaged_folders_are_refused(two_processes, sources, tmp_path):
    for slugs in two_processes.run(jobs.refusals, sources("llama"), str(tmp_path)):
        assert slugs == {
            "as it is": (),
            "tensor missing": ("missing-tensor",),
            "file missing": ("missing-file",),
            "file truncated": ("truncated-file",),
            "other shape": ("wrong-shape",),
            "index of other files": ("bad-index",),
        }


@pytest.mark.sweep
def test_memory_is_the_shards_and_no_more(tmp_path, monkeypatch):
    """Two fresh processes, 4 layers of 17 MB: memory in addition to the shards is less than the largest tensor."""
    import transformers

    from tests.support.processes import Pool

    for key, value in {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}.items():
        monkeypatch.setenv(key, value)
    sizes = dict(hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=8)
    config = transformers.LlamaConfig(**sizes, vocab_size=4096, num_hidden_layers=4)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    pool = Pool(2)
    try:
        for growth, shards, largest in pool.run(jobs.peak_memory, str(tmp_path / "source")):
            assert growth <= shards + largest, (growth, shards, largest)
    finally:
        pool.close()


def test_progress_is_shown_only_on_terminals():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, enabled, visible in [
        (Terminal(), True, True),
        (Terminal(), False, False),
        (io.StringIO(), True, False),
    ]:
        with Progress("loading", enabled, 2_000_000, stream) as progress:
            progress(2_000_000)
        assert ("loading 100%: 2.0 MB of 2.0 MB" in stream.getvalue()) == visible
