"""What a module sees of its config and class: sizes of the rank's shards, and the stock class behind a subclass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelize.plan.attribute_paths import inner_items, with_inner


class LocalConfig:
    """A view of `config` in which the fields of `local` have local values. Writes go to `config`."""

    __slots__ = ("_config", "_local")

    def __init__(self, config: Any, local: dict[str, Any]):
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_local", local)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        local = object.__getattribute__(self, "_local")
        return local[name] if name in local else getattr(object.__getattribute__(self, "_config"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)

    def __deepcopy__(self, memo: dict) -> LocalConfig:
        return LocalConfig(deepcopy(self._config, memo), deepcopy(self._local, memo))

    def __reduce__(self):
        return LocalConfig, (self._config, self._local)


def full_config(config: Any) -> Any:
    """The config itself, where `config` is a `LocalConfig`."""
    return object.__getattribute__(config, "_config") if type(config) is LocalConfig else config


def set_local(module: Any, values: dict[str, Any]) -> None:
    """Set attributes of a module to local values; of `config.name`, in a view of the config, or of another object with
    fields, that this module alone sees; of `name.path`, in a copy of the container that the attribute is."""
    on_configs: dict[str, dict[str, Any]] = {}
    for attribute, value in values.items():
        name, _, path = attribute.partition(".")
        if not path:
            setattr(module, name, value)
        elif inner_items(getattr(module, name)):
            setattr(module, name, with_inner(getattr(module, name), path, value))
        else:
            on_configs.setdefault(name, {})[path] = value
    for name, local in on_configs.items():
        setattr(module, name, LocalConfig(getattr(module, name), local))


# -- stock class -----------------------------------------------------------------------------------------------------
# The class that a module had before `fully_shard` gave it one of its own.


def class_of(module: nn.Module) -> type[nn.Module]:
    """A module's class, or, after `fully_shard`, the class that it had before."""
    return next(c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))


@contextmanager
def stock_classes(module: nn.Module) -> Iterator[None]:
    """Inside, every module has its stock class: libraries look up what they know by the name of a class."""
    changed = [(inner, type(inner)) for inner in module.modules() if isinstance(inner, FSDPModule)]
    for inner, _ in changed:
        inner.__class__ = class_of(inner)  # type: ignore[assignment]
    try:
        yield
    finally:
        for inner, cls in changed:
            inner.__class__ = cls
