"""A config of `transformers` from a file, a model type or overrides, and the class of model that it names.

A file is not trusted: no class of it is imported, no code of it runs, and its values are checked before anything is
built.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, ParallelizeError, Problem, did_you_mean
from parallelize.plan.models.config_file import config_path, read_config
from parallelize.plan.models.config_limits import config_problems


def config_of_file(path: Path, overrides: Mapping[str, Any]) -> Any:
    """The config in a file or folder, with other values of some fields.

    Raises: ModelError `unknown-model`, `bad-config`, `unknown-config-field`; ImportError.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    path = config_path(path)
    values = read_config(path)
    model_type = values["model_type"]
    # transformers would ask on the terminal whether to run the code of such a config
    if model_type not in CONFIG_MAPPING:
        what = f"transformers has no model type `{model_type}`"
        raise ModelError(Problem("unknown-model", what, str(path), fix=did_you_mean(model_type, CONFIG_MAPPING)))
    _check_values(values, CONFIG_MAPPING[model_type], str(path))
    with _reading("transformers does not accept it", "unknown-model", str(path)):
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    return _override(config, overrides)


def is_config(model: Any) -> bool:
    """Whether what stands for a model is a config of `transformers`."""
    is_made = not isinstance(model, type) and isinstance(getattr(model, "model_type", None), str)
    return is_made and hasattr(model, "to_dict")


def config_of_config(config: Any, overrides: Mapping[str, Any]) -> Any:
    """A copy of a config, with other values of some fields. Raises: ModelError `bad-config`, `unknown-config-field`."""
    _check_values(config.to_dict(), type(config))
    return _override(copy.deepcopy(config), overrides)


def config_of_type(name: str, overrides: Mapping[str, Any]) -> Any:
    """The config of a model type, with other values of some fields. Raises: as `config_of_file`."""
    from transformers import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        hint = did_you_mean(name, [*CONFIG_MAPPING, *KNOWN])
        fix = f"{hint} Or a folder with a config.json, or `package.module:function`"
        raise ModelError(Problem("unknown-model", f"{name!r} is no file, no model type and no known size", fix=fix))
    cls = CONFIG_MAPPING[name]
    _check_fields(cls(), overrides)
    _check_values(overrides, cls)
    with _reading(f"{cls.__name__} does not accept these values"):
        return cls(**overrides)


def maker_of(config: Any, text: str) -> Callable[[Any], nn.Module]:
    """The function that builds the config's class of model from a config, on torch's default device.

    Args:
        config: a config of `transformers`.
        text: the name by which it was read, for messages.

    Raises: ModelError `unknown-model`, `bad-config`. The function raises ModelError `unbuildable-model`.
    """
    cls = class_of(config, text)

    def make(config: Any) -> nn.Module:
        what, fix = f"transformers cannot build a {cls.__name__} from this config", fix_of_type(text)
        with _reading(what, "unbuildable-model", text, fix):
            return _built(cls, config)

    return make


def fix_of_type(text: str) -> str:
    """What to do where a model does not run with the default config of its type; empty where `text` is no type."""
    from transformers import CONFIG_MAPPING

    if text not in CONFIG_MAPPING:
        return ""
    return (
        f"the config.json of a published {text}, or its folder, instead of the defaults of its type; or `--set "
        "FIELD=VALUE`"
    )


def _built(cls: Any, config: Any) -> nn.Module:
    from transformers.initialization import no_init_weights

    if not torch.empty(0).is_meta:
        return cls(config)
    with no_init_weights():  # on the meta device there is nothing to initialize
        model = cls(config)
    model.tie_weights()  # initialization would have done this
    return model


@contextmanager
def _reading(what: str, slug: str = "bad-config", where: str = "", fix: str = "") -> Iterator[None]:
    """Turn any exception into a ModelError: configs raise many types for values that they do not accept."""
    try:
        yield
    except (ParallelizeError, ImportError):
        raise
    except Exception as error:
        text = " ".join(line.strip() for line in str(error).splitlines()[:2])
        fix = fix or "correct the values, or use the version of transformers that the config was written with"
        raise ModelError(Problem(slug, f"{what}: {type(error).__name__}: {text[:300]}", where, fix=fix)) from error


def _check_values(values: Mapping[str, Any], cls: Any, where: str = "") -> None:
    """Raises: ModelError `bad-config`."""
    if problems := config_problems(values, where, getattr(cls, "attribute_map", {})):
        raise ModelError(*problems)


def _override(config: Any, overrides: Mapping[str, Any]) -> Any:
    """The config with other fields, and with what it derives from fields computed again."""
    if not overrides:
        return config
    _check_fields(config, overrides)
    _check_values(overrides, type(config))
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


def class_of(config: Any, text: str) -> Any:
    """The class that the config names, or else the class with a head for its model type."""
    import transformers

    if config.architectures:
        return _named_class(config.architectures, text)
    causal, masked = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM
    encoder = type(config) in masked._model_mapping and not getattr(config, "is_decoder", False)
    both = (transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq)
    first = both if getattr(config, "is_encoder_decoder", False) else ((masked,) if encoder else ())
    last = [transformers.AutoModelForImageClassification, transformers.AutoModel]
    if "text_config" in (getattr(config, "sub_configs", None) or {}):  # whose text a classifier of images leaves out
        last.reverse()
    for auto in (*first, causal, masked, *both, transformers.AutoModelForImageTextToText, *last):
        if type(config) in auto._model_mapping:
            classes = auto._model_mapping[type(config)]
            cls = classes[0] if isinstance(classes, (tuple, list)) else classes
            if not _is_for_part(cls, config):
                return cls
    raise ModelError(Problem("unknown-model", f"transformers has no model for the config of {text}"))


def _is_for_part(cls: Any, config: Any) -> bool:
    """Whether a class takes the config of a part, such as the text's, and not this one."""
    takes = getattr(cls, "config_class", None)
    return takes is not type(config) and takes in (getattr(config, "sub_configs", None) or {}).values()


def _named_class(names: list[str], text: str) -> Any:
    """The first class of these names that is a model of `transformers`. Raises: ModelError `bad-config`."""
    import transformers

    for name in names:
        cls = getattr(transformers, name, None)
        is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
        if is_model or hasattr(cls, "_backends"):  # the second stands for a class whose package is missing, and says so
            return cls
    what = f"its architectures {names[:4]} name no model of transformers {transformers.__version__}"
    fix = "remove `architectures` from the config, for the class with a head of its model type"
    raise ModelError(Problem("bad-config", what, text, fix=fix))


# -- known sizes -----------------------------------------------------------------------------------------------------
# Published models whose sizes are known by name: `llama-3-8b`.


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
