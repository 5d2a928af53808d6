"""The config.json and generation_config.json of a folder in Hugging Face's layout, which are not trusted.
Torch-free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.paths import read_small
from parallelize.base.files.strict_json import read_json
from parallelize.plan.models.config_file import MAX_BYTES


def read_hub_config(folder: Path) -> dict[str, Any]:
    """The content of config.json in a folder, with `architectures` as a list of names; empty without such a file.

    Raises: CheckpointError of `read_small` and `read_json`, `bad-json`.
    """
    if not os.path.lexists(folder / "config.json"):
        return {}
    where = str(folder / "config.json")
    config = read_json(read_small(folder, "config.json", MAX_BYTES), where, finite=False)
    if not isinstance(config, dict):
        raise CheckpointError(Problem("bad-json", "is not a JSON object", where))
    if not isinstance(config.get("model_type", ""), (str, type(None))):
        raise CheckpointError(
            Problem("bad-json", f"its model_type is {str(config['model_type'])[:60]}, not text", where)
        )
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        what = f"architectures is {str(names)[:60]}, and not a list of names of classes"
        raise CheckpointError(Problem("bad-json", what, where, fix="copy or download it again"))
    return config


def generation_config_text(folder: Path) -> str | None:
    """The text of generation_config.json, None without one. Raises: CheckpointError of `read_small` and `read_json`."""
    name = "generation_config.json"
    if not os.path.lexists(folder / name):
        return None
    text = read_small(folder, name, MAX_BYTES)
    read_json(text, str(folder / name), finite=False)
    return text.decode()
