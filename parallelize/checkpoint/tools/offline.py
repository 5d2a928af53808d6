"""Inspecting and verifying a checkpoint without a model. Does not import torch.

Both support two layouts: a training checkpoint (with a manifest), and a Hugging Face folder (safetensors files, with or
without an index).
"""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelize.checkpoint.format import folders
from parallelize.checkpoint.format.boxes import full_box, shape_of, volume
from parallelize.checkpoint.format.digests import BLOCK_BYTES, KEY, digest_of, read_digests
from parallelize.checkpoint.format.header import FileInfo, Header, TensorEntry, read_header
from parallelize.checkpoint.format.manifest import NAME, SavedSlice, SavedTensor, read_manifest
from parallelize.checkpoint.format.paths import check_name, open_file, read_small
from parallelize.checkpoint.format.strict_json import read_json
from parallelize.checkpoint.hub.file_shards import INDEX, SINGLE
from parallelize.errors import CheckpointError, Problem

SlicesByKey = dict[str, tuple[SavedTensor, SavedSlice]]
"""Key in a file -> the tensor and the slice of it that has this key."""
_FIX = "restore the file from a copy, or load another step"
_STRUCTS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


def is_hub_folder(path: Path) -> bool:
    """Whether a folder has weights in Hugging Face's layout and is not a training checkpoint."""
    if not path.is_dir() or (path / NAME).is_file() or folders.published(path):
        return False
    return any((path / name).is_file() for name in (INDEX, SINGLE, "config.json")) or any(path.glob("*.safetensors"))


# -- inspect --------------------------------------------------------------------------------------------------------------


def inspect_checkpoint(path: str | os.PathLike, step: int | None = None) -> dict[str, Any]:
    """Describe a checkpoint as plain values. No tensor is read.

    Args:
        path: folder of one step, of a run, or in Hugging Face's layout.
        step: which step of a run. Default: the newest.

    Returns: for both layouts `kind`, `folder`, `model`, `holds` (weights, optimizer, rest: tensors, elements, bytes, dtypes),
        `files` (name -> bytes) and `tensors`. For a training checkpoint also step, mesh, ZeRO stage, plan, versions,
        optimizers with the options of their groups, schedulers, and a summary of the other state.
    Raises: CheckpointError `no-checkpoint`, and of `read_manifest` and `read_header`.
    """
    if step is None and is_hub_folder(Path(path)):
        return _inspect_hub(Path(path))
    folder = folders.resolve(path, step)
    manifest = read_manifest(folder)
    about, state = manifest.about, manifest.state
    kinds = {name: _kind(name, state) for name in manifest.tensors}
    return {
        "kind": "training checkpoint",
        "folder": str(folder),
        "step": manifest.step,
        "steps": list(folders.published(folder.parent)),
        **{key: about.get(key) for key in ("saved_at", "mesh", "world_size", "zero", "plan", "versions")},
        **{key: about[key] for key in ("reshaped_from", "converted_from") if key in about},
        "model": {"class": (about.get("model") or {}).get("class")},
        "holds": _holds(manifest.tensors.values(), kinds),
        "optimizers": {name: _optimizer(record) for name, record in (state.get("optimizers") or {}).items()},
        "schedulers": {name: _class(record.get("class")) for name, record in (state.get("schedulers") or {}).items()},
        "state": {
            **{key: bool(state.get(key)) for key in ("streams", "data", "values")},
            "user": list(state.get("user") or {}),
            "generators": len(state.get("generators") or {}),
        },
        "files": {name: info.num_bytes for name, info in manifest.files.items()},
        "tensors": {
            tensor.name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "pieces": len(tensor.slices),
                **tensor.about,
            }
            for tensor in manifest.tensors.values()
        },
    }


