"""Messages and memory of real processes in a step, measured without the package's recorder."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize import Muon, balanced_routing, build_mesh, parallelize_model
from parallelize.axes.tensor.experts import expert_parallel
from parallelize.axes.tensor.experts.routing_load import experts_of
from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.shard_data import data_of
from parallelize.base.mesh import EXPERT_AXES, SAMPLE_AXES, MeshSpec, folded
from parallelize.comm import p2p
from parallelize.comm.meshes import mesh_spec
from parallelize.plan.models.model_source import ModelSource
from parallelize.state.records import record_of
from parallelize.tools.analysis.cost.memory import memory_of
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.explain import worst_routing
from parallelize.tools.analysis.measure import measure_memory
from parallelize.tools.analysis.subject import Subject
from tests.support.models import MIXTURES, tiny_batch, tiny_model
from tests.tools.analysis.cost.live_bytes import StorageMode, existing_tensors, live_peak

OPS = {
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}


class Counting(TorchDispatchMode):
    """Counts (op, axis, ranks, bytes) of the collectives and messages of this rank."""

    def __init__(self, spec: Any):
        super().__init__()
        self.spec, self.counts = spec, Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d" and not func.__name__.startswith("alltoall_base_"):
            op, counted = OPS[func.__name__.split(".")[0]]
            groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0]))
            size = sum(x.numel() * x.element_size() for x in pytree.tree_leaves(args[counted]))
            is_point_to_point = op in ("send", "recv")
            self.counts[op, self._axis(ranks), 2 if is_point_to_point else len(ranks), size] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Counting:
        """Dispatch modes do not see collectives inside of ops, so those are counted where they are sent."""
        post, all_to_all = p2p._post, dist.all_to_all_single

        def counted_post(group: Any, send: Any, receive: Any, tag: int) -> Any:
            size = sum(x.numel() * x.element_size() for x in send.values())
            self.counts["send", self._axis(list(group.ranks)), 2, size] += 1
            return post(group, send, receive, tag)

        def counted_all_to_all(out: Any, x: Any, *sizes: Any, group: Any, **rest: Any) -> Any:
            ranks = dist.get_process_group_ranks(group)
            self.counts["all_to_all", self._axis(ranks), len(ranks), x.numel() * x.element_size()] += 1
            return all_to_all(out, x, *sizes, group=group, **rest)

        self._patches = [
            mock.patch.object(p2p, "_post", counted_post),
            mock.patch.object(dist, "all_to_all_single", counted_all_to_all),
        ]
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for patch in self._patches:
            patch.stop()
        super().__exit__(*error)

    def _axis(self, ranks: list[int]) -> str:
        members = [self.spec.coordinates(rank) for rank in ranks]
        axes = [axis for axis in self.spec.names if len({coordinates[axis] for coordinates in members}) > 1]
        return "world" if len(axes) > 1 and len(ranks) == self.spec.world_size else "*".join(axes)


@dataclass
class Trained:
    """A model on this process's mesh after one step, in which stages exchanged the headers of their messages."""

    parallel: Any
    optimizer: Any
    spec: MeshSpec
    inputs: dict[str, Any]

    def coordinate(self, axis: str) -> int:
        return self.spec.coordinates(dist.get_rank()).get(axis, 0)


def built(family: str, adapter: Any = None, **model: Any) -> torch.nn.Module:
    """A tiny model, with the adapter of PEFT that has this config."""
    if adapter is None:
        return tiny_model(family, **model)
    import peft

    return peft.get_peft_model(tiny_model(family, **model), adapter)


_OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "muon": Muon,
    "adafactor": torch.optim.Adafactor,
}


def trained(
    family: str, sizes: dict[str, int], batch: int, length: int, options: dict[str, Any], model: dict[str, Any]
) -> Trained:
    mesh = build_mesh("cpu", **sizes)
    options = dict(options)
    optimizer_class = _OPTIMIZERS[options.pop("optimizer", "adamw")]
    parallel = parallelize_model(built(family, **model), mesh, **options)
    optimizer = parallel.optimizer(optimizer_class, lr=1e-3)
    coordinates = mesh_spec(mesh).coordinates(dist.get_rank())
    seed = 1 + sum(coordinates.get(axis, 0) * 7**n for n, axis in enumerate(SAMPLE_AXES))
    ids, labels = tiny_batch(batch=batch, length=length, seed=seed)
    inputs = {"input_ids": ids, "targets": labels, **({} if family == "bert" else {"use_cache": False})}
    if family in MIXTURES:  # as `explain` assumes, for as long as the model lives
        parallel.module.__dict__["balanced"] = context = balanced_routing(parallel.module)
        context.__enter__()
    parallel.step(**inputs)
    optimizer.step()
    optimizer.zero_grad()
    return Trained(parallel, optimizer, mesh_spec(mesh), inputs)


