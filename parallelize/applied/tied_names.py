"""Which parameters of a model are one."""

from __future__ import annotations

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
    ties: dict[str, tuple[str, ...]] = {}
    if resolved is not None:
        ties |= {fact.fqn: fact.names for fact in resolved.facts.parameters.values()}
        ties |= {
            tie.members[0]: tie.members for tie in resolved.ties if tie.members[0] not in ties or len(tie.members) > 1
        }
    if cut is None:  # also what was tied since, or is in no plan
        by_id: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            by_id.setdefault(id(parameter), []).append(name)
        ties |= {names[0]: tuple(names) for names in by_id.values() if len(names) > len(ties.get(names[0], ()))}
    return tuple(names for names in ties.values() if len(names) > 1)
