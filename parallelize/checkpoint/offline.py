"""A checkpoint without a model: what it holds, and whether it is still what was written. Torch-free.

Both know two layouts: a training checkpoint (a manifest), and a Hugging Face folder (safetensors files, maybe an index).
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

from parallelize.checkpoint import folders
from parallelize.checkpoint.boxes import shape_of, volume
from parallelize.checkpoint.boxes import whole as whole_box
from parallelize.checkpoint.digests import BLOCK_BYTES, KEY, digest_of, digests_in
from parallelize.checkpoint.header import Entry, FileInfo, Header, read_header
from parallelize.checkpoint.hub_shards import INDEX, SINGLE
from parallelize.checkpoint.manifest import NAME, Piece, Saved, read_manifest
from parallelize.checkpoint.paths import check_name, open_file, read_small
from parallelize.checkpoint.strict_json import read_json
from parallelize.errors import CheckpointError, Problem

Placed = dict[str, tuple[Saved, Piece]]
"""Name in a file -> the piece of which tensor that is."""
_FIX = "restore the file from a copy, or load another step"
_STRUCTS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


def is_hub_folder(path: Path) -> bool:
    """Whether a folder has weights in Hugging Face's layout, and no training checkpoint."""
    if not path.is_dir() or (path / NAME).is_file() or folders.published(path):
        return False
    return any((path / name).is_file() for name in (INDEX, SINGLE, "config.json")) or any(path.glob("*.safetensors"))


# -- looking --------------------------------------------------------------------------------------------------------------


def inspect_checkpoint(path: str | os.PathLike, step: int | None = None) -> dict[str, Any]:
    """What a checkpoint holds, as plain values. No tensor is read.

    Args:
        path: a step's folder, a run's folder (the newest step, or `step`), or a Hugging Face folder.

    Returns: for both layouts `kind`, `folder`, `model`, `holds` (weights, optimizer, rest: tensors, elements, bytes, dtypes),
        `files` (name -> bytes) and `tensors`; of a training checkpoint also step, mesh, ZeRO stage, plan, versions,
        optimisers with the options of their groups, schedulers, and what else of the state is there.
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
        "optimizers": {name: _optimizer(one) for name, one in (state.get("optimizers") or {}).items()},
        "schedulers": {name: _class(one.get("class")) for name, one in (state.get("schedulers") or {}).items()},
        "state": {
            **{key: bool(state.get(key)) for key in ("streams", "data", "values")},
            "user": list(state.get("user") or {}),
            "generators": len(state.get("generators") or {}),
        },
        "files": {name: info.num_bytes for name, info in manifest.files.items()},
        "tensors": {
            one.name: {"dtype": one.dtype, "shape": list(one.shape), "pieces": len(one.pieces), **one.about}
            for one in manifest.tensors.values()
        },
    }


def _inspect_hub(folder: Path) -> dict[str, Any]:
    names, _ = _weight_files(folder)
    config = _config(folder)
    held: list[Saved] = []
    files, hashes = {}, True
    for name in names:
        with _opened(folder, name) as (descriptor, size):
            header = read_header(descriptor, size, str(folder / name))
        files[name], hashes = size, hashes and KEY in header.metadata
        held += [Saved(one.name, one.dtype, one.shape, ()) for one in header.entries.values()]
    return {
        "kind": "Hugging Face folder",
        "folder": str(folder),
        "model": {"class": next(iter(config.get("architectures") or ()), None), "type": config.get("model_type")},
        "transformers": config.get("transformers_version"),
        "hashes": hashes,
        "holds": _holds(held, dict.fromkeys((one.name for one in held), "weights")),
        "files": files,
        "tensors": {one.name: {"dtype": one.dtype, "shape": list(one.shape)} for one in held},
    }


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        return {}
    found = read_json(read_small(folder, "config.json", 16 << 20), str(folder / "config.json"))
    return found if isinstance(found, dict) else {}


def _kind(name: str, state: dict[str, Any]) -> str:
    above = name.partition("/")[0]
    return "weights" if above == "model" else "optimizer" if above in (state.get("optimizers") or {}) else "rest"


def _holds(tensors: Iterable[Saved], kinds: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        kind: {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": {}} for kind in ("weights", "optimizer", "rest")
    }
    for one in tensors:
        sums = found[kinds[one.name]]
        sums["tensors"] += 1
        sums["elements"] += volume(whole_box(one.shape))
        sums["bytes"] += one.num_bytes
        sums["dtypes"][one.dtype] = sums["dtypes"].get(one.dtype, 0) + one.num_bytes
    return found


def _optimizer(share: dict[str, Any]) -> dict[str, Any]:
    groups = [
        {
            "options": {key: _plain(value) for key, value in group["options"].items()},
            "parameters": len(group["params"]),
        }
        for group in share["groups"]
    ]
    return {"class": _class(share.get("class")), "parameters": len(share.get("state") or {}), "groups": groups}


def _class(described: Any) -> str | None:
    return f"{described.get('module')}.{described.get('name')}" if isinstance(described, dict) else None


def _plain(value: Any) -> Any:
    """A value as `trees` writes it, for people: what has no JSON of its own is told in a word."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
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
    return f"<{tag}>" if tag else {key: _plain(one) for key, one in value.items()}


