"""One step of a pipeline on one rank: the actions of its schedule, and the messages between them.

When a stage fails, its rank goes on with the schedule's messages (zeros in place of tensors, "failed" in place of a
header), so that no other rank waits for it, and the failure is raised on all when the step has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch

from parallelize.errors import PipelineError
from parallelize.pipeline.failure import Failure
from parallelize.pipeline.feed import Feed
from parallelize.pipeline.package import Header, check_same_form
from parallelize.pipeline.schedules import Action, Schedule
from parallelize.pipeline.split_backward import WeightHalf, backward_inputs
from parallelize.pipeline.timeline import Receive, Send, Step
from parallelize.pipeline.transport import Pending, Transport
from parallelize.pipeline.units import Outcome

T = torch.Tensor
AHEAD = 2  # actions during which a message may be on its way
Headers = dict[tuple[int, tuple], Header]  # (stage that receives it, signature) -> header


class Runner(Protocol):
    """Runs a stage's forward."""

    def run(
        self, stage: int, args: tuple, kwargs: dict, content: dict[str, Any], header: Header | None, learn: bool
    ) -> Outcome: ...


class Data(Protocol):
    """What keeps the data axes in step: see `zero`."""

    def hold(self) -> None: ...

    def release(self, stage: int) -> None: ...

    def flush(self, stage: int) -> None: ...

    def finish(self) -> None: ...

    def reset(self) -> None: ...


@dataclass
class _Saved:
    """What a microbatch's backward needs of its forward."""

    inputs: list[T]
    outputs: list[T]
    weights: WeightHalf | None = None


