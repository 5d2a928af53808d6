"""The exporters that calls of `export_weights` have built: a later call of the same ranks uses one again, if all of them can."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import nn

from parallelize.checkpoint.run.rank_sync import RankSync
from parallelize.state.records import applied, mark_applied

_MOST = 4
Settings = tuple[Any, ...]


class Exporter(Protocol):
    """What is asked of a `WeightExporter` here. `key`: what its plan is called on every rank."""

    @property
    def key(self) -> str: ...

    def is_current(self) -> bool: ...

    def use(self, sync: RankSync) -> None: ...


class _Remembered(NamedTuple):
    """An exporter, and what the model was like when it was built."""

    exporter: Exporter
    names_depend_on: tuple[type, Any]
    steps: tuple[Any, ...]


class RememberedExporters:
    """Settings of `export_weights` -> the exporter that was built with them. A copy of a model has none."""

    def __init__(self) -> None:
        self.by_settings: dict[Settings, _Remembered] = {}

    def __deepcopy__(self, memo: dict) -> RememberedExporters:
        return RememberedExporters()

    def __reduce__(self) -> Any:
        return RememberedExporters, ()


def planned_before(module: nn.Module, settings: Settings, sync: RankSync) -> Any:
    """The exporter that an earlier call has built, if every rank still has it, else None. A collective.

    Args:
        settings: the arguments of this rank. sync: of all ranks, which the exporter uses from now on.
    """
    try:
        exporter = _current(module, settings)
    except Exception:  # this rank must reach the exchange; planning anew reports what is wrong, on every rank
        exporter = None
    keys = sync.all_gather(exporter.key if exporter is not None else None)
    if exporter is None or any(key != exporter.key for key in keys):
        return None
    exporter.use(sync)
    return exporter


def remember(module: nn.Module, settings: Settings, exporter: Exporter) -> None:
    """Let later calls use this exporter."""
    before = applied(module).exporters
    exporters = before if isinstance(before, RememberedExporters) else RememberedExporters()
    if len(exporters.by_settings) >= _MOST:
        exporters.by_settings.clear()
    exporters.by_settings[settings] = _Remembered(exporter, _names_depend_on(module), _steps_of(module))
    mark_applied(module, exporters=exporters)


def _current(module: nn.Module, settings: Settings) -> Exporter | None:
    exporters = applied(module).exporters
    remembered = exporters.by_settings.get(settings) if isinstance(exporters, RememberedExporters) else None
    if remembered is None or not remembered.exporter.is_current():
        return None
    same_steps = all(a is b for a, b in zip(remembered.steps, _steps_of(module), strict=True))
    return remembered.exporter if same_steps and remembered.names_depend_on == _names_depend_on(module) else None


def _names_depend_on(module: nn.Module) -> tuple[type, Any]:
    """What names, ties and conversions depend on besides the tensors: the class and the config."""
    config: Any = getattr(module, "config", None)
    return type(module), config.to_dict() if hasattr(config, "to_dict") else None


def _steps_of(module: nn.Module) -> tuple[Any, ...]:
    """The records of what was applied to the model, which are replaced and never changed."""
    record = applied(module)
    return record.resolved, record.cut, record.plan, record.data
