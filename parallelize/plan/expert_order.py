"""Which experts of a mixture are on which rank of `ep`: in their order, or in one that balances recorded routes.

An order lists all experts of a layer: those of the first rank of `ep`, then those of the second, and so on, as many for
each as without an order. It is a fact of the mesh. Names, checkpoints and the choices of routers keep the model's own
numbers.

Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from parallelize.base.errors import ParallelizeError, Problem
from parallelize.base.files.strict_json import read_json
from parallelize.base.layout import balanced_interval
from parallelize.plan.pattern import matches

Orders = tuple[tuple[str, tuple[int, ...]], ...]
"""(pattern of names of modules of experts, their order)."""


def orders_of(value: Any) -> tuple[Orders, Problem | None]:
    """Orders from what an option may be: a mapping from names to lists of experts, or a JSON file with one."""
    where = ""
    if isinstance(value, str | os.PathLike):
        where = os.fspath(value)
        try:
            value = read_json(Path(where).read_bytes(), where)
        except (OSError, ValueError, ParallelizeError) as error:
            return (), _bad(f"{where} cannot be read: {str(error).splitlines()[0]}", where)
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        orders = tuple((name, tuple(order)) for name, order in pairs)
    except (TypeError, ValueError):
        return (), _bad(f"it is a {type(value).__name__}, no mapping from names of experts to lists", where)
    for name, order in orders:
        is_order = all(type(expert) is int for expert in order) and sorted(order) == [*range(len(order))]
        if not isinstance(name, str) or not order or not is_order:
            return (), _bad(f"the order of {name!r} does not have each of its {len(order)} experts once", where)
    return orders, None


def order_of(orders: Orders | None, fqn: str) -> tuple[int, ...] | None:
    """The order of a module of experts, or of what is inside of it; None: that of the model.

    fqn: of the module, of a parameter in it or of an adapter of it, also where PEFT wraps the model or the experts.
    """
    for pattern, order in orders or ():
        if any(matches(pattern, name) for name in _parts(fqn)):
            return order
    return None


def on_ranks(order: tuple[int, ...], ep: int) -> tuple[tuple[int, ...], ...]:
    """For each rank of `ep`, its experts, ascending: as it stores them."""
    intervals = (balanced_interval(len(order), ep, rank) for rank in range(ep))
    return tuple(tuple(sorted(order[start:stop])) for start, stop in intervals)


@lru_cache(maxsize=4096)
def new_numbers(order: tuple[int, ...], ep: int) -> tuple[int, ...]:
    """The number of each expert in the order in which ranks store them: experts of a rank are consecutive then."""
    numbers = [0] * len(order)
    for number, expert in enumerate(expert for experts in on_ranks(order, ep) for expert in experts):
        numbers[expert] = number
    return tuple(numbers)


def wrong_orders(orders: Orders | None, num_experts: Mapping[str, int]) -> list[Problem]:
    """Problems of orders on a model. num_experts: name of each module of experts -> their number."""
    problems = []
    for pattern, order in orders or ():
        counts = {name: count for name, count in num_experts.items() if any(matches(pattern, n) for n in _parts(name))}
        if not counts:
            names = ", ".join(list(num_experts)[:4]) or "none"
            problems.append(_bad(f"{pattern!r} names no experts of this model", fix=f"its experts: {names}"))
        for name, count in counts.items():
            if count != len(order):
                what = f"the order of {pattern!r} has {len(order)} experts, and {name} has {count}"
                problems.append(_bad(what))
                break
    return problems


def _parts(fqn: str) -> Iterator[str]:
    """A name, those of the modules around it, and each of them without modules around the model."""
    segments = fqn.split(".")
    for stop in range(len(segments), 0, -1):
        for start in range(stop):
            yield ".".join(segments[start:stop])


def _bad(what: str, where: str = "", fix: str = "") -> Problem:
    fix = fix or "a list for each layer: the experts of the first rank of ep, of the second, ..., each expert once"
    return Problem("bad-placement", f"expert_placement: {what}", where, fix=fix)
