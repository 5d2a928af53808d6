"""The hooks on a model by which its forwards draw: they begin and end a forward, and follow what is sharded while it
runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.comm.groups import Group
from parallelize.state.randomness.dropout.call_sites import ColumnOutput, DropoutSites
from parallelize.state.randomness.dropout.draws import RunningModel
from parallelize.state.randomness.dropout.host_draws import HostGenerators
from parallelize.state.randomness.dropout.position import Clock
from parallelize.state.records import applied, mark_applied
from parallelize.state.step_results import as_instance

Columns = Sequence[tuple[nn.Module, ColumnOutput | None]]


class DrawHooks:
    """The hooks of one model.

    Args:
        columns: modules after which activations are sharded by columns, or (None) not. In the first forward of each
            mode hooks on them tell what is sharded at a draw; they stay if something is drawn.
        masks: whether it has dropout, by which they stay always.
    """

    def __init__(self, sites: DropoutSites, columns: Columns, masks: bool):
        self.sites, self.columns, self.masks = sites, columns, masks
        self.running, self.host = RunningModel(sites), HostGenerators(sites.clock)
        self.watched: set[bool] = set()
        self.handles: list[Any] = []
        self.following: list[Any] = []

    def install(self, module: nn.Module) -> None:
        self.handles.append(module.register_forward_pre_hook(partial(_begin, self), with_kwargs=True))
        self.handles.append(module.register_forward_hook(partial(_end, self), always_call=self.masks))
        self.sites.follows = self.masks or not self.columns
        if self.masks:
            self.follow()

    def follow(self) -> None:
        """Follow what is sharded, until a forward has drawn nothing."""
        for inner, columns in self.columns if not self.following else ():
            self.following.append(inner.register_forward_hook(partial(_set_last, self.sites, columns)))
        self.sites.follows = True

    def end_watch(self, training: bool, draws: bool) -> None:
        self.watched.add(training)
        if not draws and not self.masks:
            self.sites.follows = not self.columns
            while self.following:
                self.following.pop().remove()


def install_draw_hooks(module: nn.Module, sites: DropoutSites, columns: Columns, masks: bool = False) -> None:
    """Let the forwards of a model draw by its call sites. masks: whether its dropout is installed there too."""
    hooks = DrawHooks(sites, columns, masks)
    hooks.install(module)
    mark_applied(module, draws=hooks)


def remove_draw_hooks(module: nn.Module) -> None:
    """Remove those of a model whose dropout is to be installed."""
    hooks = as_instance(applied(module).draws, DrawHooks)
    for handle in (*hooks.handles, *hooks.following) if hooks is not None else ():
        handle.remove()


def draw_clock(module: nn.Module) -> Clock | None:
    """The clock of what a model draws, with or without dropout; None where its ranks choose the seed, or nothing is
    installed."""
    hooks = as_instance(applied(module).draws, DrawHooks)
    return None if hooks is None or hooks.sites.clock.agree_later else hooks.sites.clock


def has_drawn(module: nn.Module) -> bool:
    """Whether the running forward of a model has drawn any random numbers."""
    hooks = as_instance(applied(module).draws, DrawHooks)
    return hooks is not None and (hooks.sites.clock.has_drawn() or hooks.host.has_moved())


def first_seed(groups: Sequence[Group], device_type: str) -> int:
    """The seed of PyTorch's generator on the first rank of these groups. Cost: a broadcast of 8 bytes over each."""
    device = torch.device(device_type, torch.accelerator.current_device_index()) if device_type != "cpu" else "cpu"
    seed = torch.tensor([torch.initial_seed() % 2**62], device=device)
    for group in groups:
        dist.broadcast(seed, group=group.pg, group_src=0)
    return int(seed)


def _begin(hooks: DrawHooks, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Draws random numbers of the full activations, from here to the end of the forward."""
    sites = hooks.sites
    if not hooks.masks and torch.compiler.is_compiling():
        return
    sites.clock.begin((args, kwargs), module.training)
    sites.last = None
    sites.scopes.clear()
    if hooks.masks:
        sites.begin_check(module.training)
    is_first = module.training not in hooks.watched
    if is_first:
        hooks.follow()
    hooks.host.begin(is_first)
    hooks.running.begin(module)


def _end(hooks: DrawHooks, module: nn.Module, args: tuple, out: Any) -> None:
    """Ends the drawing of random numbers of the full activations."""
    sites = hooks.sites
    if not hooks.masks and torch.compiler.is_compiling():
        return
    hooks.running.end()
    hooks.host.end()
    sites.end_check()
    if module.training not in hooks.watched:
        hooks.end_watch(module.training, sites.clock.has_drawn())
    sites.clock.end(out)


def _set_last(sites: DropoutSites, columns: ColumnOutput | None, *_: Any) -> None:
    sites.last = columns