# -- checking -------------------------------------------------------------------------------------------------------------


@dataclass
class Checked:
    """What a check went through. `hashed`: bytes of tensors that were read and compared with a hash."""

    folder: Path
    files: int = 0
    tensors: int = 0
    hashed: int = 0
    unhashed: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def verify_checkpoint(
    path: str | os.PathLike, step: int | None = None, progress: Callable[[int], None] | None = None
) -> list[Problem]:
    """Compare every byte with its hash, and every file with what the manifest (or the index) says of it.

    Goes on after a finding. A Hugging Face folder without hashes is checked for its structure only: see `check_folder`.

    Returns: what is wrong, one problem a tensor or file; nothing where all is right.
    Raises: CheckpointError `no-checkpoint`.
    """
    return check_folder(path, step, progress).problems


def check_folder(
    path: str | os.PathLike, step: int | None = None, progress: Callable[[int], None] | None = None
) -> Checked:
    """As `verify_checkpoint`, and what was checked."""
    if step is None and is_hub_folder(Path(path)):
        return _Check(Path(path), progress).hub()
    return _Check(folders.resolve(path, step), progress).run()


class _Check:
    """One check. Problems are collected; what hangs on something that is wrong is not looked at."""

    def __init__(self, folder: Path, progress: Callable[[int], None] | None):
        self.folder, self.progress = folder, progress
        self.found = Checked(folder)
        self._buffer = memoryview(bytearray(BLOCK_BYTES))

    def run(self) -> Checked:
        """A training checkpoint."""
        with self._noted():
            manifest = read_manifest(self.folder)
            placed: dict[str, Placed] = {name: {} for name in manifest.files}
            for saved in manifest.tensors.values():
                for piece in saved.pieces:
                    placed[piece.file][piece.key] = (saved, piece)
            for info in manifest.files.values():
                with self._noted():
                    self._file(info, placed[info.name])
            for path in sorted(self.folder.iterdir()):
                if path.name not in manifest.files and path.name != NAME:
                    self._add("unlisted-file", "is not in the manifest: nothing reads it", str(path), fix="remove it")
        return self.found

    def hub(self) -> Checked:
        """A Hugging Face folder."""
        with self._noted():
            names, listed = _weight_files(self.folder)
            holders: dict[str, str] = {}
            for name in names:
                with self._noted(), _opened(self.folder, name) as (descriptor, size):
                    header = read_header(descriptor, size, str(self.folder / name))
                    self._held_once(header, name, holders)
                    self._blocks(descriptor, name, header)
            if listed is not None:
                self._index(listed, holders)
        return self.found

    def _add(self, slug: str, what: str, where: str, rows: tuple[tuple[str, str], ...] = (), fix: str = _FIX) -> None:
        self.found.problems.append(Problem(slug, what, where, rows, fix))

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.found.problems += error.problems

    # -- a file ---------------------------------------------------------------------------------------------------

    def _file(self, info: FileInfo, pieces: Placed) -> None:
        where = str(self.folder / info.name)
        with _opened(self.folder, info.name) as (descriptor, size):
            if size != info.num_bytes:
                rows = (("expected", f"{info.num_bytes:,} bytes"), ("found", f"{size:,} bytes"))
                self._add("wrong-size", "is not as long as it was written", where, rows)
                return
            header = read_header(descriptor, size, where)
            digest = digest_of(header.raw)
            if digest != info.header:
                rows = (("expected", info.header), ("found", digest))
                self._add("corrupt-header", "its header is not the one that was written", where, rows)
            self._pieces(header, where, pieces)
            self._blocks(descriptor, info.name, header)

    def _pieces(self, header: Header, where: str, pieces: Placed) -> None:
        """The entries of a file are the pieces that the manifest places there, all of them and no others."""
        for key, (saved, piece) in pieces.items():
            wanted = f"{saved.dtype} {list(shape_of(piece.box))}"
            entry = header.entries.get(key)
            if entry is None:
                rows = (("tensor", saved.name), ("expected", wanted), ("found", "nothing of that name"))
                self._add("missing-tensor", f"does not hold {key!r}, which the manifest places there", where, rows)
            elif (entry.dtype, entry.shape) != (saved.dtype, shape_of(piece.box)):
                rows = (("tensor", saved.name), ("expected", wanted), ("found", f"{entry.dtype} {list(entry.shape)}"))
                self._add("wrong-entry", f"{key} is not what the manifest says", where, rows)
        for key in header.entries:
            if key not in pieces:
                self._add("unlisted-tensor", f"holds {key!r}, which no tensor of the manifest is made of", where)

    def _blocks(self, descriptor: int, name: str, header: Header) -> None:
        """Read every tensor and compare its hashes; nothing is read of a file that carries none."""
        where = str(self.folder / name)
        self.found.files += 1
        self.found.tensors += len(header.entries)
        sizes = {entry.name: entry.num_bytes for entry in header.entries.values()}
        digests = digests_in(header.metadata, sizes, where)
        if digests is None:
            self.found.unhashed.append(name)
            return
        for entry in header.entries.values():
            wrong = [one for one in self._digests(descriptor, entry, where) if one[2] != digests[entry.name][one[0]]]
            if wrong:
                number, length, digest = wrong[0]
                first = number * BLOCK_BYTES
                rows = (
                    ("tensor", entry.name),
                    ("bytes", f"{first:,} to {first + length:,} of {entry.num_bytes:,}"),
                    ("expected", digests[entry.name][number]),
                    ("found", digest),
                )
                more = (("blocks", f"{len(wrong)} of {len(digests[entry.name])} are wrong"),)
                self._add("corrupt-tensor", f"{entry.name} is not what was written", where, (*rows, *more))

    def _digests(self, descriptor: int, entry: Entry, where: str) -> Iterator[tuple[int, int, str]]:
        """(number, bytes, digest) of each block of a tensor, as it stands in the file now."""
        for number, at in enumerate(range(0, entry.num_bytes, BLOCK_BYTES)):
            data = self._buffer[: min(BLOCK_BYTES, entry.num_bytes - at)]
            _read(descriptor, data, entry.start + at, where)
            self.found.hashed += len(data)
            if self.progress is not None:
                self.progress(len(data))
            yield number, len(data), digest_of(data)

    # -- an index -------------------------------------------------------------------------------------------------

    def _held_once(self, header: Header, name: str, holders: dict[str, str]) -> None:
        for tensor in header.entries:
            if tensor in holders:
                what = f"{tensor} is in {holders[tensor]} and in {name}"
                self._add("bad-index", what, str(self.folder), fix="keep one of the files")
            holders[tensor] = name

    def _index(self, listed: dict[str, str], holders: dict[str, str]) -> None:
        """What the index lists and what the files hold is the same."""
        where, fix = str(self.folder / INDEX), "the files do not belong together: get them anew"
        for tensor in [*listed, *(name for name in holders if name not in listed)]:
            if listed.get(tensor) != holders.get(tensor):
                rows = (
                    ("tensor", tensor),
                    ("expected", f"in {listed.get(tensor) or 'no file'}"),
                    ("found", f"in {holders.get(tensor) or 'no file'}"),
                )
                self._add("bad-index", f"{tensor} is not where the index says", where, rows, fix)


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """(safetensors files, tensor -> file of the index if there is one). Raises: CheckpointError `no-weights`, `bad-index`."""
    where = str(folder / INDEX)
    if (folder / INDEX).is_file():
        index = read_json(read_small(folder, INDEX), where)
        listed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(listed, dict) or not listed:
            raise CheckpointError(Problem("bad-index", "has no weight_map of names to files", where))
        return sorted({check_name(file, where) for file in listed.values()}), listed
    there = sorted(path.name for path in folder.glob("*.safetensors"))
    names = [SINGLE] if SINGLE in there else there
    if not names:
        what = "holds no safetensors files"
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
            done = os.preadv(descriptor, [data[at:]], start + at)
        except OSError as error:
            what = f"byte {start + at} cannot be read: {error.strerror}"
            raise CheckpointError(Problem("unreadable-file", what, where)) from error
        if done == 0:
            raise CheckpointError(Problem("truncated-file", f"ends at byte {start + at}, inside a tensor", where))
        at += done


def total_bytes(path: str | os.PathLike, step: int | None = None) -> int:
    """About how many bytes a check reads. 0 where that cannot be known: the check will say why."""
    try:
        holds = inspect_checkpoint(path, step)["holds"]
    except CheckpointError:
        return 0
    return sum(kind["bytes"] for kind in holds.values())
