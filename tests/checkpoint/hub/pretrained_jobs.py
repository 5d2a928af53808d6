"""The work of each rank in the tests of Hugging Face folders: load into a model on the meta device, save, load
again."""

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
from torch.distributed.fsdp import fully_shard

from parallelize import build_mesh, load_pretrained, parallelize_module, save_pretrained
from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.axes.zero.buckets import to_local
from parallelize.base.errors import ParallelizeError
from parallelize.state.randomness.init.initialize import build_on_meta
from parallelize.training.apply_axes import parallelize_model
from tests.checkpoint.checkpoint_jobs import full
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


def loaded_on_mesh(folder: str, axes: dict[str, int], options: dict[str, Any], **more: Any) -> ParallelModel:
    cls, config = class_and_config(folder)
    return parallelize_model(build_on_meta(cls, config), build_mesh("cpu", **axes), **options, **more)


def planned_on_meta(folder: str, axes: dict[str, int]) -> Any:
    cls, config = class_and_config(folder)
    return parallelize_module(build_on_meta(cls, config), build_mesh("cpu", **axes))


def load_mapped(rank: int, folder: str, axes: dict[str, int]) -> list[str]:
    """Check that a mapped load has the weights of a copied one, where they are, and that training it does not reach the
    files."""
    copied, model = planned_on_meta(folder, axes), planned_on_meta(folder, axes)
    load_pretrained(copied, folder)
    before = {path.name: path.read_bytes() for path in Path(folder).glob("*.safetensors")}
    result = load_pretrained(model, folder, mapped=True)
    problems = []
    weights = dict(copied.named_parameters())
    sizes = {True: 0, False: 0}
    addresses = mapped_addresses(folder)
    for name, parameter in model.named_parameters():
        local, expected = to_local(parameter), to_local(weights[name])
        problems += [] if torch.equal(local, expected) and local.is_contiguous() else [name]
        sizes[any(start <= local.data_ptr() < stop for start, stop in addresses)] += local.nbytes
    if (result.bytes_mapped, result.bytes_read) != (sizes[True], sizes[False]) or not sizes[True]:
        problems.append(f"{result} and {sizes}")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    changed = {path.name: path.read_bytes() for path in Path(folder).glob("*.safetensors")} != before
    for name, parameter in model.named_parameters():
        problems += [] if torch.equal(to_local(parameter), to_local(weights[name]) + 1.0) else [f"{name}, written"]
    return problems + (["files changed"] if changed else [])


def slug_of_mapped(rank: int, folder: str, reason: str) -> tuple[str, bool]:
    """(the slug of a refused load, whether the model is as before)."""
    model = planned_on_meta(folder, {"tp": 2} if reason != "zero" else {"dp": 2, "tp": 1})
    if reason == "zero":
        fully_shard(model, mesh=build_mesh("cpu", dp=2, tp=1)["dp"])
    elif reason == "values":
        load_pretrained(model, folder)
    try:
        load_pretrained(model, folder, mapped=True, device="meta" if reason == "device" else None)
    except ParallelizeError as error:
        return error.slugs[0], all(parameter.is_meta != (reason == "values") for parameter in model.parameters())
    return "", False


