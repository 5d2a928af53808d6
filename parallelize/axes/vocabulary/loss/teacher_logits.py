"""A teacher's logits for the part of the vocabulary that a rank has of the student's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from parallelize.axes.vocabulary.logits.token_rows import TokenRows
from parallelize.base.errors import ModelError, Problem, ShapeError
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops.collectives import gather_uneven
from parallelize.ops.vocabulary.class_targets import Vocabulary

T = torch.Tensor
Interval = tuple[int, int]


@dataclass(frozen=True)
class TeacherLogits:
    """The teacher's logits of some tokens, [n, w], for this rank's w entries of the student's vocabulary.

    They are this rank's already where both vocabularies are sharded alike, or where the teacher's is whole. Two
    vocabularies that are sharded over the same ranks with other bounds (as of other padding) exchange what differs;
    else the teacher's group gathers them.

    Attributes:
        rows: the teacher's logits.
        vocabulary: the student's.
        entries: how many entries of both count: ids from 0 to `entries` - 1.
        version: of the rows, when the loss was taken.
    """

    rows: TokenRows
    vocabulary: Vocabulary
    entries: int
    version: int

    def __call__(self, tokens: slice) -> T:
        """Raises: ModelError `teacher-changed` if what the logits are computed from was written to since the loss."""
        if self.rows.version != self.version:
            what = "the teacher's logits were written to between the loss and its backward, which reads them again"
            fix = "write to a copy (`x = x / 2` and not `x /= 2`), or after backward"
            raise ModelError(Problem("teacher-changed", what, fix=fix))
        local, group = self.rows.logits(tokens), self._group
        if group.size == 1:
            start, stop = self._wanted[self.vocabulary.group.rank]
            return local[:, start:stop]
        start, stop = self._stored[group.rank]
        if not self._over_same_ranks:
            start, stop = self._wanted[self.vocabulary.group.rank]
            return gather_uneven(local, group, 1, self.rows.vocabulary.full)[:, start:stop]
        local = local[:, : stop - start]
        return local if self._wanted == self._stored else self._exchanged(local)

    @property
    def width(self) -> int:
        """w."""
        start, stop = self._wanted[self.vocabulary.group.rank]
        return stop - start

    @property
    def _group(self) -> Group:
        return self.rows.vocabulary.group

    @property
    def _over_same_ranks(self) -> bool:
        return self._group.ranks == self.vocabulary.group.ranks

    @cached_property
    def _wanted(self) -> list[Interval]:
        """By rank of the student's group: the entries that it computes with."""
        return _intervals(self.vocabulary, self.entries)

    @cached_property
    def _stored(self) -> list[Interval]:
        """By rank of the teacher's group: the entries that it has, of those that count."""
        return _intervals(self.rows.vocabulary, self.entries)

    def _exchanged(self, local: T) -> T:
        """[n, what this rank has] -> [n, what it computes with], over the same ranks."""
        group, rows = self._group, local.shape[0]
        own, wanted = self._stored[group.rank], self._wanted[group.rank]
        sent = [_overlap(own, interval) for interval in self._wanted]
        received = [_overlap(wanted, interval) for interval in self._stored]
        parts = [local[:, start - own[0] : stop - own[0]].reshape(-1) for start, stop in sent]
        sizes = [rows * (stop - start) for start, stop in received]
        flat = group.all_to_all(torch.cat(parts), [part.numel() for part in parts], sizes)
        return torch.cat([part.view(rows, -1) for part in flat.split(sizes) if part.numel()] or [local[:, :0]], 1)


def teacher_of(student: TokenRows, teacher: TokenRows, vocab_size: int | None) -> TeacherLogits:
    """The teacher for a student's tokens.

    Raises: ShapeError `bad-teacher`, `other-vocabulary`; ModelError `teacher-gradient`.
    """
    if teacher.lead != student.lead:
        what = f"the teacher has logits of tokens {list(teacher.lead)}, the student of {list(student.lead)}"
        raise ShapeError(Problem("bad-teacher", what, fix="the same tokens on this rank, in the same order"))
    refuse_gradient(teacher)
    entries = _entries(student.vocabulary.full, teacher.vocabulary.full, vocab_size)
    return TeacherLogits(teacher, student.vocabulary, entries, teacher.version)


def refuse_gradient(teacher: TokenRows) -> None:
    """Raises: ModelError `teacher-gradient` if a gradient of the teacher's logits would be lost."""
    if torch.is_grad_enabled() and teacher.requires_grad:
        what = "the teacher's logits require a gradient, and these functions have none for a teacher"
        fix = "run the teacher under torch.no_grad(), or pass its `logits.detach()`"
        raise ModelError(Problem("teacher-gradient", what, fix=fix))


def _entries(student: int, teacher: int, vocab_size: int | None) -> int:
    if vocab_size is None:
        if student == teacher:
            return student
        what = f"the student's logits have {student:,} entries, the teacher's {teacher:,}"
        fix = (
            "of one tokenizer, where the two differ in padding alone: vocab_size=len(tokenizer), the entries that "
            "have a meaning; a teacher with another tokenizer gives texts to train on, and no probabilities"
        )
        raise ShapeError(Problem("other-vocabulary", what, fix=fix))
    return entries_of(vocab_size, min(student, teacher))


def entries_of(vocab_size: int | None, most: int) -> int:
    """How many of `most` logits have a meaning. Raises: ShapeError `other-vocabulary`."""
    if vocab_size is None:
        return most
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or not 1 <= vocab_size <= most:
        what = f"vocab_size is {vocab_size!r}, of {most:,} logits"
        raise ShapeError(Problem("other-vocabulary", what, fix=f"from 1 to {most}"))
    return vocab_size


def _intervals(vocabulary: Vocabulary, entries: int) -> list[Interval]:
    size = vocabulary.group.size
    bounds = (even_interval(vocabulary.full, size, rank) for rank in range(size))
    return [(min(start, entries), min(stop, entries)) for start, stop in bounds]


def _overlap(a: Interval, b: Interval) -> Interval:
    start = max(a[0], b[0])
    return (start, max(start, min(a[1], b[1])))
