"""A run that goes on from a checkpoint: what its file says of the model and the optimizer, compared with what was
saved.

What is compared is the table of `resumed_keys.py`; the position in the data is compared by `build_run.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.base.errors import LaunchError, Problem
from parallelize.checkpoint.format.manifest import Manifest
from parallelize.checkpoint.run.metadata import model_metadata
from parallelize.launch.config.resumed_keys import REFUSED, may_differ
from parallelize.launch.config.run_config import ModelSection, RunConfig
from parallelize.launch.preflight.base_model import adapters_of
from parallelize.plan.block_formats import block_format

RECORD = "run"
"""The key of a manifest's `about` under which `record_of` is saved."""
_TAKES_EFFECT = re.compile(
    r"drop|coef|implementation|dtype|checkpointing|^(use_cache|architectures|transformers_version|_name_or_path|output_\w+|return_\w+)$"
)
"""Fields of a config that are not the model's function of its inputs: how it is regularized, computed and called."""
_MOST = 8


@dataclass(frozen=True)
class ChangedKey:
    """A key of the file whose value is another one than the saved run's."""

    key: str
    value: Any
    saved: Any

    @property
    def row(self) -> Any:
        """Of `resumed_keys.REFUSED`."""
        key = f"{self.key}."
        return next(row for name, row in REFUSED.items() if key.startswith(f"{name}.") or f"{name}.".startswith(key))

    def text(self, where: str) -> str:
        return f"{self.key} is {_shown(self.value)}, and {_shown(self.saved)} in {where}"

    def problem(self, config: RunConfig, where: str) -> Problem:
        choice = f"checkpoints: {{may_differ: [{self.key}]}}"
        rows = ((choice, self.row.note.rpartition("May differ: ")[2]),)
        fix = f"write the saved value; or another checkpoints.folder; or {choice}"
        return Problem("changed-key", self.text(where), config.place(self.key), rows, fix)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def refuse_or_tell(config: RunConfig, differences: list[ChangedKey], where: str, tell: Any) -> list[ChangedKey]:
    """The differences that the file accepts, each of which is told. Raises: LaunchError `changed-key` for the
    others."""
    refused = [each for each in differences if not may_differ(config.checkpoints.may_differ, each.key)]
    if refused:
        more = [Problem("changed-key", f"and {len(refused) - _MOST} more keys")] if len(refused) > _MOST else []
        raise LaunchError(*(each.problem(config, where) for each in refused[:_MOST]), *more)
    for each in differences:
        tell(f"{each.text(where)}: accepted by checkpoints.may_differ")
    return differences


# -- what is saved ------------------------------------------------------------------------------------------------


def record_of(config: RunConfig) -> dict[str, Any]:
    """What the file says of the model, beyond its class and config: plain values for the manifest."""
    section = config.model
    folder = section.initialize if isinstance(section.initialize, str) else None
    record = {
        "initialize": section.initialize,
        "weights": _weight_files(Path(folder)) if folder is not None else None,
        "quantize": str(block_format(section.quantize)) if section.quantize else "",
        "lora": _adapters(section),
    }
    return record | (_function_as_data(section) if _is_function(section) else {})


def _is_function(section: ModelSection) -> bool:
    return ":" in section.name and not Path(section.name).exists()


def _function_as_data(section: ModelSection) -> dict[str, Any]:
    return {"name": section.name, "set": _plain(section.set)}


def _weight_files(path: Path) -> list[list[Any]]:
    """[name, size] of the files with weights: these identify a folder wherever it is."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size] for file in files if file.suffix in (".safetensors", ".bin")]


def _adapters(section: ModelSection) -> dict[str, Any] | None:
    adapters = adapters_of(section)
    return _plain(adapters.to_dict()) if adapters is not None else None


def _plain(value: Any) -> Any:
    return json.loads(
        json.dumps(value, default=lambda item: sorted(map(str, item)) if isinstance(item, set) else str(item))
    )


# -- what is compared ---------------------------------------------------------------------------------------------


def differences_of(
    config: RunConfig, manifest: Manifest, parallel: ParallelModel, optimizer: Optimizer
) -> list[ChangedKey]:
    """The compared keys that say something else than the saved run. What an older checkpoint does not say is not
    compared."""
    record = manifest.about.get(RECORD)
    differences = list(_changes_of_record(config.model, record_of(config), record if isinstance(record, dict) else {}))
    if not any(each.key == "model.lora" for each in differences):
        differences += _changes_of_model(config.model, manifest.about.get("model"), model_metadata(parallel.module))
    return [*differences, *_changes_of_optimizer(config, manifest, optimizer)]


def _changes_of_record(section: ModelSection, now: dict[str, Any], saved: dict[str, Any]) -> Iterator[ChangedKey]:
    same_files = now["weights"] is not None and now["weights"] == saved.get("weights")
    if "initialize" in saved and saved["initialize"] != now["initialize"] and not same_files:
        yield ChangedKey("model.initialize", now["initialize"], saved["initialize"])
    if "quantize" in saved and saved["quantize"] != now["quantize"]:
        yield ChangedKey("model.quantize", section.quantize, saved["quantize"])
    if "lora" in saved:
        yield from _changes_of_adapters(now["lora"], saved["lora"])
    if "name" in saved and saved["name"] != section.name:
        yield ChangedKey("model.name", section.name, saved["name"])
    elif isinstance(saved.get("set"), dict) and "set" in now:
        names = dict.fromkeys([*saved["set"], *now["set"]])
        for name in names:
            if saved["set"].get(name) != now["set"].get(name):
                yield ChangedKey(f"model.set.{name}", now["set"].get(name), saved["set"].get(name))


def _changes_of_adapters(now: Any, saved: Any) -> Iterator[ChangedKey]:
    if isinstance(now, dict) and isinstance(saved, dict):
        for name, value, other in _unequal(now, saved):
            yield ChangedKey(f"model.lora.{name}", value, other)
    elif now != saved:
        yield ChangedKey("model.lora", "set" if now else "not set", "set" if saved else "not set")


def _changes_of_model(section: ModelSection, saved: Any, now: dict[str, Any]) -> Iterator[ChangedKey]:
    """Of class and config, which every checkpoint has."""
    if not isinstance(saved, dict):
        return
    if saved.get("class") != now["class"]:
        yield ChangedKey("model.name", now["class"], saved.get("class"))
        return
    config, saved_config = _config(now.get("config")), _config(saved.get("config"))
    for name, value, other in _unequal(config, saved_config):
        if not _TAKES_EFFECT.search(name.rpartition(".")[2]):
            yield ChangedKey(f"model.set.{name}", value, other)


def _config(text: Any) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _unequal(now: Mapping[str, Any], saved: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value, saved value) of fields that both have: another version of a library has others."""
    for name in now:
        if name not in saved or now[name] == saved[name]:
            continue
        if isinstance(now[name], dict) and isinstance(saved[name], dict):
            yield from _unequal(now[name], saved[name], f"{path}{name}.")
        else:
            yield f"{path}{name}", now[name], saved[name]


def _changes_of_optimizer(config: RunConfig, manifest: Manifest, optimizer: Optimizer) -> Iterator[ChangedKey]:
    described = (manifest.state.get("optimizers") or {}).get("optimizer") or {}
    saved = (described.get("class") or {}).get("name")
    if saved is not None and saved != type(optimizer).__qualname__:
        yield ChangedKey("optimizer.name", config.optimizer.name, saved)
