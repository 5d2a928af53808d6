"""The manifest of a checkpoint: its files, the slices of tensors that they contain, and all state that is not tensors.

    {"digest": "<digest of the value of manifest>", "manifest":
    {"format": ..., "version": 2, "step": ..., "about": ..., "files": ..., "tensors": ..., "groups": ..., "state": ...}}

A folder is a checkpoint if and only if it has a valid manifest. Does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelize.base.boxes import contains, full_box, overlapping, volume
from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.digests import DIGEST_BYTES, digest_of
from parallelize.base.files.paths import check_name, open_file, read_small
from parallelize.base.files.strict_json import read_json, write_json
from parallelize.checkpoint.format.header import SIZES, FileInfo
from parallelize.checkpoint.format.saved_slices import Grid, SavedSlice, SlicesReader, SlicesWriter, size

NAME = "manifest.json"
FORMAT, VERSION = "parallelize-checkpoint", 2
_VERSIONS = (1, VERSION)  # the first one had no grids
_OPENING = b'{"digest":"'
_BETWEEN = b'","manifest":\n'


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a checkpoint.

    Attributes:
        name, dtype, shape: name, dtype and shape of the full tensor.
        slices: boxes that cover it, each element once.
        about: its other names, compute dtype and packed chunks, where known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: Sequence[SavedSlice]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return volume(full_box(self.shape)) * SIZES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        step: the training step.
        about: mesh, plan, versions and model of the run.
        files, tensors: the files and tensors, by name.
        state: all state except tensors of the model and the optimizer, encoded by `json_codec`.
        digest: the hash of the manifest; empty if it was not read from a file.
    """

    step: int
    about: dict[str, Any]
    files: dict[str, FileInfo]
    tensors: dict[str, SavedTensor]
    state: dict[str, Any]
    digest: str = ""

    def to_bytes(self) -> bytes:
        written = SlicesWriter(list(self.files))
        body = write_json(
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.step,
                "about": self.about,
                "files": {info.name: [info.num_bytes, info.header] for info in self.files.values()},
                "tensors": {
                    saved.name: [saved.dtype, list(saved.shape), written.rows(saved.slices), saved.about]
                    for saved in self.tensors.values()
                },
                "groups": written.groups,
                "state": self.state,
            }
        )
        return _OPENING + digest_of(body).encode() + _BETWEEN + body + b"}\n"


def read_manifest(folder: Path) -> Manifest:
    """Raises: CheckpointError `not-a-checkpoint`, `corrupt-manifest`, `newer-format`, `bad-manifest`, and of
    `read_small`."""
    try:
        text = read_small(folder, NAME, 4 << 30)
    except CheckpointError as error:
        if error.slugs != ("missing-file",):
            raise
        what = "has no manifest, so it is not a checkpoint, or the save was not completed"
        raise CheckpointError(Problem("not-a-checkpoint", what, str(folder), fix="name the folder of a step")) from None
    return manifest_from(text, str(folder / NAME))


def read_digest(folder: Path) -> str:
    """The digest that a manifest states; empty if there is no manifest, or one that does not begin with a digest."""
    try:
        descriptor, _ = open_file(folder, NAME)
    except CheckpointError:
        return ""
    with os.fdopen(descriptor, "rb") as file:
        start = file.read(len(_OPENING) + 2 * DIGEST_BYTES)
    return start[len(_OPENING) :].decode("ascii", "replace") if start.startswith(_OPENING) else ""


def manifest_from(text: bytes, where: str) -> Manifest:
    """Parse the content of a manifest. Raises: as `read_manifest`."""
    start = len(_OPENING) + 2 * DIGEST_BYTES
    expected, body = text[len(_OPENING) : start], text[start + len(_BETWEEN) : -2]
    is_framed = text.startswith(_OPENING) and text[start:].startswith(_BETWEEN) and text.endswith(b"}\n")
    if not is_framed or digest_of(body).encode() != expected:
        rows = (("expected", repr(expected)), ("found", digest_of(body)))
        fix = "restore the file from a copy, or load another step"
        raise CheckpointError(Problem("corrupt-manifest", "does not match its digest", where, rows, fix))
    fields = read_json(body, where)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CheckpointError(Problem("not-a-checkpoint", f"is not of the format {FORMAT}", where))
    if fields.get("version") not in _VERSIONS or isinstance(fields["version"], bool):
        what = f"has version {fields.get('version')!r} of the format, and this package reads up to version {VERSION}"
        raise CheckpointError(Problem("newer-format", what, where, fix="use a newer version of parallelize"))
    try:
        return _manifest(fields, expected.decode(), where)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"has invalid content: {type(error).__name__} {error}"
        raise CheckpointError(Problem("bad-manifest", what[:200], where)) from None


def _manifest(fields: dict[str, Any], digest: str, where: str) -> Manifest:
    """Parse the fields and check their types. `check_tensors` checks the slices."""
    files = {
        name: FileInfo(check_name(name, where), size(length), str(header))
        for name, (length, header) in fields["files"].items()
    }
    read, tensors = SlicesReader(list(files), fields.get("groups", ())), {}
    for name, (dtype, shape, rows, about) in fields["tensors"].items():
        sizes = tuple(map(size, shape))
        slices = read.slices(sizes, rows)
        if dtype not in SIZES or not isinstance(about, dict):
            raise ValueError(f"tensor {name[:80]}")
        tensors[name] = SavedTensor(name, dtype, sizes, slices, about)
    check_tensors(tensors.values(), where)
    about, state = fields["about"], fields["state"]
    if not isinstance(about, dict) or not isinstance(state, dict):
        raise ValueError("about or state")
    return Manifest(size(fields["step"]), about, files, tensors, state, digest)


def check_tensors(tensors: Iterable[SavedTensor], where: str) -> None:
    """Check that every element of every tensor is in exactly one slice. Raises: CheckpointError `not-covered`."""
    problems = []
    for saved in tensors:
        if isinstance(saved.slices, Grid):
            if not saved.slices.is_whole:
                what = f"{saved.name} of {list(saved.shape)}: {len(saved.slices)} slices, cut at {saved.slices.cuts}"
                problems.append(Problem("not-covered", what[:200], where))
            continue
        boxes = [part.box for part in saved.slices]
        covered, elements = sum(map(volume, boxes)), volume(full_box(saved.shape))
        inside = all(contains(saved.shape, box) for box in boxes)
        overlap = overlapping([box for box in boxes if volume(box)]) if inside and len(boxes) > 1 else None
        if not inside or covered != elements or overlap:
            what = f"{saved.name} of {list(saved.shape)}: slices of {covered} elements for {elements}"
            what += f"; {overlap[0]} and {overlap[1]} overlap" if overlap else ""
            problems.append(Problem("not-covered", what, where))
    if problems:
        raise CheckpointError(*problems[:20])
