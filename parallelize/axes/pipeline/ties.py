"""Tied parameters on several pipeline stages: equal copies, whose gradients are summed.

Parameters are tied where they were one object before the model was split, or where the plan declares it. Within a stage
one parameter has all the names. Across stages the gradient of each copy is a part, from the copy's own uses. The parts
are summed after ZeRO has reduced them over the data axes (the order of the sums does not matter), on the shards that
ZeRO keeps, so that 1/dp of the bytes are sent where gradients are sharded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from parallelize.axes.zero.buckets import as_gradient, to_local
from parallelize.axes.zero.data_guards import watch_optimizers
from parallelize.axes.zero.shard_data import data_of
from parallelize.base.errors import HandshakeError, Problem
from parallelize.comm.groups import Group, group_for
from parallelize.comm.handshake import TIMEOUT_S, compare_facts, digest
from parallelize.plan.resolve import tied_parameters
from parallelize.plan.schema import Plan, Tie
from parallelize.state.layout_tensor.layout_dtensor import wrap_like
from parallelize.state.loop.clip import serve_stock_clip
from parallelize.state.loop.grad_scaler import agree_over_stages
from parallelize.state.records import (
    Cut,
    StageMark,
    applied,
    mark_applied,
    mark_parameter,
    pipeline_cut,
    resolution_so_far,
)
from parallelize.state.step_results import as_instance

T = torch.Tensor

LOAD_TIMEOUT_S = TIMEOUT_S


@dataclass(frozen=True)
class TieGroup:
    """A tied parameter and the ranks of the pipeline that have a copy.

    Attributes:
        name: the name of the tie.
        members: fqns, on all stages.
        local: the members on this rank.
        group: the ranks with a copy, the owner first.
        reduce: "sum" or "none", as in `Tie`.
    """

    name: str
    members: tuple[str, ...]
    local: tuple[str, ...]
    group: Group
    reduce: str = "sum"

    @property
    def is_owner(self) -> bool:
        return self.group.rank == 0


class Ties:
    """The ties with members on this rank.

    Args:
        module: the root.
        groups: the ties, in the same order on all ranks.
    """

    def __init__(self, module: nn.Module, groups: list[TieGroup]):
        self.module, self.groups = module, groups
        self._summed: set[str] = set()

    def parameters(self, tie: TieGroup) -> list[nn.Parameter]:
        """The copies on this rank: one, unless a plan ties different parameters of one stage."""
        parameters = (self.module.get_parameter(name) for name in tie.local)
        return list({id(parameter): parameter for parameter in parameters}.values())

    def copies(self) -> set[int]:
        """ids of the parameters that do not count in norms, because the first copy of the owner does."""
        return {
            id(parameter)
            for tie in self.groups
            for index, parameter in enumerate(self.parameters(tie))
            if not tie.is_owner or index
        }

    def stepped(self, parameter: nn.Parameter) -> list[Any]:
        """What an optimizer may step to update this copy: the parameter, and under ZeRO its shard."""
        data = data_of(self.module)
        shards = data.shards if data is not None else ()
        return [parameter, *(shard.stepped for shard in shards if shard.param is parameter)]

    @torch.no_grad()
    def equalize(self) -> None:
        """Copy the owner's value to all copies. A broadcast over the ranks of each tie."""
        for tie in self.groups:
            first, *other_copies = (to_local(p) for p in self.parameters(tie))
            if first.is_meta:
                continue
            if tie.group.size > 1:
                value = first.contiguous()
                tie.group.broadcast(value, 0)
                first.copy_(value)
            for other in other_copies:
                other.copy_(first)

    @torch.no_grad()
    def equalize_to(self, tie: TieGroup, loaded: str | None) -> None:
        """Copy the value of the last member that any rank has loaded to all copies; nothing where none has.

        loaded: the last member of this rank that was loaded.

        Cost: an all-gather of one number over the ranks of the tie, and a broadcast of the value.
        """
        copies = [to_local(parameter) for parameter in self.parameters(tie)]
        last = -1 if loaded is None else tie.members.index(loaded)
        by_rank = [last]
        if tie.group.size > 1:
            by_rank = tie.group.all_gather(torch.tensor([last], device=copies[0].device)).flatten().tolist()
        if max(by_rank) < 0:
            return
        value = copies[0] if loaded is None else to_local(self.module.get_parameter(loaded)).contiguous()
        if tie.group.size > 1:
            value = value.clone(memory_format=torch.contiguous_format)
            tie.group.broadcast(value, by_rank.index(max(by_rank)))
        for copy in copies:
            copy.copy_(value)

    def reload_masters(self) -> None:
        """Let the float32 copies that an optimizer steps follow the values of the tied copies."""
        data, tied = data_of(self.module), {id(copy) for tie in self.groups for copy in self.parameters(tie)}
        for shard in data.shards if data is not None else ():
            if id(shard.param) in tied:
                shard.reload()

    def reopen(self) -> None:
        """Before another backward adds to gradients that are summed already: divide them by the number of copies.

        The next `reduce_gradients` then restores this sum, and adds the new parts to it.
        """
        for tie in self.groups:
            if tie.name in self._summed:
                for parameter in self.parameters(tie):
                    if parameter.grad is not None:
                        to_local(parameter.grad).mul_(1.0 / (tie.group.size * len(self.parameters(tie))))
        self._summed.clear()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum the gradients of each tie over its copies. Once per step, after the last backward; an all_reduce per
        tie."""
        for tie in self.groups:
            if tie.reduce == "none":
                continue
            parameters = [p for p in self.parameters(tie) if p.requires_grad]
            if not parameters:
                continue
            for parameter in parameters:
                if parameter.grad is None:  # unused here, used elsewhere
                    parameter.grad = self._zero_gradient(parameter)
            total = to_local(parameters[0].grad)
            for other in parameters[1:]:
                total.add_(to_local(other.grad))
            if tie.group.size > 1:
                tie.group.all_reduce(total)
            for other in parameters[1:]:
                to_local(other.grad).copy_(total)
            self._summed.add(tie.name)

    def _zero_gradient(self, parameter: Any) -> Any:
        """A gradient of zeros, sharded as ZeRO shards gradients."""
        data = data_of(self.module)
        shards = data.shards if data is not None and data.zero == 2 else ()
        shard = next((shard for shard in shards if shard.param is parameter), None)
        dtype = getattr(data.engine, "dtype", None) if data is not None else None
        dtype = dtype or parameter.dtype
        if shard is None or shard.spec is None:
            return as_gradient(parameter, torch.zeros_like(to_local(parameter), dtype=dtype))
        zeros = torch.zeros_like(shard.slice_of(to_local(parameter)), dtype=dtype)
        return wrap_like(parameter, zeros, shard.spec)

    def check(self) -> None:
        """Compare the copies by digest. An all_gather per tie.

        Raises: HandshakeError `ties-differ` on every rank of a tie whose copies differ.
        """
        for tie in self.groups:
            digests = [digest(to_local(p)) for p in self.parameters(tie)]
            gathered = tie.group.all_gather(digests[0]) if tie.group.size > 1 else digests[0][None]
            if any(not torch.equal(other, gathered[0]) for other in (*gathered, *digests)):
                what = f"copies of {tie.name} ({', '.join(tie.members)}) are not equal any more"
                fix = "update all copies by one optimizer with the same settings; then call equalize()"
                raise HandshakeError(Problem("ties-differ", what, fix=fix))


def ties_of(module: nn.Module) -> Ties | None:
    """The ties of a model, or None: what `tie_parameters` recorded."""
    return as_instance(applied(module).ties, Ties)


def tie_parameters(module: nn.Module, plan: Plan | None = None) -> Ties | None:
    """Tie parameters across pipeline stages, and give all copies the value of the first stage that has one.

    Parameters that were one object before `cut_pipeline` are tied, and so are those that the plan's `ties:` list.
    `Pipeline.step` then sums their gradients once per step.

    Args:
        module: after `cut_pipeline`, and after `parallelize_module` where the model has a plan.
        plan: the plan whose `ties:` are used. None: the plan that was applied.

    Returns: the ties, or None where no tie has members on two stages.

    Raises:
        PlanError: `unknown-parameter`, `tie-shapes-differ`, `tie-layouts-differ`.

    Cost: a broadcast of each tied parameter's local shard over the pp ranks that have it. A collective over `pp`: all
        its ranks must call it.
    """
    resolved, cut = resolution_so_far(module), pipeline_cut(module)
    if plan is not None:
        chosen = replace(resolved.plan, ties=plan.ties)
        tied = tied_parameters(chosen, resolved.facts, resolved.parameters, resolved.pp_ranks)
        resolved = replace(resolved, ties=tied)
    groups = [group for tie in resolved.ties if (group := _group(cut, tie, resolved.pp_ranks(tie.members))) is not None]
    if not groups:
        return None
    local_ties = Ties(module, groups)
    mark_applied(module, ties=local_ties)
    local_ties.equalize()
    module.register_load_state_dict_post_hook(_equalize_loaded)
    return local_ties


def _equalize_loaded(module: nn.Module, incompatible: Any) -> None:
    """After `load_state_dict`: all copies of a tie have the value that was loaded last, as one parameter with all the
    names has.

    A state dict may have only some of the names: a tied checkpoint has no `lm_head.weight`. A collective over the ranks
    of each tie, which first find out whether all of them are here.

    Raises: HandshakeError `ranks-missing` where other ranks of a tie do not load.
    """
    ties = ties_of(module)
    if ties is None:
        return
    missing = set(incompatible.missing_keys)
    for tie in ties.groups:
        compare_facts(sorted(tie.group.ranks), {"loads": tie.name}, LOAD_TIMEOUT_S, "load_state_dict")
        loaded = [member for member in tie.local if not any(_names(key, member) for key in missing)]
        ties.equalize_to(tie, loaded[-1] if loaded else None)
    ties.reload_masters()


def _names(key: str, member: str) -> bool:
    """Whether a key names this member, also in a state dict of a module around the model."""
    return key == member or key.endswith(f".{member}")


def mark_stages(module: nn.Module) -> None:
    """Mark each parameter with its pipeline group, and with whether it counts in norms on this rank.

    This is the last step of application, because wrappers replace parameters.
    """
    cut, ties = pipeline_cut(module), ties_of(module)
    copies = ties.copies() if ties is not None else set()
    for parameter in module.parameters():
        if cut is not None:
            mark_parameter(parameter, stage=StageMark(cut.group, id(parameter) not in copies))
            serve_stock_clip([parameter])
            agree_over_stages(parameter, cut.mesh)
            watch_optimizers()


def _group(cut: Cut | None, tie: Tie, ranks: tuple[int, ...]) -> TieGroup | None:
    """The tie on this rank, or None where it has no member. Every rank of the tie must call it: it makes a group.

    ranks: the ranks of the pipeline that have a copy.
    """
    if cut is None:
        return TieGroup(tie.name, tie.members, tie.members, Group.alone(), tie.reduce)
    if cut.group.rank not in ranks:
        return None
    local = tuple(member for member in tie.members if cut.present(member))
    group = Group.alone() if len(ranks) == 1 else Group(group_for([cut.group.ranks[rank] for rank in ranks]))
    return TieGroup(tie.name, tie.members, local, group, tie.reduce)
