"""What a verification found, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One comparison: the worst relative error over ranks and tensors, and the tensor's name."""

    mode: str
    what: str
    error: float
    bound: float
    name: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Difference:
    """The first place where the runs part.

    Attributes:
        module: or parameter, or what else is named. kind: as `relate` calls it, or "raised".
        rule, where: the plan's rule that serves it, and its line; of the nearest one where none does.
        others: further places that may be meant, most likely first: (module, rule).
    """

    mode: str
    module: str
    kind: str
    explanation: str
    rule: str = ""
    where: str = ""
    others: tuple[tuple[str, str], ...] = ()
    fix: str = ""

    def __str__(self) -> str:
        rows = [("module", self.module), ("kind", self.kind), ("what", self.explanation)]
        rows += [("rule", f"{self.rule}  ({self.where})" if self.where else self.rule)] if self.rule else []
        rows += [("or", f"{name}: {rule}") for name, rule in self.others[:3]]
        rows += [("fix", self.fix)] if self.fix else []
        rows = [(label, text) for label, text in rows if text]
        width = max(len(label) for label, _ in rows)
        return "\n".join([f"first difference, {self.mode}:", *(f"  {a:<{width}}  {b}" for a, b in rows)])


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`; true when everything is equal to rounding.

    Attributes:
        sizes: of the model and batch that were compared. unseen: what this kind of run did not look at.
    """

    ok: bool
    model: str
    plan: str
    mesh: str
    backend: str
    dtype: str
    seconds: float
    sizes: dict[str, int]
    rows: tuple[Row, ...]
    difference: Difference | None = None
    unseen: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok

    def as_dict(self) -> dict[str, Any]:
        """For JSON: errors that are not finite as text."""
        found = asdict(self)
        found["rows"] = [{**asdict(row), "error": _number(row.error), "ok": row.ok} for row in self.rows]
        return found

    def __str__(self) -> str:
        return "\n".join([self._title(), "", *self._table(), "", *self._end()])

    def _title(self) -> str:
        sizes = ", ".join(f"{name} {value:,}" for name, value in self.sizes.items())
        return f"{self.model} with plan {self.plan} on {self.mesh} ({self.backend}, {self.dtype})\n{sizes}"

    def _table(self) -> list[str]:
        head = ("compared with the unsharded model", "largest error", "allowed", "", "where it is largest")
        body: list[tuple[str, ...]] = []
        for mode in dict.fromkeys(row.mode for row in self.rows):
            for row in (row for row in self.rows if row.mode == mode):
                mark = "ok" if row.ok else "DIFFERS"
                name = row.name if not row.ok else ""
                body.append((f"{mode}: {row.what}", f"{row.error:.1e}", f"{row.bound:.1e}", mark, name))
        widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, *body)
        ]

    def _end(self) -> list[str]:
        lines = [f"not looked at: {'; '.join(self.unseen)}"] if self.unseen else []
        if self.difference is not None:
            return [str(self.difference), *lines]
        return [*lines, f"the same numbers ({self.seconds:.1f} s)" if self.ok else "the numbers differ"]


def _number(value: float) -> float | str:
    return value if value == value and abs(value) != float("inf") else str(value)
