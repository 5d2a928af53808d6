"""Rows of a fixed number of tokens, packed from documents of any length.

A row is a dict of integer tensors [tokens], for `ParallelModel.step(**batch)` or for a model and a loss:

    input_ids     the tokens of one or more documents, one after the other
    position_ids  the position of each token in its document, or in the part of it that the row has. Models that detect packed
                  documents do not let a token attend to those of another document
    targets       the token that follows in the same document, -100 (ignored) at its end
    labels        with unshifted=True instead of `targets`: the token itself, -100 at the beginning of a document, for losses
                  that shift, such as those of `transformers`
"""  # noqa: E501

from __future__ import annotations

import bisect
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import Dataset

from parallelize.axes.context.inputs import IGNORED
from parallelize.base.errors import DataError, Problem
from parallelize.training.data.sample_reader import (
    SampleReader,
    check_samples,
    is_read_once,
    not_a_position,
    refuse_second_read,
)

T = torch.Tensor
Row = dict[str, T]


class PackedRows(Dataset[Row]):
    """Rows of a data set that is one long sequence of tokens: documents are split where a row ends. For
    `GlobalBatches`.

    Args:
        tokens: ids [total]: a tensor, a NumPy array or a memory map, of which slices are read.
        length: tokens per row. The remainder of `tokens` that fills no row is dropped.
        starts: the position of the first token of each document, ascending. Default: one document.
        unshifted: give `labels` instead of `targets`.

    Raises: DataError `bad-row-length`; `bad-starts` if they do not ascend from 0 within the tokens.
    """

    def __init__(self, tokens: Any, length: int, *, starts: Any = None, unshifted: bool = False):
        self.tokens, self.length, self.unshifted = tokens, length, unshifted
        self.starts = torch.as_tensor([0] if starts is None else starts).long()  # unsigned ones cannot be subtracted
        _check_length(length, len(tokens))
        firsts = self.starts
        if not len(firsts) or firsts[0] != 0 or firsts[-1] >= len(tokens) or not bool((firsts.diff() > 0).all()):
            what = f"{len(firsts)} starts of documents do not ascend from 0 to below {len(tokens)} tokens"
            raise DataError(Problem("bad-starts", what, fix="pass the position of each document's first token"))

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = index * self.length
        # a copy, as a row may be changed in place
        ids = torch.as_tensor(self.tokens[first : first + self.length + 1]).to(torch.long, copy=True)
        begin, end = torch.searchsorted(self.starts, torch.tensor([first + 1, first + self.length + 1])).tolist()
        return packed_row(ids, self.length, (self.starts[begin:end] - first).tolist(), self.unshifted)


class PackedDocuments:
    """Rows of documents that are iterated and tokenized as they come. A source of `IterableBatches`, with a state.

    Documents are split where a row ends. What is left after the last row, at most as much as a row, is dropped.

    Args:
        documents: anything that can be iterated again and gives the ids of each document, a list or a tensor. An order
            that changes with the epoch: pass `lambda epoch: PackedDocuments(documents_of(epoch), length)` to
            `IterableBatches`.
        length: tokens per row.
        unshifted: give `labels` instead of `targets`.

    Raises: DataError `bad-row-length`; `bad-source` for a string or a dict as documents, and for an iterator that is
        read again.
    Cost: the state is as small as that of `documents`; after loading, one document is read again.
    """

    def __init__(self, documents: Any, length: int, *, unshifted: bool = False):
        _check_length(length, length)
        self.documents, self.length, self.unshifted = documents, length, unshifted
        if not callable(documents):
            check_samples(documents, "the documents")
        self._read: list[bool] = []  # shared by copies: whether documents that can be read once were begun with
        self._begin: dict[str, Any] = {"documents": SampleReader(documents).state_dict(), "used": 0}
        self._position = self._begin

    def __deepcopy__(self, memo: dict) -> PackedDocuments:
        """A copy with a position of its own, of the same documents: readers copy those that have a state."""
        other = copy.copy(self)
        other._begin, other._position = copy.deepcopy((self._begin, self._position), memo)
        return other

    def __iter__(self) -> Iterator[Row]:
        if is_read_once(self.documents):
            refuse_second_read(self.documents, self._read)
        reader = SampleReader(self.documents)
        reader.load_state_dict(self._begin["documents"])
        ids: list[int] = []
        starts: list[int] = []
        used = self._begin["used"]
        before = reader.state_dict()
        for document in reader:
            tokens = document.tolist() if isinstance(document, torch.Tensor) else list(document)
            size = len(tokens)
            starts.append(len(ids))
            ids += tokens[used:]
            while len(ids) > self.length:
                row = packed_row(torch.tensor(ids[: self.length + 1]), self.length, starts, self.unshifted)
                ids, starts = ids[self.length :], [0]
                self._position = {"documents": before, "used": size - len(ids)}
                yield row
            used, before = 0, reader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The document in which the next row begins, and how many of its tokens have been used."""
        return dict(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iterations at a saved position, a `state` of `state_dict`.

        Raises: CheckpointError `data-position` if this is no position. Nothing is changed then.
        """
        if not isinstance(state, dict) or type(state.get("used")) is not int or state["used"] < 0:
            raise not_a_position("the saved position in packed documents", state)
        SampleReader(self.documents).check_state(state.get("documents"))
        self._begin = self._position = dict(state)


