"""Decoding on a GPU from a CUDA graph: the forward and draw of one token, captured once and replayed for the others.

They are hundreds of short kernels, which the host starts more slowly than a GPU runs them. A graph of them, with their
collectives, is started by one call. It repeats what was captured, with the same tensors: ids, positions and the key of
the draw are copied into it, and the cache has a fixed size (`caches`). When the cache is full, a larger one is made and
captured anew.

Forwards with the first such cache, captured and not, are compared with one that reads the prompt's own cache. Of each
graph the second replay is compared too, for what Python would do otherwise from token to token. If logits differ on a
rank, or a forward waits for the GPU or cannot be captured, all ranks go on without a graph, with a warning that says
why. The first forward with a cache may wait, as it compiles compiled layers: where one rank's does, all run that token
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelize.axes.vocabulary.generation.caches import set_length, why_not_fixed, with_fixed_room
from parallelize.axes.vocabulary.logits.forms import shard_of
from parallelize.axes.vocabulary.sampling.candidates import Candidates
from parallelize.axes.vocabulary.sampling.draw import SamplingOptions, can_be_captured, draw
from parallelize.base.errors import ModelError, Problem, warn_caller
from parallelize.base.torch_private import torch_cuda as private_cuda
from parallelize.comm.groups import Group
from parallelize.ops.random.counter import Key, KeyTensors
from parallelize.ops.vocabulary.softmax import working_dtype
from parallelize.state.records import applied

T = torch.Tensor
_MIN_NEW_TOKENS = 16  # for which a capture and its comparisons are worth their time
_MIN_ROOM, _ROOM_STEP = 256, 64  # in tokens; attention's kernels want rows of masks that are aligned
_MASKED = ("sdpa", "eager")  # attention that reads a mask, which hides the empty places of a fixed cache


def why_not(model: nn.Module, key_values: Any, tokens: int, device: torch.device) -> str:
    """Why the decoding of a model cannot be captured, in words that follow its name; "" if it can.

    Args:
        key_values: its cache of a prompt of `tokens` tokens.
        device: that of the prompt.
    """
    if not getattr(model, "_can_compile_fullgraph", False):
        return "does not say that its forward is one graph (`_can_compile_fullgraph` of transformers)"
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention not in _MASKED:
        return (
            f"computes attention by {attention}, not by {' or '.join(_MASKED)}, whose masks hide the empty places of a "
            "cache"
        )
    if applied(model).context is not None:
        return "stores a part of each cache on every rank of cp"
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return "gathers its weights in each forward (`fully_shard`)"
    if any(parameter.device != device for parameter in model.parameters()):
        return f"has parameters on other devices than {device}"
    return why_not_fixed(key_values, tokens)


def is_worthwhile(new_tokens: int) -> bool:
    return new_tokens >= _MIN_NEW_TOKENS


class CapturedDecoding:
    """Forwards and draws of one token a row, after a prompt.

    Args:
        forward: `forward(ids, cache, inputs)`, the model's output.
        options: of the draws.
        key_values: the cache of the prompt's `tokens` tokens, which is not changed.
        longest: tokens of the longest possible sequence.
        mask: [B, >= longest] of padded prompts, or None.
        groups: those whose ranks generate the same tokens.
        refuse: is called with a reason where no graph is used any more, on all ranks of the groups.
    """

    def __init__(
        self,
        forward: Callable[[T, Any, dict[str, T]], Any],
        options: SamplingOptions,
        key_values: Any,
        tokens: int,
        longest: int,
        mask: T | None,
        groups: Sequence[Group],
        refuse: Callable[[str], None],
    ):
        self.forward, self.options, self.longest, self.mask = forward, options, longest, mask
        self.groups, self.refuse = groups, refuse
        self.tokens, self.replays, self.is_refused = tokens, 0, False
        self.inputs: dict[str, T] = {}
        self.ids: T | None = None
        self.key: T | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self._make_room(key_values)

    def start(self, ids: T, position_ids: T | None, key: Key, expected: T) -> bool:
        """Run the token after the prompt too, whose logits are `expected` [B, V/P]; whether a graph gives them."""
        self._load(ids, position_ids, key)
        self._run_and_capture(expected)
        self.tokens += 1
        return self.graph is not None

    def __call__(self, ids: T, position_ids: T | None, key: Key) -> T:
        """The next tokens [B], drawn with `key`; a later call overwrites them.

        Shapes: ids, position_ids [B, 1].
        """
        self._load(ids, position_ids, key)
        if self.tokens == self.room:
            self._make_room(self.key_values)
            self._run_and_capture(None)
        elif self.graph is None:
            self._run()
        else:
            self._replay()
            if self.replays == 2:
                self._compare_once_more()
        self.tokens += 1
        return self.drawn if self.drawn is not None else draw(self.candidates, self.options, key)

    def _make_room(self, key_values: Any) -> None:
        wanted = min(self.longest, self.tokens + max(_MIN_ROOM, self.tokens // 4))
        self.room = -(-wanted // _ROOM_STEP) * _ROOM_STEP
        self.key_values = with_fixed_room(key_values, self.tokens, self.room)
        if self.mask is not None:
            missing = max(0, self.room - self.mask.shape[1])
            self.inputs["attention_mask"] = nn.functional.pad(self.mask, (0, missing), value=1)[:, : self.room]
        self.graph, self.replays = None, 0

    def _load(self, ids: T, position_ids: T | None, key: Key) -> None:
        """Copy the inputs to where the graph reads them."""
        if self.ids is None or self.key is None:
            self.ids, self.key = ids.clone(), torch.tensor(key, device=ids.device)
            if position_ids is not None:
                self.inputs["position_ids"] = position_ids.clone()
            return
        self.ids.copy_(ids)
        self.key.copy_(torch.tensor(key, pin_memory=ids.is_cuda), non_blocking=True)
        if position_ids is not None:
            self.inputs["position_ids"].copy_(position_ids)

    def _run(self) -> None:
        assert self.ids is not None and self.key is not None
        logits = self.forward(self.ids, self.key_values, self.inputs).logits[:, -1]
        self.candidates, self.drawn = Candidates.of(*shard_of(logits)), None
        if can_be_captured(self.candidates, self.options):
            self.drawn = draw(self.candidates, self.options, KeyTensors(*self.key.unbind()))

    def _run_and_capture(self, expected: T | None) -> None:
        """One token without a graph and, if that may be, from one; its logits are `expected`, if they are known."""
        waits = self._waits_of_a_run()  # it loads kernels and libraries as well
        if self.is_refused:
            return
        if self._on_any_rank(bool(waits)):  # compiled layers are compiled there, which waits too
            set_length(self.key_values, self.tokens)
            waits = self._waits_of_a_run()
        uncaptured, logits = (self.candidates, self.drawn), self.candidates.logits
        reason = f"its forward waits for the GPU at {waits[0]}" if waits else ""
        if not reason and expected is not None and not _are_near(logits, expected):
            reason = "its forward with a cache of fixed size gives other logits"
        if self._is_served(reason):
            set_length(self.key_values, self.tokens)
            graph, reason = self._capture()
            if self._is_served(reason):
                self.graph = graph
                self._replay()
                agrees = _agree(self.candidates.logits, logits)
                if self._is_served("" if agrees else "its captured forward gives other logits"):
                    return
        self.graph = None
        self.candidates, self.drawn = uncaptured
        set_length(self.key_values, self.tokens + 1)

    def _waits_of_a_run(self) -> list[str]:
        waits: list[str] = []
        with private_cuda.noted_waits(waits):
            self._run()
        return waits

    def _capture(self) -> tuple[torch.cuda.CUDAGraph | None, str]:
        assert self.ids is not None
        try:
            return private_cuda.captured(self._run, self.ids.device), ""
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0]
            return None, f"its forward cannot be captured ({first_line})"

    def _replay(self) -> None:
        assert self.graph is not None
        self.graph.replay()
        self.replays += 1

    def _compare_once_more(self) -> None:
        """The same token without the graph: what Python counts would be another number now."""
        of_graph = self.candidates, self.drawn
        replayed = self.candidates.logits.clone()
        set_length(self.key_values, self.tokens)
        self._run()
        agrees = _agree(replayed, self.candidates.logits)
        if self._is_served("" if agrees else "another replay of its captured forward gives other logits"):
            self.candidates, self.drawn = of_graph
        else:
            self.graph = None

    def _is_served(self, reason: str) -> bool:
        """Whether no rank of the groups has a reason not to go on; the same on all of them."""
        if self._on_any_rank(bool(reason)):
            self.is_refused = True
            self.refuse(reason or "another rank cannot use a graph")
        return not self.is_refused

    def _on_any_rank(self, holds: bool) -> bool:
        """Whether something holds on one of the groups' ranks at least."""
        count = torch.tensor(int(holds), device=self.candidates.logits.device)
        for group in self.groups:
            if group.size > 1:
                group.all_reduce(count, dist.ReduceOp.MAX)
        return bool(count)


