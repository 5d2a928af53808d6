"""What each rank does in the tests of Hugging Face folders: read into planned meta models, write, and read again."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from parallelize import build_mesh, load_pretrained, save_pretrained
from parallelize.errors import ParallelizeError
from parallelize.randomness.initialise import build_on_meta
from parallelize.training import ParallelModel, parallelize_model
from tests.dist.checkpoint_jobs import full
from tests.support.models import tiny_model

MIXTRAL = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
    "hidden_size": 32,
    "vocab_size": 67,
}


def write_source(family: str, folder: str) -> None:
    """A tiny model as `transformers` saves it, in several files."""
    import transformers

    if family == "mixtral":
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        model: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL, **sizes))
    else:
        more = {"num_key_value_heads": 2} if family in ("llama", "phi3") else {}
        model = tiny_model(family, num_hidden_layers=3, **more)
    model.save_pretrained(folder, max_shard_size="50KB")


def class_and_config(folder: str) -> tuple[Any, Any]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]), config


def on_mesh(folder: str, axes: dict[str, int], options: dict[str, Any], **more: Any) -> ParallelModel:
    cls, config = class_and_config(folder)
    return parallelize_model(build_on_meta(cls, config), build_mesh("cpu", **axes), **options, **more)


def there_and_back(rank: int, folder: str, axes: dict[str, int], options: dict[str, Any], out: str) -> list[str]:
    """Bytes read, weights, the folder written, and what `transformers` makes of it."""
    cls, _ = class_and_config(folder)
    parallel = on_mesh(folder, axes, options, initialize=folder)
    wanted = cls.from_pretrained(folder)
    named = dict(wanted.named_parameters(remove_duplicate=False)) | dict(wanted.named_buffers())
    wrong = []
    for name, parameter in parallel.module.named_parameters():
        got = full(parallel.module, name, parameter)
        wrong += [] if torch.equal(got, named[name].to(got.dtype)) else [name]
    again = load_pretrained(parallel, folder)
    copies = 2 if options.get("dtype") is not None and options["zero"] < 3 else 1  # float32 copies are read once more
    if again.bytes_read > 1.02 * again.bytes_held * copies:
        wrong.append(f"{again.bytes_read} bytes read for {again.bytes_held}")
    if rank == 0:
        shutil.rmtree(out, ignore_errors=True)
    dist.barrier()
    save_pretrained(parallel, out, max_shard_size="50KB", dtype=torch.float32, carry=folder)
    if rank > 0:
        return wrong
    if sorted(os.listdir(out)) != sorted(os.listdir(folder)):
        wrong.append(f"files {sorted(os.listdir(out))}")
    fused = "mixtral" in type(parallel.module).__name__.lower()  # its many tensors may lie in other files
    for name in ("config.json", "model.safetensors.index.json")[: 1 if fused else 2]:
        if json.loads((Path(out) / name).read_text()) != json.loads((Path(folder) / name).read_text()):
            wrong.append(name)
    here, there = tensors_of(out), tensors_of(folder)
    narrow = options.get("dtype") is not None
    wrong += [] if set(here) == set(there) else ["names in files"]
    for name, value in there.items():
        wrong += [] if torch.equal(here[name], value.bfloat16().float() if narrow else value) else [f"{name} in files"]
    loaded = cls.from_pretrained(out).state_dict()
    for name, value in wanted.state_dict().items():
        wrong += [] if torch.equal(loaded[name], value.bfloat16().float() if narrow else value) else [f"{name} again"]
    return wrong


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    return {name: value for file in Path(folder).glob("*.safetensors") for name, value in load_file(file).items()}


def refusals(rank: int, folder: str, root: str) -> dict[str, tuple[str, ...]]:
    """Slugs for folders that are not what they should be; the model stays on meta, or as it was."""
    found: dict[str, tuple[str, ...]] = {}
    files = sorted(path.name for path in Path(folder).glob("*.safetensors"))

    def tried(name: str, change: Any) -> None:
        copy = Path(root) / name.replace(" ", "-")
        if rank == 0:
            shutil.copytree(folder, copy)
            change(copy)
        dist.barrier()
        for on_meta in (True, False):
            try:
                if on_meta:
                    model = on_mesh_only(folder, {"tp": 2})
                else:
                    model = tiny_model("llama", num_hidden_layers=3, num_key_value_heads=2)
                    model = parallelize_model(model, build_mesh("cpu", tp=2)).module
                    before = {n: p.to_local().clone() for n, p in model.named_parameters()}
                load_pretrained(model, copy, mesh=build_mesh("cpu", tp=2))
                found[name] = ()
            except ParallelizeError as error:
                found[name] = tuple(sorted(set(error.slugs)))
                if on_meta and not all(p.is_meta for p in model.parameters()):
                    found[name] += ("not on meta",)
                if not on_meta and any(not torch.equal(before[n], p.to_local()) for n, p in model.named_parameters()):
                    found[name] += ("changed",)

    def edit(file: Path, change: Any) -> None:
        held = load_file(file)
        change(held)
        save_file(held, file, {"format": "pt"})

    def drop(copy: Path, name: str) -> None:
        index = json.loads((copy / "model.safetensors.index.json").read_text())
        edit(copy / index["weight_map"].pop(name), lambda held: held.pop(name))
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))

    def cut(copy: Path) -> None:
        with open(copy / files[1], "r+b") as file:
            file.truncate(os.path.getsize(copy / files[1]) - 100)

    def reshape(copy: Path) -> None:
        name, value = next(iter(load_file(copy / files[0]).items()))
        edit(copy / files[0], lambda held: held.update({name: value.flatten()[:-1].clone()}))

    tried("as it is", lambda copy: None)
    tried("tensor missing", lambda copy: drop(copy, "model.layers.1.mlp.up_proj.weight"))
    tried("file missing", lambda copy: (copy / files[-1]).unlink())
    tried("file cut off", cut)
    tried("other shape", reshape)
    tried("index of other files", lambda copy: edit(copy / files[0], lambda held: held.update(new=torch.ones(3))))
    return found


def on_mesh_only(folder: str, axes: dict[str, int]) -> Any:
    """A planned model that lies on meta."""
    from parallelize import parallelize_module

    cls, config = class_and_config(folder)
    return parallelize_module(build_on_meta(cls, config), build_mesh("cpu", **axes))


def peak_memory(rank: int, folder: str) -> tuple[int, int, int]:
    """(growth of the peak resident memory, bytes held, largest tensor) of a load into a model on meta."""
    model = on_mesh_only(folder, {"tp": 2})
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loaded = load_pretrained(model, folder)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, loaded.bytes_held, largest
