"""A model named on a command line: a config of `transformers`, a model type, a published size, or a function of yours.

    read_model("llama", {"num_hidden_layers": 2}).build("meta")
    read_model("path/to/llama").build("cpu", seed=0)
    read_model("my_package.models:tiny")

Nothing is downloaded. A function returns a module, or a dict of `model`, `inputs`, `loss` and `count`. `inputs(batch, sequence)`
returns keyword arguments of the forward, and `targets` for the loss. `loss` and `count` are those of `Pipeline`.
"""

from __future__ import annotations

import copy
import importlib
import inspect
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
from parallelize.models.model_dtype import in_dtype

KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-8x7b": (
        "mixtral",
        dict(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=32768,
        ),
    ),
    "qwen3-235b-a22b": (
        "qwen3_moe",
        dict(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            num_hidden_layers=94,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            max_position_embeddings=40960,
        ),
    ),
    "deepseek-v3": (
        "deepseek_v3",
        dict(
            vocab_size=129280,
            hidden_size=7168,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            num_hidden_layers=61,
            num_attention_heads=128,
            num_key_value_heads=128,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=3,
            max_position_embeddings=4096,
        ),
    ),
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
"""Sizes of published models. [The Llama 3 Herd of Models, arXiv:2407.21783, table 3; Mixtral, arXiv:2401.04088; Qwen3,
arXiv:2505.09388; DeepSeek-V3, arXiv:2412.19437; their config.json]"""