class FittedRows(Dataset[Row]):
    """Rows of full documents: none is split, as in supervised fine-tuning. For `GlobalBatches`.

    The longest documents are put first, each into the fullest row that has room (best fit decreasing). The rest of a
    row is padding, which is a document of its own that no loss counts.
    Source: Ding et al., "Fewer truncations improve language modeling", ICML 2024.

    Args:
        documents: map-style: each is a sequence of ids, or a mapping with `input_ids` and, if some tokens are not to be
            learned, `labels` (the token itself, or -100).
        length: tokens per row.
        lengths: the number of tokens of each document, at least. Default: all documents are read once to count them.
        pad_id: the id of padding.
        truncate: cut documents that are longer than a row, instead of refusing them.
        unshifted: give `labels` instead of `targets`.

    Raises: DataError `bad-row-length`; `long-documents`, with their number and the longest; `unequal-lengths` if the
        number of `lengths` is not that of the documents, and when a document is read that is longer than they say.
    """

    def __init__(
        self,
        documents: Any,
        length: int,
        *,
        lengths: Sequence[int] | None = None,
        pad_id: int = 0,
        truncate: bool = False,
        unshifted: bool = False,
    ):
        self.documents, self.length, self.pad_id, self.unshifted = documents, length, pad_id, unshifted
        if lengths is None:
            lengths = [len(_ids_and_labels(documents[i])[0]) for i in range(len(documents))]
        self.counts = counts = [int(count) for count in lengths]
        if len(counts) != len(documents):
            what = f"there are {len(counts)} lengths of {len(documents)} documents"
            raise DataError(Problem("unequal-lengths", what, fix="give one for each document, or leave lengths out"))
        _check_length(length, max(counts, default=0) and length)
        long = [count for count in counts if count > length]
        if long and not truncate:
            what = f"{len(long)} of {len(counts)} documents have more than {length} tokens, the longest {max(long)}"
            raise DataError(
                Problem("long-documents", what, fix="truncate=True cuts them; or use PackedRows, which splits")
            )
        self.rows = best_fit([min(count, length) for count in counts], length)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def row_lengths(self) -> list[list[int]]:
        """The tokens of the documents of each row, and of its padding, for `RowCosts.of_rows`."""
        lengths = [[min(self.counts[n], self.length) for n in row] for row in self.rows]
        return [[*row, self.length - sum(row)] if sum(row) < self.length else row for row in lengths]

    def __getitem__(self, index: int) -> Row:
        ids: list[int] = []
        labels: list[int] = []
        starts: list[int] = []
        for document in self.rows[index]:
            document_ids, document_labels = self._read(document)
            starts.append(len(ids))
            ids += document_ids[: self.length]
            labels += document_labels[: self.length]
        padding = self.length - len(ids)
        starts += [len(ids)] * bool(padding)
        full = torch.tensor(ids + [self.pad_id] * padding)
        return packed_row(full, self.length, starts, self.unshifted, torch.tensor(labels + [IGNORED] * padding))

    def _read(self, document: int) -> tuple[list[int], list[int]]:
        """Ids and labels of a document, for which the row has room."""
        ids, labels = _ids_and_labels(self.documents[document])
        if len(ids) > self.counts[document]:
            what = f"document {document} has {len(ids)} tokens, and a row was made for {self.counts[document]}"
            raise DataError(
                Problem("unequal-lengths", what, fix="pass lengths of these documents, or leave lengths out")
            )
        return ids, labels


