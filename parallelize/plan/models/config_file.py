"""Reading a JSON file that a user names and that may come from anywhere: a config.json, the words of a plan.
Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallelize.base.errors import CheckpointError, ModelError, Problem
from parallelize.base.files.paths import read_small
from parallelize.base.files.strict_json import read_json

MAX_BYTES = 16 << 20


def config_path(path: Path) -> Path:
    """The file of a config: `path`, or config.json in it."""
    return path / "config.json" if path.is_dir() else path


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. NaN and Infinity are accepted: published configs have them.

    Raises: CheckpointError of `read_small` and `read_json`, such as `missing-file`, `unsafe-path` for what is no
        regular file, `oversized-file`, `bad-json`; `bad-json` for JSON that is no object.
    """
    try:
        file = path.resolve()  # a link may lead anywhere: the user has named it
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links, in Python 3.11
        raise CheckpointError(Problem("unreadable-file", str(error), str(path))) from None
    data = read_json(read_small(file.parent, file.name, MAX_BYTES), str(path), finite=False)
    if not isinstance(data, dict):
        raise CheckpointError(Problem("bad-json", f"contains a JSON {_kind(data)}, and not an object", str(path)))
    return data


def _kind(data: Any) -> str:
    kinds = {list: "list", str: "text", bool: "truth value", type(None): "null"}
    return kinds.get(type(data), "number")


def read_config(path: Path) -> dict[str, Any]:
    """The values of a config.json that names its model type; they are not checked.

    Raises: ModelError `unknown-model` for a file that is no config.
    """
    fix = "give a config.json that names its model_type, as `transformers` writes it"
    try:
        data = read_object(path)
    except CheckpointError as error:
        what = f"contains no config: {error.problems[0].what}"
        raise ModelError(Problem("unknown-model", what, str(path), fix=fix)) from None
    if not isinstance(data.get("model_type"), str):
        raise ModelError(Problem("unknown-model", "names no model_type", str(path), fix=fix))
    return data
