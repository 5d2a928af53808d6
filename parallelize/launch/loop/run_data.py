"""The batches of a run: global ones that do not depend on the mesh, epoch after epoch, with a position that is
saved."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from parallelize.axes.batch.row_lengths import ROW_LENGTHS
from parallelize.base.errors import DataError, Problem, short_list
from parallelize.launch.config.run_config import DataSection, RunConfig
from parallelize.launch.loop import token_files
from parallelize.launch.loop.memory_report import object_of
from parallelize.plan.models.model_source import name_of_ids
from parallelize.training.data.balanced_deal import RowCosts
from parallelize.training.data.collate import collate_rows
from parallelize.training.data.global_batches import GlobalBatches
from parallelize.training.data.iterable_batches import IterableBatches
from parallelize.training.data.packing import JoinedRows, PackedRows

Batch = dict[str, torch.Tensor]
Names = Mapping[str, str] | None


class RunData:
    """Batches of this data rank, without end.

    Args:
        rows: a map-style data set of rows; or an iterable of them, a function of the epoch that returns one, or a list
            of these.
        section: what the file of the run says.
        mesh: the mesh of all processes.
        device: where batches are put.
        names: value of a batch -> the argument of the model that it is passed as; others are left out. None: all are
            passed, under their names.
        num_microbatches: of a step, over which samples are balanced.

    Attributes:
        batches: `GlobalBatches` or `IterableBatches`: what a checkpoint saves.
        tokens_per_step: of a global batch; of documents of different lengths the mean.
    """

    def __init__(
        self, rows: Any, section: DataSection, mesh: Any, device: str, names: Names, num_microbatches: int = 1
    ):
        self.device, self.names = device, names
        self.tokens_per_step: float = section.global_batch * section.sequence
        if _is_map_style(rows):
            rows, ways = _balanced(rows, section, num_microbatches)
            if isinstance(rows, JoinedRows) and ways:
                self.tokens_per_step = section.global_batch * sum(rows.lengths) / max(len(rows.lengths), 1)
            batches = GlobalBatches(
                len(rows), section.global_batch, seed=section.seed, shuffle=section.shuffle, mesh=mesh, **ways
            )
            # of workers' seeds: none is drawn from the process's
            generator = torch.Generator().manual_seed(section.seed)
            options: dict[str, Any] = dict(
                num_workers=section.workers, collate_fn=collate_or_error, generator=generator
            )
            self.batches: Any = batches
            self._epoch: Callable[[], Any] = lambda: batches.track(DataLoader(rows, batch_sampler=batches, **options))
        else:
            if section.balance != "off":
                what = "the data are iterated, and only samples with an index can be dealt by what they cost"
                raise DataError(Problem("bad-costs", what, fix="a map-style data set; or data.balance: off"))
            iterated = IterableBatches(rows, section.global_batch, mesh=mesh)
            self.batches = iterated
            self._epoch = partial(iterated.loader, num_workers=section.workers, collate_fn=collate_or_error)
        self._stream: Iterator[Any] | None = None

    def next(self) -> Batch:
        """The next batch: name to tensor [local batch, tokens]. Raises: DataError `no-samples`, `bad-row`,
        `unequal-rows`."""
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


def _balanced(rows: Any, section: DataSection, num_microbatches: int) -> tuple[Any, dict[str, Any]]:
    """(the data set, what `GlobalBatches` is told to balance it). Documents are counted once, on every rank."""
    if section.balance == "off":
        return rows, {}
    costs = RowCosts(1.0, section.pair_cost)
    ways = {"num_microbatches": num_microbatches}
    if section.balance == "rows" and hasattr(rows, "row_lengths"):
        return rows, {**ways, "costs": costs.of_rows(rows.row_lengths)}
    documents = rows if isinstance(rows, JoinedRows) else JoinedRows(rows)
    joined = section.balance != "rows"
    ways |= {"joined": joined, "lockstep": section.balance == "lockstep"}
    return documents, {**ways, "costs": costs.of(documents.lengths)}


def data_of(
    config: RunConfig, names: Names, mesh: Any, device: str, agree: token_files.Agree, num_microbatches: int = 1
) -> RunData:
    """The data of a run. names, num_microbatches: as `RunData` takes them. agree: as `token_files.cached_tokens` takes
    it.

    Raises: DataError.
    """
    return RunData(_rows(config, agree), config.data, mesh, device, names, num_microbatches)


def argument_names(module: nn.Module) -> Names:
    """The values of a batch that the model takes; None where it takes any. The loss takes `targets` and `labels`.
    `input_ids` are the first argument of a model that has none of that name."""
    parameters = inspect.signature(module.forward).parameters
    if (
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        and "position_ids" in parameters
    ):
        return None
    names = {name: name for name in (*parameters, "targets", "labels", ROW_LENGTHS)}
    return {"input_ids": name_of_ids(module), **names}


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
        tokens = _tokens_from_cache(config, agree)
    ids, starts = tokens
    return PackedRows(ids, section.sequence, starts=starts)


def _tokens_from_cache(config: RunConfig, agree: token_files.Agree) -> token_files.Tokens:
    section = config.data
    paths = [*section.text, *section.jsonl]
    folder = Path(section.cache or os.path.join(config.checkpoints.folder or ".", "tokens"))

    def documents() -> Iterator[str]:
        yield from token_files.texts_of_files(section.text)
        yield from token_files.documents_of_lines(section.jsonl, section.field)

    digest = token_files.digest_of_sources(paths, section.tokenizer, section.field)
    writes = os.environ.get("LOCAL_RANK", "0") == "0"
    return token_files.cached_tokens(folder, digest, documents, section.tokenizer, writes, agree)


# -- checked rows ----------------------------------------------------------------------------------------------------
# Rows of a run as batches. What no row of a data set can be is an error with a name, which another start would meet
# again.


_FIX = 'data.function: rows such as {"input_ids": [...], "labels": [...]}, of lists or tensors: docs/data.md'


def collate_or_error(rows: Sequence[Any]) -> dict[str, Any] | DataError:
    """The batch of rows, or what is wrong with them: as a value, because a worker process sends an error as text
    alone."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or not row or not all(isinstance(name, str) for name in row):
            what = f"row {number} of a batch is a {type(row).__name__}, and no mapping of names to values"
            return DataError(Problem("bad-row", what, fix=_FIX))
    try:
        return collate_rows(rows)
    except DataError as error:
        return error
    except (TypeError, ValueError, RuntimeError) as error:  # of torch, for values that make no tensor
        what = f"rows make no batch: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return DataError(Problem("bad-row", what, rows=_types(rows[0]), fix=_FIX))


def known_values(batch: Mapping[str, Any] | DataError, names: Names) -> dict[str, Any]:
    """What the model takes of a batch. names: as `RunData` takes them.

    Raises: DataError `bad-row`, and the error of `collate_or_error`.
    """
    if isinstance(batch, DataError):
        raise batch
    known = dict(batch)
    if names is not None:
        known = {name: value for name, value in batch.items() if names.get(name) == name}
        known |= {names[name]: value for name, value in batch.items() if names.get(name, name) not in batch}
    if not known:
        what = f"rows have {short_list(sorted(batch))}, and the model takes {short_list(sorted(names or ()))}"
        raise DataError(Problem("bad-row", what, fix="name the values of a row as the arguments of the model"))
    if names is not None and (others := [name for name, value in known.items() if not isinstance(value, torch.Tensor)]):
        what = f"{others[0]} of a row is no tensor and no number"
        raise DataError(Problem("bad-row", what, rows=_types(known), fix=_FIX))
    ids = batch.get("input_ids")
    if isinstance(ids, torch.Tensor) and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise DataError(Problem("bad-row", f"input_ids are {ids.dtype}", fix="ids of tokens are integers"))
    return known


def _types(row: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name, type(value).__name__) for name, value in list(row.items())[:12])
