"""`resize_token_embeddings` of a planned or data-parallel model of `transformers`: embedding and head are full while it
runs, and new parameters, which the next forward shards and reduces as layers that were replaced."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.state.forward_steps import PLANNED, has_inner
from parallelize.state.guards.early_optimizers import retire_optimizers
from parallelize.state.guards.stock_methods import guarded_method
from parallelize.state.records import KEY, applied, mesh_of, pipeline_cut, record_of
from parallelize.state.stage_values import unsharded

_NAME = "resize_token_embeddings"
_ENDS = (("get_input_embeddings", "set_input_embeddings"), ("get_output_embeddings", "set_output_embeddings"))


def serve_resizing(model: nn.Module) -> None:
    """Let a model resize its embedding and head."""
    if callable(getattr(type(model), _NAME, None)):
        model.__dict__[_NAME] = MethodType(_resize, model)


def _resize(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock method, with the embedding and head in full. A collective; new rows are those of the first rank.

    Raises: ModelError `reads-full-parameters` with pipeline stages, ZeRO 3 or overlap, and of layers with a forward of
        their own; `replaces-parameters` where optimizers step float32 copies, which the values of now would round. The
        next step of an optimizer that was built before, `early-optimizer`.
    """
    data: Any = applied(self).data
    ends = [module for get, _ in _ENDS if (module := getattr(self, get)()) is not None]
    if not _is_served(self, ends):
        return guarded_method(_NAME)(self, *args, **kwargs)
    if data is not None and data.masters:
        what = f"{type(self).__name__}.{_NAME} replaces parameters of which optimizers have float32 copies"
        fix = "save a checkpoint, build the model with more tokens, and resume(resize_vocabulary=True)"
        raise ModelError(Problem("replaces-parameters", what, fix=fix))
    own, full = {id(module) for module in self.modules()}, dict[int, nn.Parameter]()
    replaced = [p for module in ends if id(module) in own for p in module.parameters(recurse=False)]
    stepped = {id(shard.param): shard.stepped for shard in (data.shards if data is not None else ())}
    retire_optimizers([*replaced, *(stepped[id(p)] for p in replaced if id(p) in stepped)])
    for get, put in _ENDS:
        module = getattr(self, get)()
        if module is not None and id(module) in own:
            getattr(self, put)(_unplanned_copy(module, full))
    embedding = getattr(type(self), _NAME)(self, *args, **kwargs)
    _give_first_ranks_values(self)
    return embedding


@torch.no_grad()
def _give_first_ranks_values(model: nn.Module) -> None:
    """New rows are drawn, and ranks may not be seeded alike."""
    mesh = mesh_of(model)
    if mesh is None or mesh.size == 1:
        return
    group = mesh.group(*mesh.spec.names)
    ends = [module for get, _ in _ENDS if (module := getattr(model, get)()) is not None]
    for parameter in {id(p): p for module in ends for p in module.parameters(recurse=False)}.values():
        group.broadcast(parameter.detach(), 0)


def _is_served(model: nn.Module, ends: list[nn.Module]) -> bool:
    record, data = record_of(model), applied(model).data
    if pipeline_cut(model) is not None or (data is not None and data.zero == 3):
        return False
    if record is None or record.group.size == 1:
        return data is not None
    has_own = any(applied(module).planned is None or has_inner(module, PLANNED) for module in ends)
    return not has_own and record.resolved.options.overlap == "off" and record.resolved.plan.on_unclaimed != "leave"


def _unplanned_copy(module: nn.Module, full: dict[int, nn.Parameter]) -> nn.Module:
    """A module of the same class and attributes, that no plan has seen. full: by id of the parameter, so that ties
    stay."""
    plain = module.__class__.__new__(module.__class__)
    plain.__dict__.update({key: value for key, value in vars(module).items() if key not in ("forward", KEY)})
    plain.__dict__["_parameters"] = parameters = dict(module._parameters)
    for key, parameter in module._parameters.items():
        if parameter is not None:
            if id(parameter) not in full:
                value = unsharded(parameter) if isinstance(parameter, DTensor) else parameter.detach().clone()
                full[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            parameters[key] = full[id(parameter)]
    return plain
