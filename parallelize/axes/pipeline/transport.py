"""Messages between stages: tensors whose shapes both sides know, and headers where they do not yet.

Messages are point to point on the pipeline's group. On backends that match them by order (NCCL), each pair of ranks
posts its messages in the order of the schedule. gloo matches by tag, so nothing depends on timing.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from parallelize.axes.pipeline.failure import LOOK_AT_PEER
from parallelize.base.errors import ModelError, PipelineError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group

T = torch.Tensor

_FAILED = 0  # the length of a header from a failed stage: nothing more is sent over this boundary in this step
_MAX_TENSORS = 256  # tags of one message, hence the number of its tensors


def check_count(tensors: Sequence[T], where: str) -> None:
    """Raises: ModelError `too-many-tensors` where a message has no tags for all its tensors."""
    if len(tensors) > _MAX_TENSORS:
        what = f"{where} sends {len(tensors)} tensors, and a message has at most {_MAX_TENSORS}"
        raise ModelError(Problem("too-many-tensors", what, fix="pass fewer, larger tensors"))


class Pending:
    """Tensors that are being received from the rank `peer` of the pipeline."""

    def __init__(self, tensors: list[T], works: list[Any], peer: int):
        self.tensors, self.works, self.peer = tensors, works, peer

    def wait(self) -> list[T]:
        """The tensors. Raises: PipelineError `peer-lost`."""
        for work in self.works:
            _finish(work, self.peer)
        self.works = []
        return self.tensors


class Transport:
    """The messages of one rank in one step.

    Args:
        group: the process group of the pipeline.
        device: the device of all tensors.
    """

    def __init__(self, group: Group, device: torch.device):
        self.group, self.device = group, device
        self.by_tag = group.backend(device) == "gloo"
        self._sending: list[tuple[Any, T, int]] = []  # (work, tensor, peer); sending needs the tensor

    def send(self, tensors: Sequence[T], peer: int, tag: int) -> None:
        """Start to send at most `_MAX_TENSORS` tensors; they are kept alive until they are sent."""
        self._sending = [message for message in self._sending if not message[0].is_completed()]
        for index, tensor in enumerate(tensors):
            tensor = tensor.detach().contiguous()
            work = dist.isend(tensor, self.group.ranks[peer], group=self.group.pg, tag=tag * _MAX_TENSORS + index)
            self._sending.append((work, tensor, peer))

    def receive(self, metas: Sequence[Meta], peer: int, tag: int) -> Pending:
        """Start to receive tensors of known shapes."""
        tensors, works = [], []
        for index, meta in enumerate(metas):
            tensor = meta.empty(self.device)
            tensors.append(tensor)
            works.append(
                dist.irecv(tensor, self.group.ranks[peer], group=self.group.pg, tag=tag * _MAX_TENSORS + index)
            )
        return Pending(tensors, works, peer)

    def send_header(self, header: StageHeader | None, peer: int, tag: int) -> None:
        """Start to send a header. None: this stage failed before it knew what it would send."""
        raw = torch.empty(0, dtype=torch.uint8) if header is None else header.to_bytes()
        size = torch.tensor([raw.numel() if header is not None else _FAILED], device=self.device)
        self.send([size] if header is None else [size, raw.to(self.device)], peer, tag)

    def receive_header(self, peer: int, tag: int) -> StageHeader | None:
        """Wait for a header. None: the sender failed."""
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._receive_now(size, peer, tag * _MAX_TENSORS)
        if int(size) == _FAILED:
            return None
        raw = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self._receive_now(raw, peer, tag * _MAX_TENSORS + 1)
        return StageHeader.from_bytes(raw)

    def _receive_now(self, tensor: T, peer: int, tag: int) -> None:
        _finish(dist.irecv(tensor, self.group.ranks[peer], group=self.group.pg, tag=tag), peer)

    def drain(self) -> None:
        """Wait until all messages of this rank are sent."""
        for work, _, peer in self._sending:
            _finish(work, peer)
        self._sending = []


def _finish(work: Any, peer: int) -> None:
    """Wait for a message. Raises: PipelineError `peer-lost`."""
    try:
        work.wait()
    except RuntimeError as error:
        raise _peer_lost(peer, error) from error


def _peer_lost(peer: int, error: BaseException) -> PipelineError:
    """The error for a neighbor that does not respond: its process ended, hangs, or raised an error."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    what = f"rank {peer} of the pipeline does not answer: {text}"
    return PipelineError(Problem("peer-lost", what, fix=LOOK_AT_PEER))


