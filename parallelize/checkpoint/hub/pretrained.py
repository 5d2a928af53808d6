"""Loading pretrained weights into a sharded model. Each rank reads only the bytes of its own shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.boxes import (
    Box,
    shape_of,
    volume,
)
from parallelize.base.errors import CheckpointError, Problem, short_list
from parallelize.base.terminal.console import Progress
from parallelize.checkpoint.format.device_pieces import Arena, torch_dtype
from parallelize.checkpoint.hub.adapter_folder import (
    StockNames,
    initialize_adapters,
    names_of_adapters,
    new_adapters,
)
from parallelize.checkpoint.hub.extras import read_generation_config
from parallelize.checkpoint.hub.folder import HubFolder, check_mappable, map_parameters
from parallelize.checkpoint.hub.names import ComputedTensor, ModelTensor, TensorSources, find_sources, source_names
from parallelize.checkpoint.hub.quantized_tensors import (
    bytes_to_read,
    check_floating,
    in_source_order,
    quantize_while_reading,
    quantized_tensors,
    with_weights,
)
from parallelize.checkpoint.run.fill_tensors import allocate_local
from parallelize.checkpoint.run.local_tensors import LocalTensor, ModelOnMesh, model_on_mesh, targets
from parallelize.checkpoint.run.meta_model import MetaModel
from parallelize.checkpoint.run.rank_sync import TIMEOUT_S, RankSync, as_parallelize_error
from parallelize.plan.model_facts import named_once
from parallelize.state.full_values import reshard_units
from parallelize.state.stored_slices import copy_into
from parallelize.state.transaction import gc_paused

T = torch.Tensor
Rebuild = Mapping[str, Callable[[], T]]


@dataclass(frozen=True)
class Loaded:
    """The result of `load_pretrained`.

    Attributes:
        bytes_read: bytes of tensors that this rank read from the files.
        bytes_held: bytes of the local tensors that this rank filled.
        bytes_mapped: those of them that are views of the files (`mapped=True`).
    """

    bytes_read: int
    bytes_held: int
    bytes_mapped: int = 0


def load_pretrained(
    model: Any,
    folder: str | os.PathLike,
    *,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    allow_pickle: bool = False,
    resize_vocabulary: bool = False,
    rebuild: Rebuild | None = None,
    mapped: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Loaded:
    """Load the weights of a checkpoint in Hugging Face's layout into a model. A collective over all processes.

    Each rank reads only its own shards. A model on the meta device is allocated first and filled in place. A model with
    values is changed only after everything was read. Floating-point tensors are converted to the dtype of the model;
    the weights of quantized linears are quantized while they are read, a part at a time. With adapters of PEFT, the
    folder is that of the stock model: adapters keep their values, and those on the meta device get PEFT's initial ones,
    from torch's generator. As with `from_pretrained`, the folder's generation_config.json becomes the model's
    `generation_config`.

    Args:
        model: an unsharded, parallelized or pipelined module, with or without ZeRO; or a `ParallelModel`.
        folder: a folder with `model.safetensors` or its index; or one .safetensors file.
        device: the device on which a model on the meta device is allocated. Default: the device type of the mesh, or
            the CPU.
        mesh: the mesh of all processes, if the model has none.
        allow_missing: tensors that are not in the folder keep their values. No effect for a model on the meta device.
        allow_unexpected: ignore tensors that the model does not have.
        allow_pickle: read `pytorch_model.bin` if there are no safetensors files; see `HubFolder`.
        resize_vocabulary: of a folder with another number of tokens, load those that both have. More tokens of the
            model keep their values.
        rebuild: functions that recreate buffers of a model on the meta device, by name, as for `materialize`.
        mapped: a parameter whose shard is one run of bytes in a safetensors file of the model's dtype (shards along dim
            0, and full tensors) becomes a view of the file, whose pages are read at their first use and copied at their
            first write; the file is never written to. Others are copied. For a model on meta that is loaded to the CPU
            without ZeRO. The files must not be changed while the model lives: its values would change, or the process
            would end (SIGBUS) where a file is truncated.
        timeout_s: seconds to wait for other ranks.

    Returns: the bytes read and filled by this rank.
    Raises: CheckpointError, on every rank: `missing-tensor` and `unexpected-tensor` with similar names, `wrong-shape`,
        `missing-rows`, `wrong-dtype`, `twins-differ`, `not-mappable`, and those of the files (see `HubFolder`). The
        model is then unchanged.
    Cost: two small rendezvous of all ranks (names and shapes; errors). No tensor is communicated.
    """
    module, on_mesh = model_on_mesh(model, mesh)
    sync = RankSync(on_mesh.mesh, timeout_s, own_group=False)
    try:
        return _Load(module, on_mesh, sync, device, rebuild, mapped).run(
            folder, allow_missing, allow_unexpected, allow_pickle, resize_vocabulary
        )
    finally:
        sync.close()


class _Load:
    """One load; `run` is the order of its steps."""

    def __init__(
        self,
        module: nn.Module,
        on_mesh: ModelOnMesh,
        sync: RankSync,
        device: Any,
        rebuild: Rebuild | None,
        mapped: bool,
    ):
        self.module, self.on_mesh, self.sync, self.rebuild, self.mapped = module, on_mesh, sync, rebuild, mapped
        self.device = device or (on_mesh.mesh.device_type if on_mesh.mesh is not None else "cpu")
        self.meta_model = MetaModel(module)
        self.arena = Arena()

    def run(
        self, folder: Any, allow_missing: bool, allow_unexpected: bool, allow_pickle: bool, resize_vocabulary: bool
    ) -> Loaded:
        reshard_units(self.module)
        tensors = model_tensors(self.on_mesh, self.sync)
        self.adapters = new_adapters(self.module)
        loaded, error, generation = None, None, None
        staged: list[tuple[LocalTensor, T]] = []
        try:
            with gc_paused(), HubFolder(folder, allow_pickle=allow_pickle) as hub:
                allow_missing = allow_missing and not self.meta_model.was_meta
                stock = StockNames(self.module, tensors)
                sources = find_sources(
                    stock.module,
                    stock.tensors,
                    hub.tensors,
                    allow_missing=allow_missing,
                    allow_unexpected=allow_unexpected,
                    resize_vocabulary=resize_vocabulary,
                )
                if self.meta_model.was_meta and sources.resized is not None:
                    sources.resized.refuse_without_values(str(hub.folder))
                generation = read_generation_config(stock.module, folder)
                loaded = self._read(hub, stock.of_model(sources), staged)
        except Exception as cause:  # every rank must reach the rendezvous below
            error = as_parallelize_error(cause)
        try:
            self.sync.agree(error)
        except BaseException:
            self.meta_model.undo()
            raise
        with torch.no_grad():
            for tensor, values in staged:
                tensor.stored.local.copy_(values)
        assert loaded is not None
        if generation is not None:
            stock.module.__dict__["generation_config"] = generation
        return loaded

    def _read(self, hub: HubFolder, sources: TensorSources, staged: list[tuple[LocalTensor, T]]) -> Loaded:
        if self.mapped:
            check_mappable(self.module, self.device, self.meta_model.was_meta)
        if self.meta_model.was_meta:
            self.meta_model.allocate(self.device, self.rebuild, in_arena=not self.mapped)
        tensors = targets(self.on_mesh)
        mapped: set[str] = set()
        if self.mapped:
            reads_of = lambda tensor: _jobs(tensor, tensor.stored.local, sources)  # noqa: E731
            named = [(fqn_of(tensor), tensor) for tensor in tensors]
            mapped, tensors = map_parameters(self.on_mesh, hub, named, sources.by_name, reads_of)
        quantized = [item for item in quantized_tensors(self.on_mesh) if item.name in sources.by_name]
        stored_as_codes = {name for item in quantized for name in (item.codes, item.scales)}
        if self.meta_model.was_meta:
            filled_elsewhere = stored_as_codes | names_of_adapters(self.module, self.adapters)
            _check_covered([t for t in tensors if fqn_of(t) not in filled_elsewhere], sources, str(hub.folder))
            initialize_adapters(self.module, self.adapters)
        filled = [tensor for tensor in tensors if fqn_of(tensor) in sources.by_name]
        _check_dtypes(hub, sources, filled)
        check_floating(hub, [name for item in quantized for name in source_names(sources.by_name[item.name])])
        destinations = [(tensor, self._destination(tensor, sources.resized is not None)) for tensor in filled]
        blocks = {fqn_of(t): (t, self._destination(t)) for t in tensors if fqn_of(t) in stored_as_codes}
        jobs = [job for tensor, destination in destinations for job in _jobs(tensor, destination, sources)]
        jobs.sort(key=lambda job: (hub.position(job.source), job.box))
        unread = [job for job in jobs if job.target not in mapped]
        total = sum(volume(job.box) * job.out.element_size() for job in unread)
        total += sum(bytes_to_read(item, blocks[item.scales][0]) for item in quantized)
        with Progress("loading", self.sync.is_coordinator, total) as progress, torch.no_grad():
            for job in unread:
                hub.read(job.source, job.box, job.out, wait=False)
                progress(volume(job.box) * job.out.element_size())
            hub.finish()
            _compute(hub, sources, destinations)
            _check_twins(hub, sources, jobs)
            for item in quantized:
                quantize_while_reading(hub, item, sources, blocks[item.codes], blocks[item.scales], progress)
        if not self.meta_model.was_meta:
            staged += [*destinations, *blocks.values()]
        filled += [tensor for tensor, _ in blocks.values()]
        filled_bytes = {fqn_of(tensor): 0 for tensor in filled}
        for tensor in filled:  # a parameter and its copy in another dtype have one name
            filled_bytes[fqn_of(tensor)] += tensor.stored.local.nbytes
        return Loaded(hub.bytes_read, sum(filled_bytes.values()), sum(filled_bytes[name] for name in mapped))

    def _destination(self, tensor: LocalTensor, keeps: bool = False) -> T:
        """What is filled for a local tensor: itself where the model was on meta, else memory beside it. keeps: what is
        not filled has the values of now."""
        if self.meta_model.was_meta:
            return self.meta_model.cleared_local(tensor)
        if keeps:
            return tensor.stored.local.detach().clone()
        return allocate_local(tensor.stored, tensor.stored.local.dtype, self.arena)


def model_tensors(on_mesh: ModelOnMesh, sync: RankSync, *, as_weights: bool = True) -> list[ModelTensor]:
    """Every tensor of the unsharded model, including those of other pipeline stages. A collective over all processes.

    as_weights: of quantized linears, the weights that their codes and scales stand for.
    """
    local: list[ModelTensor] = []
    if on_mesh.is_first:
        parameters = {on_mesh.canonical(names[0]) for names, _ in named_once(on_mesh.module)}
        for tensor in targets(on_mesh):
            name = fqn_of(tensor)
            names = tuple(all_names(on_mesh, tensor))
            local.append(ModelTensor(name, names, tensor.stored.shape, name not in parameters))
    quantized = quantized_tensors(on_mesh) if as_weights else ()
    named = [[t.name, t.names, t.shape, t.is_buffer] for t in with_weights(local, quantized)]
    by_name: dict[str, ModelTensor] = {}
    for name, names, shape, is_buffer in (row for rows in sync.all_gather(named) for row in rows):
        by_name.setdefault(name, ModelTensor(name, tuple(names), tuple(shape), is_buffer))
    return list(by_name.values())


def all_names(on_mesh: ModelOnMesh, tensor: LocalTensor) -> list[str]:
    """Every name of a tensor in the full model."""
    facts = on_mesh.cut.facts.parameters.get(fqn_of(tensor)) if on_mesh.cut is not None else None
    return list(facts.names if facts is not None else tensor.stored.names)


def fqn_of(tensor: LocalTensor) -> str:
    """The name of a tensor in the model: without the prefix of training checkpoints."""
    return tensor.name.removeprefix("model/")


@dataclass(frozen=True)
class _Job:
    """One read: a box of a tensor of the folder, and a view of its shape, in the tensor `target` of the model, to read
    it into."""

    source: str
    box: Box
    out: T
    target: str


def _jobs(tensor: LocalTensor, destination: T, sources: TensorSources) -> Iterable[_Job]:
    source = sources.by_name[fqn_of(tensor)]
    if isinstance(source, ComputedTensor):
        return
    for pair in tensor.stored.slices:
        for part in source:
            shared = pair.within(part.target)
            if shared is not None:
                out = in_source_order(destination[shared.local], part)
                yield _Job(part.source, part.source_box(shared.box), out, fqn_of(tensor))


def _compute(hub: HubFolder, sources: TensorSources, destinations: Sequence[tuple[LocalTensor, T]]) -> None:
    """Fill the tensors that are computed from full tensors, one at a time."""
    for tensor, destination in destinations:
        source = sources.by_name[fqn_of(tensor)]
        if isinstance(source, ComputedTensor):
            full = source.compute({name: hub.read_full(name) for name in source.sources})
            copy_into(tensor.stored, full, destination)


def _check_twins(hub: HubFolder, sources: TensorSources, jobs: Sequence[_Job]) -> None:
    """Two tensors for one tied parameter must be equal. If not, the model was trained without the tie."""
    for used, ignored in sources.twins:
        for job in jobs:
            if job.source == used:
                other = torch.empty(shape_of(job.box), dtype=job.out.dtype)
                hub.read(ignored, job.box, other)
                if not torch.equal(other, job.out.cpu()):
                    what = f"has two different tensors for one tied parameter: {used} and {ignored}"
                    fix = "set tie_word_embeddings=False in the model's config, or remove one of them"
                    raise CheckpointError(Problem("twins-differ", what, str(hub.folder), fix=fix))


def _check_covered(tensors: Sequence[LocalTensor], sources: TensorSources, where: str) -> None:
    """Tensors that the class allows to be missing must have values already. On the meta device they have none."""
    missing = [fqn_of(tensor) for tensor in tensors if fqn_of(tensor) not in sources.by_name]
    if missing:
        what = f"{short_list(missing, 6)} may be missing, and is; a model on the meta device has no values to keep"
        fix = "initialize(model, seed) first, then load_pretrained(model, folder)"
        raise CheckpointError(Problem("missing-tensor", what, where, fix=fix))


def _check_dtypes(hub: HubFolder, sources: TensorSources, filled: Sequence[LocalTensor]) -> None:
    """Only floating-point tensors may differ in dtype from the model."""
    problems = []
    for tensor in filled:
        for name in source_names(sources.by_name[fqn_of(tensor)]):
            dtype = torch_dtype(hub.tensors[name][0])
            if dtype != tensor.stored.local.dtype and not (
                dtype.is_floating_point and tensor.stored.local.is_floating_point()
            ):
                what = f"{name} is {hub.tensors[name][0]}, the model's {fqn_of(tensor)} {tensor.stored.local.dtype}"
                problems.append(Problem("wrong-dtype", what, str(hub.folder)))
    if problems:
        raise CheckpointError(*problems[:20])
