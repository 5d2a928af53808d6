"""PyTorch's readers and writers of Hugging Face's files, for weights of which a rank stores several intervals."""

from __future__ import annotations

import pytest
import torch.distributed.checkpoint as dcp

from parallelize import build_mesh, full_state_dict, parallelize_module
from tests.support.models import tiny_model
from tests.support.parity import worst

pytestmark = pytest.mark.processes


def _refused(rank: int, folder: str, consolidates: bool) -> None:
    model = parallelize_module(tiny_model("phi3"), build_mesh("cpu", tp=2))
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=consolidates)
    with pytest.raises(dcp.api.CheckpointException, match="several-intervals") as error:
        dcp.save(model.state_dict(), storage_writer=writer)
    assert "qkv_proj" in str(error.value) and "save_pretrained" in str(error.value)


@pytest.mark.parametrize("consolidates", [True, False])
def test_a_writer_of_one_item_is_refused_for_packed_weights(two_processes, tmp_path, consolidates):
    two_processes.run(_refused, str(tmp_path), consolidates)
    assert not list(tmp_path.rglob("*.safetensors"))


def _read(rank: int, folder: str) -> None:
    model = parallelize_module(tiny_model("phi3", seed=5), build_mesh("cpu", tp=2))
    state = model.state_dict()
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder))
    model.load_state_dict(state)
    assert worst(full_state_dict(model, every_rank=True), tiny_model("phi3", seed=4).state_dict())[0] == 0


def test_packed_weights_are_read_from_the_files_of_the_stock_model(two_processes, tmp_path):
    tiny_model("phi3", seed=4).save_pretrained(tmp_path)
    two_processes.run(_read, str(tmp_path))
