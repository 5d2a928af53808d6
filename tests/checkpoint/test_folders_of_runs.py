"""Files of a run are written and read where the script says, in the background too."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from parallelize import Checkpointer, load_checkpoint, load_pretrained, save_pretrained
from tests.checkpoint.small_checkpoints import linear


@pytest.mark.sweep
@pytest.mark.processes
def test_a_save_in_the_background_outlives_the_script(tmp_path):
    script = f"""
        import torch
        from torch import nn
        from parallelize import Checkpointer
        checkpoints = Checkpointer({str(tmp_path / "run")!r}, nn.Linear(2048, 4096), asynchronous=True)
        checkpoints.save(1)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    load_checkpoint(tmp_path / "run", nn.Linear(2048, 4096))


def test_a_folder_is_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run", linear()) as checkpoints:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoints.save(1)
    assert os.listdir(tmp_path / "elsewhere") == [] and load_checkpoint(tmp_path / "run", linear()) == 1


def test_a_single_file_comes_before_an_index(tmp_path):
    save_pretrained(linear(0), tmp_path / "many", max_shard_size=64)
    save_pretrained(linear(1), tmp_path / "one")
    os.replace(tmp_path / "one" / "model.safetensors", tmp_path / "many" / "model.safetensors")
    module = linear(2)
    load_pretrained(module, tmp_path / "many")
    assert torch.equal(module[0].weight, linear(1)[0].weight)
