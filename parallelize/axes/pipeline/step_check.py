"""The check of a step: ranks that must have the same batch, settings and progress have them.

It travels with the global count, in one all-reduce of 64 bytes over the mesh. Each rank adds a digest of each kind of
facts times a weight (see `rank_weights`), so that equal digests vanish. Only when a sum is not 0 are the facts
themselves gathered, to name what differs, and where.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from parallelize.axes.pipeline.replica_check import ReplicaCheck, number_of, signed, weight_in, weight_of
from parallelize.axes.pipeline.ties import TieGroup
from parallelize.base.agreement import Facts, differing_rows
from parallelize.base.errors import HandshakeError, PipelineError, Problem, short_list
from parallelize.base.mesh import DATA_AXES, SAMPLE_AXES, MeshSpec
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.handshake import digest, silent_ranks
from parallelize.comm.mesh_view import MeshView

T = torch.Tensor

MESSAGE_BYTES = 64
LOST_AFTER_S = 5.0
_BUILT = "optimizers of the model"
_CHANGED = 1 << 40
"""What a rank that trains other parameters adds to the number of sequences, which is smaller."""
_MOST_WORDS = 1 << 16
"""Words of eight bytes that are multiplied at once; larger tensors take `digest`, which does it in blocks."""
_FACTOR = 0x1E3779B97F4A7C15


@dataclass(frozen=True)
class _Facts:
    """The facts of one call on this rank.

    Attributes:
        batch: the inputs and targets by name, which ranks of one data rank share. settings: what all ranks share.
        stage: what the ranks of one pipeline stage share. ties: what the ranks with a copy of a tied parameter share.
        edits: by tie, how often its copy was written to. Other numbers alone are no error: the copies are compared
            then.
    """

    batch: Mapping[str, Any]
    settings: Facts
    stage: Facts
    ties: Mapping[str, Facts]
    edits: Facts


class StepCheck:
    """The count of a step, and the comparison that travels with it.

    Args:
        mesh: the mesh with all axes.
        device: of the message.
        replicas: compares what ranks store, every N calls. Copies of its ties must require gradients, and be updated,
            alike.
        compares: False sends the same message and compares nothing.

    Attributes:
        counts_loss: whether the loss of this rank is summed: of ranks with the same loss (along tp), only that of the
            first.
    """

    def __init__(self, mesh: MeshView, device: torch.device, replicas: ReplicaCheck, compares: bool = True):
        self.mesh, self.device, self.replicas = mesh, device, replicas
        self.spec, self.world = mesh.spec, mesh.world.pg
        self.compares = compares and mesh.size > 1 and dist.get_backend(self.world) != "fake"
        self._optimizers: list[tuple[weakref.ref[Optimizer], list[int]]] = []
        self._may_have_dropped = False
        self._sent: _Facts | None = None
        self._message: T | None = None
        self._problems: tuple[Problem, ...] | None = None
        self._calls = self._sequences = 0
        self.says_changed = False  # whether this rank's stages train other parameters than in the last call
        index = mesh.position
        self._weights = [weight_of(self.spec, index, axes) for axes in (SAMPLE_AXES, self.spec.names[:0], ("pp",))]
        self._tie_weights = {tie.name: weight_in(tie.group.ranks, dist.get_rank()) for tie in replicas.shared_ties()}
        coordinates = self.spec.coordinates(index)
        self._data_rank, self._data_ranks = mesh.sample_place
        self._counts_sequences = all(at == 0 for axis, at in coordinates.items() if axis not in SAMPLE_AXES)
        self._counts = all(at == 0 for axis, at in coordinates.items() if axis not in DATA_AXES)
        self.counts_loss = all(at == 0 for axis, at in coordinates.items() if axis not in (*DATA_AXES, "pp"))

    def watch(self, optimizer: Optimizer) -> None:
        """Compare the hyperparameters of this optimizer, and how often it has stepped, from now on."""
        steps = [0]

        def stepped(*_: Any) -> None:
            steps[0] += 1

        optimizer.register_step_post_hook(stepped)
        self._optimizers.append((weakref.ref(optimizer), steps))
        self._may_have_dropped = len(self._optimizers) > 1

    def total(self, count: T | int, batch: Mapping[str, Any], settings: Facts, sequences: int = 0) -> T:
        """The sum of `count` over the data axes.

        Args:
            count: of this rank's tokens.
            batch: inputs and targets by name, which must be the same on all ranks of a data rank.
            settings: facts that must be the same on all ranks.
            sequences: of this rank's batch; see `first_sequence`.

        Raises: PipelineError `peer-lost`; HandshakeError `ranks-diverged`, `replicas-differ` and `ties-differ`, which
            on an accelerator `raise_difference` raises after the step.
        Cost: one all-reduce of 64 bytes over the mesh; another one of the count, where that is no integer. Where
            replicas are compared, a read of the parameters, and an all-gather over `tp` of 136 bytes for each that is
            replicated there.
        """
        self._sequences, self._message = sequences, None
        local = (count.detach().clone() if isinstance(count, torch.Tensor) else torch.tensor(count)).to(self.device)
        if self.mesh.size == 1:
            return local
        of_this_rank = [sequences, sequences**2] if self._counts_sequences else [0, 0]
        message = torch.tensor([0] * (MESSAGE_BYTES // 8 - 2) + of_this_rank, device=self.device)
        if self._counts and not local.is_floating_point():
            message[0] = local
        if self.says_changed:
            message[6] += _CHANGED
        if self.compares:
            self._sent = _Facts(batch, settings, self._hyperparameters(), self._tied(), self.replicas.edits())
            self._add_digests(message, self._sent)
            if self.replicas.due(self._calls):
                digests, drifted = self.replicas.total()
                message[4] += digests.to(self.device)
                message[5] += drifted.to(self.device)
        self._send(message)
        self._message, self._problems = message, None
        if self.device.type == "cpu":  # elsewhere reading it would wait for the device
            self.raise_difference()
        return self._sum_of_floats(local) if local.is_floating_point() else message[0]

    def _send(self, message: T) -> None:
        """Raises: PipelineError `peer-lost` with the ranks that did not take part."""
        self._calls += 1
        try:
            dist.all_reduce(message, group=self.world)
        except RuntimeError as error:
            ranks = self.mesh.ranks
            lost = silent_ranks(ranks, f"step/{self._calls}", LOST_AFTER_S)
            who = short_list([f"rank {rank}" for rank in lost]) or "a rank"
            what = f"{who} did not take part in the step: {str(error).strip().splitlines()[0]}"
            fix = "look at that rank's own output; start again on all ranks"
            raise PipelineError(Problem("peer-lost", what, fix=fix)) from error

    def differs(self) -> bool:
        """Whether ranks differ, by the last message. On an accelerator it waits for the message.

        A collective over the mesh where the message is not 0: the ranks then compare the facts themselves.
        """
        if self._problems is None:
            says_so = self.compares and self._message is not None and bool(self._message[1:6].any())
            self._problems = self._compare() if says_so else ()
        return bool(self._problems)

    def first_sequence(self) -> int:
        """The index of this data rank's first sequence in the last step's global batch.

        Cost: no communication, but where data ranks have different numbers of sequences an all_gather of 8 bytes over
            them. On an accelerator it waits for the message.
        """
        sizes = [self._sequences] * self._data_ranks
        if self._message is not None and dist.get_backend(self.world) != "fake":
            total, squares = self._message[6:].tolist()
            total %= _CHANGED
            if self._data_ranks * squares != total**2:  # equal for equal numbers alone
                parts = [torch.empty(1, dtype=torch.int64, device=self.device) for _ in sizes]
                group = self.mesh.group(*SAMPLE_AXES).pg
                dist.all_gather(parts, torch.tensor([self._sequences], device=self.device), group=group)
                sizes = torch.cat(parts).tolist()
        return sum(sizes[: self._data_rank])

    def any_changed(self) -> bool:
        """Whether any rank said in the last call that it trains other parameters. On an accelerator it waits for the
        message."""
        return self._message is not None and int(self._message[6]) >= _CHANGED

    def place(self) -> tuple[int, int]:
        """(`first_sequence`, the number of sequences of the last step's global batch). Cost: that of
        `first_sequence`."""
        first = self.first_sequence()
        if self._message is None or dist.get_backend(self.world) == "fake":
            return first, self._sequences * self._data_ranks
        return first, int(self._message[6]) % _CHANGED

    def raise_difference(self) -> None:
        """Raises: HandshakeError `ranks-diverged`, `replicas-differ` or `ties-differ` on every rank, with what differs
        where."""
        if self.differs():
            problems, self._problems, self._sent, self._message = self._problems, None, None, None
            raise HandshakeError(*(problems or ()))

    def _compare(self) -> tuple[Problem, ...]:
        """What differs in the facts of the last call; nothing, where copies of ties were written to and are still
        equal, and where an optimizer was deleted on some ranks only."""
        call = self._sent
        assert call is not None
        copies = self.replicas.facts(self.replicas.due(self._calls - 1))
        own = (_readable(call.batch), call.settings, call.stage, call.ties)
        gathered: list[Any] = [None] * self.mesh.size
        dist.all_gather_object(gathered, (own, call.edits, copies), group=self.world)
        ranks = self.mesh.ranks
        facts, edits, copies_by_rank = zip(*gathered, strict=True)
        existing = _facts_of_existing_optimizers(facts)
        rows = _rows(self.spec, ranks, existing)
        problems = self.replicas.problems(ranks, copies_by_rank)
        written = any(len({counts[name] for counts in edits if name in counts}) > 1 for name in call.edits)
        if rows or not (problems or written or existing != list(facts)):
            return (_diverged(rows),)  # other copies only follow from it
        self.replicas.accept_edits()
        return tuple(problems)

    def _add_digests(self, message: T, call: _Facts) -> None:
        batch, everyone, stage = self._weights
        leaves, structure = private.tree_flatten(dict(call.batch))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        form = [_form(leaf) for leaf in leaves]
        for number, tensor in enumerate(tensors):
            message[1] += (_content(tensor) * (2 * number + 1) * batch).to(self.device)
        message[2:5] = torch.tensor(
            [
                signed(number_of(f"{form} {structure}") * batch),
                signed(number_of(repr(sorted(call.settings.items()))) * everyone),
                signed(number_of(repr(sorted(call.stage.items()))) * stage),
            ]
        )
        ties = {name: number_of(repr(sorted(facts.items())) + call.edits[name]) for name, facts in call.ties.items()}
        message[5] = signed(sum(value * self._tie_weights[name] for name, value in ties.items()))

    def _hyperparameters(self) -> Facts:
        facts: Facts = {_BUILT: str(len(self._optimizers))} if self._optimizers else {}
        if self._may_have_dropped:  # one that was replaced would live on some ranks until their next collection
            gc.collect()
            self._may_have_dropped = False
        for number, (reference, steps) in enumerate(self._optimizers):
            optimizer = reference()
            if optimizer is None:
                continue
            name = f"{type(optimizer).__name__} {number}" if number else type(optimizer).__name__
            facts[f"{name}, steps"] = str(steps[0])
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if _is_scalar(value):
                        facts[f"{name}, group {index}, {key}"] = _scalar(value)
        return facts

    def _tied(self) -> dict[str, Facts]:
        """By tie: whether its copies on this rank require a gradient, and how each optimizer updates them."""
        optimizers = [optimizer for reference, _ in self._optimizers if (optimizer := reference()) is not None]
        return {tie.name: self._update_of(tie, optimizers) for tie in self.replicas.shared_ties()}

    def _update_of(self, tie: TieGroup, optimizers: list[Optimizer]) -> Facts:
        ties = self.replicas.ties
        assert ties is not None
        copies = ties.parameters(tie)
        facts = {"requires_grad": str(sorted({parameter.requires_grad for parameter in copies}))}
        stepped = {id(tensor) for parameter in copies for tensor in ties.stepped(parameter)}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if any(id(parameter) in stepped for parameter in group["params"]):
                    values = {key: _scalar(value) for key, value in group.items() if _is_scalar(value)}
                    facts |= {f"{type(optimizer).__name__}, {key}": value for key, value in values.items()}
        return facts

    def _sum_of_floats(self, local: T) -> T:
        if self.spec.data_axes:
            dist.all_reduce(local, group=self.mesh.data_group.pg)
        return local


def _facts_of_existing_optimizers(facts: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The facts of all ranks, without those of optimizers that some rank has not any more: Python deletes replaced ones
    at any time."""
    names = [{key.partition(", ")[0] for key in stage} for _, _, stage, _ in facts]
    if len({stage.get(_BUILT) for _, _, stage, _ in facts}) > 1:
        return list(facts)
    common = set.intersection(*names)
    return [
        (batch, settings, {key: value for key, value in stage.items() if key.partition(", ")[0] in common}, ties)
        for batch, settings, stage, ties in facts
    ]


# -- digests -----------------------------------------------------------------------------------------------------------


def _content(tensor: T) -> T:
    """A digest, a scalar int64, of a tensor's elements in their order. Small tensors cost six ops."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() * flat.element_size() % 8 or flat.storage_offset() * flat.element_size() % 8 or flat.numel() == 0:
        return digest(flat)[:2].sum()
    words = flat.view(torch.int64)
    if words.numel() > _MOST_WORDS:
        return digest(flat)[:2].sum()
    # odd factors alone would not tell apart ids whose small differences cancel, so the bits of the products are mixed
    products = words * (torch.arange(1, 2 * words.numel(), 2, device=words.device) * _FACTOR)
    return (products ^ (products >> 29)).sum()


def _form(leaf: Any) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else _scalar(leaf)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.device.type == "cpu"
    return isinstance(value, (bool, int, float, str, tuple, type(None)))


def _scalar(value: Any) -> str:
    """A value as text; of objects, whose text may contain an address, only the type."""
    if isinstance(value, torch.Tensor):
        return repr(value.item())
    return repr(value) if _is_scalar(value) else type(value).__name__


# -- naming a difference ----------------------------------------------------------------------------------------------


def _readable(batch: Mapping[str, Any]) -> Facts:
    facts: Facts = {}
    for name, value in batch.items():
        leaves, structure = private.tree_flatten(value)
        texts = []
        for leaf in leaves:
            text = _form(leaf)
            if isinstance(leaf, torch.Tensor):
                text += f" with digest {int(_content(leaf)) % (1 << 32):08x}"
            texts.append(text)
        facts[name] = ", ".join(texts) if len(leaves) == 1 else f"{structure}: {', '.join(texts)}"
    return facts


def _rows(
    spec: MeshSpec, ranks: list[int], every: Sequence[tuple[Facts, Facts, Facts, Mapping[str, Facts]]]
) -> list[tuple[str, str]]:
    """What differs, by fact: settings over all ranks, hyperparameters in each stage, the batch in each data rank, ties
    over pp."""
    rows = differing_rows({ranks[i]: settings for i, (_, settings, _, _) in enumerate(every)})
    rows += _tie_rows(spec, ranks, [ties for *_, ties in every])
    stages, batches = [stage for _, _, stage, _ in every], [batch for batch, *_ in every]
    for facts, shared in ((stages, ("pp",)), (batches, SAMPLE_AXES)):
        across = [axis for axis in spec.names if axis not in shared]
        seen: set[int] = set()
        for index in range(len(ranks)):
            if index in seen or not across:
                continue
            group = sorted(spec.group_of(index, *across))
            seen.update(group)
            rows += differing_rows({ranks[i]: facts[i] for i in group})
    return rows


def _diverged(rows: list[tuple[str, str]]) -> Problem:
    return Problem(
        "ranks-diverged",
        f"ranks that must run the same step differ in {len(rows)} of its facts",
        rows=tuple(rows[:20]),
        fix="give every rank of a data rank (its pp, cp and tp ranks) the same batch (`check_loader(loader, mesh)` "
        "tells whether the loader does), and all ranks the same calls and settings, and all copies of a tied parameter "
        "the same; check_replicated=False turns this check off",
    )


def _tie_rows(spec: MeshSpec, ranks: list[int], every: list[Mapping[str, Facts]]) -> list[tuple[str, str]]:
    """What differs between the copies of each tie, which are on some ranks of a pipeline group."""
    rows: list[tuple[str, str]] = []
    for name in sorted({name for ties in every for name in ties}):
        groups = {tuple(sorted(spec.group_of(index, "pp"))) for index, ties in enumerate(every) if name in ties}
        for group in sorted(groups):
            copies = {ranks[i]: every[i][name] for i in group if name in every[i]}
            rows += [(f"tie {name}, {key}", text) for key, text in differing_rows(copies)]
    return rows
