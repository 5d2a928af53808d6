"""The result of a verification, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One compared quantity: the largest relative error over ranks and tensors, and the name of that tensor."""

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
    """The first difference between the run on the mesh and the unsharded one.

    Attributes:
        mode: the mode in which it was found.
        module: the fqn of a module, or what else differs, such as "the loss".
        kind: a kind of `relations.Relation`, or "raised".
        explanation: what differs, in words.
        rule, where: the rule of the plan that matches the module, and its line in the plan file.
        others: further suspects, most likely first: (module, rule).
        fix: what to change, if that is known.
        slug: of the problem that was raised; "" where none was.
    """

    mode: str
    module: str
    kind: str
    explanation: str
    rule: str = ""
    where: str = ""
    others: tuple[tuple[str, str], ...] = ()
    fix: str = ""
    slug: str = ""

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
    """The result of `verify`. It is true when all errors are within their bounds.

    Attributes:
        ok: whether all errors are within their bounds.
        model, plan, mesh, backend, dtype: what was run.
        seconds: how long it took.
        sizes: sizes of the model and batch that were compared.
        rows: for each mode and compared quantity the largest error and its bound.
        difference: the first difference, or None.
        unseen: what a run of this kind does not compare.
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
        """The result for JSON. Errors that are not finite are text."""
        data = asdict(self)
        data["rows"] = [{**asdict(row), "error": _number(row.error), "ok": row.ok} for row in self.rows]
        return data

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
        lines = [f"not compared: {'; '.join(self.unseen)}"] if self.unseen else []
        if self.difference is not None:
            return [str(self.difference), *lines]
        return [*lines, f"the same numbers ({self.seconds:.1f} s)" if self.ok else "the numbers differ"]


def _number(value: float) -> float | str:
    return value if value == value and abs(value) != float("inf") else str(value)
