"""What each part of a decoder does with one microbatch on one rank: ops, messages, memory. Arithmetic, torch-free.

The parts are the embedding, a layer, and the head with the loss. A recording of the code (`record/`) has the same
form; an outline needs no code, and can stand for kernels that the code does not call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.outline.decoder import Decoder
from parallelize.tools.analysis.record.kernel_sets import KernelSet, kernel_set
from parallelize.tools.analysis.record.trace_data import LAYERS, Kernel, MemoryChange, Message, Segment

ITEM = 2  # bytes of an element of 16 bits
SUM_ITEM = 4  # of a float32
DISPATCH_LAUNCHES = 24  # of `ep` in one direction: counts, two sorts of rows, and their sum; an assumption
RING_LAUNCHES = 8  # of a turn of the ring of cp: two messages, attention, and the sum of its results


@dataclass(frozen=True)
class Work:
    """One part in one direction. launches: of the host."""

    kernels: tuple[Kernel, ...] = ()
    messages: tuple[Message, ...] = ()
    launches: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.kernels + other.kernels, self.messages + other.messages, self.launches + other.launches)


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a decoder under one setting, whose mesh and batch say what one rank has of each tensor."""

    decoder: Decoder
    setting: Setting

    @cached_property
    def kernels(self) -> KernelSet:
        return kernel_set(self.setting.kernels)

    @cached_property
    def tp(self) -> int:
        return self.setting.size("tp")

    @cached_property
    def tokens(self) -> int:
        """Of a microbatch on one rank of cp."""
        return self.setting.microbatch_size * self.setting.sequence // self.setting.size("cp")

    @cached_property
    def residual_tokens(self) -> float:
        """Those whose hidden states one rank has between the regions of tp."""
        return self.tokens / (self.tp if self.setting.sequence_parallel else 1)

    @property
    def boundary_bytes(self) -> int:
        """Of what a stage sends to the next one."""
        return int(self.residual_tokens * self.decoder.hidden * ITEM)

    # -- a layer ------------------------------------------------------------------------------------------------------

    def layer_forward(self, dense: bool = False) -> Work:
        own, part = self.decoder, self.kernels
        hidden, hidden_whole = self.residual_tokens * own.hidden, self.tokens * own.hidden
        qk = self.tokens * (own.query_width + own.kv_width) / self.tp
        compute = [
            *self._linear(own.hidden, (own.query_width + 2 * own.kv_width) / self.tp),
            *self._attention(0),
            *self._linear(own.query_width / self.tp, own.hidden),
            *self._feed_forward(dense),
            _moved(2 * hidden * part.norm.forward),
            _moved(2 * hidden * part.residual.forward),
        ]
        if not own.positions:
            compute.append(_moved(qk * part.rotary.forward))
        messages = [*self._tp_pair(hidden_whole, "forward"), *self._tp_pair(hidden_whole, "forward")]
        messages += [*self._context_messages("forward", 1), *self._expert_messages(dense, "forward")]
        launches = part.launches.forward + self._ring_launches + self._expert_launches(dense, 2)
        return Work(tuple(compute), tuple(messages), launches)

    def layer_backward(self, dense: bool = False) -> Work:
        own, part = self.decoder, self.kernels
        hidden, hidden_whole = self.residual_tokens * own.hidden, self.tokens * own.hidden
        qk = self.tokens * (own.query_width + own.kv_width) / self.tp
        compute = [
            *self._linear(own.hidden, (own.query_width + 2 * own.kv_width) / self.tp, 2),
            *self._attention(1),
            *self._linear(own.query_width / self.tp, own.hidden, 2),
            *self._feed_forward(dense, 2),
            _moved(2 * hidden * part.norm.backward),
            _moved(2 * hidden * part.residual.backward),
            self._added(self._layer_gradients(dense)),
        ]
        if not own.positions:
            compute.append(_moved(qk * part.rotary.backward))
        messages = [*self._tp_pair(hidden_whole, "backward"), *self._tp_pair(hidden_whole, "backward")]
        messages += [*self._context_messages("backward", 2), *self._expert_messages(dense, "backward")]
        launches = part.launches.backward + 2 * self._ring_launches + self._expert_launches(dense, 4)
        return Work(tuple(compute), tuple(messages), launches)

    def layer_kept(self, dense: bool = False) -> float:
        """Bytes that a layer keeps for backward, without recompute, its input among them."""
        own, part = self.decoder, self.kernels
        residual, whole = self.residual_tokens * own.hidden, self.tokens
        kept = 2 * residual * part.norm.kept + residual * part.dropout
        kept += whole * (2 * own.query_width + 2 * own.kv_width) * ITEM / self.tp  # q, k, v, and the output
        if not own.positions:
            kept += whole * (own.query_width + own.kv_width) / self.tp * part.rotary.kept
        kept += self._scores() * part.scores.kept if part.has_scores else whole * own.heads / self.tp * SUM_ITEM
        activation = part.gated if own.gated else part.plain
        for width, tokens in self._ffn_widths(dense):
            kept += tokens * width * activation.kept
        if own.experts and not dense:
            kept += self._expert_rows_kept * own.hidden * ITEM
        return kept

    def layer_peak(self, dense: bool = False) -> float:
        """Bytes beside those that are kept, while a layer runs backward."""
        own, part = self.decoder, self.kernels
        activation = part.gated if own.gated else part.plain
        rows = sum(tokens * width for width, tokens in self._ffn_widths(dense))
        of_ffn = rows * (activation.peak + own.gates * ITEM)
        of_attention = self.tokens * (own.query_width + 2 * own.kv_width) / self.tp * ITEM * 2
        of_attention += self._scores() * part.scores.peak if part.has_scores else 0.0
        return max(of_ffn, of_attention) + 2 * self.tokens * own.hidden * ITEM

    # -- recompute ----------------------------------------------------------------------------------------------------

    def attention_again(self) -> tuple[Work, float]:
        """(what runs once more in backward, bytes that are not kept) where attention alone is recomputed."""
        return Work(tuple(self._attention(0)), (), 4), self._scores() * self.kernels.scores.kept

    def elements_again(self, dense: bool) -> tuple[Work, float]:
        """The same where results of matmuls and of attention are kept, and all else is computed again."""
        own, part = self.decoder, self.kernels
        activation = part.gated if own.gated else part.plain
        rows = sum(tokens * width for width, tokens in self._ffn_widths(dense))
        hidden = self.residual_tokens * own.hidden
        again = [_moved(2 * hidden * part.norm.forward), _moved(rows * activation.forward)]
        less = 2 * hidden * max(0.0, part.norm.kept - ITEM) + rows * max(0.0, activation.kept - own.gates * ITEM)
        if self.setting.matmuls_again:  # in their order: keys, what attention gives to the residual, and the gate
            width = rows / self.tokens
            again += self._linear(own.hidden, own.kv_width / self.tp)
            again += self._linear(own.query_width / self.tp, own.hidden)
            again += self._linear(own.hidden, width) if own.gated else ()
            less += (self.tokens * own.kv_width / self.tp + hidden + (rows if own.gated else 0)) * ITEM
        return Work(tuple(again), (), part.launches.forward / 2), less

    @property
    def _expert_rows_kept(self) -> float:
        """Rows of hidden width that a mixture keeps: what experts are given, sorted, and what they return; with `ep`
        also what arrived, before it was sorted, of every rank of an expert."""
        chosen = self.decoder.chosen
        if self.setting.ep == 1:
            return 2 * self.tokens * chosen / self.tp
        return self.residual_tokens * chosen * (1 + 2 * self._etp)

    def _expert_launches(self, dense: bool, matmuls: int) -> float:
        """Of matmuls that are launched for one expert after another, and of what tokens' way to other ranks takes."""
        own = self.decoder
        if dense or not own.experts:
            return 0.0
        ways = DISPATCH_LAUNCHES if self.setting.ep > 1 else 0
        return own.experts // max(self.setting.ep, 1) * matmuls * self.kernels.grouped + ways

    @cached_property
    def _etp(self) -> int:
        return max(self.setting.etp, 1) if self.setting.ep > 1 else self.tp

    def _ffn_widths(self, dense: bool) -> Iterator[tuple[float, float]]:
        """(width on this rank, tokens) of each feed-forward part of a layer."""
        own = self.decoder
        if not own.experts or dense:
            yield (own.dense_ffn if dense and own.dense_ffn else own.ffn) / self.tp, self.tokens
            return
        rows = self.residual_tokens if self.setting.ep > 1 else self.tokens
        yield own.ffn / self._etp, rows * own.chosen * (self._etp if self.setting.ep > 1 else 1)
        if own.shared_ffn:
            yield own.shared_ffn / self.tp, self.tokens

    def _feed_forward(self, dense: bool, times: int = 1) -> Iterator[Kernel]:
        own = self.decoder
        activation = self.kernels.gated if own.gated else self.kernels.plain
        moved = activation.forward if times == 1 else activation.backward
        local = own.experts // max(self.setting.ep, 1) if own.experts and not dense else 1
        for index, (width, tokens) in enumerate(self._ffn_widths(dense)):
            copies = local if index == 0 else 1
            yield from self._linear(own.hidden, own.gates * width, times, tokens, copies)
            yield from self._linear(width, own.hidden, times, tokens, copies)
            yield _moved(tokens * width * moved)
        if own.experts and not dense:
            copies = self._etp if self.setting.ep > 1 else 1
            # tokens are sorted by expert, and back
            yield _moved(self.residual_tokens * own.chosen * own.hidden * ITEM * 6 * copies)
            yield from self._linear(own.hidden, own.experts, times, int(self.residual_tokens))

    def _layer_gradients(self, dense: bool) -> float:
        """Elements of the weights of a layer on this rank."""
        own = self.decoder
        experts = own.experts if not dense else 0
        total = sum(weight.numel for weight in own.layer_weights() if not weight.is_expert) / self.tp
        if experts:
            each = sum(weight.numel for weight in own.layer_weights() if weight.is_expert)
            total += each * experts / (max(self.setting.ep, 1) * self._etp)
        return total

    def _added(self, elements: float) -> Kernel:
        """Gradients of weights are added to those that are there: by an op of its own, or while the matmul writes."""
        return Kernel(0.0, elements * self.setting.gradient_bytes * 2.0, self.kernels.adds_gradients)

    def _linear(
        self, inside: float, outside: float, times: int = 1, tokens: float | None = None, copies: int = 1
    ) -> Iterator[Kernel]:
        """times: matmuls of that size. copies: of the weight, among which the tokens are divided."""
        rows = self.tokens if tokens is None else tokens
        size = (rows * (inside + outside) + copies * inside * outside) * ITEM
        for _ in range(times):
            yield Kernel(2.0 * rows * inside * outside, size, True)

    def _attention(self, direction: int) -> Iterator[Kernel]:
        """direction: 0 forward, 1 backward."""
        own, part = self.decoder, self.kernels
        batch = self.setting.microbatch_size
        scores = float(batch) * self.setting.sequence**2 / self.setting.size("cp") * own.heads / self.tp
        matmuls = (2, 4 if part.has_scores else 5)[direction]
        name = ("forward", "backward")[direction]
        flops = 2.0 * matmuls * scores * own.width
        rows = self.tokens * (2 * own.query_width + 2 * own.kv_width) / self.tp * ITEM * (1 + direction)
        if part.has_scores:
            yield Kernel(flops, rows, True, name, own.width)
            yield _moved(scores * (part.scores.backward if direction else part.scores.forward))
        else:
            yield Kernel(flops / 2, rows, True, name, own.width)

    def _scores(self) -> float:
        return self.setting.microbatch_size * self.setting.sequence**2 * self.decoder.heads / self.tp

    # -- the ends -----------------------------------------------------------------------------------------------------

    def first_forward(self) -> Work:
        hidden = self.tokens * self.decoder.hidden
        messages = []
        if self.tp > 1:
            op = "reduce_scatter" if self.setting.sequence_parallel else "all_reduce"
            messages = [Message(op, "tp", self.tp, int(hidden * ITEM), "embedding", "forward")]
        return Work((_moved(hidden * 2 * ITEM),), tuple(messages), 6)

    def first_backward(self) -> Work:
        return Work((_moved(self.tokens * self.decoder.hidden * 4 * ITEM),), (), 6)

    @property
    def _logits(self) -> float:
        shards = self.tp if self.setting.loss_parallel else 1
        return self.tokens * self.decoder.vocab / shards

    def last_forward(self) -> Work:
        own, part = self.decoder, self.kernels
        hidden = self.residual_tokens * own.hidden
        compute = (_moved(hidden * part.norm.forward), *self._linear(own.hidden, own.vocab / self.tp))
        messages = list(self._gathered(self.tokens * own.hidden, "forward"))
        if self.tp > 1 and not self.setting.loss_parallel:
            size = int(self.tokens * own.vocab * ITEM)
            messages.append(Message("all_gather", "tp", self.tp, size, "head", "forward"))
        return Work((*compute, _moved(self._logits * part.logits.forward)), tuple(messages), 20)

    def last_backward(self) -> Work:
        own, part = self.decoder, self.kernels
        compute = (
            *self._linear(own.hidden, own.vocab / self.tp, 2),
            _moved(self.residual_tokens * own.hidden * part.norm.backward + self._logits * part.logits.backward),
            self._added(own.vocab * own.hidden / self.tp),
        )
        messages = []
        if self.tp > 1:
            op = "reduce_scatter" if self.setting.sequence_parallel else "all_reduce"
            messages = [Message(op, "tp", self.tp, int(self.tokens * own.hidden * ITEM), "head", "backward")]
        return Work(compute, tuple(messages), 20)

    @property
    def last_kept(self) -> float:
        """Bytes of the head and the loss that wait for backward."""
        return self._logits * self.kernels.logits.kept + self.residual_tokens * self.decoder.hidden * ITEM * 2

    @property
    def last_peak(self) -> float:
        """Bytes of the loss beside those. Logits that every rank of tp has in full were gathered: the parts that came,
        what they are joined to, and its gradient."""
        gathered = 3 * ITEM if self.tp > 1 and not self.setting.loss_parallel else 0
        return self._logits * (self.kernels.logits.peak + gathered + self.setting.training_system.logits)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _tp_pair(self, elements: float, phase: str) -> Iterator[Message]:
        """What one region of tp sends in one direction."""
        if self.tp == 1:
            return
        size = int(elements * ITEM)
        if not self.setting.sequence_parallel:
            yield Message("all_reduce", "tp", self.tp, size, LAYERS, phase)
            return
        yield Message("all_gather", "tp", self.tp, size, LAYERS, phase)
        yield Message("reduce_scatter", "tp", self.tp, size, LAYERS, phase)

    def _gathered(self, elements: float, phase: str) -> Iterator[Message]:
        if self.tp > 1 and self.setting.sequence_parallel:
            yield Message("all_gather", "tp", self.tp, int(elements * ITEM), "head", phase)

    def _context_messages(self, phase: str, times: int) -> Iterator[Message]:
        """Keys and values (in backward with their gradients) around the ring of cp, or gathered; or heads for tokens,
        and back."""
        ranks, own = self.setting.size("cp"), self.decoder
        if ranks == 1:
            return
        if self.setting.ulysses > 1:
            exchanged = self.tokens * (2 * own.query_width + 2 * own.kv_width) / self.tp * ITEM
            yield Message("all_to_all", "cp", ranks, int(exchanged), LAYERS, phase)
            return
        if self.setting.gathers_keys:
            size = int(self.tokens * ranks * 2 * own.kv_width / self.tp * ITEM)
            yield Message("all_gather", "cp", ranks, size, LAYERS, phase)
            if phase == "backward":
                yield Message("reduce_scatter", "cp", ranks, size, LAYERS, phase)
            return
        size = int(self.tokens * 2 * own.kv_width / self.tp * ITEM * times)
        for _ in range(ranks - 1):
            yield Message("send", "cp", 2, size, LAYERS, phase)

    @cached_property
    def _ring_launches(self) -> int:
        """Of one direction of a layer."""
        ranks = self.setting.size("cp")
        turns = 1 if self.setting.ulysses > 1 or self.setting.gathers_keys else ranks - 1
        return 0 if ranks == 1 else RING_LAUNCHES * turns

    def _expert_messages(self, dense: bool, phase: str) -> Iterator[Message]:
        """Tokens to their experts, and results back."""
        ranks = self.setting.ep * max(self.setting.etp, 1)
        if not self.decoder.experts or dense or self.setting.ep == 1:
            return
        size = int(self.residual_tokens * self.decoder.chosen * self.decoder.hidden * ITEM * max(self.setting.etp, 1))
        for _ in range(2):
            yield Message("all_to_all", "ep", ranks, size, "experts", phase)


def _moved(size: float) -> Kernel:
    return Kernel(0.0, size, False)


def segment(unit: str, work: Work, changes: Sequence[float]) -> Segment:
    """The segment of one unit. changes: bytes allocated (or freed), in order."""
    return Segment(
        unit,
        [MemoryChange(int(size), 0) for size in changes if size],
        list(work.messages),
        [kernel for kernel in work.kernels if kernel.bytes],
        launches=work.launches,
    )
