"""Reads an iterable from a position that can be saved."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from parallelize.base.errors import CheckpointError, DataError, Problem

Source = Iterable[Any] | Callable[[int], Iterable[Any]]
"""Samples that can be iterated again and again, or a function from an epoch to its samples."""


class SampleReader:
    """The samples of a source, from a position on, epoch after epoch.

    A source with `state_dict` and `load_state_dict` (`PackedDocuments`, an iterable data set of `datasets`) continues
    from its own state. Each epoch iterates a deep copy of it, so that none begins where an earlier one was resumed; one
    that holds much data shares it between copies by a `__deepcopy__`. Of any other source the samples before the
    position are read again and dropped.

    Args:
        source: an iterable, or a function of the epoch that returns one.
        repeat: whether the source begins again when it ends.

    Attributes:
        epoch: how often the source has ended.
        taken: the number of samples that were taken in this epoch.
    """

    def __init__(self, source: Source, repeat: bool = False):
        self.source, self.repeat = source, repeat
        self.epoch = self.taken = 0
        self._iterated: Any = None  # the source of this epoch, once its iteration has begun
        self._state: Any = None  # its own state, loaded and not begun with
        self._returned: list[Any] = []  # the iterator that a function returned last, also to copies of this reader

    def __iter__(self) -> Iterator[Any]:
        while True:
            for sample in self._samples_of_epoch():
                self.taken += 1
                yield sample
            if not self.taken and self.repeat:
                what = f"a source of samples is empty in epoch {self.epoch}"
                raise DataError(
                    Problem("no-samples", what, fix="leave it out; or return an iterable, not a spent iterator")
                )
            self.next_epoch()
            if not self.repeat:
                return

    def _samples_of_epoch(self) -> Iterator[Any]:
        self._state = self._own_state()
        source: Any = self._source_from_function() if callable(self.source) else self.source
        _check_kind(source, self._state)
        # a copy: a source that was told where to begin may begin there in later epochs too
        source = self._iterated = _copied(source) if _says_where(source) else source
        if self._state is not None:
            source.load_state_dict(self._state)
            return iter(source)
        return itertools.islice(source, self.taken, None)

    def _source_from_function(self) -> Any:
        source: Any = self.source(self.epoch)  # type: ignore[operator]
        check_samples(source, "what a function of the epoch returns")
        if is_read_once(source):
            if any(source is earlier for earlier in self._returned):
                raise _read_once("what a function of the epoch returns again", source)
            self._returned[:] = [source]
        return source

    def next_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.epoch, self.taken, self._iterated, self._state = self.epoch + 1, 0, None, None

    def _own_state(self) -> Any:
        """What the source itself says of its position; None if it is at its beginning, or cannot say."""
        if self._iterated is None:
            return self._state
        if not self.taken or not _says_where(self._iterated):
            return None
        return copy.deepcopy(self._iterated.state_dict())  # some return the dict that they go on to change

    def copy(self) -> SampleReader:
        """A reader of the same source, at the same position."""
        other = SampleReader(self.source, self.repeat)
        other._returned = self._returned
        other.load_state_dict(self.state_dict())
        return other

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "taken": self.taken, "source": self._own_state()}

    def load_state_dict(self, state: Any) -> None:
        """Continue at a saved position. An iteration that has begun is not changed.

        Raises: CheckpointError `data-position` if this is no position, or one that this kind of source cannot continue
            from. Nothing is changed then.
        """
        self.check_state(state)
        self.epoch, self.taken = state["epoch"], state["taken"]
        self._iterated, self._state = None, state.get("source")

    def check_state(self, state: Any) -> None:
        """Raises: as `load_state_dict`. What a function of the epoch returns is checked when its iteration begins."""
        if not isinstance(state, dict) or any(not _is_count(state.get(name)) for name in ("epoch", "taken")):
            raise not_a_position("the saved position of a source of samples", state)
        if not callable(self.source):
            _check_kind(self.source, state.get("source"))


def check_source(source: Any, name: str) -> None:
    """Refuse what cannot be iterated again and again, and single samples.

    Raises: DataError `bad-source`.
    """
    if callable(source):
        return
    check_samples(source, name)
    if is_read_once(source):
        raise _read_once(name, source)


def check_samples(source: Any, name: str) -> None:
    """Refuse what is one sample, or nothing that can be iterated. Raises: DataError `bad-source`."""
    is_sample = isinstance(source, str | bytes | bytearray | Mapping)
    if is_sample or not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
        what = f"{name} is {_shown(source)}: " + (
            "a sample, or a name, is no source" if is_sample else "it has no samples"
        )
        fix = (
            "an iterable of samples, in a list of sources if it is a list itself: IterableBatches([samples], ...); of "
            "a "
        )
        raise DataError(
            Problem("bad-source", what, fix=fix + "file, a function that opens it: lambda epoch: open(name)")
        )


def is_read_once(source: Any) -> bool:
    """Whether a source is an iterator, which is spent when it was read, and cannot begin at a state of its own."""
    return isinstance(source, Iterator) and not _says_where(source)


def refuse_second_read(source: Any, begun: list[bool]) -> None:
    """Let an iterator be read once. begun: what its readers share. Raises: DataError `bad-source`."""
    if begun:
        raise _read_once("what is read again", source)
    begun.append(True)


def _read_once(name: str, source: Any) -> DataError:
    what = f"{name} is {_shown(source)}, an iterator: what was read ahead, or in an earlier epoch, cannot be read again"
    fix = "a function that makes a new one, lambda epoch: read(epoch); or an object whose __iter__ does"
    return DataError(Problem("bad-source", what, fix=fix))


def _shown(source: Any) -> str:
    """The kind of a source, and what it is where it is short: no addresses of objects."""
    text = repr(source)
    return f"a {type(source).__name__}" + (f", {text[:40]}" if isinstance(source, str | bytes | int | float) else "")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _says_where(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _check_kind(source: Any, state: Any) -> None:
    """Whether a source can continue from a state of its own; None is no state."""
    if state is not None and not _says_where(source):
        what = (
            f"the position is one of a source with a state of its own, and a {type(source).__name__} has no "
            "load_state_dict"
        )
        raise CheckpointError(Problem("data-position", what, fix="pass the same sources in the same order"))


def _copied(source: Any) -> Any:
    try:
        return copy.deepcopy(source)
    except Exception as error:  # what `__deepcopy__` and `__reduce__` of its members raise
        what = f"a {type(source).__name__} has a state and cannot be copied, so that epochs would share it: {error}"
        fix = "open files in its __iter__; or give it a __deepcopy__, which may share what does not change"
        raise DataError(Problem("uncopied-source", what, fix=fix)) from error


def not_a_position(name: str, state: Any) -> CheckpointError:
    """The error for a state that `state_dict` did not return."""
    what = f"{name} is {str(state)[:80]!r}"
    return CheckpointError(Problem("data-position", what, fix="pass what state_dict() returned"))
