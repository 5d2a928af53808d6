"""Adapters of a planned model as PEFT's folders: adapter_config.json and adapter_model.safetensors, written by PEFT
itself.

Full tensors of the adapters alone are gathered on the first rank. PEFT loads such a folder on any mesh or none, and
what it has written itself loads here: `PeftModel.from_pretrained(model, folder)`, `model.load_adapter(folder, name)`.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.boxes import Part, full_part
from parallelize.base.errors import CheckpointError, ParallelizeError, Problem
from parallelize.checkpoint.hub.names import ModelTensor, Shape, TensorSources, parts_to_save
from parallelize.checkpoint.run.local_tensors import ModelOnMesh, model_on_mesh
from parallelize.checkpoint.run.rank_sync import TIMEOUT_S, RankSync, as_parallelize_error
from parallelize.plan.adapters import BASE, COPIES, ORIGINAL, PROMPTS, TOKENS, is_adapter_parameter, peft_prefix
from parallelize.plan.model_facts import describe
from parallelize.state.full_values import reshard_units
from parallelize.state.records import mesh_of

T = torch.Tensor


def save_adapter(model: Any, folder: str | os.PathLike, *, timeout_s: float = TIMEOUT_S) -> Path:
    """Write the adapters of a model as `save_pretrained` of PEFT does. A collective over all processes.

    Args:
        model: a `PeftModel` that is planned, or that contains a planned model; or a `ParallelModel` of one.
        folder: the folder to write, which must be new or empty.
        timeout_s: seconds to wait for other ranks.

    Returns: the folder. It is renamed into place after everything was written.
    Raises: CheckpointError `no-adapters`, `folder-not-empty`, `unsavable-adapter`, `write-failed`, on every rank.
    Cost: one all-gather of each adapter tensor over the axes that shard it; the stages of a pipeline send theirs to the
        first rank.
    """
    root = model if isinstance(model, nn.Module) else model.module
    if not has_adapters(root):
        what = f"{type(root).__name__} has no adapters of PEFT"
        raise CheckpointError(Problem("no-adapters", what, fix="save_pretrained writes the weights of a model"))
    planned = next((inner for inner in root.modules() if mesh_of(inner) is not None), root)
    _, on_mesh = model_on_mesh(planned)
    sync = RankSync(on_mesh.mesh, timeout_s, own_group=False)
    try:
        reshard_units(planned)
        return _write(root, on_mesh, sync, Path(folder).resolve())
    finally:
        sync.close()


def _write(root: Any, on_mesh: ModelOnMesh, sync: RankSync, folder: Path) -> Path:
    error: ParallelizeError | None = None
    if sync.is_coordinator and folder.exists() and any(folder.iterdir()):
        error = CheckpointError(Problem("folder-not-empty", f"{folder} has files already", fix="choose a new folder"))
    sync.agree(error)
    state, expected = _gathered(root, on_mesh, sync)
    if sync.is_coordinator:
        temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
        try:
            root.save_pretrained(temporary, state_dict=state)
            _check(temporary, expected)
            if folder.exists():
                folder.rmdir()
            os.replace(temporary, folder)
        except Exception as failure:
            shutil.rmtree(temporary, ignore_errors=True)
            error = as_parallelize_error(failure)
    sync.agree(error)
    return folder


def _gathered(root: Any, on_mesh: ModelOnMesh, sync: RankSync) -> tuple[dict[str, T], set[str]]:
    """(full tensors on the CPU of the first rank, the names that PEFT gives to what it saves); empty on the others."""
    selected, saved = _selected(root)
    state: dict[str, T] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if is_adapter_parameter(name) or id(parameter) in selected:
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if on_mesh.is_first:
                state[name] = full.detach().cpu()
    if sync.size == 1:
        return state, saved
    parts: list[Any] | None = [None] * sync.size if sync.is_coordinator else None
    dist.gather_object((state, saved), parts, dst=sync.ranks[0], group=sync.group)
    gathered = parts or []
    return {n: value for part, _ in gathered for n, value in part.items()}, {n for _, names in gathered for n in names}


def _selected(root: Any) -> tuple[set[int], set[str]]:
    """(ids of the parameters that PEFT saves, the names that it gives them). Learned prompts it computes itself."""
    from peft import get_peft_model_state_dict

    parameters = dict(root.named_parameters(remove_duplicate=False))
    ids, names = set(), set()
    for adapter, config in root.peft_config.items():
        if not config.is_prompt_learning:
            saved = get_peft_model_state_dict(root, state_dict=dict(parameters), adapter_name=adapter)
            ids |= {id(value) for value in saved.values()}
            names |= {f"{adapter} {name}" for name in saved}
    return ids, names


def _check(folder: Path, expected: set[str]) -> None:
    """PEFT finds what it saves in the modules of this rank, which may be a part of a pipeline."""
    written = set()
    for file in folder.rglob("adapter_model.safetensors"):
        adapter = "default" if file.parent == folder else file.parent.name
        with safe_open(file, "pt") as tensors:
            written |= {f"{adapter} {name}" for name in tensors.keys()}  # noqa: SIM118, as it is no dictionary
    if missing := sorted(expected - written):
        what = f"PEFT left out {len(missing)} tensors of modules that other pipeline stages have, such as {missing[0]}"
        fix = "a mesh without pp, or adapters without modules_to_save on the last stage"
        raise CheckpointError(Problem("unsavable-adapter", what, fix=fix))


def has_adapters(module: Any) -> bool:
    """Whether a model is PEFT's, which saves its adapters alone."""
    return hasattr(module, "peft_config")


