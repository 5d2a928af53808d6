"""The manifest of a checkpoint: which files there are, which boxes of which tensors they hold, and all that is no tensor.

    {"digest": "<of all the rest>", "manifest":
    {"format": ..., "version": 1, "step": ..., "about": ..., "files": ..., "tensors": ..., "state": ...}}

A folder is a checkpoint when it has a manifest that says what it should; nothing else in the folder's name or age counts.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelize.checkpoint.boxes import Box, contains, overlapping, volume
from parallelize.checkpoint.boxes import whole as whole_box
from parallelize.checkpoint.digests import DIGEST_BYTES, digest_of
from parallelize.checkpoint.dtypes import SIZES
from parallelize.checkpoint.header import FileInfo
from parallelize.checkpoint.paths import check_name, read_small
from parallelize.checkpoint.strict_json import read_json, write_json
from parallelize.errors import CheckpointError, Problem

NAME = "manifest.json"
FORMAT, VERSION = "parallelize-checkpoint", 1
_OPENING = b'{"digest":"'
_BETWEEN = b'","manifest":\n'


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the name under which a file holds it."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class Saved:
    """One tensor of a checkpoint. `about`: its other names, dtype of compute and ways to cut it, where known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return volume(whole_box(self.shape)) * SIZES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: of training. about: mesh, plan, versions, model. files, tensors: by name. state: all that is no tensor of the
            model or of the optimiser, encoded by `trees`.
    """

    step: int
    about: dict[str, Any]
    files: dict[str, FileInfo]
    tensors: dict[str, Saved]
    state: dict[str, Any]
    digest: str = ""

    def to_bytes(self) -> bytes:
        numbers = {name: number for number, name in enumerate(self.files)}
        body = write_json(
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.step,
                "about": self.about,
                "files": {info.name: [info.num_bytes, info.header] for info in self.files.values()},
                "tensors": {
                    saved.name: [
                        saved.dtype,
                        list(saved.shape),
                        [[numbers[piece.file], piece.key, *map(list, piece.box)] for piece in saved.pieces],
                        saved.about,
                    ]
                    for saved in self.tensors.values()
                },
                "state": self.state,
            }
        )
        return _OPENING + digest_of(body).encode() + _BETWEEN + body + b"}\n"


def read_manifest(folder: Path) -> Manifest:
    """Raises: CheckpointError `not-a-checkpoint`, `corrupt-manifest`, `newer-format`, `bad-manifest`, and of `paths`."""
    try:
        text = read_small(folder, NAME, 4 << 30)
    except CheckpointError as error:
        if error.slugs != ("missing-file",):
            raise
        what = "has no manifest, so it is no checkpoint, or was never finished"
        raise CheckpointError(Problem("not-a-checkpoint", what, str(folder), fix="name the folder of a step")) from None
    where = str(folder / NAME)
    start = len(_OPENING) + 2 * DIGEST_BYTES
    said, body = text[len(_OPENING) : start], text[start + len(_BETWEEN) : -2]
    framed = text.startswith(_OPENING) and text[start:].startswith(_BETWEEN) and text.endswith(b"}\n")
    if not framed or digest_of(body).encode() != said:
        rows = (("expected", repr(said)), ("found", digest_of(body)))
        fix = "restore the file from a copy, or load another step"
        raise CheckpointError(Problem("corrupt-manifest", "is not what was written", where, rows, fix))
    found = read_json(body, where)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(Problem("not-a-checkpoint", f"is not of the format {FORMAT}", where))
    if found.get("version") != VERSION:
        what = f"has version {found.get('version')!r} of the format, and this package knows {VERSION}"
        raise CheckpointError(Problem("newer-format", what, where, fix="use a newer version of parallelize"))
    try:
        return _manifest(found, said.decode(), where)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"does not have the shape that it should: {type(error).__name__} {error}"
        raise CheckpointError(Problem("bad-manifest", what[:200], where)) from None


def _manifest(found: dict[str, Any], digest: str, where: str) -> Manifest:
    """Types are checked here, meaning in `check_tensors`."""
    files = {
        name: FileInfo(check_name(name, where), _size(size), str(header))
        for name, (size, header) in found["files"].items()
    }
    names = list(files)
    tensors = {}
    for name, (dtype, shape, pieces, about) in found["tensors"].items():
        placed = tuple(
            Piece(names[_size(number)], str(key), tuple((_size(a), _size(b)) for a, b in box))
            for number, key, *box in pieces
        )
        if dtype not in SIZES or not isinstance(about, dict):
            raise ValueError(f"tensor {name[:80]}")
        tensors[name] = Saved(name, dtype, tuple(map(_size, shape)), placed, about)
    check_tensors(tensors.values(), where)
    about, state = found["about"], found["state"]
    if not isinstance(about, dict) or not isinstance(state, dict):
        raise ValueError("about or state")
    return Manifest(_size(found["step"]), about, files, tensors, state, digest)


def _size(given: Any) -> int:
    if type(given) is not int or not 0 <= given < 1 << 62:
        raise ValueError(f"{str(given)[:40]} is no size")
    return given


def check_tensors(tensors: Iterable[Saved], where: str) -> None:
    """Every element of every tensor stands in exactly one piece. Raises: CheckpointError `not-covered`."""
    problems = []
    for saved in tensors:
        boxes = [piece.box for piece in saved.pieces]
        held, size = sum(map(volume, boxes)), volume(whole_box(saved.shape))
        inside = all(contains(saved.shape, box) for box in boxes)
        twice = overlapping([box for box in boxes if volume(box)]) if inside and len(boxes) > 1 else None
        if not inside or held != size or twice:
            what = f"{saved.name} of {list(saved.shape)}: pieces of {held} elements for {size}"
            what += f"; {twice[0]} and {twice[1]} overlap" if twice else ""
            problems.append(Problem("not-covered", what, where))
    if problems:
        raise CheckpointError(*problems[:20])