class JoinedRows(Dataset[Row]):
    """Rows of any length, each of whole documents that `GlobalBatches(..., joined=True)` has put together.

    A row is a tuple of documents: `rows[(4, 7, 2)]` are three, one after the other, without padding; `rows[4]` is one.
    Besides what the head of this file lists it has `row_lengths`, its number of tokens: `collate_rows` pads the rows of
    a batch, and the step cuts them again.

    Args:
        documents: as `FittedRows` takes them.
        unshifted: give `labels` instead of `targets`.
    """

    def __init__(self, documents: Any, *, unshifted: bool = False):
        self.documents, self.unshifted = documents, unshifted

    def __len__(self) -> int:
        return len(self.documents)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each document. All are read once, when this is asked for first."""
        return [len(_ids_and_labels(self.documents[n])[0]) for n in range(len(self.documents))]

    def __getitem__(self, index: int | tuple[int, ...]) -> dict[str, Any]:
        ids: list[int] = []
        labels: list[int] = []
        starts: list[int] = []
        for document in index if isinstance(index, tuple | list) else (index,):
            document_ids, document_labels = _ids_and_labels(self.documents[document])
            starts.append(len(ids))
            ids += document_ids
            labels += document_labels
        row = packed_row(torch.tensor(ids), len(ids), starts, self.unshifted, torch.tensor(labels))
        return {**row, "row_lengths": len(ids)}


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Documents in rows of `room` tokens: the longest first, each into the fullest row where it fits. Empty ones in
    none.

    Cost: O(n log n) for n documents.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free tokens -> rows
    sizes: list[int] = []  # the keys of `with_room`, ascending
    for document in sorted((i for i, count in enumerate(lengths) if count), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(sizes, lengths[document])
        if at == len(sizes):
            row, free = len(rows), room
            rows.append([])
        else:
            free = sizes[at]
            row = with_room[free].pop()
            if not with_room[free]:
                del with_room[free], sizes[at]
        rows[row].append(document)
        left = free - lengths[document]
        if left:
            if left not in with_room:
                bisect.insort(sizes, left)
            with_room.setdefault(left, []).append(row)
    return rows


def packed_row(ids: T, length: int, starts: Iterable[int], unshifted: bool, labels: T | None = None) -> Row:
    """One row of packed documents.

    Args:
        ids: [length] or more tokens; the one after the row is the target of the row's last token.
        length: tokens of the row.
        starts: positions in `ids` where documents begin.
        unshifted: give `labels` instead of `targets`.
        labels: [length] or more, the token itself or -100. Default: `ids`.

    Returns: `input_ids`, `position_ids`, and `targets` or `labels`, each [length].
    """
    first = torch.zeros(length + 1, dtype=torch.long)
    begins = torch.tensor([0, *(start for start in starts if start <= length)])
    first[begins] = begins
    positions = torch.arange(length) - first[:length].cummax(0).values
    learned = torch.full((length + 1,), IGNORED)
    known = (ids if labels is None else labels)[: length + 1]
    learned[: len(known)] = known
    learned[begins] = IGNORED
    row = {"input_ids": ids[:length], "position_ids": positions}
    return row | ({"labels": learned[:length]} if unshifted else {"targets": learned[1:]})


def _ids_and_labels(document: Any) -> tuple[list[int], list[int]]:
    ids = document["input_ids"] if isinstance(document, Mapping) else document
    labels = document.get("labels", ids) if isinstance(document, Mapping) else ids
    as_lists = [value.tolist() if isinstance(value, torch.Tensor) else list(value) for value in (ids, labels)]
    if len(as_lists[0]) != len(as_lists[1]):
        what = f"a document has {len(as_lists[0])} tokens and {len(as_lists[1])} labels"
        raise DataError(Problem("unequal-labels", what, fix="give one label for each token: the token, or -100"))
    return as_lists[0], as_lists[1]


def _check_length(length: int, total: int) -> None:
    if length < 1 or total < length:
        what = f"{total} tokens make no row of {length}"
        raise DataError(
            Problem("bad-row-length", what, fix="use rows of at least 1 token, and as many tokens as a row has")
        )
