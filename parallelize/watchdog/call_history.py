"""What a group is expected to call next: what followed on its last two calls the last time.

Each pair of calls is one `CallHistory`, which refers to the expected call, and that one to the next pair: a call that repeats costs a
few comparisons, and no lookup.
"""

from __future__ import annotations

from typing import Any

_MOST_HISTORIES = 20_000
Form = tuple[str, Any, Any]
"""Of a call: its method, and shape and dtype of its first tensor."""


class CallHistory:
    """The last two calls of a group.

    Attributes:
        last: what was compared of the last call. expected: what followed the last time, None where nothing has yet.
        known: all histories of the group, by what was compared of the two calls.
    """

    __slots__ = ("expected", "known", "last")

    def __init__(self, last: Any = None, known: dict[Any, CallHistory] | None = None):
        self.last = last
        self.expected: ExpectedCall | None = None
        self.known: dict[Any, CallHistory] = {} if known is None else known

    def learn(self, form: Form, place: Any, compared: tuple[Any, ...]) -> CallHistory:
        """Expect this call from now on. Returns: the history with it."""
        if len(self.known) > _MOST_HISTORIES:
            self.known.clear()
        history = self.known.get((self.last, compared))
        if history is None:
            history = self.known[self.last, compared] = CallHistory(compared, self.known)
        self.expected = ExpectedCall(form, place, compared, history)
        return history


class ExpectedCall:
    """A call, and the history that it leads to. By its form and place the very same call is known without making what is compared of it."""

    __slots__ = ("compared", "form", "history", "place")

    def __init__(self, form: Form, place: Any, compared: tuple[Any, ...], history: CallHistory):
        self.form, self.place = form, place
        self.compared, self.history = compared, history
