"""Which parameters of a model are one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from parallelize.state.records import pipeline_cut, record_of


def tied_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each tied parameter of a model: shared by modules, or copied to several pipeline stages.

    Args:
        module: any model, parallelized or not. After `cut_pipeline` these are the ties of the full model, as every rank has them,
            though it stores only the copies of its own stages (`shard_info` says which ranks store which). A tie that was broken by an assignment
            after the plan is still listed; the first forward refuses it.

    Returns: for each parameter with several names, all of them, the first one first. Those of the plan's `ties:` are listed too.
    Cost: no communication.
    """
    cut, record = pipeline_cut(module), record_of(module)
    resolved = cut.resolved if cut is not None else record.resolved if record is not None else None
    groups: list[tuple[str, ...]] = []
    if resolved is not None:
        groups += [fact.names for fact in resolved.facts.parameters.values()]
        groups += [tie.members for tie in resolved.ties]
    if cut is None:  # also what was tied since, or is in no plan
        by_id: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            by_id.setdefault(id(parameter), []).append(name)
        groups += map(tuple, by_id.values())
    return tuple(names for names in _joined(groups) if len(names) > 1)


def _joined(groups: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Groups that have a name in common as one, in the order of the names' first group."""
    order = list(dict.fromkeys(name for group in groups for name in group))
    joined: dict[str, set[str]] = {name: {name} for name in order}
    for group in groups:
        members = set().union(*(joined[name] for name in group))
        joined |= dict.fromkeys(members, members)
    seen: set[str] = set()
    for name in order:
        if name not in seen:
            seen |= joined[name]
            yield tuple(other for other in order if other in joined[name])