def read_adapters(model: Any, folder: Path) -> None:
    """Load the adapters that PEFT wrote: `default` in the folder itself, others in one of their name.

    Raises: CheckpointError `missing-file`.
    """
    from peft import set_peft_model_state_dict

    for name in model.peft_config:
        file = (folder if name == "default" else folder / name) / "adapter_model.safetensors"
        if not file.is_file():
            what = f"there are no weights of the adapter {name}"
            raise CheckpointError(Problem("missing-file", what, str(file), fix="the path of a checkpoint of this run"))
        set_peft_model_state_dict(model, load_file(file), adapter_name=name)


# -- adapted models --------------------------------------------------------------------------------------------------
# Models with adapters of PEFT, whose base is read from a folder of the stock model: names without PEFT's, and
# adapters beside them. A trained copy of a layer (`modules_to_save`) begins with the values of the layer, as where
# PEFT makes it beside a model that has values. LoRA and (IA)^3 that were made on the meta device get PEFT's initial
# values.


_OF_PEFT = re.compile(rf"\{TOKENS}(?=\.)|\.{BASE}(?=\.)|\.{ORIGINAL}(?=\.)|\.{COPIES}\.[^.]+(?=\.)")
_COPY = f".{COPIES}."
_MADE = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "ia3_l")


class StockNames:
    """The tensors of a model with adapters under the names of the stock model.

    Args:
        module: the model. tensors: of the unsharded model, with adapters.

    Attributes:
        module: the stock model inside. tensors: its own, without adapters.
    """

    def __init__(self, module: nn.Module, tensors: Sequence[ModelTensor]):
        self.module: nn.Module = module
        self.tensors: list[ModelTensor] = list(tensors)
        self._names: dict[str, list[str]] = {}
        self._prefix = peft_prefix(describe(module))
        if not self._prefix and not any(is_adapter_parameter(tensor.name) for tensor in tensors):
            return
        self.module = module.get_submodule(self._prefix.rstrip("."))
        stock: dict[str, ModelTensor] = {}
        for tensor in tensors:
            if is_adapter_parameter(tensor.name) and _COPY not in tensor.name:
                continue
            names = tuple(dict.fromkeys(stock_name(name, self._prefix) for name in tensor.names))
            self._names.setdefault(names[0], []).append(tensor.name)
            stock.setdefault(names[0], replace(tensor, name=names[0], names=names))
        self.tensors = list(stock.values())

    def of_model(self, sources: TensorSources) -> TensorSources:
        """The sources under the names of the model; those of a layer are those of its copies too."""
        if not self._names:
            return sources
        by_name = {name: source for stock, source in sources.by_name.items() for name in self._names[stock]}
        return replace(sources, by_name=by_name)


def stock_name(name: str, prefix: str) -> str:
    """The name in the stock model of what PEFT put inside of other modules. prefix: of `peft_prefix`."""
    return _OF_PEFT.sub("", name.removeprefix(prefix))


