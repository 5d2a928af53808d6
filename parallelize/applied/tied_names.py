"""Which parameters of a model are one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from parallelize.applied.records import cut_of, record_of


def tied_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each tied parameter of a model: shared by modules, or copied to several pipeline stages.

    Args:
        module: any model, parallelized or not. After `cut_pipeline` these are the ties of the full model, as every rank has them,
            though it stores only the copies of its own stages (`shard_info` lists those). A tie that was broken by an assignment
            after the plan is still listed; the first forward refuses it.

    Returns: for each parameter with several names, all of them, the first one first. Those of the plan's `ties:` are listed too.
    Cost: no communication.
    """
    cut, record = cut_of(module), record_of(module)
    resolved = cut.resolved if cut is not None else record.resolved if record is not None else None
    groups: list[tuple[str, ...]] = []
    if resolved is not None:
        groups += [fact.names for fact in resolved.facts.parameters.values()]
        groups += [tie.members for tie in resolved.ties]
    if cut is None:  # also what was tied since, or is in no plan
        by_id: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            by_id.setdefault(id(parameter), []).append(name)
        groups += [tuple(names) for names in by_id.values()]
    return tuple(names for names in joined(groups) if len(names) > 1)


def joined(groups: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Groups that have a name in common as one. Names and groups are in the order in which they first occur."""
    group_of: dict[str, list[str]] = {}
    for names in groups:
        target = group_of.setdefault(names[0], [names[0]])
        for name in names:
            other = group_of.setdefault(name, [name])
            if other is not target:
                target += other
                group_of |= dict.fromkeys(other, target)
    order = {name: number for number, name in enumerate(group_of)}
    by_id = {id(group): group for group in group_of.values()}
    return [tuple(sorted(group, key=order.__getitem__)) for group in by_id.values()]
