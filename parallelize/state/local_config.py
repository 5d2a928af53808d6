"""A module's view of a shared config in which some sizes are those of the rank's shards."""

from __future__ import annotations

from copy import deepcopy
from typing import Any


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
    """Set attributes of a module to local values; of `config.name`, in a view of the config that this module alone sees."""
    on_config = {key.partition(".")[2]: value for key, value in values.items() if key.startswith("config.")}
    if on_config:
        module.config = LocalConfig(module.config, on_config)
    for attribute, value in values.items():
        if not attribute.startswith("config."):
            setattr(module, attribute, value)
