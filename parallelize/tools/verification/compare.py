"""The six quantities that are compared, each by its largest relative error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from parallelize.tools.verification.relations import error_of

T = torch.Tensor
ORDER = ("loss", "outputs", "input gradients", "gradients", "gradient norm", "weights")
FLOOR = 1e-3  # of the largest tensor of a kind: a tensor that is nearly zero has no meaningful relative error


@dataclass
class ReferenceValues:
    """What the unsharded model computes. Parameters are listed under every name that they have."""

    loss: T
    outputs: list[T]  # every floating-point tensor of the model's output
    inputs: T | None
    embedding: str  # the module at whose output the gradient `inputs` was taken, or empty
    gradients: dict[str, T]
    norm: T
    weights: dict[str, T]
    _largest_of_kind: dict[str, float] = field(default_factory=dict)

    def tensors(self, kind: str) -> dict[str, T]:
        return {"gradients": self.gradients, "weights": self.weights}[kind]

    def floor(self, kind: str, name: str) -> float:
        """The smallest magnitude that the error of a tensor is divided by.

        A bias's gradient sums the same terms as its weight's gradient and may cancel to zero (a key's bias does not
        change a softmax). So its error is relative to the weight's gradient.
        """
        weight = self.tensors(kind).get(name.removesuffix("bias") + "weight") if name.endswith(".bias") else None
        largest = _largest(weight) if weight is not None and kind == "gradients" else 0.0
        return max(largest, FLOOR * self._largest_of(kind))

    def _largest_of(self, kind: str) -> float:
        if kind not in self._largest_of_kind:
            self._largest_of_kind[kind] = max(map(_largest, self.tensors(kind).values()), default=0.0)
        return self._largest_of_kind[kind]


def _largest(tensor: T) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@dataclass
class Errors:
    """The largest error of each compared quantity, with the name of its tensor.

    Attributes:
        wrong: parameters whose gradients exceed the bound, with their errors.
        failed: the error that ended the step, or empty.
    """

    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    wrong: dict[str, float] = field(default_factory=dict)
    failed: str = ""

    def add(self, what: str, error: float, name: str = "") -> None:
        if what not in self.worst or error > self.worst[what][0]:
            self.worst[what] = error, name

    def merge(self, other: Errors) -> None:
        for what, (error, name) in other.worst.items():
            self.add(what, error, name)
        for name, error in other.wrong.items():
            self.wrong[name] = max(error, self.wrong.get(name, 0.0))
        self.failed = self.failed or other.failed

    def equal(self, bound: float) -> bool:
        return not self.failed and all(error <= bound for error, _ in self.worst.values())


def compare_named(
    errors: Errors, kind: str, actual: Mapping[str, T], reference: ReferenceValues, names: set[str], bound: float
) -> None:
    """Compare the gradients or weights (`kind`) of the parameters `names`, which a rank has."""
    expected = reference.tensors(kind)
    errors.add(kind, 0.0)
    for name in sorted(names):
        if name not in expected and name not in actual:
            continue  # frozen or unused
        if name in expected and name in actual:
            tensor = actual[name]
            error = error_of(tensor, expected[name].to(tensor.device), reference.floor(kind, name))
        else:
            error = float("inf")
        errors.add(kind, error, name)
        if kind == "gradients" and error > bound:
            errors.wrong[name] = error


# -- result ----------------------------------------------------------------------------------------------------------
# The result of a verification, as data and as text.


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
