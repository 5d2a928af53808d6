"""Weights out in Hugging Face's layout: every rank writes files of its own, and no rank ever holds the model.

A file of that layout holds whole tensors, so the parts of each come together on the rank that writes it, one tensor at a
time; all writers work at once. Which rank sends what to whom follows from what each rank owns, which all ranks know.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize.checkpoint import disk
from parallelize.checkpoint.boxes import Box, Part, common, moved, shape_of, slices_of, starts, volume
from parallelize.checkpoint.boxes import whole as whole_box
from parallelize.checkpoint.held import Place, parameters, placed
from parallelize.checkpoint.hub_extras import write_extras
from parallelize.checkpoint.hub_names import Wanted, parts_out
from parallelize.checkpoint.hub_shards import INDEX, Written, index_of, parse_size, share_out
from parallelize.checkpoint.meeting import TIMEOUT_S, Meeting, known
from parallelize.checkpoint.memory import code_of, empty, torch_dtype
from parallelize.checkpoint.pretrained import plain_name, wanted_of
from parallelize.checkpoint.snapshot import fold
from parallelize.checkpoint.writer import Outgoing, write_tensors
from parallelize.errors import CheckpointError, ParallelizeError, Problem

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
    """Write a model's weights as `transformers` would. A collective over all processes.

    Ties, names and conversions are those of `transformers`' own `save_pretrained`; config.json and generation_config.json are
    written for its models. Every rank holds one tensor more than its shards, at most.

    Args:
        model: a module on any mesh, or a `ParallelModel`. folder: new, or empty.
        max_shard_size: of a file, "5GB" or bytes. dtype: of floating weights; default: that of compute.
        carry: a folder whose other files (tokenizer, chat template) go along.

    Returns: the folder, which appears at once, when all of it is written.
    Raises: CheckpointError `folder-not-empty`, `write-failed`, `unwritable-conversion`, on every rank; nothing is left then.
    """
    module, place = placed(model, mesh)
    meeting = Meeting(place.mesh, timeout_s, beside=False)
    try:
        fold(module)
        return _Export(place, meeting, dtype).run(Path(folder).resolve(), parse_size(max_shard_size), carry)
    finally:
        meeting.close()


@dataclass(frozen=True)
class _Message:
    """Elements of a tensor that go from one rank to another: a box of the model's tensor, and where it goes."""

    sender: int
    name: str
    number: int
    box: Box
    part: Part

    def target(self) -> Box:
        """The box of the written tensor."""
        box = list(self.part.target)
        for along, (start, stop), first in zip(self.part.dims, self.box, self.part.source_start, strict=True):
            if along is not None:
                begin = self.part.target[along][0] + start - first
                box[along] = (begin, begin + stop - start)
        return tuple(box)