# -- payload ---------------------------------------------------------------------------------------------------------
# What is sent between two stages: the tensors of a call, and a header with their structure. The header is sent once
# for each signature of a step's inputs (shapes, dtypes, mode). Both sides store it, and later steps send tensors
# only.


@dataclass(frozen=True)
class Meta:
    """Shape, dtype and `requires_grad` of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, x: T) -> Meta:
        return cls(tuple(x.shape), x.dtype, x.requires_grad)

    def empty(self, device: torch.device) -> T:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def absent(self, device: torch.device) -> T:
        """The output of an absent module: NaN, so that a use of it is detected, in the memory of one element."""
        value = torch.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
        return torch.full((), value, dtype=self.dtype, device=device).expand(self.shape)


@dataclass(frozen=True)
class Nested:
    """A nested value with a `Meta` in place of each tensor.

    Attributes:
        leaves: the leaves in order, each a `Meta` or a value that is not a tensor.
        structure: the pytree structure.
    """

    leaves: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, value: Any) -> tuple[Nested, list[T]]:
        """(the value without its tensors, the tensors in order)."""
        leaves, structure = private.tree_flatten(value)
        form = tuple(Meta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(form, structure), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    @property
    def metas(self) -> list[Meta]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Meta)]

    def fill(self, make: Callable[[Meta], T]) -> Any:
        """The nested value, with a tensor from `make` for each `Meta`, in order."""
        leaves = [make(leaf) if isinstance(leaf, Meta) else leaf for leaf in self.leaves]
        return private.tree_unflatten(leaves, self.structure)


@dataclass(frozen=True)
class StageHeader:
    """What both sides of a stage boundary store.

    Attributes:
        content: what is sent: {"call": {position or name: value}, "skips": {unit: value}, "router": sums or None}.
        outputs: the output of each unit of the previous stages, by name.
        compared: digests of the call's other tensors, by position or name; both sides compute these tensors.
        region: the full sequence length, where the boundary is inside the sequence-parallel region.
    """

    content: Nested
    outputs: dict[str, Nested] = field(default_factory=dict)
    compared: dict[Any, list[list[int]]] = field(default_factory=dict)
    region: int | None = None

    def to_bytes(self) -> T:
        return torch.frombuffer(bytearray(pickle.dumps(self)), dtype=torch.uint8)

    @staticmethod
    def from_bytes(raw: T) -> StageHeader:
        return unpickled(raw)


def unpickled(raw: T) -> Any:
    """An object that a rank of the same job has pickled. Never used on data from elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.13 warns when it unpickles its own pytree structures
        return pickle.loads(bytes(raw.cpu().tolist()))


def check_same_form(sent: Nested, known: Nested, where: str) -> None:
    """Raises: ModelError `stage-output-changed` where the output of a stage differs from earlier ones for such
    inputs."""
    if sent.leaves != known.leaves or sent.structure != known.structure:
        raise ModelError(
            Problem(
                "stage-output-changed",
                f"{where} sends other tensors than it did before for inputs of the same shapes",
                rows=(("before", _shown(known)), ("now", _shown(sent))),
                fix="make output shapes, and what requires a gradient, depend on input shapes only; or pad",
            )
        )


def _shown(form: Nested) -> str:
    return (
        ", ".join(f"{list(m.shape)} {m.dtype}{' grad' if m.requires_grad else ''}" for m in form.metas) or "no tensor"
    )