def new_adapters(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """(layer of PEFT, adapter) for adapters on the meta device that PEFT can initialize: of a model that no plan has
    sharded."""
    return [
        (layer, name)
        for layer in module.modules()
        if _initializer(layer) and not isinstance(next(layer.parameters(), None), DTensor)
        for name in _names_on_meta(layer)
    ]


def initialize_adapters(root: nn.Module, adapters: Sequence[tuple[nn.Module, str]]) -> None:
    """Give adapters the values that PEFT would have given them, from torch's generator of this rank."""
    for layer, name in adapters:
        adapter_layer: Any = layer
        config = _configs(root).get(name)
        if _initializer(layer) == "reset_lora_parameters":
            adapter_layer.reset_lora_parameters(name, getattr(config, "init_lora_weights", True))
        else:
            adapter_layer.reset_ia3_parameters(name)


def names_of_adapters(root: nn.Module, adapters: Sequence[tuple[nn.Module, str]]) -> set[str]:
    """The names of the parameters that `initialize_adapters` fills."""
    named = {id(module): name for name, module in root.named_modules()}
    return {
        f"{named[id(layer)]}.{key}.{name}" + (f".{inner}" if inner else "")
        for layer, name in adapters
        for key, inner in _parameters_of(layer, name)
    }


def _parameters_of(layer: Any, name: str) -> Iterator[tuple[str, str]]:
    for key in _MADE:
        children = getattr(layer, key, None)
        child = children[name] if children is not None and name in children else None
        if isinstance(child, nn.Module):
            yield from ((key, inner) for inner, _ in child.named_parameters())
        elif child is not None:
            yield key, ""


def _names_on_meta(layer: Any) -> list[str]:
    names: dict[str, None] = {}
    for key in _MADE:
        children: Any = getattr(layer, key, None) or {}
        for name in children:
            child = children[name]
            values = list(child.parameters()) if isinstance(child, nn.Module) else [child]
            if any(value.is_meta for value in values):
                names[name] = None
    return list(names)


def _initializer(layer: nn.Module) -> str:
    known = ("reset_lora_parameters", "reset_ia3_parameters")
    return next((name for name in known if callable(getattr(type(layer), name, None))), "")


def _configs(root: nn.Module) -> dict[str, Any]:
    holders = (module for module in root.modules() if isinstance(vars(module).get("peft_config"), dict))
    return next((vars(holder)["peft_config"] for holder in holders), {})


# -- saved adapters --------------------------------------------------------------------------------------------------
# What a folder of the stock model gets of a model with adapters of PEFT: merged weights, and the active copies of
# layers. A folder has one weight for each layer. So adapters are in the weights (merged), or add nothing (disabled,
# or none active). Trained copies of a layer (`modules_to_save`) take the layer's name.


_COPIED = re.compile(rf"(.*)\.{COPIES}\.([^.]+)(?:\..*)?$")
_ORIGINAL = re.compile(rf"(.*)\.{ORIGINAL}(?:\..*)?$")


def stock_parts_to_save(module: nn.Module, tensors: Sequence[ModelTensor]) -> dict[str, tuple[Shape, tuple[Part, ...]]]:
    """`parts_to_save` of a model with or without adapters; sources are tensors of the model.

    Raises: CheckpointError `unwritable-conversion`.
    """
    prefix, copies = peft_prefix(describe(module)), _active_copies(module)
    if not prefix and not any(is_adapter_parameter(tensor.name) for tensor in tensors):
        return parts_to_save(module, tensors)
    stock: list[ModelTensor] = []
    sources: dict[str, str] = {}
    for tensor in tensors:
        names = tuple(dict.fromkeys(stock_name(name, prefix) for name in tensor.names if _is_saved(name, copies)))
        if names:
            stock.append(replace(tensor, name=names[0], names=names))
            sources[names[0]] = tensor.name
    saved = parts_to_save(stock_module(module), stock)
    return {
        name: (shape, tuple(replace(part, source=sources[part.source]) for part in parts))
        for name, (shape, parts) in saved.items()
    }


def stock_module(module: nn.Module) -> nn.Module:
    """The stock model that PEFT wraps; a model that it does not wrap itself."""
    return module.get_submodule(peft_prefix(describe(module)).rstrip("."))


def adapter_state(module: nn.Module) -> tuple[Any, ...]:
    """What decides which weights are those of the model: merged adapters, and active copies. It changes without any
    tensor."""
    return tuple(_active_copies(module).items()), tuple(unmerged_layers(module))


def refuse_unmerged(module: nn.Module, call: str) -> None:
    """Raises: CheckpointError `unmerged-adapters` for a model whose adapters are beside its weights."""
    unmerged = list(unmerged_layers(module))
    if unmerged:
        what = (
            f"{call} writes one weight for each layer under the names of the Hub, and {len(unmerged)} have adapters "
            "beside it"
        )
        fix = (
            "model.merge_adapter() before and model.unmerge_adapter() after; or save_adapter(model, folder), which "
            "writes the adapters; of export_weights merge_adapters=True, or names='peft'"
        )
        raise CheckpointError(Problem("unmerged-adapters", what, unmerged[0], fix=fix))


def _is_saved(name: str, copies: dict[str, str]) -> bool:
    """Whether a parameter or buffer is one of the stock model, or takes the place of one. copies: wrapper -> active
    copy."""
    if copy := _COPIED.match(name):
        return copies.get(copy[1]) == copy[2]
    if original := _ORIGINAL.match(name):
        return not copies.get(original[1])
    return not is_adapter_parameter(name) and f"{TOKENS}.trainable_tokens" not in name


def _active_copies(module: nn.Module) -> dict[str, str]:
    """Name of a layer with trained copies -> the copy that it calls; "" for the layer itself."""
    wrappers = [(name, inner) for name, inner in module.named_modules() if {ORIGINAL, COPIES} <= inner._modules.keys()]
    return {name: _active_copy(inner) for name, inner in wrappers}


def _active_copy(wrapper: Any) -> str:
    active = () if getattr(wrapper, "disable_adapters", False) else getattr(wrapper, "active_adapters", ())
    return next((name for name in active if name in wrapper._modules[COPIES]._modules), "")


def unmerged_layers(module: nn.Module) -> Iterator[str]:
    """Names of layers that add adapters to what their weight computes, and of learned prompts."""
    for name, inner in module.named_modules():
        layer: Any = inner
        if inner._modules.get(PROMPTS):
            yield f"{name}.{PROMPTS}".lstrip(".")
        elif BASE in inner._modules and not (layer.merged or layer.disable_adapters) and _adds(layer):
            yield name


def _adds(layer: Any) -> bool:
    """Whether an active adapter has a part in this layer."""
    known = {key for part in getattr(layer, "adapter_layer_names", ()) for key in getattr(layer, part, None) or ()}
    return not known.isdisjoint(layer.active_adapters)


# -- adapters alone ---------------------------------------------------------------------------------------------------

_PREFIX = "base_model.model."


def adapter_parts(tensors: Sequence[ModelTensor], names: Container[str]) -> dict[str, tuple[Shape, tuple[Part, ...]]]:
    """The adapters alone, under the names that PEFT saves them by: without the name of the adapter.

    Raises: CheckpointError `no-adapters`, `unsavable-adapter`.
    """
    adapters = {tensor.name: tensor for tensor in tensors if is_adapter_parameter(tensor.name) and tensor.name in names}
    if not adapters:
        what = "the model has no adapters of PEFT, or none with tensors of their own"
        raise CheckpointError(Problem("no-adapters", what, fix="names='hf' exports the weights of a model"))
    parts: dict[str, tuple[Shape, tuple[Part, ...]]] = {}
    for name, tensor in adapters.items():
        saved = _saved_name(name)
        if saved in parts or PROMPTS in name:
            what = (
                f"{name} is one of several adapters, or a learned prompt" if PROMPTS in name else f"{name} has a twin"
            )
            fix = "save_adapter(model, folder), or names='model'; of several adapters, delete_adapter the others"
            raise CheckpointError(Problem("unsavable-adapter", what, fix=fix))
        parts[saved] = tuple(tensor.shape), (full_part(name, tensor.shape),)
    return parts


def adapter_config(root: nn.Module) -> dict[str, Any]:
    """PEFT's config of the adapter, with the values of adapter_config.json.

    Raises: CheckpointError `no-adapters`.
    """
    configs = _configs(root)
    if not configs:
        raise CheckpointError(Problem("no-adapters", f"{type(root).__name__} has no config of PEFT", fix="a PeftModel"))
    values = next(iter(configs.values())).to_dict()
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
    return {name: getattr(value, "value", value) for name, value in plain.items()}


def _saved_name(name: str) -> str:
    """`..q_proj.lora_A.default.weight` is saved as `..q_proj.lora_A.weight`, and a trained copy of a layer as the
    layer."""
    words = name.split(".")
    place = next(index for index, word in enumerate(words) if is_adapter_parameter(word)) + 1
    kept = words[: place - 1] if words[place - 1] == COPIES else words[:place]
    saved = ".".join([*kept, *words[place + 1 :]])
    if words[place - 1] == "lora_magnitude_vector":  # a parameter where DoRA began, and a module since
        saved = saved.removesuffix(".weight")
    return saved if saved.startswith(_PREFIX) else _PREFIX + saved