def sent_messages(rank: int, *configuration: Any) -> Any:
    """(pp rank, 0 for ranks of which the messages are predicted, counts of messages in a step and in the optimizer).

    configuration: as `trained` takes it.
    """
    job = trained(*configuration)
    with Counting(job.spec) as counting:
        job.parallel.step(**job.inputs)
        job.optimizer.step()
    others = job.coordinate("tp") + job.coordinate("cp")
    if isinstance(job.optimizer, (Muon, torch.optim.Adafactor)):  # data ranks own others
        others = sum(job.coordinate(axis) for axis in job.spec.names if axis != "pp")
    return job.coordinate("pp"), others, dict(counting.counts)


def choose_first_experts(module: Any) -> None:
    """Let each token choose the first experts, which are on the first rank of `ep`."""

    def replace_choices(experts: Any, args: tuple) -> tuple:
        tokens, choices, weights = args
        return tokens, torch.arange(choices.shape[1]).expand_as(choices).contiguous(), weights

    for _, experts, _ in experts_of(module):
        experts.register_forward_pre_hook(replace_choices)


def messages_to_one_rank(rank: int, *configuration: Any) -> Any:
    """(pp rank, rank of `ep`, counts of messages, [rows, choices], bytes from other ranks) of a step whose tokens
    choose the experts of the first rank. configuration: as `trained` takes it."""
    job = trained(*configuration)
    module, routes, received = job.parallel.module, [], []
    choose_first_experts(module)
    routes_of, all_to_all = expert_parallel.routes_of, dist.all_to_all_single

    def seen_routes(*args: Any) -> Any:
        routes.append(routes_of(*args))
        return routes[-1]

    def seen_rows(out: Any, x: Any, sizes: Any = None, *rest: Any, group: Any, **more: Any) -> Any:
        if sizes:
            received.append((sum(sizes) - sizes[dist.get_rank(group)]) * x.element_size())
        return all_to_all(out, x, sizes, *rest, group=group, **more)

    patches = (
        mock.patch.object(expert_parallel, "routes_of", seen_routes),
        mock.patch.object(dist, "all_to_all_single", seen_rows),
    )
    with patches[0], patches[1], Counting(job.spec) as counting:
        job.parallel.step(**job.inputs)
        job.optimizer.step()
    chunks = [route.chunks[0] for route in routes]
    most = [max(sum(chunk.received) for chunk in chunks), max(chunk.pairs for chunk in chunks)]
    ep = record_of(module).folded.index("ep")
    return job.coordinate("pp"), ep, dict(counting.counts), most, sum(received)


def source_of(family: str, model: dict[str, Any]) -> ModelSource:
    """The tiny model of the tests, as a source."""
    return ModelSource(family, lambda _: built(family, **model))


def _dense_axis(setting: Setting, axis: str, ranks: int) -> str:
    """An axis of the mesh of experts by the axes of the mesh that its ranks differ along."""
    if axis not in EXPERT_AXES:
        return axis
    expert_mesh = folded(setting.mesh, setting.expert_ranks)
    members = [setting.mesh.coordinates(rank) for rank in expert_mesh.group_of(0, axis)]
    axes = [name for name in setting.mesh.names if len({coordinates[name] for coordinates in members}) > 1]
    return "world" if len(axes) > 1 and ranks == setting.mesh.world_size else "*".join(axes)


def predicted_messages(
    family: str,
    sizes: dict[str, int],
    batch: int,
    length: int,
    options: dict[str, Any],
    model: dict[str, Any],
    to_one_rank: bool = False,
) -> dict[int, dict[tuple, int]]:
    """The prediction for each pp rank."""
    setting = Setting(MeshSpec(**sizes), batch=batch, sequence=length, transport="gloo", **options).complete()
    subject = Subject(source_of(family, model))
    predictions = {}
    for pp_rank in range(setting.size("pp")):
        counts: Counter[tuple] = Counter()
        for message, times in subject.rank_step(setting, setting.pipeline(), pp_rank, False, to_one_rank).messages:
            axis = _dense_axis(setting, message.axis, message.ranks)
            counts[message.op, axis, message.ranks, message.bytes] += times
        predictions[pp_rank] = dict(counts)
    return predictions