def _inspect_hub(folder: Path) -> dict[str, Any]:
    names, _ = _weight_files(folder)
    config = _config(folder)
    tensors: list[SavedTensor] = []
    files, hashes = {}, True
    for name in names:
        with _opened(folder, name) as (descriptor, size):
            header = read_header(descriptor, size, str(folder / name))
        files[name], hashes = size, hashes and KEY in header.metadata
        tensors += [SavedTensor(tensor.name, tensor.dtype, tensor.shape, ()) for tensor in header.entries.values()]
    return {
        "kind": "Hugging Face folder",
        "folder": str(folder),
        "model": {"class": next(iter(config.get("architectures") or ()), None), "type": config.get("model_type")},
        "transformers": config.get("transformers_version"),
        "hashes": hashes,
        "holds": _holds(tensors, dict.fromkeys((tensor.name for tensor in tensors), "weights")),
        "files": files,
        "tensors": {tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in tensors},
    }


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        return {}
    config = read_json(read_small(folder, "config.json", 16 << 20), str(folder / "config.json"))
    return config if isinstance(config, dict) else {}


def _kind(name: str, state: dict[str, Any]) -> str:
    prefix = name.partition("/")[0]
    if prefix == "model":
        return "weights"
    return "optimizer" if prefix in (state.get("optimizers") or {}) else "rest"


