"""The class of a checkpoint's model, built on the meta device: it knows the names of its tensors in files."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from parallelize.base.errors import CheckpointError, Problem
from parallelize.plan.models.config_limits import config_problems

_IMPLEMENTATION_KEYS = (
    "_attn_implementation",
    "attn_implementation",
    "_experts_implementation",
    "experts_implementation",
)


def model_on_meta(name: str | None, config: Mapping[str, Any] | None, required: bool = False) -> Any:
    """Build a model of `transformers` on the meta device. Only public classes of `transformers`; nothing is downloaded.

    Args:
        name: the name of the class.
        config: the values of config.json.
        required: a class that does not exist is an error.

    Returns: the model. None without a name or config; or, if not `required`, if there is no such class.
    Raises: CheckpointError `no-transformers`, `bad-config` for values that no model has, `unbuildable-model`.
    """
    if not name or not config:
        return None
    try:
        import transformers
    except ImportError:
        what = f"{name} is a model of transformers, which is needed for the names of its tensors in files"
        raise CheckpointError(Problem("no-transformers", what, fix="pip install transformers")) from None
    model_class: Any = getattr(transformers, name, None)
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if not is_model:  # a name of its own, so that type checkers without transformers keep `Any`
        if required:
            what = f"transformers {transformers.__version__} has no model {name}"
            raise CheckpointError(
                Problem("unbuildable-model", what, fix="use the version that the model was trained with")
            )
        return None
    config = {key: value for key, value in config.items() if key not in _IMPLEMENTATION_KEYS}
    aliases = getattr(model_class.config_class, "attribute_map", {})
    if problems := config_problems(config, f"the config of a {name}", aliases):
        raise CheckpointError(*problems)
    try:
        config_class: Any = model_class.config_class
        original = config_class.from_dict(deepcopy(config))
        eager = deepcopy(original)
        eager._attn_implementation = "eager"  # the implementation used in training may not be installed here
        with torch.device("meta"):
            module = model_class(eager)
    except Exception as error:
        rows = (("why", (str(error).partition("\n")[0] or type(error).__name__)[:200]),)
        what = f"transformers cannot build a {name} from its config"
        fix = "use the version of transformers that it was saved with"
        raise CheckpointError(Problem("unbuildable-model", what, rows=rows, fix=fix)) from error
    module.config = original
    return module


def class_name(described: Mapping[str, Any]) -> str | None:
    """The name of the class, from `about["model"]`; None if it is not of `transformers`."""
    module, _, name = str(described.get("class") or "").rpartition(".")
    return name if module.partition(".")[0] == "transformers" else None
