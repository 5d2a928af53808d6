"""One step of a pipeline on one rank: the actions of its schedule, and the messages between them.

When a stage fails, its rank continues with the messages of the schedule (zeros in place of tensors, an empty header in
place of a header), so that no other rank waits for it. The failure is raised on all ranks at the end of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch

from parallelize.axes.pipeline.batch_reader import MicrobatchInputs
from parallelize.axes.pipeline.failure import Failure
from parallelize.axes.pipeline.interleaved_actions import InterleavedRunner, Pair
from parallelize.axes.pipeline.schedules import Action, Schedule
from parallelize.axes.pipeline.split_backward import Wgrad, backward_inputs
from parallelize.axes.pipeline.stage_forward import Outcome
from parallelize.axes.pipeline.timeline import Receive, Send, Step
from parallelize.axes.pipeline.transport import Pending, StageHeader, Transport, check_count, check_same_form
from parallelize.base.errors import PipelineError

T = torch.Tensor
AHEAD = 2  # a receive is posted at most this many actions before the one that needs it
StageHeaders = dict[tuple[int, tuple], StageHeader]
"""(receiving stage, signature of the inputs) to header. A boundary is named by the stage that receives over it in
forward."""


@dataclass
class _Saved:
    """What the backward of a microbatch needs of its forward."""

    inputs: list[T]  # received, that require a gradient
    outputs: list[T]  # sent, that require a gradient; or the loss
    wgrad: Wgrad | None = None


@dataclass
class StepRun:
    """The state of one step.

    Args:
        schedule: the schedule of all ranks.
        steps: this rank's actions and messages, in order.
        runner: runs the forward of a stage.
        transport: None on a pipeline of one rank.
        microbatches: inputs and targets of each.
        signatures: of the inputs of each microbatch, equal for all but where their texts have other images.
        headers: the headers of earlier steps; this step adds to them.
        root: the model, for messages.
        loss_of: (output, targets) to the microbatch's part of the loss. None: outputs are collected.
        split: dgrad ("I") and wgrad ("W") run separately; else "I" computes both, and "W" nothing.
        data: reduces gradients over the data axes.
        enter: called with (stage, microbatch, its inputs) before each action.
        run_pair: runs the two actions of a `Pair`.
        record: measure `spans`.

    Attributes:
        losses: the loss of each microbatch, on the rank of the last stage.
        outputs: the model's output for each microbatch, on the rank of the last stage, without `loss_of`.
        spans: (action, start, stop) in seconds, of each action.
        failure, cause: the failure of this rank and its exception, if a stage failed.
        stopped: this rank or its neighbor failed, so the rest of the step computes nothing.
    """

    schedule: Schedule
    steps: Sequence[Step | Pair]
    runner: Runner
    transport: Transport | None
    microbatches: list[MicrobatchInputs]
    signatures: Sequence[tuple]
    headers: StageHeaders
    root: torch.nn.Module
    loss_of: Callable[[Any, Any], T] | None
    split: bool = True
    data: Data | None = None
    enter: Callable[[int, int, MicrobatchInputs], None] | None = None
    run_pair: InterleavedRunner | None = None
    record: bool = False

    losses: list[T] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    spans: list[tuple[Action, float, float]] = field(default_factory=list)
    failure: Failure | None = None
    cause: BaseException | None = None
    stopped: bool = False
    _arriving: dict[tuple[int, int], Pending] = field(default_factory=dict)
    _content: dict[tuple[int, int], list[T]] = field(default_factory=dict)
    _grads: dict[tuple[int, int], Pending | list[T]] = field(default_factory=dict)
    _to_send: dict[tuple[int, int, str], list[T]] = field(default_factory=dict)
    _saved: dict[tuple[int, int], _Saved] = field(default_factory=dict)
    # boundaries, with signatures, after a failure: no such microbatch is sent over them any more
    _closed: set[tuple[int, tuple]] = field(default_factory=set)
    _new_headers: set[tuple[int, tuple]] = field(default_factory=set)  # those whose header must be sent

    def __post_init__(self) -> None:
        self._local_stages = {step.stage for step in self.steps if isinstance(step, Action)}

    def run(self) -> None:
        """Run all steps. Raises: PipelineError `peer-lost`. Other errors become `failure`."""
        last = self._last_backwards()
        early: set[Any] = set()
        for index, step in enumerate(self.steps):
            if isinstance(step, Send):
                self._send(step)
            elif isinstance(step, Receive):
                if step not in early:
                    self._receive(step)
            elif isinstance(step, Pair):
                self._act_in_turns(step)
                if self.data is not None:
                    self.data.flush(step.backward.stage)
            else:
                early |= self._post_early(index, early)
                if step in last and self.data is not None:
                    self.data.release(step.stage)
                self._act(step)
                if step.kind in self._final_kinds and self.data is not None:  # also after a failure: others wait for it
                    self.data.flush(step.stage)
        if self.transport is not None:
            self.transport.drain()

    def _post_early(self, index: int, posted: set[Step]) -> set[Step]:
        """Post the receives of the next actions, so that messages arrive during this one.

        Only where messages are matched by tag; otherwise the order of the schedule must be kept.
        """
        early: set[Step] = set()
        if self.transport is None or not self.transport.by_tag:
            return early
        actions = 0
        for step in islice(self.steps, index + 1, None):
            actions += isinstance(step, Action)
            if actions > AHEAD:
                break
            if isinstance(step, Receive) and step not in posted and self._has_header(step):
                self._receive(step)
                early.add(step)
        return early

    def _has_header(self, step: Receive) -> bool:
        key = (step.stage if step.direction == "F" else step.stage + 1, self.signatures[step.microbatch])
        return key not in self._closed and key in self.headers

    @property
    def _final_kinds(self) -> str:
        """The kinds of actions that complete the gradients of a microbatch."""
        return "BW" if self.split else "BI"

    def _last_backwards(self) -> set[Action]:
        """For each stage, the action that completes the gradients of the step."""
        last: dict[int, Action] = {}
        for step in self.steps:
            if isinstance(step, Action) and step.kind in self._final_kinds:
                last[step.stage] = step
        return set(last.values())

    def _act(self, action: Action) -> None:
        self._await(action)
        try:
            if not self.stopped:
                self._enter(action)
                self._compute(action)
        except PipelineError:
            raise
        except Exception as error:  # whatever a stock model raises
            self._fail(action, error)

    def _act_in_turns(self, pair: Pair) -> None:
        """The model is told of the forward alone: without recompute no backward asks where in the batch it is."""
        assert self.run_pair is not None
        failed: list[Action] = []

        def compute(action: Action) -> None:
            try:
                self._compute(action)
            except Exception:
                failed.append(action)
                raise

        if self.stopped:
            return
        self._enter(pair.forward)
        try:
            self.run_pair(pair, compute)
        except Exception as error:
            self._fail(failed[0] if failed else pair.forward, error)

    def _enter(self, action: Action) -> None:
        if self.enter is not None:
            self.enter(action.stage, action.microbatch, self.microbatches[action.microbatch])

    def _compute(self, action: Action) -> None:
        began = time.perf_counter()
        try:
            run = {"F": self._forward, "B": self._backward, "I": self._dgrad, "W": self._wgrad}[action.kind]
            run(action.stage, action.microbatch)
        finally:
            if self.record:
                self.spans.append((action, began, time.perf_counter()))

    def _fail(self, action: Action, error: Exception) -> None:
        self.failure = Failure.of(error, self.root, action.stage, action.microbatch, action.kind)
        self.cause, self.stopped = error, True
        self._saved.clear()

    def _await(self, action: Action) -> None:
        """Wait for the tensors that an action needs. The time of waiting is not part of its span."""
        received: Any = self._arriving if action.kind == "F" else self._grads
        pending = received.get((action.stage, action.microbatch))
        if isinstance(pending, Pending) and action.kind != "W":
            pending.wait()

    # -- forward --------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int) -> None:
        microbatch_inputs = self.microbatches[microbatch]
        header: StageHeader | None = None
        tensors: list[T] = []
        if stage > 0:
            header, tensors = self._input_of(stage, microbatch)
            if header is None:
                self.stopped = True
                return
        for meta, tensor in zip(header.content.metas if header else (), tensors, strict=True):
            tensor.requires_grad_(meta.requires_grad and torch.is_grad_enabled())
        received = iter(tensors)
        content = header.content.fill(lambda _: next(received)) if header else {"call": {}, "skips": {}}
        after = (stage + 1, self.signatures[microbatch])
        last = stage + 1 == self.schedule.num_stages
        make_header = after not in self.headers
        outcome = self.runner.run(stage, microbatch_inputs.args, microbatch_inputs.kwargs, content, header, make_header)
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        if last:
            if outcome.header is not None:
                self.headers[after] = outcome.header
            self._finish_forward(microbatch, inputs, outcome.output, microbatch_inputs)
        else:
            self._pass_on(stage, microbatch, inputs, outcome)

    def _input_of(self, stage: int, microbatch: int) -> tuple[StageHeader | None, list[T]]:
        """The output of the previous stage; no header where that stage failed."""
        key = (stage, microbatch)
        if key in self._content:
            tensors = self._content.pop(key)
        elif key in self._arriving:
            tensors = self._arriving.pop(key).wait()
        else:
            return None, []
        return self.headers[stage, self.signatures[microbatch]], tensors

    def _finish_forward(
        self, microbatch: int, inputs: list[T], output: Any, microbatch_inputs: MicrobatchInputs
    ) -> None:
        if self.loss_of is None:
            self.outputs.append(output)
            return
        loss = self.loss_of(output, microbatch_inputs.targets)
        self.losses.append(loss.detach())
        self._saved[self.schedule.num_stages - 1, microbatch] = _Saved(inputs, [loss])

    def _pass_on(self, stage: int, microbatch: int, inputs: list[T], outcome: Outcome) -> None:
        header, after = outcome.header, (stage + 1, self.signatures[microbatch])
        assert header is not None
        if after not in self.headers:
            if not self._is_local(stage + 1):
                # before the header is stored and sent: then the receiver learns of the failure, and waits for nothing
                check_count(outcome.tensors, f"stage {stage}")
            self.headers[after] = header
            self._new_headers.add(after)
        else:
            check_same_form(header.content, self.headers[after].content, f"stage {stage}")
        outputs = [tensor for tensor in outcome.tensors if tensor.requires_grad]
        self._saved[stage, microbatch] = _Saved(inputs, outputs)
        if self._is_local(stage + 1):
            self._content[stage + 1, microbatch] = [tensor.detach() for tensor in outcome.tensors]
        else:
            self._to_send[stage, microbatch, "F"] = outcome.tensors

    # -- backward -------------------------------------------------------------------------------------------------

    def _grads_of(self, stage: int, microbatch: int) -> tuple[_Saved, list[T | None]]:
        saved = self._saved[stage, microbatch]
        if stage + 1 == self.schedule.num_stages:
            return saved, [None]
        grads = self._grads.pop((stage, microbatch))
        return saved, list(grads.wait() if isinstance(grads, Pending) else grads)

    def _backward(self, stage: int, microbatch: int) -> None:
        saved, grads = self._grads_of(stage, microbatch)
        if saved.outputs:
            torch.autograd.backward(saved.outputs, grads)
        self._return(stage, microbatch, saved.inputs)
        del self._saved[stage, microbatch]

    def _dgrad(self, stage: int, microbatch: int) -> None:
        saved, grads = self._grads_of(stage, microbatch)
        if self.split and saved.inputs and saved.outputs:
            saved.wgrad = backward_inputs(saved.outputs, grads, saved.inputs)
            saved.outputs = []
        elif self.split and saved.outputs:  # the first stage has no inputs, so its backward is wgrad only
            outputs = saved.outputs
            saved.wgrad = Wgrad([], list(zip(outputs, grads, strict=True)))
        elif saved.outputs:
            torch.autograd.backward(saved.outputs, grads)
        self._return(stage, microbatch, saved.inputs)
        saved.inputs = []

    def _wgrad(self, stage: int, microbatch: int) -> None:
        saved = self._saved.pop((stage, microbatch))
        if saved.wgrad is not None:
            saved.wgrad()

    def _return(self, stage: int, microbatch: int, inputs: list[T]) -> None:
        """Pass the gradients of the received tensors to the previous stage."""
        if stage == 0:
            return
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs]
        if self._is_local(stage - 1):
            self._grads[stage - 1, microbatch] = grads
        else:
            self._to_send[stage, microbatch, "B"] = grads

    # -- messages -------------------------------------------------------------------------------------------------

    def _is_local(self, stage: int) -> bool:
        return stage in self._local_stages

    def _tag(self, boundary: int, microbatch: int, direction: str) -> int:
        return (microbatch * (self.schedule.num_stages + 1) + boundary) * 4 + (0 if direction == "F" else 1)

    def _send(self, step: Send) -> None:
        assert self.transport is not None
        boundary = step.stage + 1 if step.direction == "F" else step.stage
        key = (boundary, self.signatures[step.microbatch])
        if key in self._closed:
            return
        tensors = self._to_send.pop((step.stage, step.microbatch, step.direction), None)
        header = self.headers.get(key)
        tag = self._tag(boundary, step.microbatch, step.direction)
        if step.direction == "F" and (header is None or key in self._new_headers):
            self.transport.send_header(header, step.peer_rank, tag + 2)
            self._new_headers.discard(key)
            if header is None:
                self._closed.add(key)
                return
        assert header is not None
        if tensors is None:  # this rank has failed: zeros, so that the others reach the end of the step
            metas = [meta for meta in header.content.metas if step.direction == "F" or meta.requires_grad]
            tensors = [torch.zeros(meta.shape, dtype=meta.dtype, device=self.transport.device) for meta in metas]
        self.transport.send(tensors, step.peer_rank, tag)

    def _receive(self, step: Receive) -> None:
        assert self.transport is not None
        boundary = step.stage if step.direction == "F" else step.stage + 1
        key = (boundary, self.signatures[step.microbatch])
        tag = self._tag(boundary, step.microbatch, step.direction)
        if step.direction == "F" and key not in self.headers and key not in self._closed:
            header = self.transport.receive_header(step.peer_rank, tag + 2)
            if header is None:
                self._closed.add(key)
                self.stopped = True
            else:
                self.headers[key] = header
        if key in self._closed:
            return
        metas = self.headers[key].content.metas
        if step.direction == "F":
            self._arriving[step.stage, step.microbatch] = self.transport.receive(metas, step.peer_rank, tag)
        else:
            metas = [meta for meta in metas if meta.requires_grad]
            self._grads[step.stage, step.microbatch] = self.transport.receive(metas, step.peer_rank, tag)

    def settle(self) -> None:
        """Wait for messages that no action needs any more, after a failure."""
        for pending in (*self._arriving.values(), *self._grads.values()):
            if isinstance(pending, Pending):
                pending.wait()


# -- step parts ------------------------------------------------------------------------------------------------------
# What a step calls: the forward of a stage, and the reduction of gradients over the data axes.


class Runner(Protocol):
    """Runs a stage's forward."""

    def run(
        self,
        stage: int,
        args: tuple,
        kwargs: dict,
        content: dict[str, Any],
        header: StageHeader | None,
        make_header: bool,
    ) -> Outcome: ...


class Data(Protocol):
    """What a step calls to reduce gradients over the data axes: an `engine` of `zero`."""

    def hold(self) -> None: ...

    def release(self, stage: int) -> None: ...

    def flush(self, stage: int) -> None: ...

    def finish(self) -> None: ...

    def reset(self) -> None: ...