@dataclass
class StepRun:
    """The state of one step.

    Attributes:
        steps: this rank's actions and messages, in order. loss_of: (output, targets) -> the microbatch's part of the loss.
        split: whether backward halves are run apart; else "I" does both.
        enter: called with (stage, microbatch, feed) before each action.
    """

    schedule: Schedule
    steps: Sequence[Step]
    runner: Runner
    transport: Transport | None
    feeds: list[Feed]
    signature: tuple
    headers: Headers
    root: torch.nn.Module
    loss_of: Callable[[Any, Any], T] | None
    split: bool = True
    data: Data | None = None
    enter: Callable[[int, int, Feed], None] | None = None
    record: bool = False

    losses: list[T] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    spans: list[tuple[Action, float, float]] = field(default_factory=list)
    failure: Failure | None = None
    cause: BaseException | None = None
    dead: bool = False
    _arriving: dict[tuple[int, int], Pending] = field(default_factory=dict)
    _content: dict[tuple[int, int], list[T]] = field(default_factory=dict)
    _grads: dict[tuple[int, int], Pending | list[T]] = field(default_factory=dict)
    _to_send: dict[tuple[int, int, str], list[T]] = field(default_factory=dict)
    _saved: dict[tuple[int, int], _Saved] = field(default_factory=dict)
    _closed: set[int] = field(default_factory=set)  # boundaries (by the stage after) over which nothing comes any more
    _learned: set[int] = field(default_factory=set)  # boundaries whose header is to be sent

    def __post_init__(self) -> None:
        self._mine = {step.stage for step in self.steps if isinstance(step, Action)}

    def run(self) -> None:
        """Raises: PipelineError `peer-lost`. Other failures are kept in `failure`."""
        last = self._last_backwards()
        early: set[Step] = set()
        for place, step in enumerate(self.steps):
            if isinstance(step, Send):
                self._send(step)
            elif isinstance(step, Receive):
                if step not in early:
                    self._receive(step)
            else:
                early |= self._post_early(place, early)
                if step in last and self.data is not None:
                    self.data.release(step.stage)
                self._act(step)
                if step.kind in self._ends and self.data is not None:  # a failed rank too: others wait for its part
                    self.data.flush(step.stage)
        if self.transport is not None:
            self.transport.drain()

    def _post_early(self, place: int, posted: set[Step]) -> set[Step]:
        """Where messages find their receive by tag, receives of the next actions are posted already: they then arrive
        during this one. Transports that match in order keep the order of the schedule."""
        found: set[Step] = set()
        if self.transport is None or not self.transport.by_tag:
            return found
        actions = 0
        for step in islice(self.steps, place + 1, None):
            actions += isinstance(step, Action)
            if actions > AHEAD:
                break
            if isinstance(step, Receive) and step not in posted and self._known(step):
                self._receive(step)
                found.add(step)
        return found

    def _known(self, step: Receive) -> bool:
        boundary = step.stage if step.direction == "F" else step.stage + 1
        return boundary not in self._closed and (boundary, self.signature) in self.headers

    @property
    def _ends(self) -> str:
        """Kinds of actions that complete a microbatch's gradients."""
        return "BW" if self.split else "BI"

    def _last_backwards(self) -> set[Action]:
        """For each stage the action that completes its gradients."""
        found: dict[int, Action] = {}
        for step in self.steps:
            if isinstance(step, Action) and step.kind in self._ends:
                found[step.stage] = step
        return set(found.values())

    def _act(self, action: Action) -> None:
        self._await(action)
        began = time.perf_counter()
        try:
            if not self.dead:
                if self.enter is not None:
                    self.enter(action.stage, action.microbatch, self.feeds[action.microbatch])
                {"F": self._forward, "B": self._backward, "I": self._input_half, "W": self._weight_half}[action.kind](
                    action.stage, action.microbatch
                )
        except PipelineError:
            raise
        except Exception as error:  # whatever a stock model raises
            self.failure = Failure.of(error, self.root, action.stage, action.microbatch, action.kind)
            self.cause, self.dead = error, True
            self._saved.clear()
        if self.record:
            self.spans.append((action, began, time.perf_counter()))

    def _await(self, action: Action) -> None:
        """Wait for what an action needs, which is no part of what it takes."""
        held: Any = self._arriving if action.kind == "F" else self._grads
        pending = held.get((action.stage, action.microbatch))
        if isinstance(pending, Pending) and action.kind != "W":
            pending.wait()

    # -- forward --------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int) -> None:
        feed = self.feeds[microbatch]
        header: Header | None = None
        tensors: list[T] = []
        if stage > 0:
            header, tensors = self._input_of(stage, microbatch)
            if header is None:
                self.dead = True
                return
        for meta, tensor in zip(header.content.metas if header else (), tensors, strict=True):
            tensor.requires_grad_(meta.requires_grad and torch.is_grad_enabled())
        parts = iter(tensors)
        content = header.content.fill(lambda _: next(parts)) if header else {"call": {}, "skips": {}}
        after = (stage + 1, self.signature)
        last = stage + 1 == self.schedule.num_stages
        learn = after not in self.headers
        outcome = self.runner.run(stage, feed.args, feed.kwargs, content, header, learn)
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        if last:
            if outcome.header is not None:
                self.headers[after] = outcome.header
            self._finish_forward(microbatch, inputs, outcome.output, feed)
        else:
            self._pass_on(stage, microbatch, inputs, outcome, learn)

    def _input_of(self, stage: int, microbatch: int) -> tuple[Header | None, list[T]]:
        key = (stage, microbatch)
        if key in self._content:
            tensors = self._content.pop(key)
        elif key in self._arriving:
            tensors = self._arriving.pop(key).wait()
        else:
            return None, []
        return self.headers[stage, self.signature], tensors

    def _finish_forward(self, microbatch: int, inputs: list[T], output: Any, feed: Feed) -> None:
        if self.loss_of is None:
            self.outputs.append(output)
            return
        loss = self.loss_of(output, feed.targets)
        self.losses.append(loss.detach())
        self._saved[self.schedule.num_stages - 1, microbatch] = _Saved(inputs, [loss])

    def _pass_on(self, stage: int, microbatch: int, inputs: list[T], outcome: Outcome, learned: bool) -> None:
        header, after = outcome.header, (stage + 1, self.signature)
        assert header is not None
        if learned:
            self.headers[after] = header
            self._learned.add(stage + 1)
        else:
            check_same_form(header.content, self.headers[after].content, f"stage {stage}")
        outputs = [tensor for tensor in outcome.tensors if tensor.requires_grad]
        self._saved[stage, microbatch] = _Saved(inputs, outputs)
        if self._is_mine(stage + 1):
            self._content[stage + 1, microbatch] = [tensor.detach() for tensor in outcome.tensors]
        else:
            self._to_send[stage, microbatch, "F"] = outcome.tensors

    # -- backward -------------------------------------------------------------------------------------------------

    def _grads_of(self, stage: int, microbatch: int) -> tuple[_Saved, list[T | None]]:
        saved = self._saved[stage, microbatch]
        if stage + 1 == self.schedule.num_stages:
            return saved, [None]
        found = self._grads.pop((stage, microbatch))
        return saved, list(found.wait() if isinstance(found, Pending) else found)

    def _backward(self, stage: int, microbatch: int) -> None:
        saved, grads = self._grads_of(stage, microbatch)
        if saved.outputs:
            torch.autograd.backward(saved.outputs, grads)
        self._return(stage, microbatch, saved.inputs)
        del self._saved[stage, microbatch]

    def _input_half(self, stage: int, microbatch: int) -> None:
        saved, grads = self._grads_of(stage, microbatch)
        if self.split and saved.inputs and saved.outputs:
            saved.weights = backward_inputs(saved.outputs, grads, saved.inputs)
            saved.outputs = []
        elif self.split and saved.outputs:  # the first stage has no inputs: all of it are weights
            outputs = saved.outputs
            saved.weights = WeightHalf([], list(zip(outputs, grads, strict=True)))
        elif saved.outputs:
            torch.autograd.backward(saved.outputs, grads)
        self._return(stage, microbatch, saved.inputs)
        saved.inputs = []

    def _weight_half(self, stage: int, microbatch: int) -> None:
        saved = self._saved.pop((stage, microbatch))
        if saved.weights is not None:
            saved.weights()

    def _return(self, stage: int, microbatch: int, inputs: list[T]) -> None:
        """Gradients of what came from the stage before, on their way back."""
        if stage == 0:
            return
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs]
        if self._is_mine(stage - 1):
            self._grads[stage - 1, microbatch] = grads
        else:
            self._to_send[stage, microbatch, "B"] = grads

    # -- messages -------------------------------------------------------------------------------------------------

    def _is_mine(self, stage: int) -> bool:
        return stage in self._mine

    def _tag(self, boundary: int, microbatch: int, direction: str) -> int:
        return (microbatch * (self.schedule.num_stages + 1) + boundary) * 4 + (0 if direction == "F" else 1)

    def _send(self, step: Send) -> None:
        assert self.transport is not None
        boundary = step.stage + 1 if step.direction == "F" else step.stage
        if boundary in self._closed:
            return
        tensors = self._to_send.pop((step.stage, step.microbatch, step.direction), None)
        header = self.headers.get((boundary, self.signature))
        tag = self._tag(boundary, step.microbatch, step.direction)
        if step.direction == "F" and (header is None or boundary in self._learned):
            self.transport.send_header(header, step.peer_rank, tag + 2)
            self._learned.discard(boundary)
            if header is None:
                self._closed.add(boundary)
                return
        assert header is not None
        if tensors is None:  # this rank has failed: the others go on for nothing, but go on
            metas = [meta for meta in header.content.metas if step.direction == "F" or meta.requires_grad]
            tensors = [torch.zeros(meta.shape, dtype=meta.dtype, device=self.transport.device) for meta in metas]
        self.transport.send(tensors, step.peer_rank, tag)

    def _receive(self, step: Receive) -> None:
        assert self.transport is not None
        boundary = step.stage if step.direction == "F" else step.stage + 1
        key, tag = (boundary, self.signature), self._tag(boundary, step.microbatch, step.direction)
        if step.direction == "F" and key not in self.headers and boundary not in self._closed:
            header = self.transport.receive_header(step.peer_rank, tag + 2)
            if header is None:
                self._closed.add(boundary)
                self.dead = True
            else:
                self.headers[key] = header
        if boundary in self._closed:
            return
        metas = self.headers[key].content.metas
        if step.direction == "F":
            self._arriving[step.stage, step.microbatch] = self.transport.receive(metas, step.peer_rank, tag)
        else:
            metas = [meta for meta in metas if meta.requires_grad]
            self._grads[step.stage, step.microbatch] = self.transport.receive(metas, step.peer_rank, tag)

    def settle(self) -> None:
        """Wait for what was sent here and is not wanted any more."""
        for pending in (*self._arriving.values(), *self._grads.values()):
            if isinstance(pending, Pending):
                pending.wait()