def mapped_addresses(folder: str) -> list[tuple[int, int]]:
    """The addresses in this process at which files of a folder are mapped."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]
    return [tuple(int(side, 16) for side in line.split()[0].split("-")) for line in lines]  # type: ignore[misc]


def load_and_save(rank: int, folder: str, axes: dict[str, int], options: dict[str, Any], out: str) -> list[str]:
    """Check the bytes read, the weights, the written folder, and the model that `transformers` loads from it."""
    cls, _ = class_and_config(folder)
    parallel = loaded_on_mesh(folder, axes, options, initialize=folder)
    reference = cls.from_pretrained(folder)
    expected = dict(reference.named_parameters(remove_duplicate=False)) | dict(reference.named_buffers())
    problems = []
    for name, parameter in parallel.module.named_parameters():
        full_value = full(parallel.module, name, parameter)
        problems += [] if torch.equal(full_value, expected[name].to(full_value.dtype)) else [name]
    again = load_pretrained(parallel, folder)
    # float32 copies (master weights) are read too
    copies = 2 if options.get("dtype") is not None and options["zero"] < 3 else 1
    if again.bytes_read > 1.02 * again.bytes_held * copies:
        problems.append(f"{again.bytes_read} bytes read for {again.bytes_held}")
    if rank == 0:
        shutil.rmtree(out, ignore_errors=True)
    dist.barrier()
    save_pretrained(parallel, out, max_shard_size="50KB", dtype=torch.float32, carry=folder)
    if rank > 0:
        return problems
    fused = any("experts" in name for name in expected)  # experts may be assigned to other files
    if not fused and sorted(os.listdir(out)) != sorted(os.listdir(folder)):
        problems.append(f"files {sorted(os.listdir(out))}")
    for name in ("config.json", "model.safetensors.index.json")[: 1 if fused else 2]:
        if json.loads((Path(out) / name).read_text()) != json.loads((Path(folder) / name).read_text()):
            problems.append(name)
    written, source = tensors_of(out), tensors_of(folder)
    narrow, kept = options.get("dtype") is not None, {name for name, _ in reference.named_buffers()}

    def rounded(name: str, value: torch.Tensor) -> torch.Tensor:
        return value.bfloat16().float() if narrow and name not in kept else value

    problems += [] if set(written) == set(source) else ["names in files"]
    for name, value in source.items():
        problems += [] if torch.equal(written[name], rounded(name, value)) else [f"{name} in files"]
    loaded = cls.from_pretrained(out).state_dict()
    for name, value in reference.state_dict().items():
        problems += [] if torch.equal(loaded[name], rounded(name, value)) else [f"{name} again"]
    return problems


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    return {name: value for file in Path(folder).glob("*.safetensors") for name, value in load_file(file).items()}


def refusals(rank: int, folder: str, root: str) -> dict[str, tuple[str, ...]]:
    """The slugs for damaged folders. The model must stay on the meta device, or unchanged."""
    slugs: dict[str, tuple[str, ...]] = {}
    files = sorted(path.name for path in Path(folder).glob("*.safetensors"))

    def attempt(name: str, change: Any) -> None:
        copy = Path(root) / name.replace(" ", "-")
        if rank == 0:
            shutil.copytree(folder, copy)
            change(copy)
        dist.barrier()
        for on_meta in (True, False):
            try:
                if on_meta:
                    model = parallelized_on_meta(folder, {"tp": 2})
                else:
                    model = tiny_model("llama", num_hidden_layers=3, num_key_value_heads=2)
                    model = parallelize_model(model, build_mesh("cpu", tp=2)).module
                    before = {n: p.to_local().clone() for n, p in model.named_parameters()}
                load_pretrained(model, copy, mesh=build_mesh("cpu", tp=2))
                slugs[name] = ()
            except ParallelizeError as error:
                slugs[name] = tuple(sorted(set(error.slugs)))
                if on_meta and not all(p.is_meta for p in model.parameters()):
                    slugs[name] += ("not on meta",)
                if not on_meta and any(not torch.equal(before[n], p.to_local()) for n, p in model.named_parameters()):
                    slugs[name] += ("changed",)

    def edit(file: Path, change: Any) -> None:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    def drop(copy: Path, name: str) -> None:
        index = json.loads((copy / "model.safetensors.index.json").read_text())
        edit(copy / index["weight_map"].pop(name), lambda tensors: tensors.pop(name))
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))

    def truncate(copy: Path) -> None:
        with open(copy / files[1], "r+b") as file:
            file.truncate(os.path.getsize(copy / files[1]) - 100)

    def reshape(copy: Path) -> None:
        name, value = next(iter(load_file(copy / files[0]).items()))
        edit(copy / files[0], lambda tensors: tensors.update({name: value.flatten()[:-1].clone()}))

    attempt("as it is", lambda copy: None)
    attempt("tensor missing", lambda copy: drop(copy, "model.layers.1.mlp.up_proj.weight"))
    attempt("file missing", lambda copy: (copy / files[-1]).unlink())
    attempt("file truncated", truncate)
    attempt("other shape", reshape)
    attempt(
        "index of other files", lambda copy: edit(copy / files[0], lambda tensors: tensors.update(new=torch.ones(3)))
    )
    return slugs


def parallelized_on_meta(folder: str, axes: dict[str, int]) -> Any:
    """A parallelized model on the meta device."""
    from parallelize import parallelize_module

    cls, config = class_and_config(folder)
    return parallelize_module(build_on_meta(cls, config), build_mesh("cpu", **axes))


def peak_memory(rank: int, folder: str) -> tuple[int, int, int]:
    """(growth of the peak resident memory, bytes of shards, bytes of the largest shard) of a load into a meta model."""
    model = parallelized_on_meta(folder, {"tp": 2})
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loaded = load_pretrained(model, folder)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, loaded.bytes_held, largest