class _Export:
    """One export. Rounds: in each, every writer gets its next tensor."""

    def __init__(self, place: Place, meeting: Meeting, dtype: torch.dtype | None):
        self.place, self.meeting = place, meeting
        self.own = {plain_name(one): list(one.owned()) for one in parameters(place)}
        self.code = _code(dtype)

    def run(self, folder: Path, most: int, carry: Any) -> Path:
        error: ParallelizeError | None = None
        mine: dict[str, Any] = {}
        try:
            mine = self._mine()
        except Exception as found:
            error = known(found)
        everyone = self.meeting.agree(error, mine)
        wanted = wanted_of(self.place, self.meeting)
        try:
            tensors = self._tensors(wanted, everyone)
            files = share_out({one.name: one.num_bytes for one in tensors.values()}, most)
        except Exception as found:
            error = known(found)
        self.meeting.agree(error)
        writing = self._begin(folder)
        error = self._write(writing, files, tensors)
        if error is None and self.meeting.leads:
            try:
                self._finish(writing, files, tensors, carry)
            except Exception as found:
                error = known(found)
        try:
            self.meeting.agree(error)
            self._publish(writing, folder)
        except BaseException:
            if self.meeting.leads:
                disk.remove_folder(writing)
            raise
        return folder

    def _mine(self) -> dict[str, Any]:
        """What this rank owns: name -> dtype and boxes."""
        return {
            plain_name(one): [one.about.get("compute") or one.dtype, [[list(map(list, o.box)) for o in one.owned()]]]
            for one in parameters(self.place)
        }

    def _tensors(self, wanted: list[Wanted], everyone: list[dict[str, Any]]) -> dict[str, Written]:
        """All tensors that are written, and who owns what of the model: the same on every rank."""
        self.owners: dict[str, list[tuple[int, int, Box]]] = {}
        dtypes: dict[str, str] = {}
        for rank, held in enumerate(everyone):
            for name, (dtype, (boxes,)) in held.items():
                dtypes.setdefault(name, dtype)
                found = self.owners.setdefault(name, [])
                found += [(rank, number, tuple((a, b) for a, b in box)) for number, box in enumerate(boxes)]
        return {
            name: Written(name, self._dtype(dtypes[parts[0].source]), shape, parts)
            for name, (shape, parts) in parts_out(self.place.module, wanted).items()
        }

    def _dtype(self, code: str) -> str:
        return self.code if self.code is not None and torch_dtype(code).is_floating_point else code

    def _begin(self, folder: Path) -> Path:
        said: Any = None
        error: ParallelizeError | None = None
        if self.meeting.leads:
            said = f".{folder.name}.writing-{uuid.uuid4().hex[:12]}"
            try:
                _check_free(folder)
                with disk.explained(folder):
                    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
                    disk.make_folder(folder.absolute().parent / said)
            except Exception as found:
                error = known(found)
        self.meeting.agree(error)
        return folder.absolute().parent / self.meeting.share(said)

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _write(
        self, writing: Path, files: Mapping[str, list[str]], tensors: Mapping[str, Written]
    ) -> ParallelizeError | None:
        """Write this rank's files. What fails here must not leave other writers waiting: rounds go on to the last."""
        names = list(files)
        by_writer: list[list[str]] = [[] for _ in range(self.meeting.size)]
        for number, file in enumerate(names):
            by_writer[number * self.meeting.size // len(names)].append(file)
        order = [[tensors[name] for file in mine for name in files[file]] for mine in by_writer]
        rounds = max(map(len, order))
        self._done = 0
        error = None
        for file in by_writer[self.meeting.rank]:
            try:
                outgoing = [
                    Outgoing(one.name, one.dtype, one.shape, lambda: self._round(order))
                    for one in map(tensors.__getitem__, files[file])
                ]
                write_tensors(writing / file, outgoing, {"format": "pt"})
            except Exception as found:
                error = known(found)
                break
        while self._done < rounds:
            try:
                self._round(order)
            except Exception as found:
                return error or known(found)
        return error

    def _round(self, order: Sequence[Sequence[Written]]) -> T:
        """Bring the next tensor of every writer together; returns this rank's own."""
        number, self._done = self._done, self._done + 1
        here, works, kept = self.meeting.rank, [], []
        arriving: list[tuple[_Message, T]] = []
        mine = order[here][number] if number < len(order[here]) else None
        for writer, tensors in enumerate(order):
            for tag, message in enumerate(self._messages(tensors[number]) if number < len(tensors) else ()):
                code = tensors[number].dtype
                if message.sender == here:
                    value = self._cut(message, torch_dtype(code))
                    if writer == here:
                        arriving.append((message, value))
                    else:
                        kept.append(value)
                        works.append(self._send(value, writer, tag))
                elif writer == here:
                    value = torch.empty(shape_of(message.box), dtype=torch_dtype(code))
                    arriving.append((message, value))
                    works.append(self._receive(value, message.sender, tag))
        for work in works:
            work.wait()
        if mine is None:
            return torch.empty(0)
        full = empty(mine.shape, torch_dtype(mine.dtype))
        for message, value in arriving:
            full[slices_of(message.target())].copy_(_as_target(value, message.part))
        return full

    def _messages(self, one: Written) -> list[_Message]:
        """Everything that makes a tensor, in an order that all ranks agree on."""
        found = []
        for part in one.parts:
            box = part.source_box(part.target)
            for rank, number, owned in self.owners[part.source]:
                shared = common(box, owned)
                if shared is not None:
                    found.append(_Message(rank, part.source, number, shared, part))
        return found

    def _cut(self, message: _Message, dtype: torch.dtype) -> T:
        owned = self.own[message.name][message.number]
        value = owned.value[slices_of(moved(message.box, starts(owned.box)))]
        return value.to(device="cpu", dtype=dtype).contiguous()

    def _send(self, value: T, to: int, tag: int) -> Any:
        return dist.isend(_raw(value), self.meeting.ranks[to], group=self.meeting.group, tag=tag)

    def _receive(self, value: T, source: int, tag: int) -> Any:
        return dist.irecv(_raw(value), self.meeting.ranks[source], group=self.meeting.group, tag=tag)

    # -- the end --------------------------------------------------------------------------------------------------

    def _finish(
        self, writing: Path, files: Mapping[str, list[str]], tensors: Mapping[str, Written], carry: Any
    ) -> None:
        with disk.explained(writing):
            if len(files) > 1:
                sizes = {one.name: one.num_bytes for one in tensors.values()}
                count = sum(volume(whole_box(one.shape)) for one in tensors.values())
                disk.write_file(writing / INDEX, index_of(files, sizes, count))
            kinds = [one.dtype for one in tensors.values() if torch_dtype(one.dtype).is_floating_point]
            write_extras(self.place.module, writing, torch_dtype(kinds[0]) if kinds else None, carry)

    def _publish(self, writing: Path, folder: Path) -> None:
        error = None
        if self.meeting.leads:
            try:
                with disk.explained(folder):
                    disk.flush_folder(writing)
                    if folder.is_dir():
                        folder.rmdir()
                    disk.rename(writing, folder)
                    disk.flush_folder(folder.absolute().parent)
            except Exception as found:
                error = known(found)
        self.meeting.agree(error)


def _code(dtype: torch.dtype | None) -> str | None:
    code = code_of(dtype) if dtype is not None else None
    if dtype is not None and (code is None or not dtype.is_floating_point):
        what = f"weights cannot be written as {dtype}"
        raise CheckpointError(Problem("unsavable-dtype", what, fix="torch.bfloat16, float16, float32 or float64"))
    return code


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is there already, and not empty"
        raise CheckpointError(Problem("folder-not-empty", what, str(folder), fix="name a new folder"))


def _as_target(value: T, part: Part) -> T:
    """Elements in the model's order, as dims of the written tensor."""
    keep = [place for place, along in enumerate(part.dims) if along is not None]
    value = value.reshape([value.shape[place] for place in keep])
    along = [dim for dim in part.dims if dim is not None]
    value = value.permute([along.index(dim) for dim in sorted(along)])
    for dim in range(len(part.target)):
        if dim not in along:
            value = value.unsqueeze(dim)
    return value


def _raw(value: T) -> T:
    """As bytes: gloo does not know every dtype."""
    return value.view(-1).view(torch.uint8) if value.numel() else value.new_empty(0, dtype=torch.uint8)