def predicted_worst_routing(
    family: str, sizes: dict[str, int], batch: int, length: int, options: dict[str, Any], model: dict[str, Any]
) -> Any:
    """Of a rank that gets all tokens."""
    setting = Setting(MeshSpec(**sizes), batch=batch, sequence=length, transport="gloo", **options).complete()
    subject = Subject(source_of(family, model))
    return worst_routing(subject, setting, *measure_memory(subject, setting))


def peak_of_step(
    rank: int,
    family: str,
    sizes: dict[str, int],
    batch: int,
    length: int,
    optimizer: str,
    options: dict[str, Any],
    model: dict[str, Any],
) -> tuple[int, bool, int]:
    """(pp rank, whether this is the first rank of its stage, the peak of live bytes over a whole training step)."""
    older = existing_tensors()
    job = trained(family, sizes, batch, length, {**options, "optimizer": optimizer}, model)
    parallel, stepped = job.parallel, job.optimizer

    def step() -> None:
        parallel.step(**job.inputs)
        stepped.step()
        stepped.zero_grad()

    peak = live_peak(step, [*older, job.inputs["input_ids"], job.inputs["targets"]])
    others = sum(job.coordinate(axis) for axis in job.spec.names if axis != "pp")
    return job.coordinate("pp"), not others, peak


def measured_memory(rank: int, *configuration: Any) -> Any:
    """(pp rank, tp rank, dp rank, bytes of each part). configuration: as `trained` takes it."""
    return _memory_of(trained(*configuration))


def measured_memory_to_one_rank(rank: int, *configuration: Any) -> Any:
    """The same of steps whose tokens choose the experts of the first rank."""
    job = trained(*configuration)
    choose_first_experts(job.parallel.module)
    return _memory_of(job)


def _memory_of(job: Trained) -> Any:
    parallel, optimizer = job.parallel, job.optimizer
    params = [to_local(p) for p in parallel.module.parameters()]
    data = data_of(parallel.module)
    flat = [bucket.flat for bucket in getattr(data and data.engine, "buckets", ()) if hasattr(bucket, "flat")]
    peaks = []
    for _ in range(5):  # some are higher by what the garbage collector or a thread of gloo has not freed yet
        optimizer.zero_grad()
        with StorageMode() as storages:
            storages.ignore(
                [*params, *parallel.module.buffers(), job.inputs["input_ids"], job.inputs["targets"], *flat]
            )
            parallel.step(**job.inputs)
        peaks.append(storages.peak(storages.serials_of(_gradients(parallel.module))))
    grads = _gradients(parallel.module)
    state = [
        to_local(x)
        for values in optimizer.state.values()
        for x in values.values()
        if isinstance(x, torch.Tensor) and x.ndim
    ]
    masters = [to_local(s.stepped) for s in (data.shards if data is not None else ()) if s.has_master]
    measured = {
        "parameters": _distinct(params),
        "gradients": _distinct([*grads, *flat]),
        "optimizer": _distinct([*state, *masters]),
        "activations": min(peaks),
        "buffers": _distinct(list(pool._free)) if (pool := getattr(data and data.engine, "_pool", None)) else 0,
    }
    return job.coordinate("pp"), job.coordinate("tp"), job.coordinate("dp"), measured


def _gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    """Local tensors. Who keeps them over the next step keeps their memory, which that step would have freed."""
    return [to_local(p.grad) for p in module.parameters() if p.grad is not None]


def _distinct(tensors: list[torch.Tensor]) -> int:
    """Bytes of storages, each once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def predicted_memory(
    family: str,
    sizes: dict[str, int],
    batch: int,
    length: int,
    options: dict[str, Any],
    model: dict[str, Any],
    to_one_rank: bool = False,
) -> dict[int, dict[str, int]]:
    """The prediction for each pp rank."""
    options = dict(options)
    if "dtype" in options:
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    setting = Setting(MeshSpec(**sizes), batch=batch, sequence=length, transport="gloo", **options).complete()
    subject = Subject(source_of(family, model))
    predictions = {}
    for pp_rank in range(setting.size("pp")):
        memory = memory_of(subject.rank_step(setting, setting.pipeline(), pp_rank, False, to_one_rank))
        predictions[pp_rank] = {
            key: getattr(memory, key) for key in ("parameters", "gradients", "optimizer", "activations", "buffers")
        }
    return predictions