def no_graph(what: str) -> ModelError:
    return ModelError(Problem("no-cuda-graph", what, fix="cuda_graph=None, which decodes without one"))


def warn_of(reason: str) -> None:
    what = f"generate decodes without a CUDA graph, which is slower: {reason}"
    warn_caller(f"{what}. cuda_graph=False decodes so without this warning", RuntimeWarning)


def _agree(actual: T, expected: T) -> bool:
    """Whether logits of the same kernels differ by no more than sums in another order: each by that much of the
    largest."""
    difference, scale = _difference(actual, expected)
    tolerance = torch.finfo(expected.dtype).eps ** 0.7  # 3e-2 in bfloat16, 1e-5 in float32
    return not expected.numel() or bool(difference.abs().amax() <= scale.abs().amax() * tolerance)


def _are_near(actual: T, expected: T) -> bool:
    """Whether logits of other kernels, whose roundings all layers pass on, are about the same: their norms, as a
    whole."""
    difference, scale = _difference(actual, expected)
    # 9e-2 in bfloat16, 3e-4 in float32, and in float64 too: models take norms and softmax in float32 there
    tolerance = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    return bool(difference.norm() <= scale.norm() * tolerance)


def _difference(actual: T, expected: T) -> tuple[T, T]:
    """(actual - expected, expected), in float32 at least, with 0 for logits that are infinite in both, and in the
    second."""
    expected = expected.to(working_dtype(expected))
    difference = torch.where(actual == expected, 0.0, actual - expected)
    return difference, torch.where(expected.isfinite(), expected, 0.0)
