"""Between training checkpoints and Hugging Face's layout, one tensor at a time, without a process group.

Which tensor of one layout is which boxes of the other is for `hub_names` to say; it asks the model's class, built on meta.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.checkpoint import disk, folders
from parallelize.checkpoint.about import about_run
from parallelize.checkpoint.boxes import Box, Part, common, moved, shape_of, slices_of, starts, volume, whole_part
from parallelize.checkpoint.boxes import whole as whole_box
from parallelize.checkpoint.dtypes import CODES, FLOATS, TORCH
from parallelize.checkpoint.fill import Files, read_box
from parallelize.checkpoint.held import Place
from parallelize.checkpoint.hub_extras import carry_files, write_extras
from parallelize.checkpoint.hub_folder import HubFolder
from parallelize.checkpoint.hub_names import Computed, Sources, Wanted, parts_in, parts_out
from parallelize.checkpoint.hub_shards import INDEX, Written, index_of, parse_size, share_out
from parallelize.checkpoint.manifest import Manifest, Saved, read_manifest
from parallelize.checkpoint.meeting import Meeting
from parallelize.checkpoint.memory import empty, torch_dtype
from parallelize.checkpoint.pretrained import as_source, wanted_of
from parallelize.checkpoint.reshape import Incoming, Told, check_target, cuts_for, spec_of, write_run
from parallelize.checkpoint.writer import Outgoing, write_tensors
from parallelize.errors import CheckpointError, Problem, did_you_mean, short_list
from parallelize.mesh import MeshSpec

T = torch.Tensor
Read = Callable[[str, Box, T], None]
"""(tensor, box, view to fill)"""
_OWN_WAY = ("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation")


# -- the model's class ----------------------------------------------------------------------------------------------------


def model_on_meta(name: str | None, config: Mapping[str, Any] | None, required: bool = False) -> Any:
    """A model of `transformers` without memory, by its class's name and its config; None (unless `required`) where there
    is no class of that name.

    Nothing but the namespace of `transformers` is looked into, and nothing is fetched.

    Raises: CheckpointError `no-transformers`, `unbuildable-model`.
    """
    if not name or not config:
        return None
    try:
        import transformers
    except ImportError:
        what = f"{name} is a model of transformers, which alone knows the names of its tensors in files"
        raise CheckpointError(Problem("no-transformers", what, fix="pip install transformers")) from None
    found: Any = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        if required:
            what = f"transformers {transformers.__version__} has no model {name}"
            raise CheckpointError(Problem("unbuildable-model", what, fix="use the version that it was trained with"))
        return None
    config = {key: value for key, value in config.items() if key not in _OWN_WAY}
    try:
        kind: Any = found.config_class
        made = kind.from_dict(deepcopy(config))
        plain = deepcopy(made)
        plain._attn_implementation = "eager"  # whatever it was trained with may not be installed here
        with torch.device("meta"):
            module = found(plain)
    except Exception as error:
        why = (("why", (str(error).partition("\n")[0] or type(error).__name__)[:200]),)
        what = f"transformers cannot build a {name} from its config"
        fix = "use the version of transformers that it was made with"
        raise CheckpointError(Problem("unbuildable-model", what, rows=why, fix=fix)) from error
    module.config = made
    return module


def _class_name(described: Mapping[str, Any]) -> str | None:
    """The name of a class of `transformers`, out of `about["model"]`."""
    above, _, name = str(described.get("class") or "").rpartition(".")
    return name if above.partition(".")[0] == "transformers" else None


# -- elements -------------------------------------------------------------------------------------------------------------


def assembled(box: Box, dtype: torch.dtype, parts: Sequence[Part], read: Read) -> T:
    """A box of a tensor that is made of boxes of others."""
    out = empty(shape_of(box), dtype)
    for part in parts:
        shared = common(box, part.target)
        if shared is not None:
            view = out[slices_of(moved(shared, starts(box)))]
            read(part.source, part.source_box(shared), as_source(view, part))
    return out


# -- to Hugging Face ------------------------------------------------------------------------------------------------------


def to_hub(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    carry: str | os.PathLike | None = None,
    step: int | None = None,
    progress: Told = None,
) -> Path:
    """Write the weights of a training checkpoint as `save_pretrained` of `transformers` would. Memory: about one tensor.

    Names, ties and conversions are those of the model's class where it is of `transformers`; else names are the model's own.

    Args:
        source: a step's folder, or a run's: then the newest, or `step`. target: new, or empty.
        dtype: of floating weights; default: that in which the model computed, or else as they were saved.
        max_shard_size: of a file, "5GB" or bytes. carry: a folder whose other files (tokenizer, chat template) go along.

    Returns: the folder, which appears at once, when all of it is written.
    Raises: CheckpointError: what is wrong with the source, `folder-not-empty`, `bad-dtype`, `bad-size`, `no-transformers`,
        `unbuildable-model`, `other-model`, `unwritable-conversion`, `write-failed`. Nothing is left then.
    """
    folder = folders.resolve(source, step)
    check_target(Path(target), folder)
    manifest = read_manifest(folder)
    described = manifest.about.get("model") or {}
    config = json.loads(described["config"]) if described.get("config") else None
    module = model_on_meta(_class_name(described), config, required=True)
    tensors = _tensors_out(module, manifest, _code(dtype))
    shards = share_out({name: one.num_bytes for name, one in tensors.items()}, parse_size(max_shard_size))
    with Files(folder, manifest) as files, _new_folder(Path(target)) as writing:

        def read(name: str, box: Box, out: T) -> None:
            read_box(files, manifest.tensors[f"model/{name}"], box, out)

        for file, names in shards.items():
            outgoing = [_outgoing(name, tensors[name], read) for name in names]
            write_tensors(writing / file, outgoing, {"format": "pt"}, progress)
        _finish(writing, shards, tensors, module, described, carry)
    return Path(target)


def _code(dtype: torch.dtype | str | None) -> str | None:
    """Raises: CheckpointError `bad-dtype`."""
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and CODES.get(name) not in FLOATS:
        known = [TORCH[code] for code in FLOATS]
        raise CheckpointError(Problem("bad-dtype", f"{name!r} is no dtype for weights", fix=did_you_mean(name, known)))
    return CODES[name] if dtype is not None else None


def _tensors_out(module: Any, manifest: Manifest, code: str | None) -> dict[str, Written]:
    """What is written, by name. Raises: CheckpointError `other-model`, `unwritable-conversion`."""
    saved = {n.removeprefix("model/"): one for n, one in manifest.tensors.items() if n.startswith("model/")}
    parts: dict[str, tuple[tuple[int, ...], tuple[Part, ...]]]
    if module is None:
        parts = {name: (one.shape, (whole_part(name, one.shape),)) for name, one in saved.items()}
    else:
        wanted = wanted_of(Place(module), Meeting())
        _check_same(wanted, saved)
        parts = parts_out(module, wanted)
    found = {}
    for name, (shape, made_of) in parts.items():
        one = saved[made_of[0].source]
        kept = one.about.get("compute") or one.dtype
        found[name] = Written(name, code if code is not None and kept in FLOATS else kept, shape, made_of)
    return found


def _check_same(wanted: Sequence[Wanted], saved: Mapping[str, Saved]) -> None:
    """The class and config build what was saved. Raises: CheckpointError `other-model`."""
    built = {one.name: one.shape for one in wanted}
    odd = [name for name in {**built, **saved} if name not in built or name not in saved]
    odd += [name for name, one in saved.items() if name in built and built[name] != one.shape]
    if odd:
        name = odd[0]
        rows = (
            ("built", str(list(built[name])) if name in built else "nothing of that name"),
            ("saved", str(list(saved[name].shape)) if name in saved else "nothing of that name"),
        )
        what = f"class and config do not build what was saved: {short_list(odd, 4)}"
        fix = "use the version of transformers that it was trained with; or save_pretrained from the run"
        raise CheckpointError(Problem("other-model", what, name, rows, fix))


def _outgoing(name: str, one: Written, read: Read) -> Outgoing:
    box, dtype = whole_box(one.shape), torch_dtype(one.dtype)
    return Outgoing(name, one.dtype, one.shape, lambda: assembled(box, dtype, one.parts, read))


def _finish(
    writing: Path,
    shards: Mapping[str, list[str]],
    tensors: Mapping[str, Written],
    module: Any,
    described: Mapping[str, Any],
    carry: str | os.PathLike | None,
) -> None:
    """Index, configs, and what is carried along. Raises: CheckpointError `unwritable-config`."""
    sizes = {name: one.num_bytes for name, one in tensors.items()}
    dtype = next((TORCH[one.dtype] for one in tensors.values() if one.dtype in FLOATS), None)
    with disk.explained(writing):
        if len(shards) > 1:
            count = sum(volume(whole_box(one.shape)) for one in tensors.values())
            disk.write_file(writing / INDEX, index_of(shards, sizes, count))
        if described.get("generation_config") and (module is None or module.can_generate()):
            disk.write_file(writing / "generation_config.json", described["generation_config"].encode())
        if module is None and described.get("config"):
            config = json.loads(described["config"]) | ({"dtype": dtype} if dtype is not None else {})
            disk.write_file(writing / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        if module is None and carry is not None:
            carry_files(Path(carry), writing)
        if module is not None:
            _write_extras(module, writing, dtype, carry)


def _write_extras(module: Any, writing: Path, dtype: str | None, carry: str | os.PathLike | None) -> None:
    module.generation_config = None  # written as it was; transformers refuses to write some that were published
    try:
        write_extras(module, writing, getattr(torch, dtype) if dtype is not None else None, carry)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # whatever a config's own checks raise
        rows = (("why", str(error).strip().partition("\n")[0][:200]),)
        what = "transformers refuses to write the model's config"
        raise CheckpointError(Problem("unwritable-config", what, rows=rows, fix="correct the config")) from error


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder that takes this name when everything is in it, and is gone after an error.

    Raises: CheckpointError `folder-not-empty`, `write-failed`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fix = "name a new folder"
        raise CheckpointError(Problem("folder-not-empty", "is there already, and not empty", str(folder), fix=fix))
    folder = folder.absolute()
    above = folder.parent
    writing = above / f".{folder.name}.writing-{uuid.uuid4().hex[:12]}"
    try:
        with disk.explained(folder):
            above.mkdir(parents=True, exist_ok=True)
            disk.make_folder(writing)
        yield writing
        with disk.explained(folder):
            disk.flush_folder(writing)
            disk.rename(writing, folder)
            disk.flush_folder(above)
    except BaseException:
        disk.remove_folder(writing)
        raise


# -- from Hugging Face ----------------------------------------------------------------------------------------------------


def from_hub(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    mesh: MeshSpec | str | None = None,
    step: int = 0,
    progress: Told = None,
) -> Path:
    """Write a training checkpoint of weights alone, out of a Hugging Face folder. Memory: about one tensor.

    Names are those of the model's class where config.json names one of `transformers`; else those of the files.
    `load_checkpoint` loads it, and so does `Checkpointer.resume(strict=False)`, whose optimiser then begins anew.

    Args:
        target: a run's folder, new or without this step. mesh: for which to cut; default: one rank.

    Returns: the published folder in `target`.
    Raises: CheckpointError: of `HubFolder` and `parts_in`, `twins-differ`, `bad-step`, `bad-target`, `already-saved`,
        `folder-in-use`, `write-failed`, `no-transformers`, `unbuildable-model`; MeshError. Nothing is left then.
    """
    if type(step) is not int or step < 0:
        raise CheckpointError(Problem("bad-step", f"{step!r} is no step", fix="give a whole number, 0 or more"))
    spec = spec_of(mesh) if mesh is not None else MeshSpec()
    check_target(Path(target), Path(source))
    with HubFolder(source) as held:
        module = model_on_meta(next(iter(held.config.get("architectures") or ()), None), held.config)
        tensors = _tensors_in(module, held)
        blank = _blank(module, held, spec, step)
        cuts = cuts_for(Manifest(step, blank.about, {}, {one.name: one for one, _ in tensors}, blank.state), spec, 0)
        incoming = [Incoming(saved, cuts[saved.name], read) for saved, read in tensors]
        return write_run(Path(target), blank, spec, incoming, progress)


def _tensors_in(module: Any, held: HubFolder) -> list[tuple[Saved, Callable[[Box], T]]]:
    """Every tensor of the new checkpoint, and how a box of it is read."""
    if module is None:
        names = {name: (whole_part(name, shape),) for name, (_, shape) in held.tensors.items()}
        wanted = [Wanted(name, (name,), held.tensors[name][1], False) for name in names]
        sources = Sources(dict(names))
    else:
        wanted = wanted_of(Place(module), Meeting())
        sources = parts_in(module, wanted, held.tensors)
    _check_twins(held, sources)
    found = []
    for one in wanted:
        made_of = sources.by_name.get(one.name)
        if made_of is None:
            continue
        first = made_of.sources[0] if isinstance(made_of, Computed) else made_of[0].source
        code = held.tensors[first][0]
        about: dict[str, Any] = {"names": list(one.names)} if len(one.names) > 1 else {}
        found.append((Saved(f"model/{one.name}", code, one.shape, (), about), _reader(held, made_of, code)))
    return found


def _reader(held: HubFolder, made_of: Computed | tuple[Part, ...], code: str) -> Callable[[Box], T]:
    if not isinstance(made_of, Computed):
        return partial(_read_parts, held, made_of, torch_dtype(code))
    return partial(_read_computed, held, made_of, torch_dtype(code))


def _read_parts(held: HubFolder, parts: tuple[Part, ...], dtype: torch.dtype, box: Box) -> T:
    return assembled(box, dtype, parts, held.read)


def _read_computed(held: HubFolder, made_of: Computed, dtype: torch.dtype, box: Box) -> T:
    return made_of.compute({name: _whole(held, name) for name in made_of.sources})[slices_of(box)].to(dtype)


def _whole(held: HubFolder, name: str) -> T:
    code, shape = held.tensors[name]
    full = empty(shape, torch_dtype(code))
    held.read(name, whole_box(shape), full)
    return full


def _check_twins(held: HubFolder, sources: Sources) -> None:
    """Two tensors for one tied parameter must be equal. Raises: CheckpointError `twins-differ`."""
    for used, ignored in sources.twins:
        kept = _whole(held, used)
        if not torch.equal(kept, _whole(held, ignored).to(kept.dtype)):
            what = f"holds two different tensors for one tied parameter: {used} and {ignored}"
            fix = "set tie_word_embeddings=False in its config.json, or remove one of them"
            raise CheckpointError(Problem("twins-differ", what, str(held.folder), fix=fix))


def _blank(module: nn.Module | None, held: HubFolder, mesh: MeshSpec, step: int) -> Manifest:
    """The new manifest, without files and tensors."""
    about = about_run(Place(module if module is not None else nn.Module()))
    about |= {"mesh": [list(axis) for axis in mesh.axes], "world_size": mesh.world_size}
    about["converted_from"] = str(held.folder)
    if module is None:
        about["model"] = {"class": None, "config": json.dumps(held.config) if held.config else None}
    path = held.folder / "generation_config.json"
    about["model"]["generation_config"] = path.read_text() if held.config and path.is_file() else None
    state: dict[str, Any] = {
        "optimizers": {},
        "generators": {},
        "streams": None,
        "schedulers": {},
        "data": None,
        "values": None,
    }
    return Manifest(step, about, {}, {}, state)
