"""A model named on a command line: a config of `transformers`, a model type, a published size, or a function of yours.

    read_model("llama", {"num_hidden_layers": 2}).build("meta")
    read_model("path/to/llama").build("cpu", seed=0)
    read_model("my_package.models:tiny")

Nothing is downloaded. A function returns a module, or a dict of `model`, `inputs`, `loss` and `count`. `inputs(batch,
sequence)` returns keyword arguments of the forward, and `targets` for the loss. `loss` and `count` are those of
`Pipeline`.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.plan.models.float8_linears import as_plain_linears
from parallelize.plan.models.image_inputs import (
    accepts_images,
    has_images,
    image,
    images_in_text,
    plain_tokens,
)
from parallelize.plan.models.tiny_copy import in_dtype, meta_copy, rebind_functions
from parallelize.plan.models.transformers_models import (
    KNOWN,
    class_of,
    config_of_config,
    config_of_file,
    config_of_type,
    is_config,
    maker_of,
)
from parallelize.plan.models.wrapped_models import forward_signature, stock_model


@dataclass(frozen=True)
class ModelSource:
    """How to build a model and its inputs.

    Attributes:
        text: the name by which it was read.
        make: builds the module from a config, on torch's default device.
        config: the config of `transformers`, or None.
        extras: what a function returned besides the model: `inputs`, `loss`, `count`. Empty until it was called. Of a
            model of `transformers` its `loss`, where only the model itself computes one.
    """

    text: str
    make: Callable[[Any], nn.Module]
    config: Any = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def with_config(self, config: Any) -> ModelSource:
        """The same class of model with other sizes."""
        return replace(self, config=config)

    def build(self, device: str = "meta", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Build the module, in training mode. On the meta device it takes no memory, and no weights are initialized.

        Raises: ModelError `unbuildable-model` where the class of `transformers` does not accept the config;
            `bad-factory`.
        """
        default_dtype = torch.get_default_dtype()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                torch.set_default_dtype(dtype)
                with torch.device(device):
                    model = self.make(self.config)
            finally:
                torch.set_default_dtype(default_dtype)
        return in_dtype(as_plain_linears(model), dtype).train()

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
        """Keyword arguments of a training step, drawn from torch's generator. `targets` among them is for the loss.

        Raises: ModelError `unknown-inputs` if the arguments of the model are unknown.
        """
        if "inputs" in self.extras:
            return dict(self.extras["inputs"](batch, sequence))
        return default_inputs(model, batch, sequence)

    @property
    def loss(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """(output, targets) -> sum over tokens. None: cross entropy of the logits."""
        return self.extras.get("loss")

    @property
    def count(self) -> Callable[[Any], Any] | None:
        """(targets) -> what the loss is divided by. None: the number of targets that are not ignored."""
        return self.extras.get("count")


def read_model(model: Any, overrides: Mapping[str, Any] | None = None) -> ModelSource:
    """Find the model that a text names, or a config describes.

    Args:
        model: a config of `transformers` or its `config.json` or folder, a model type, a name in `KNOWN`, or
            `package.module:function`.
        overrides: fields of the config, or keyword arguments of the function.

    Raises: ModelError `unknown-model`, `unknown-config-field`, `bad-config`, `no-such-factory`, `bad-factory`;
        ImportError if `transformers` is needed and missing. A config is refused before anything is built where a value
        of it is beyond the limits of `config_limits`, or where it names a class that is no model of `transformers`. No
        code of its folder runs.
    """
    if is_config(model):
        return _source_of_config(model.model_type, config_of_config(model, overrides or {}))
    name, overrides = str(model), dict(overrides or {})
    if os.path.exists(name):
        return _source_of_config(name, config_of_file(Path(name), overrides))
    if ":" in name:
        return _source_of_function(name, overrides)
    if name.lower() in KNOWN:
        model_type, sizes = KNOWN[name.lower()]
        return _source_of_config(name, config_of_type(model_type, {**sizes, **overrides}))
    return _source_of_config(name, config_of_type(name, overrides))


def source_of(model: Any, overrides: Mapping[str, Any] | None = None, name: str = "") -> ModelSource:
    """The source of a model given by name, by a function or as a module, which is copied. `name`: its name in
    messages."""
    if isinstance(model, ModelSource):
        return model
    if isinstance(model, nn.Module):  # before functions: a module is callable too
        return ModelSource(name or type(model).__name__, lambda _: _copied(model))
    if callable(model) and not isinstance(model, (str, os.PathLike)):
        return _source_of_callable(name or getattr(model, "__name__", "model"), model, dict(overrides or {}))
    return read_model(model, overrides)


def _copied(model: nn.Module) -> nn.Module:
    """A copy on torch's default device, if that is meta: without a copy of the values."""
    return meta_copy(model) if torch.empty(0).is_meta else copy_of(model)


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy, whose functions run its own modules. Raises: ModelError `reference-failed` for what Python, or
    PyTorch, does not copy."""
    copies: dict[int, Any] = {}
    try:
        copied = copy.deepcopy(model, copies)
    except Exception as error:  # of any attribute of any module
        what = f"{type(model).__name__} cannot be copied for each rank: {type(error).__name__}: {error}"
        fix = "no locks, files or computed tensors as attributes; weight_norm of torch.nn.utils.parametrizations"
        raise ModelError(Problem("reference-failed", what, fix=fix)) from error
    rebind_functions(copied, copies)
    return copied


def parse_overrides(texts: list[str]) -> dict[str, Any]:
    """`["num_hidden_layers=2", "hidden_act=relu"]` as a dict. Values are JSON if they can be read as JSON, else text.

    Raises: ModelError `bad-override`.
    """
    overrides: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ModelError(Problem("bad-override", f"cannot read {text!r}", fix="write `num_hidden_layers=2`"))
        try:
            overrides[key] = json.loads(value)
        except json.JSONDecodeError:
            overrides[key] = value
    return overrides


def _source_of_config(text: str, config: Any) -> ModelSource:
    extras = {"loss": own_loss} if returns_loss(class_of(config, text)) else {}
    return ModelSource(text, maker_of(config, text), config, extras)


def _source_of_function(text: str, overrides: dict[str, Any]) -> ModelSource:
    module, _, name = text.partition(":")
    fix = "package.module:function"
    if not module or module.startswith("."):
        raise ModelError(Problem("no-such-factory", f"no module is called {module!r}", fix=fix))
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as under `python -m`
    try:
        function = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and not (module == error.name or module.startswith(error.name + ".")):
            raise  # the module exists, and imports one that does not
        raise ModelError(Problem("no-such-factory", f"no module is called {module!r}", fix=fix)) from error
    except AttributeError as error:
        raise ModelError(Problem("no-such-factory", f"{module} has no {name!r}", fix=fix)) from error
    return _source_of_callable(text, function, overrides)


def _source_of_callable(text: str, function: Callable[..., Any], overrides: dict[str, Any]) -> ModelSource:
    extras: dict[str, Any] = {}

    def make(_: Any) -> nn.Module:
        returned = function(**overrides)
        values = returned if isinstance(returned, Mapping) else {"model": returned}
        if not isinstance(values.get("model"), nn.Module):
            what = f"{text} returned a {type(returned).__name__}"
            fix = "return an nn.Module, or a dict with `model` and optionally `inputs`, `loss`, `count`"
            raise ModelError(Problem("bad-factory", what, fix=fix))
        extras.update({key: value for key, value in values.items() if key != "model" and value is not None})
        return values["model"]

    return ModelSource(text, make, None, extras)


def default_inputs(model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
    """Random inputs and targets: token ids [batch, sequence] for a model with an embedding; of others see
    `step_inputs`.

    Raises: ModelError `unknown-inputs`.
    """
    if values := step_inputs(model, batch, sequence):
        return values
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        fix = 'have the function return {"model": ..., "inputs": lambda batch, sequence: {...}}'
        raise ModelError(Problem("unknown-inputs", f"{type(model).__name__} has no embedding of ids", fix=fix))
    config = getattr(model, "config", None)
    sizes = (getattr(part, "vocab_size", None) for part in (config, getattr(config, "text_config", None)))
    vocabulary = next(filter(None, sizes), None) or max(table.num_embeddings for table in tables)
    ids = torch.randint(0, vocabulary, (batch, sequence))
    inputs: dict[str, Any] = {name_of_ids(model): ids}
    if hasattr(config, "use_cache"):
        inputs["use_cache"] = False  # as in a training loop
    if "ForSequenceClassification" in type(model).__name__:
        return {**inputs, "targets": torch.randint(0, int(getattr(config, "num_labels", 2)), (batch,))}
    return {**inputs, "targets": torch.randint(0, vocabulary, (batch, sequence))}


def name_of_ids(model: nn.Module) -> str:
    """`input_ids`, or the first argument of a forward without it."""
    names = list(forward_signature(model).parameters)[1:]
    return "input_ids" if "input_ids" in names or not names else names[0]


# -- step inputs -----------------------------------------------------------------------------------------------------
# Inputs and targets of a training step of models that read more than the ids of one sequence, by their config and
# forward.


T = torch.Tensor


def step_inputs(model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
    """Keyword arguments of the forward with `targets`; empty for a model that reads ids alone, or in another way than
    these.

    Images have a class each; a text, or sound, has a target text of `sequence` tokens. Texts with images in them have
    the tokens of the images besides. Pairs of a text and an image have no targets: the model has a loss of its own.
    """
    config: Any = getattr(model, "config", None)
    arguments = forward_signature(model).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values" and "input_ids" not in arguments and "ForImageClassification" in type(model).__name__:
        return {main: image(config, batch), "targets": torch.randint(0, int(config.num_labels), (batch,))}
    if returns_loss(type(stock_model(model))) and hasattr(config, "text_config"):
        return _pairs(config, batch, sequence)
    if config is not None and not torch.empty(0).is_meta and has_images(model):
        return _texts_with_images(model, batch, sequence)
    if "decoder_input_ids" not in arguments or not getattr(config, "is_encoder_decoder", False):
        return {}
    vocabulary = int(getattr(config, "decoder_vocab_size", None) or config.vocab_size)
    source: torch.Tensor | None = None
    if main == "input_ids":
        source = torch.randint(0, int(config.vocab_size), (batch, sequence))
    elif main == "input_features" and type(getattr(config, "max_source_positions", None)) is int:
        source = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)  # a convolution halves them
    if source is None:
        return {}
    ids, targets = (torch.randint(0, vocabulary, (batch, sequence)) for _ in range(2))
    return {main: source, "decoder_input_ids": ids, "use_cache": False, "targets": targets}


def returns_loss(cls: type[nn.Module]) -> bool:
    """Whether a model computes a loss of pairs of a text and an image where `return_loss` asks for it."""
    if hasattr(cls, "_backends"):  # it stands for a class whose package is missing
        return False
    return {"input_ids", "pixel_values", "return_loss"} <= inspect.signature(cls.forward).parameters.keys()


def own_loss(output: Any, targets: Any) -> T:
    """The loss that a model of `returns_loss` has computed."""
    loss: T = output.loss
    return loss


def _pairs(config: Any, batch: int, sequence: int) -> dict[str, Any]:
    """Texts that end where their model reads them, and as many images."""
    text = config.text_config
    ids = torch.randint(3, max(4, int(text.vocab_size) - 1), (batch, sequence))  # 0 to 2 are padding and ends in most
    if type(end := getattr(text, "eos_token_id", None)) is int and end < text.vocab_size:
        ids = torch.where(ids == end, 3 if end != 3 else 4, ids)
        ids[:, -1] = end
    return {"input_ids": ids, "pixel_values": image(config, batch), "return_loss": True}


def _texts_with_images(model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
    """Texts with an image each; empty where the model takes none of the forms of images that are known.

    Not on meta: how many tokens an image takes is counted by running the model's tower, whose sizes are values there.
    """
    try:
        inputs = images_in_text(model, batch, sequence)
    except Exception:  # of code of any model, whose texts by themselves are read as those of others
        return {}
    config: Any = model.config
    text = getattr(config, "text_config", None) or config
    plain = plain_tokens(config, int(text.vocab_size) // 2)
    targets = plain[torch.randint(0, len(plain), inputs["input_ids"].shape)]
    return {**_by_rows(model, inputs, batch), "targets": targets}


def _by_rows(model: nn.Module, inputs: dict[str, Any], batch: int) -> dict[str, Any]:
    """The patches of all images as [batch, patches, channels] where the model takes them so: a part of the batch has
    its patches."""
    patches = inputs.get("pixel_values")
    if patches is None or patches.ndim != 2 or patches.shape[0] % batch:
        return inputs
    by_rows = {**inputs, "pixel_values": patches.unflatten(0, (batch, -1))}
    return by_rows if accepts_images(model, by_rows) else inputs
