"""`resize_token_embeddings` of a planned model of `transformers`: embedding and head are full while it runs, and sharded again after it."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.axes.tensor.planned_forward import installed
from parallelize.state.guards.stock_methods import guarded_method
from parallelize.state.records import KEY, applied, pipeline_cut, record_of
from parallelize.state.stage_values import unsharded

_NAME = "resize_token_embeddings"
_ENDS = (("get_input_embeddings", "set_input_embeddings"), ("get_output_embeddings", "set_output_embeddings"))


def serve_resizing(model: nn.Module) -> None:
    """Let a planned model resize its embedding and head, which the next forward shards as new layers (`replaced_layers.py`)."""
    if callable(getattr(type(model), _NAME, None)):
        model.__dict__[_NAME] = MethodType(_resize, model)


def _resize(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock method, with the embedding and head in full. A collective over `tp`; new rows are those of its first rank.

    Raises: ModelError `reads-full-parameters` with pipeline stages, data axes or overlap, and of layers with a forward of their own.
    """
    ends = [module for get, _ in _ENDS if (module := getattr(self, get)()) is not None]
    if not _is_served(self, ends):
        return guarded_method(_NAME)(self, *args, **kwargs)
    names = {id(module): name for name, module in self.named_modules()}
    full: dict[int, nn.Parameter] = {}
    for get, put in _ENDS:
        module = getattr(self, get)()
        if module is not None and id(module) in names:
            getattr(self, put)(_with_full_parameters(self, module, names[id(module)], full))
    return getattr(type(self), _NAME)(self, *args, **kwargs)


def _is_served(model: nn.Module, ends: list[nn.Module]) -> bool:
    record = record_of(model)
    if record is None or pipeline_cut(model) is not None or applied(model).data is not None:
        return False
    planned = [installed(module) for module in ends]
    has_own = any(each is None or each.stock is not None for each in planned)
    return not has_own and record.resolved.options.overlap == "off" and record.resolved.plan.unclaimed != "leave"


def _with_full_parameters(model: nn.Module, module: nn.Module, name: str, full: dict[int, nn.Parameter]) -> nn.Module:
    """A module of the same class and attributes, that no plan has seen. full: by id of the parameter, so that ties stay."""
    plain = module.__class__.__new__(module.__class__)
    plain.__dict__.update({key: value for key, value in vars(module).items() if key not in ("forward", KEY)})
    plain.__dict__["_parameters"] = parameters = dict(module._parameters)
    for key, parameter in module._parameters.items():
        if isinstance(parameter, DTensor):
            if id(parameter) not in full:
                full[id(parameter)] = nn.Parameter(unsharded(parameter), requires_grad=parameter.requires_grad)
            parameters[key] = full[id(parameter)]
    return plain
