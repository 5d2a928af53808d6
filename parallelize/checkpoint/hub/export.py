"""Writing weights in Hugging Face's layout. Every rank writes its own files, and no rank stores the unsharded model.

The files contain full tensors. Each tensor is gathered on the rank that writes it, one tensor at a time per rank, and
all ranks write concurrently. All ranks know which boxes each rank owns, so all derive the same messages.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.boxes import shape_of, slices_of
from parallelize.base.errors import CheckpointError, ParallelizeError, Problem
from parallelize.checkpoint.format import disk
from parallelize.checkpoint.format.device_pieces import empty, torch_dtype
from parallelize.checkpoint.format.writer import TensorToWrite, write_tensors
from parallelize.checkpoint.hub.adapter_folder import refuse_unmerged, stock_module
from parallelize.checkpoint.hub.described_tensors import owned_by_rank, tensors_of_model
from parallelize.checkpoint.hub.extras import carried_files, write_extras
from parallelize.checkpoint.hub.file_shards import INDEX, HubTensor, assign_files, index_of, parse_size
from parallelize.checkpoint.hub.quantized_tensors import refuse_quantized
from parallelize.checkpoint.hub.tensor_messages import HubTensors, OwnedBoxes, TensorMessage, as_target, dtype_code
from parallelize.checkpoint.run.local_tensors import ModelOnMesh, model_on_mesh
from parallelize.checkpoint.run.rank_sync import TIMEOUT_S, RankSync, as_parallelize_error
from parallelize.state.full_values import reshard_units

T = torch.Tensor


def save_pretrained(
    model: Any,
    folder: str | os.PathLike,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    carry: str | os.PathLike | None = None,
    mesh: DeviceMesh | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Path:
    """Write the weights of a model in the format of `transformers`. A collective over all processes.

    Ties, names and conversions are those of `save_pretrained` of `transformers`; of a model with adapters of PEFT those
    of the stock model, with what is merged and with the active copies of `modules_to_save`. For its models, config.json
    and generation_config.json are written too. Memory: one full tensor per rank, besides its shards.

    Args:
        model: a module on any mesh, or a `ParallelModel`.
        folder: the folder to write, which must be new or empty.
        max_shard_size: maximum size of a file: bytes, or a text such as "5GB".
        dtype: the dtype of floating-point weights. Default: the compute dtype.
        carry: a folder whose files that are not weights (tokenizer, chat template) are copied.
        mesh: the mesh of all processes, if the model has none.
        timeout_s: seconds to wait for other ranks.

    Returns: the folder. It is renamed into place after everything was written.
    Raises: CheckpointError `quantized-base`, `unmerged-adapters`, `folder-not-empty`, `write-failed`,
        `unwritable-conversion`, `unsavable-dtype`, `bad-size`, on every rank. `folder` is then empty.
    Cost: each element is sent once to the rank that writes it, point to point over gloo, unless that rank owns it; and
        rendezvous of all ranks for errors.
    """
    module, on_mesh = model_on_mesh(model, mesh)
    sync = RankSync(on_mesh.mesh, timeout_s, own_group=False)
    try:
        reshard_units(module)
        return _Export(on_mesh, sync, dtype).run(Path(folder).resolve(), parse_size(max_shard_size), carry)
    finally:
        sync.close()


class _Export:
    """One export. It proceeds in rounds: in each, every writer receives its next tensor."""

    def __init__(self, on_mesh: ModelOnMesh, sync: RankSync, dtype: torch.dtype | None):
        self.on_mesh, self.sync = on_mesh, sync
        self.owned = OwnedBoxes(on_mesh)
        self.code = dtype_code(dtype)

    def run(self, folder: Path, max_bytes: int, carry: Any) -> Path:
        """Every rank must reach each rendezvous, whatever fails on it: therefore any exception becomes an `error`."""
        error: ParallelizeError | None = None
        local: dict[str, Any] = {}
        try:
            refuse_quantized(self.on_mesh, "save_pretrained")
            refuse_unmerged(self.on_mesh.module, "save_pretrained")
            if carry is not None and self.sync.is_coordinator:
                carried_files(Path(carry))  # before anything is written
            local = self.owned.described()
        except Exception as cause:
            error = as_parallelize_error(cause)
        described = self.sync.agree(error, local)
        try:
            model, by_rank = tensors_of_model(described), owned_by_rank(described)
            self.tensors = HubTensors(self.on_mesh.module, model, by_rank, self.code)
            tensors = self.tensors.by_name
            files = assign_files({tensor.name: tensor.num_bytes for tensor in tensors.values()}, max_bytes)
        except Exception as cause:
            error = as_parallelize_error(cause)
        self.sync.agree(error)
        writing = self._create_folder(folder)
        error = self._write(writing, files, tensors)
        if error is None and self.sync.is_coordinator:
            try:
                self._finish(writing, files, tensors, carry)
            except Exception as cause:
                error = as_parallelize_error(cause)
        try:
            self.sync.agree(error)
            self._publish(writing, folder)
        except BaseException:
            if self.sync.is_coordinator:
                disk.remove_folder(writing)
            raise
        return folder

    def _create_folder(self, folder: Path) -> Path:
        """A temporary folder next to `folder`, with the same name on every rank."""
        name: str | None = None
        error: ParallelizeError | None = None
        if self.sync.is_coordinator:
            name = f".{folder.name}.writing-{uuid.uuid4().hex[:12]}"
            try:
                _check_is_new(folder)
                with disk.reporting_errors(folder):
                    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
                    disk.make_folder(folder.absolute().parent / name)
            except Exception as cause:
                error = as_parallelize_error(cause)
        self.sync.agree(error)
        return folder.absolute().parent / self.sync.broadcast(name)

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _write(
        self, writing: Path, files: Mapping[str, list[str]], tensors: Mapping[str, HubTensor]
    ) -> ParallelizeError | None:
        """Write the files of this rank. After a failure it still takes part in all rounds, or other ranks would
        deadlock."""
        names = list(files)
        by_writer: list[list[str]] = [[] for _ in range(self.sync.size)]
        for number, file in enumerate(names):
            by_writer[number * self.sync.size // len(names)].append(file)
        order = [[tensors[name] for file in assigned for name in files[file]] for assigned in by_writer]
        rounds = max(map(len, order))
        self.round = 0
        error = None
        for file in by_writer[self.sync.rank]:
            try:
                items = [
                    TensorToWrite(tensor.name, tensor.dtype, tensor.shape, lambda: self._round(order))
                    for tensor in map(tensors.__getitem__, files[file])
                ]
                write_tensors(writing / file, items, {"format": "pt"})
            except Exception as cause:
                error = as_parallelize_error(cause)
                break
        while self.round < rounds:
            try:
                self._round(order)
            except Exception as cause:
                return error or as_parallelize_error(cause)
        return error

    def _round(self, order: Sequence[Sequence[HubTensor]]) -> T:
        """Gather the next tensor of every writer. Returns that of this rank, or an empty tensor if it has no more."""
        number, self.round = self.round, self.round + 1
        rank, works, sent = self.sync.rank, [], []  # `sent`: keeps the tensors alive until they were sent
        received: list[tuple[TensorMessage, T]] = []
        own = order[rank][number] if number < len(order[rank]) else None
        for writer, tensors in enumerate(order):
            for tag, message in enumerate(self.tensors.messages(tensors[number]) if number < len(tensors) else ()):
                code = tensors[number].dtype
                if message.sender == rank:
                    value = self._local_box(message, torch_dtype(code))
                    if writer == rank:
                        received.append((message, value))
                    else:
                        sent.append(value)
                        works.append(self._send(value, writer, tag))
                elif writer == rank:
                    value = torch.empty(shape_of(message.box), dtype=torch_dtype(code))
                    received.append((message, value))
                    works.append(self._receive(value, message.sender, tag))
        for work in works:
            work.wait()
        if own is None:
            return torch.empty(0)
        full = empty(own.shape, torch_dtype(own.dtype))
        for message, value in received:
            full[slices_of(message.target())].copy_(as_target(value, message.part))
        return full

    def _local_box(self, message: TensorMessage, dtype: torch.dtype) -> T:
        return self.owned.view(message).to(device="cpu", dtype=dtype).contiguous()

    def _send(self, value: T, to: int, tag: int) -> Any:
        return dist.isend(_as_bytes(value), self.sync.ranks[to], group=self.sync.group, tag=tag)

    def _receive(self, value: T, source: int, tag: int) -> Any:
        return dist.irecv(_as_bytes(value), self.sync.ranks[source], group=self.sync.group, tag=tag)

    # -- completion -----------------------------------------------------------------------------------------------

    def _finish(
        self, writing: Path, files: Mapping[str, list[str]], tensors: Mapping[str, HubTensor], carry: Any
    ) -> None:
        """Write the index and the other files."""
        with disk.reporting_errors(writing):
            if len(files) > 1:
                disk.write_file(writing / INDEX, index_of(files, tensors.values()))
            dtypes = (torch_dtype(tensor.dtype) for tensor in tensors.values())
            dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
            write_extras(stock_module(self.on_mesh.module), writing, dtype, carry)

    def _publish(self, writing: Path, folder: Path) -> None:
        error = None
        if self.sync.is_coordinator:
            try:
                with disk.reporting_errors(folder):
                    disk.flush_folder(writing)
                    if folder.is_dir():
                        folder.rmdir()
                    disk.rename(writing, folder)
                    disk.flush_folder(folder.absolute().parent)
            except Exception as cause:
                error = as_parallelize_error(cause)
        self.sync.agree(error)


def _check_is_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "exists already and is not empty"
        raise CheckpointError(Problem("folder-not-empty", what, str(folder), fix="name a new folder"))


def _as_bytes(value: T) -> T:
    """As bytes, because gloo does not support every dtype."""
    return value.view(-1).view(torch.uint8) if value.numel() else value.new_empty(0, dtype=torch.uint8)
