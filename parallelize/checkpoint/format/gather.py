"""One checkpoint from several folders: those of nodes that share none, or one folder into which all were copied.

Does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelize.base.errors import CheckpointError, Problem, short_list
from parallelize.checkpoint.format import folders
from parallelize.checkpoint.format.folders import check_files, saving_nodes
from parallelize.checkpoint.format.manifest import NAME, Manifest, read_manifest

Source = str | os.PathLike | Sequence[str | os.PathLike]
"""The folder of a run or of a step; or several, one of each node."""
_FIX = "name the folder of that node too, or copy its files into this folder"


@dataclass(frozen=True)
class GatheredCheckpoint:
    """A checkpoint whose files are in one or several folders.

    Attributes:
        folders: the folders of the step, each with the manifest.
        manifest: the manifest, which is the same in all of them.
    """

    folders: tuple[Path, ...]
    manifest: Manifest

    @property
    def where(self) -> str:
        """The folders, for messages."""
        return short_list([str(folder) for folder in self.folders], 4)

    def copies(self, name: str) -> list[Path]:
        """The folders that have a file."""
        return [folder for folder in self.folders if (folder / name).is_file()]

    def present(self) -> dict[str, Path]:
        """File -> the first folder that has it; without those that none has."""
        return {name: copies[0] for name in self.manifest.files if (copies := self.copies(name))}

    @property
    def is_of_nodes(self) -> bool:
        """Whether nodes have saved it in folders of their own."""
        return len(self.folders) > 1 or bool(saving_nodes(self.manifest.about))

    def check_files(self) -> None:
        """Raises: CheckpointError `missing-node-files` if a node's files are in none of the folders."""
        if self.is_of_nodes:  # otherwise a missing file is an error when it is read
            check_files(self.manifest, self.present(), self.where, _FIX)


def sources_of(source: Source) -> list[Path]:
    """The folders that were named. Raises: CheckpointError `no-checkpoint` if there are none."""
    listed = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not listed:
        raise CheckpointError(Problem("no-checkpoint", "no folder was named", fix="name the folder of a run"))
    return [Path(folder) for folder in listed]


def gather(source: Source, step: int | None = None) -> GatheredCheckpoint:
    """Find a checkpoint in one or several folders. No file but the manifests is read.

    Args:
        source: the folder of a run or of a step, or several.
        step: which step. Default: the newest in any of the folders.

    Raises: CheckpointError of `step_folders` and `gathered`.
    """
    return gathered(step_folders(source, step))


def gathered(found: Sequence[Path]) -> GatheredCheckpoint:
    """The checkpoint in the folders of one step.

    Raises: CheckpointError `other-checkpoint` if they have different ones, and those of `read_manifest`.
    """
    manifests = [read_manifest(folder) for folder in found]
    if len({manifest.digest for manifest in manifests}) > 1:
        rows = tuple((str(folder), manifest.digest[:16]) for folder, manifest in zip(found, manifests, strict=True))
        what, fix = "the folders have different checkpoints", "name folders of one run, and the same step of it"
        raise CheckpointError(Problem("other-checkpoint", what, rows=rows, fix=fix))
    return GatheredCheckpoint(tuple(found), manifests[0])


def step_folders(source: Source, step: int | None = None) -> list[Path]:
    """The folders of a step, of those of the sources that have it. Raises: CheckpointError `no-checkpoint`,
    `not-a-checkpoint`."""
    roots = sources_of(source)
    if len(roots) == 1:
        return [folders.resolve(roots[0], step)]
    if step is None and any((root / NAME).is_file() for root in roots):
        return [folders.resolve(root) for root in roots]
    published = [folders.published(root) for root in roots]
    chosen = step if step is not None else max((number for steps in published for number in steps), default=None)
    found = [steps[chosen] for steps in published if chosen is not None and chosen in steps]
    return found or [folders.resolve(roots[0], step)]  # which says what the folder contains
