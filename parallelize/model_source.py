"""A model named on a command line: a config of `transformers`, one of its model types, a known size, or a function of yours.

    read_model("llama", {"num_hidden_layers": 2}).build("meta")
    read_model("path/to/llama").build("cpu", seed=0)
    read_model("my_package.models:tiny")

Nothing is downloaded. A function may return a module, or a dict of `model`, `inputs` (batch, sequence) -> keyword arguments of
the forward, of which `targets` goes to the loss, and `loss`, `count` as `Pipeline` takes them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.errors import ModelError, ParallelizeError, Problem, did_you_mean

KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": (
        "llama",
        dict(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
        ),
    ),
    "llama-3-70b": (
        "llama",
        dict(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            max_position_embeddings=8192,
        ),
    ),
    "llama-3.1-405b": (
        "llama",
        dict(
            vocab_size=128256,
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=126,
            num_attention_heads=128,
            num_key_value_heads=8,
            max_position_embeddings=131072,
        ),
    ),
}
"""Sizes of published models. [The Llama 3 Herd of Models, arXiv:2407.21783, table 3; their config.json]"""

Inputs = Callable[[int, int], dict[str, Any]]


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from, and what it is fed.

    Attributes:
        text: as it was named. config: of `transformers`, or None. make: builds the module where torch's default device is.
        given: what a function returned beside the model: `inputs`, `loss`, `count`.
    """

    text: str
    make: Callable[[Any], nn.Module]
    config: Any = None
    given: Mapping[str, Any] = field(default_factory=dict)

    def with_config(self, config: Any) -> ModelSource:
        """The same class of model, of other sizes."""
        return replace(self, config=config)

    def build(self, device: str = "meta", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The module in training mode. On meta it takes no memory, and no time to draw weights."""
        kept = torch.get_default_dtype()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                torch.set_default_dtype(dtype)
                with torch.device(device):
                    model = self.make(self.config)
            finally:
                torch.set_default_dtype(kept)
        return model.to(dtype).train()

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
        """Keyword arguments of a training step, drawn from torch's generator; `targets` is for the loss.

        Raises: ModelError `unknown-inputs` where it cannot be told what the model takes.
        """
        if "inputs" in self.given:
            return dict(self.given["inputs"](batch, sequence))
        return default_inputs(model, batch, sequence)

    @property
    def loss(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """(output, targets) -> sum; None: cross entropy of the logits."""
        return self.given.get("loss")

    @property
    def count(self) -> Callable[[Any], Any] | None:
        return self.given.get("count")


def read_model(text: str | os.PathLike, overrides: Mapping[str, Any] | None = None) -> ModelSource:
    """The model that a text names.

    Args:
        text: a `config.json` or its folder, a model type of `transformers`, a name in `KNOWN`, or `package.module:function`.
        overrides: fields of the config; for a function its keyword arguments.

    Raises: ModelError `unknown-model`, `unknown-config-field`, `no-such-factory`, `bad-factory`; ImportError where
        `transformers` is needed and missing.
    """
    name, overrides = str(text), dict(overrides or {})
    if os.path.exists(name):
        return _of_config(name, _config_of_file(Path(name), overrides))
    if ":" in name:
        return _of_function(name, overrides)
    if name.lower() in KNOWN:
        model_type, sizes = KNOWN[name.lower()]
        return _of_config(name, _config_of_type(model_type, {**sizes, **overrides}))
    return _of_config(name, _config_of_type(name, overrides))


def source_of(model: Any, overrides: Mapping[str, Any] | None = None, name: str = "") -> ModelSource:
    """A model that is named, or made by a function; `name` is what the latter is called."""
    if isinstance(model, ModelSource):
        return model
    if callable(model) and not isinstance(model, (str, os.PathLike)):
        return _of_callable(name or getattr(model, "__name__", "model"), model, dict(overrides or {}))
    return read_model(model, overrides)


def parse_overrides(texts: list[str]) -> dict[str, Any]:
    """`["num_hidden_layers=2", "hidden_act=relu"]` as values: JSON where it is, else text.

    Raises: ModelError `bad-override`.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ModelError(Problem("bad-override", f"cannot read {text!r}", fix="write `num_hidden_layers=2`"))
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def _config_of_file(path: Path, overrides: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        known = isinstance(raw, dict) and "model_type" in raw
    except (OSError, ValueError) as error:
        raise ModelError(Problem("unknown-model", f"{path} holds no config: {error}")) from error
    if not known:
        fix = "give a config.json that names its model_type, as `transformers` writes it"
        raise ModelError(Problem("unknown-model", f"{path} names no model_type", fix=fix))
    with _reading(f"transformers cannot read {path}", "unknown-model"):
        config = AutoConfig.from_pretrained(str(path))
    return _override(config, overrides)


@contextmanager
def _reading(what: str, slug: str = "bad-config") -> Iterator[None]:
    """Whatever a config says of values that it does not take: of every type, its own and Python's."""
    try:
        yield
    except (ParallelizeError, ImportError):
        raise
    except Exception as error:
        told = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise ModelError(Problem(slug, f"{what}: {type(error).__name__}: {told}")) from error


def _config_of_type(name: str, overrides: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        near = did_you_mean(name, [*CONFIG_MAPPING, *KNOWN])
        fix = f"{near} Or a folder with a config.json, or `package.module:function`"
        raise ModelError(Problem("unknown-model", f"{name!r} is no file, no model type and no known size", fix=fix))
    cls = CONFIG_MAPPING[name]
    _check_fields(cls(), overrides)
    with _reading(f"no {cls.__name__} has these values"):
        return cls(**overrides)


def _override(config: Any, overrides: Mapping[str, Any]) -> Any:
    """Fields changed and everything that follows from them worked out again."""
    if not overrides:
        return config
    _check_fields(config, overrides)
    values = config.to_dict() | dict(overrides)
    if "num_hidden_layers" in overrides and "layer_types" not in overrides and values.get("layer_types"):
        with _reading("num_hidden_layers is no number of layers"):
            values["layer_types"] = _repeated(values["layer_types"], overrides["num_hidden_layers"])
    architectures = config.architectures
    with _reading(f"no {type(config).__name__} has these values"):
        config = type(config).from_dict(values)
    config.architectures = architectures
    return config


def _repeated(kinds: list[str], count: int) -> list[str]:
    return [kinds[at % len(kinds)] for at in range(count)]


def _check_fields(config: Any, overrides: Mapping[str, Any]) -> None:
    known = {name for name in dir(config) if not name.startswith("_")} | set(getattr(config, "attribute_map", {}))
    for name in overrides:
        if name not in known:
            what = f"{type(config).__name__} has no field {name!r}"
            raise ModelError(Problem("unknown-config-field", what, fix=did_you_mean(name, config.to_dict())))


def _of_config(text: str, config: Any) -> ModelSource:
    cls = _class_of(config, text)

    def make(config: Any) -> nn.Module:
        from transformers.initialization import no_init_weights

        if not torch.empty(0).is_meta:
            return cls(config)
        with no_init_weights():  # there is nothing to draw
            model = cls(config)
        model.tie_weights()  # which comes with the drawing
        return model

    return ModelSource(text, make, config)


def _class_of(config: Any, text: str) -> Any:
    """The class that the config names, or the one with a head for its type."""
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    causal, masked = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM
    encoder = type(config) in masked._model_mapping and not getattr(config, "is_decoder", False)
    for auto in (*((masked,) if encoder else ()), causal, masked, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise ModelError(Problem("unknown-model", f"transformers has no model for the config of {text}"))


def _of_function(text: str, overrides: dict[str, Any]) -> ModelSource:
    place, _, name = text.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        function = getattr(importlib.import_module(place), name)
    except ModuleNotFoundError as error:
        if error.name is not None and not (place == error.name or place.startswith(error.name + ".")):
            raise
        raise ModelError(
            Problem("no-such-factory", f"no module is called {place!r}", fix="package.module:function")
        ) from error
    except AttributeError as error:
        raise ModelError(
            Problem("no-such-factory", f"{place} has no {name!r}", fix="package.module:function")
        ) from error
    return _of_callable(text, function, overrides)


def _of_callable(text: str, function: Callable[..., Any], overrides: dict[str, Any]) -> ModelSource:
    given: dict[str, Any] = {}

    def make(_: Any) -> nn.Module:
        made = function(**overrides)
        held = made if isinstance(made, Mapping) else {"model": made}
        if not isinstance(held.get("model"), nn.Module):
            what = f"{text} returned a {type(made).__name__}"
            fix = "return an nn.Module, or a dict with `model` and, where wanted, `inputs`, `loss`, `count`"
            raise ModelError(Problem("bad-factory", what, fix=fix))
        given.update({key: value for key, value in held.items() if key != "model" and value is not None})
        return held["model"]

    return ModelSource(text, make, None, given)


def default_inputs(model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
    """Ids and targets for a model of token ids: [batch, sequence], by its embedding and its head.

    Raises: ModelError `unknown-inputs`.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        fix = 'have the function return {"model": ..., "inputs": lambda batch, sequence: {...}}'
        raise ModelError(Problem("unknown-inputs", f"{type(model).__name__} has no embedding of ids", fix=fix))
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None) or max(table.num_embeddings for table in tables)
    ids = torch.randint(0, vocabulary, (batch, sequence))
    found: dict[str, Any] = {_name_of_ids(model): ids}
    if hasattr(config, "use_cache"):
        found["use_cache"] = False  # what a training loop says
    if "ForSequenceClassification" in type(model).__name__:
        return {**found, "targets": torch.randint(0, int(getattr(config, "num_labels", 2)), (batch,))}
    return {**found, "targets": torch.randint(0, vocabulary, (batch, sequence))}


def _name_of_ids(model: nn.Module) -> str:
    import inspect

    names = list(inspect.signature(model.forward).parameters)
    return "input_ids" if "input_ids" in names or not names else names[0]