@dataclass(frozen=True)
class ModelSource:
    """How to build a model and its inputs.

    Attributes:
        text: the name by which it was read.
        make: builds the module from a config, on torch's default device.
        config: the config of `transformers`, or None.
        extras: what a function returned besides the model: `inputs`, `loss`, `count`. Empty until it was called.
    """

    text: str
    make: Callable[[Any], nn.Module]
    config: Any = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def with_config(self, config: Any) -> ModelSource:
        """The same class of model with other sizes."""
        return replace(self, config=config)

    def build(self, device: str = "meta", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Build the module, in training mode. On the meta device it takes no memory, and no weights are initialized."""
        default_dtype = torch.get_default_dtype()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                torch.set_default_dtype(dtype)
                with torch.device(device):
                    model = self.make(self.config)
            finally:
                torch.set_default_dtype(default_dtype)
        return in_dtype(model, dtype).train()

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


def read_model(text: str | os.PathLike, overrides: Mapping[str, Any] | None = None) -> ModelSource:
    """Find the model that a text names.

    Args:
        text: a `config.json` or its folder, a model type of `transformers`, a name in `KNOWN`, or `package.module:function`.
        overrides: fields of the config, or keyword arguments of the function.

    Raises: ModelError `unknown-model`, `unknown-config-field`, `bad-config`, `no-such-factory`, `bad-factory`; ImportError
        if `transformers` is needed and missing.
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
    """The source of a model given by name, by a function or as a module, which is copied. `name`: its name in messages."""
    if isinstance(model, ModelSource):
        return model
    if isinstance(model, nn.Module):  # before functions: a module is callable too
        return ModelSource(name or type(model).__name__, lambda _: _copied(model))
    if callable(model) and not isinstance(model, (str, os.PathLike)):
        return _of_callable(name or getattr(model, "__name__", "model"), model, dict(overrides or {}))
    return read_model(model, overrides)


def _copied(model: nn.Module) -> nn.Module:
    """A copy on torch's default device, if that is meta: without a copy of the values."""
    if not torch.empty(0).is_meta:
        return copy.deepcopy(model)
    copies: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        copies[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(model, copies)


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


def _config_of_file(path: Path, overrides: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(Problem("unknown-model", f"{path} contains no config: {error}")) from error
    if not isinstance(data, dict) or "model_type" not in data:
        fix = "give a config.json that names its model_type, as `transformers` writes it"
        raise ModelError(Problem("unknown-model", f"{path} names no model_type", fix=fix))
    with _reading(f"transformers cannot read {path}", "unknown-model"):
        config = AutoConfig.from_pretrained(str(path))
    return _override(config, overrides)


@contextmanager
def _reading(what: str, slug: str = "bad-config") -> Iterator[None]:
    """Turn any exception into a ModelError: configs raise many types for values that they do not accept."""
    try:
        yield
    except (ParallelizeError, ImportError):
        raise
    except Exception as error:
        text = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise ModelError(Problem(slug, f"{what}: {type(error).__name__}: {text}")) from error


def _config_of_type(name: str, overrides: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        hint = did_you_mean(name, [*CONFIG_MAPPING, *KNOWN])
        fix = f"{hint} Or a folder with a config.json, or `package.module:function`"
        raise ModelError(Problem("unknown-model", f"{name!r} is no file, no model type and no known size", fix=fix))
    cls = CONFIG_MAPPING[name]
    _check_fields(cls(), overrides)
    with _reading(f"{cls.__name__} does not accept these values"):
        return cls(**overrides)


def _override(config: Any, overrides: Mapping[str, Any]) -> Any:
    """The config with other fields, and with what it derives from fields computed again."""
    if not overrides:
        return config
    _check_fields(config, overrides)
    values = config.to_dict() | dict(overrides)
    if "num_hidden_layers" in overrides and "layer_types" not in overrides and values.get("layer_types"):
        with _reading("num_hidden_layers is not a number of layers"):
            values["layer_types"] = _repeated(values["layer_types"], overrides["num_hidden_layers"])
    architectures = config.architectures
    with _reading(f"{type(config).__name__} does not accept these values"):
        config = type(config).from_dict(values)
    config.architectures = architectures
    return config


def _repeated(kinds: list[str], count: int) -> list[str]:
    return [kinds[index % len(kinds)] for index in range(count)]


def _check_fields(config: Any, overrides: Mapping[str, Any]) -> None:
    known = {name for name in dir(config) if not name.startswith("_")} | set(getattr(config, "attribute_map", {}))
    known.add("head_dim")  # read by the attention of models whose configs do not declare it
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
        with no_init_weights():  # on the meta device there is nothing to initialize
            model = cls(config)
        model.tie_weights()  # initialization would have done this
        return model

    return ModelSource(text, make, config)


def _class_of(config: Any, text: str) -> Any:
    """The class that the config names, or else the class with a head for its model type."""
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    causal, masked = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM
    encoder = type(config) in masked._model_mapping and not getattr(config, "is_decoder", False)
    both = (transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq)
    first = both if getattr(config, "is_encoder_decoder", False) else ((masked,) if encoder else ())
    for auto in (*first, causal, masked, *both, transformers.AutoModelForImageClassification, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            classes = auto._model_mapping[type(config)]
            return classes[0] if isinstance(classes, (tuple, list)) else classes
    raise ModelError(Problem("unknown-model", f"transformers has no model for the config of {text}"))


def _of_function(text: str, overrides: dict[str, Any]) -> ModelSource:
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
    return _of_callable(text, function, overrides)


def _of_callable(text: str, function: Callable[..., Any], overrides: dict[str, Any]) -> ModelSource:
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
    """Random token ids and targets, [batch, sequence], for a model with an embedding.

    Raises: ModelError `unknown-inputs`.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        fix = 'have the function return {"model": ..., "inputs": lambda batch, sequence: {...}}'
        raise ModelError(Problem("unknown-inputs", f"{type(model).__name__} has no embedding of ids", fix=fix))
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None) or max(table.num_embeddings for table in tables)
    ids = torch.randint(0, vocabulary, (batch, sequence))
    inputs: dict[str, Any] = {_name_of_ids(model): ids}
    if hasattr(config, "use_cache"):
        inputs["use_cache"] = False  # as in a training loop
    if "ForSequenceClassification" in type(model).__name__:
        return {**inputs, "targets": torch.randint(0, int(getattr(config, "num_labels", 2)), (batch,))}
    return {**inputs, "targets": torch.randint(0, vocabulary, (batch, sequence))}


def _name_of_ids(model: nn.Module) -> str:
    names = list(inspect.signature(model.forward).parameters)
    return "input_ids" if "input_ids" in names or not names else names[0]
