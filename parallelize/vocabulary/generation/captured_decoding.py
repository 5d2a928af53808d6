"""Decoding on a GPU without Python: the forward and draw of one token, captured in a CUDA graph and replayed for the others.

They are hundreds of short kernels, which the host starts more slowly than a GPU runs them. A graph of them, with their collectives,
is started by one call. It repeats what was captured, with the same tensors: ids, positions and the key of the draw are copied into
it, and the cache has a fixed size (`fixed_cache`). When the cache is full, a larger one is made and captured anew.

Of each graph the second replay is compared with a forward that is not captured: if its logits differ, or nothing could be captured,
decoding goes on without a graph, with a warning. Ranks need not agree on that: all of them run the same collectives in any case.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelize.applied.records import applied
from parallelize.ops.random.counter import Key, KeyTensors
from parallelize.vocabulary.generation.fixed_cache import can_be_fixed, set_length, with_fixed_room
from parallelize.vocabulary.logits.forms import shard_of
from parallelize.vocabulary.sampling.candidates import Candidates
from parallelize.vocabulary.sampling.draw import SamplingOptions, can_be_captured, draw

T = torch.Tensor
_FEWEST = 8  # tokens for which a capture and its check are worth their time
_LEAST_ROOM, _ROOM_STEP = 256, 64  # in tokens; attention's kernels want rows of masks that are aligned


def why_not(model: nn.Module, key_values: Any) -> str:
    """Why the decoding of a model cannot be captured, in words that follow its name; "" if it can."""
    if not getattr(model, "_can_compile_fullgraph", False):
        return "does not say that its forward is one graph (`_can_compile_fullgraph` of transformers)"
    if applied(model).context is not None:
        return "stores a part of each cache on every rank of cp"
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return "gathers its weights in each forward (`fully_shard`)"
    if not can_be_fixed(key_values):
        return "has a cache with layers other than transformers' DynamicLayer and DynamicSlidingWindowLayer"
    return ""


def is_worthwhile(new_tokens: int) -> bool:
    return new_tokens >= _FEWEST


class CapturedDecoding:
    """Forwards and draws of one token a row, after a prompt.

    Args:
        forward: `forward(ids, cache, inputs)`, the model's output.
        options: of the draws.
        key_values: the cache of the prompt's `tokens` tokens.
        longest: tokens of the longest possible sequence.
        mask: [B, >= longest] of padded prompts, or None.
    """

    def __init__(
        self,
        forward: Callable[[T, Any, dict[str, T]], Any],
        options: SamplingOptions,
        key_values: Any,
        tokens: int,
        longest: int,
        mask: T | None,
    ):
        self.forward, self.options, self.longest, self.mask = forward, options, longest, mask
        self.tokens, self.is_refused = tokens, False
        self.inputs: dict[str, T] = {}
        self.ids: T | None = None
        self.key: T | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self._make_room(key_values)

    def __call__(self, ids: T, position_ids: T | None, key: Key) -> T:
        """The next tokens [B], drawn with `key`; a later call overwrites them.

        Shapes: ids, position_ids [B, 1].
        """
        if self.tokens == self.room:
            self._make_room(self.key_values)
        self._load(ids, position_ids, key)
        self.calls += 1
        if self.calls == 1:
            self._run()  # loads kernels and libraries
        elif self.calls == 2:
            self._capture()
            self._replay()
        elif self.calls == 3:
            self._compare()
        else:
            self._replay()
        self.tokens += 1
        return self.drawn if self.drawn is not None else draw(self.candidates, self.options, key)

    def _make_room(self, key_values: Any) -> None:
        wanted = min(self.longest, self.tokens + max(_LEAST_ROOM, self.tokens // 4))
        self.room = -(-wanted // _ROOM_STEP) * _ROOM_STEP
        self.key_values = with_fixed_room(key_values, self.tokens, self.room)
        if self.mask is not None:
            missing = max(0, self.room - self.mask.shape[1])
            self.inputs["attention_mask"] = nn.functional.pad(self.mask, (0, missing), value=1)[:, : self.room]
        self.graph, self.calls = None, 0

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

    def _capture(self) -> None:
        if self.is_refused:
            return
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may allocate meanwhile: they are not captured
            with _no_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._run()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            self._refuse(f"its forward cannot be captured ({reason})")
            return
        self.graph = graph

    def _replay(self) -> None:
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()

    def _compare(self) -> None:
        """One token twice, with the graph and without."""
        results = self.candidates, self.drawn
        self._replay()
        replayed = self.candidates.logits.clone()
        set_length(self.key_values, self.tokens)
        self._run()
        if not _agree(replayed, self.candidates.logits):
            self._refuse("a replay of its captured forward gives other logits")
            self.graph = None
        elif self.graph is not None:  # whose next replays write there
            self.candidates, self.drawn = results

    def _refuse(self, why: str) -> None:
        self.is_refused = True
        what = f"generate decodes without a CUDA graph, which takes several times as long: {why}"
        warnings.warn(f"{what}. cuda_graph=False decodes so without this warning", RuntimeWarning, stacklevel=5)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A context without garbage collections: one that frees memory of the GPU would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _agree(replayed: T, expected: T) -> bool:
    """Whether logits differ by no more than kernels that sum in another order."""
    if not expected.numel():
        return True
    tolerance = torch.finfo(expected.dtype).eps ** 0.7  # 3e-2 in bfloat16, 1e-5 in float32
    difference = torch.where(replayed == expected, 0.0, replayed - expected)  # both may be infinite
    limit = torch.where(expected.isfinite(), expected, 0.0).abs().amax() * tolerance
    return bool(difference.abs().amax() <= limit)