def _holds(tensors: Iterable[SavedTensor], kinds: dict[str, str]) -> dict[str, Any]:
    sums_by_kind: dict[str, Any] = {
        kind: {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": {}} for kind in ("weights", "optimizer", "rest")
    }
    for tensor in tensors:
        sums = sums_by_kind[kinds[tensor.name]]
        sums["tensors"] += 1
        sums["elements"] += volume(full_box(tensor.shape))
        sums["bytes"] += tensor.num_bytes
        sums["dtypes"][tensor.dtype] = sums["dtypes"].get(tensor.dtype, 0) + tensor.num_bytes
    return sums_by_kind


def _optimizer(record: dict[str, Any]) -> dict[str, Any]:
    groups = [
        {
            "options": {key: _plain(value) for key, value in group["options"].items()},
            "parameters": len(group["params"]),
        }
        for group in record["groups"]
    ]
    return {"class": _class(record.get("class")), "parameters": len(record.get("state") or {}), "groups": groups}


def _class(described: Any) -> str | None:
    return f"{described.get('module')}.{described.get('name')}" if isinstance(described, dict) else None


def _plain(value: Any) -> Any:
    """A value that `json_encoder` has encoded, for display. Values without a short form are shown as their tag."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get("$")
    if tag == "tuple":
        return _plain(value["items"])
    if tag == "float":
        return value["value"]
    if tag == "tensor" and not value["shape"] and value["dtype"] in _STRUCTS:
        return struct.unpack(_STRUCTS[value["dtype"]], base64.b64decode(value["base64"]))[0]
    if tag in ("tensor", "stored_tensor"):
        return f"{value['dtype']} {value['shape']}"
    return f"<{tag}>" if tag else {key: _plain(item) for key, item in value.items()}


# -- verify -------------------------------------------------------------------------------------------------------------


@dataclass
class CheckReport:
    """The result of a check.

    Attributes:
        folder: that was checked.
        files, tensors: number of files and of their entries.
        hashed: bytes of tensors that were compared with a hash.
        unhashed: names of files without hashes.
        problems: that were found.
    """

    folder: Path
    files: int = 0
    tensors: int = 0
    hashed: int = 0
    unhashed: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def verify_checkpoint(
    path: str | os.PathLike, step: int | None = None, progress: Callable[[int], None] | None = None
) -> list[Problem]:
    """Compare every tensor with its hashes, and every file with the manifest or the index.

    Continues after a problem. For files without hashes (Hugging Face folders), only the structure is checked; `check_folder`
    returns their names.

    Args:
        path: folder of one step, of a run, or in Hugging Face's layout.
        step: which step of a run. Default: the newest.
        progress: called with the number of bytes after each read.

    Returns: one problem per damaged tensor or file.
    Raises: CheckpointError `no-checkpoint`.
    """
    return check_folder(path, step, progress).problems


def check_folder(
    path: str | os.PathLike, step: int | None = None, progress: Callable[[int], None] | None = None
) -> CheckReport:
    """As `verify_checkpoint`, with counts of what was checked."""
    if step is None and is_hub_folder(Path(path)):
        return _Check(Path(path), progress).hub()
    return _Check(folders.resolve(path, step), progress).run()


class _Check:
    """One check. Problems are collected; parts that depend on a damaged part are skipped."""

    def __init__(self, folder: Path, progress: Callable[[int], None] | None):
        self.folder, self.progress = folder, progress
        self.report = CheckReport(folder)
        self._buffer = memoryview(bytearray(BLOCK_BYTES))

    def run(self) -> CheckReport:
        """A training checkpoint."""
        with self._collect_problems():
            manifest = read_manifest(self.folder)
            slices: dict[str, SlicesByKey] = {name: {} for name in manifest.files}
            for saved in manifest.tensors.values():
                for part in saved.slices:
                    slices[part.file][part.key] = (saved, part)
            for info in manifest.files.values():
                with self._collect_problems():
                    self._check_file(info, slices[info.name])
            for path in sorted(self.folder.iterdir()):
                if path.name not in manifest.files and path.name != NAME:
                    self._add("unlisted-file", "is not in the manifest, and is never read", str(path), fix="remove it")
        return self.report

    def hub(self) -> CheckReport:
        """A Hugging Face folder."""
        with self._collect_problems():
            names, listed = _weight_files(self.folder)
            file_of: dict[str, str] = {}
            for name in names:
                with self._collect_problems(), _opened(self.folder, name) as (descriptor, size):
                    header = read_header(descriptor, size, str(self.folder / name))
                    self._check_unique(header, name, file_of)
                    self._check_blocks(descriptor, name, header)
            if listed is not None:
                self._check_index(listed, file_of)
        return self.report

    def _add(self, slug: str, what: str, where: str, rows: tuple[tuple[str, str], ...] = (), fix: str = _FIX) -> None:
        self.report.problems.append(Problem(slug, what, where, rows, fix))

    @contextmanager
    def _collect_problems(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.report.problems += error.problems

    # -- a file ---------------------------------------------------------------------------------------------------

    def _check_file(self, info: FileInfo, slices: SlicesByKey) -> None:
        where = str(self.folder / info.name)
        with _opened(self.folder, info.name) as (descriptor, size):
            if size != info.num_bytes:
                rows = (("expected", f"{info.num_bytes:,} bytes"), ("found", f"{size:,} bytes"))
                self._add("wrong-size", "has another size than it was written with", where, rows)
                return
            header = read_header(descriptor, size, where)
            digest = digest_of(header.raw)
            if digest != info.header:
                rows = (("expected", info.header), ("found", digest))
                self._add("corrupt-header", "its header does not match its digest", where, rows)
            self._check_entries(header, where, slices)
            self._check_blocks(descriptor, info.name, header)

    def _check_entries(self, header: Header, where: str, slices: SlicesByKey) -> None:
        """The entries of a file must be exactly the slices that the manifest lists for it."""
        for key, (saved, part) in slices.items():
            expected = f"{saved.dtype} {list(shape_of(part.box))}"
            entry = header.entries.get(key)
            if entry is None:
                rows = (("tensor", saved.name), ("expected", expected), ("found", "no entry of that name"))
                self._add("missing-tensor", f"lacks {key!r}, which the manifest lists for it", where, rows)
            elif (entry.dtype, entry.shape) != (saved.dtype, shape_of(part.box)):
                rows = (("tensor", saved.name), ("expected", expected), ("found", f"{entry.dtype} {list(entry.shape)}"))
                self._add("wrong-entry", f"{key} differs from the manifest", where, rows)
        for key in header.entries:
            if key not in slices:
                self._add("unlisted-tensor", f"contains {key!r}, which the manifest does not list", where)

    def _check_blocks(self, descriptor: int, name: str, header: Header) -> None:
        """Read every tensor and compare its hashes. Tensors of a file without hashes are not read."""
        where = str(self.folder / name)
        self.report.files += 1
        self.report.tensors += len(header.entries)
        sizes = {entry.name: entry.num_bytes for entry in header.entries.values()}
        digests = read_digests(header.metadata, sizes, where)
        if digests is None:
            self.report.unhashed.append(name)
            return
        for entry in header.entries.values():
            expected = digests[entry.name]
            damaged = [block for block in self._digests(descriptor, entry, where) if block[2] != expected[block[0]]]
            if damaged:
                number, length, digest = damaged[0]
                first = number * BLOCK_BYTES
                rows = (
                    ("tensor", entry.name),
                    ("bytes", f"{first:,} to {first + length:,} of {entry.num_bytes:,}"),
                    ("expected", expected[number]),
                    ("found", digest),
                )
                more = (("blocks", f"{len(damaged)} of {len(expected)} are damaged"),)
                self._add("corrupt-tensor", f"{entry.name} does not match its digest", where, (*rows, *more))

    def _digests(self, descriptor: int, entry: TensorEntry, where: str) -> Iterator[tuple[int, int, str]]:
        """(number, number of bytes, digest) of each block of a tensor, computed from the file."""
        for number, at in enumerate(range(0, entry.num_bytes, BLOCK_BYTES)):
            data = self._buffer[: min(BLOCK_BYTES, entry.num_bytes - at)]
            _read(descriptor, data, entry.start + at, where)
            self.report.hashed += len(data)
            if self.progress is not None:
                self.progress(len(data))
            yield number, len(data), digest_of(data)

    # -- an index -------------------------------------------------------------------------------------------------

    def _check_unique(self, header: Header, name: str, file_of: dict[str, str]) -> None:
        """Each tensor must be in one file. Adds the tensors of this file to `file_of`."""
        for tensor in header.entries:
            if tensor in file_of:
                what = f"{tensor} is in {file_of[tensor]} and in {name}"
                self._add("bad-index", what, str(self.folder), fix="keep one of the files")
            file_of[tensor] = name

    def _check_index(self, listed: dict[str, str], file_of: dict[str, str]) -> None:
        """The index must list exactly the tensors of the files."""
        where, fix = str(self.folder / INDEX), "the files do not belong together: copy or download them again"
        for tensor in [*listed, *(name for name in file_of if name not in listed)]:
            if listed.get(tensor) != file_of.get(tensor):
                rows = (
                    ("tensor", tensor),
                    ("expected", f"in {listed.get(tensor) or 'no file'}"),
                    ("found", f"in {file_of.get(tensor) or 'no file'}"),
                )
                self._add("bad-index", f"{tensor} is not in the file that the index names", where, rows, fix)


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """(safetensors files, weight map of the index; None without an index). Raises: CheckpointError `no-weights`, `bad-index`."""
    where = str(folder / INDEX)
    if (folder / INDEX).is_file():
        index = read_json(read_small(folder, INDEX), where)
        listed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(listed, dict) or not listed:
            raise CheckpointError(Problem("bad-index", "has no weight_map from tensors to files", where))
        return sorted({check_name(file, where) for file in listed.values()}), listed
    existing = sorted(path.name for path in folder.glob("*.safetensors"))
    names = [SINGLE] if SINGLE in existing else existing
    if not names:
        what = "has no safetensors files"
        raise CheckpointError(Problem("no-weights", what, str(folder), fix="name a folder with weights in that format"))
    return names, None


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[tuple[int, int]]:
    descriptor, size = open_file(folder, name)
    try:
        yield descriptor, size
    finally:
        os.close(descriptor)


def _read(descriptor: int, data: memoryview, start: int, where: str) -> None:
    at = 0
    while at < len(data):
        try:
            count = os.preadv(descriptor, [data[at:]], start + at)
        except OSError as error:
            what = f"byte {start + at} cannot be read: {error.strerror}"
            raise CheckpointError(Problem("unreadable-file", what, where)) from error
        if count == 0:
            raise CheckpointError(Problem("truncated-file", f"ends at byte {start + at}, inside a tensor", where))
        at += count


def total_bytes(path: str | os.PathLike, step: int | None = None) -> int:
    """The number of bytes that a check reads, for a progress line. 0 if it is unknown: the check then reports why."""
    try:
        holds = inspect_checkpoint(path, step)["holds"]
    except CheckpointError:
        return 0
    return sum(kind["bytes"] for kind in holds.values())
