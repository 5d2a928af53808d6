"""The batches of a run: global ones that do not depend on the mesh, epoch after epoch, with a position that is saved."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from parallelize.base.errors import DataError, Problem
from parallelize.launch.config.run_config import DataSection, RunConfig
from parallelize.launch.loop import token_files
from parallelize.launch.loop.checked_rows import collate_or_error, known_values
from parallelize.launch.loop.named_objects import object_of
from parallelize.training.data.global_batches import GlobalBatches
from parallelize.training.data.iterable_batches import IterableBatches
from parallelize.training.data.packing import PackedRows

Batch = dict[str, torch.Tensor]


class RunData:
    """Batches of this data rank, without end.

    Args:
        rows: a map-style data set of rows; or an iterable of them, a function of the epoch that returns one, or a list of these.
        section: what the file of the run says.
        mesh: the mesh of all processes.
        device: where batches are put.
        names: arguments of the model; others are left out of a batch. None: all are passed.

    Attributes:
        batches: `GlobalBatches` or `IterableBatches`: what a checkpoint saves.
    """

    def __init__(self, rows: Any, section: DataSection, mesh: Any, device: str, names: set[str] | None):
        self.device, self.names = device, names
        if _is_map_style(rows):
            batches = GlobalBatches(
                len(rows), section.global_batch, seed=section.seed, shuffle=section.shuffle, mesh=mesh
            )
            # of workers' seeds: none is drawn from the process's
            generator = torch.Generator().manual_seed(section.seed)
            options: dict[str, Any] = dict(
                num_workers=section.workers, collate_fn=collate_or_error, generator=generator
            )
            self.batches: Any = batches
            self._epoch: Callable[[], Any] = lambda: batches.track(DataLoader(rows, batch_sampler=batches, **options))
        else:
            iterated = IterableBatches(rows, section.global_batch, mesh=mesh)
            self.batches = iterated
            self._epoch = partial(iterated.loader, num_workers=section.workers, collate_fn=collate_or_error)
        self._stream: Iterator[Any] | None = None

    def next(self) -> Batch:
        """The next batch: name to tensor [local batch, tokens]. Raises: DataError `no-samples`, `bad-row`, `unequal-rows`."""
        for _ in range(2):
            if self._stream is None:
                self._stream = iter(self._epoch())
            batch = next(self._stream, None)
            if batch is not None:
                return self._moved(batch)
            self._stream = None
        raise DataError(Problem("no-samples", "the data make no batch", fix="more data, or a smaller global_batch"))

    def _moved(self, batch: Mapping[str, Any] | DataError) -> Batch:
        known = known_values(batch, self.names)
        return {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value for name, value in known.items()
        }

    def restart(self) -> None:
        """Begin again at the position of `batches`, which was loaded."""
        self._stream = None


def _is_map_style(rows: Any) -> bool:
    """Whether rows have a length and an index. A list of functions is a list of sources that are iterated."""
    sources = isinstance(rows, list | tuple) and bool(rows) and callable(rows[0])
    return hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and not sources


def data_of(config: RunConfig, names: set[str] | None, mesh: Any, device: str, agree: token_files.Agree) -> RunData:
    """The data of a run. names: as `RunData` takes them. agree: as `token_files.cached_tokens` takes it.

    Raises: DataError.
    """
    return RunData(_rows(config, agree), config.data, mesh, device, names)


def argument_names(module: nn.Module) -> set[str] | None:
    """Names of a batch that the model takes; None where it takes any. The loss takes `targets` and `labels`."""
    parameters = inspect.signature(module.forward).parameters
    if (
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        and "position_ids" in parameters
    ):
        return None
    return {*parameters, "targets", "labels"}


def _rows(config: RunConfig, agree: token_files.Agree) -> Any:
    section = config.data
    if section.function:
        rows = object_of(section.function)(**section.args)
        if isinstance(rows, Mapping) or not (_is_map_style(rows) or callable(rows) or hasattr(rows, "__iter__")):
            what = f"{section.function} returns a {type(rows).__name__}"
            fix = (
                "texts, a map-style data set of rows, an iterable of rows, a function of the epoch, or a list of these"
            )
            raise DataError(Problem("no-data", what, fix=fix))
        if isinstance(rows, str):
            rows = [rows]
        if not (isinstance(rows, list) and rows and isinstance(rows[0], str)):
            return rows
        tokens = token_files.tokenized(rows, token_files.encoder_of(section.tokenizer))
    elif section.text and not section.tokenizer:
        tokens = token_files.bytes_of_files(section.text)
    else:
        tokens = _from_cache(config, agree)
    ids, starts = tokens
    return PackedRows(ids, section.sequence, starts=starts)


def _from_cache(config: RunConfig, agree: token_files.Agree) -> token_files.Tokens:
    section = config.data
    paths = [*section.text, *section.jsonl]
    folder = Path(section.cache or os.path.join(config.checkpoints.folder or ".", "tokens"))

    def documents() -> Iterator[str]:
        yield from token_files.texts_of_files(section.text)
        yield from token_files.documents_of_lines(section.jsonl, section.field)

    digest = token_files.digest_of_sources(paths, section.tokenizer, section.field)
    writes = os.environ.get("LOCAL_RANK", "0") == "0"
    return token_files.cached_tokens(folder, digest, documents, section.tokenizer, writes, agree)
