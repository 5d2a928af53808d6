"""Evaluation, forwards by hand, log-probabilities, sampling and generation, also between the steps of training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import parallelize
from parallelize import sample, token_entropy, token_log_probs, token_log_probs_and_entropy
from tests.matrix.axes import Axis
from tests.matrix.feature import at, feature
from tests.matrix.features.steps import packed_positions
from tests.matrix.kinds import IGNORED, ROWS, logits_of
from tests.matrix.sides import Side

T = torch.Tensor
TEXT = {"causal", "text"}
GENERATES = {"causal", "stock"}


def _whole_model(axis: Axis) -> bool:
    """A forward by hand is that of a whole model."""
    return "pp" not in axis.sizes


@feature(names=("evaluate",))
def evaluate(side: Side) -> None:
    side.place()
    side.evaluate(0)
    side.train()
    side.evaluate(2)


@at("between")
def evaluation_mode(side: Side, number: int) -> None:
    """`eval()` and `train()` around an evaluation between two steps."""
    side.model.eval()
    side.evaluate(number + 1)
    side.model.train()


@at("between", on=_whole_model, apart={"positions"})
def forward_by_hand(side: Side, number: int) -> None:
    side.evaluate_by_hand(number)
    side.model.eval()
    side.evaluate_by_hand(number + 1)
    side.model.train()


@at("between", apart={"positions"})
def outputs(side: Side, number: int) -> None:
    """What `ParallelModel.forward` returns by microbatch, on the ranks of the last stage."""
    _outputs(side)


@feature(needs=GENERATES, without={"recurrent"})
def outputs_of_packed_rows(side: Side) -> None:
    side.place()
    _outputs(side, position_ids=side.local(packed_positions()))


def _outputs(side: Side, **extra: T) -> None:
    with torch.no_grad():
        found = [side.forward(0, **extra)] if side.alone else side.parallel.forward(**side.inputs(0), **extra)
        targets = side.targets(0).chunk(max(len(found), 1))
        total = torch.zeros((), dtype=torch.float64)
        for output, wanted in zip(found, targets, strict=False):
            total += side.summed_loss(output, wanted)
    total = side.summed(total)
    if not side.alone and "pp" in side.axis.sizes:
        torch.distributed.all_reduce(total, group=side.mesh.get_group("pp"))
    side.record("summed", total)


def _chosen(side: Side) -> tuple[T, T]:
    """Logits of a batch, and this rank's targets, of which some are ignored."""
    return logits_of(side.forward(0)), side.split(side.targets(0))


def _plain(logits: T, ids: T, temperature: float = 1.0) -> tuple[T, T]:
    """Log-probabilities and entropies, by PyTorch."""
    log_probs = F.log_softmax(logits / temperature, dim=-1)
    chosen = log_probs.gather(-1, ids.clamp(min=0)[..., None])[..., 0].masked_fill(ids == IGNORED, 0)
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


@feature(on=_whole_model, needs=TEXT, names=("token_log_probs",))
def log_probs(side: Side) -> None:
    """With gradients: the backward of a loss by hand, where sums of data ranks are the loss."""
    side.place()
    logits, ids = _chosen(side)
    values = _plain(logits, ids)[0] if side.alone else token_log_probs(logits, ids)
    (values.square().sum() / side.count()).backward()
    side.record("values", side.whole(values.detach(), sequence=True))


@at("gradients", on=_whole_model, needs=TEXT, apart={"positions"})
def log_probs_without_gradient(side: Side, number: int) -> None:
    with torch.no_grad():
        logits, ids = _chosen(side)
        values = _plain(logits, ids, 0.7)[0] if side.alone else token_log_probs(logits, ids, temperature=0.7)
    side.record("values", side.whole(values, sequence=True))


@feature(on=_whole_model, needs=TEXT, names=("token_entropy", "token_log_probs_and_entropy"))
def entropy(side: Side) -> None:
    side.place()
    with torch.no_grad():
        logits, ids = _chosen(side)
        side.record("alone", side.whole(_plain(logits, ids)[1] if side.alone else token_entropy(logits), sequence=True))
    logits, ids = _chosen(side)
    chosen, entropies = _plain(logits, ids) if side.alone else token_log_probs_and_entropy(logits, ids)
    entropies = entropies.masked_fill(ids == IGNORED, 0)
    ((chosen + 0.5 * entropies).square().sum() / side.count()).backward()
    side.record("values", side.whole(entropies.detach(), sequence=True))


@feature(on=lambda axis: not {"pp", "cp"} & axis.sizes.keys(), needs=TEXT, names=("sample",))
def sampled(side: Side) -> None:
    """The same tokens as from full logits, by the rows' places in the batch."""
    side.place()
    with torch.no_grad():
        logits = logits_of(side.forward(0))[:, -1]
        rows = side.local(torch.arange(ROWS))
        for number, options in enumerate(({"temperature": 0}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05})):
            ids = sample(logits, seed=3, position=number, rows=rows, **options)
            side.record(f"ids {number}", side.whole(ids))


@feature(on=lambda axis: not {"pp", "cp"} & axis.sizes.keys(), needs=TEXT)
def greedy_ids(side: Side) -> None:
    """Against the largest of the logits."""
    side.place()
    with torch.no_grad():
        logits = logits_of(side.forward(0))
    side.record("ids", side.whole(logits.argmax(-1) if side.alone else sample(logits, temperature=0)))


def _prompts(side: Side, padded: bool) -> dict[str, Any]:
    ids = side.kind.batch(0)[0]["input_ids"][:, :6].clone()
    mask = torch.ones_like(ids)
    if padded:
        for row in range(ROWS):
            mask[row, : row % 4] = 0
        ids[mask == 0] = 0
    return side.local({"input_ids": ids, "attention_mask": mask})


GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _is_inside(side: Side) -> bool:
    """Whether the model that PEFT's `generate` calls is inside of the one that divides sequences, which refuses it:
    `outside-context`."""
    if side.alone or side.model is not side.parallel.module or not hasattr(side.model, "peft_config"):
        return False
    return "cp" in side.axis.sizes


def _counts_no_prompts(side: Side) -> bool:
    """Whether PEFT's `generate` gives wrong tokens: it drops positions, without which Bamba counts from 0."""
    return "recurrent" in side.kind.traits and _drops_positions(side.model)


def _drops_positions(model: nn.Module) -> bool:
    return getattr(getattr(model, "active_peft_config", None), "peft_type", None) == "PROMPT_TUNING"


def _greedy_without_cache(model: nn.Module, prompts: dict[str, Any]) -> torch.Tensor:
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    for _ in range(GREEDY["max_new_tokens"]):
        positions = {} if _drops_positions(model) else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, **positions, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids


def _generated(side: Side, padded: bool) -> None:
    """Greedy, by the loop of `transformers` on one process and by both loops on a mesh."""
    side.model.eval()
    prompts = _prompts(side, padded)
    ours = None
    if not side.alone:
        ours = parallelize.generate(side.model, **prompts, max_new_tokens=3, temperature=0, eos_token_id=[])
    if side.alone:
        ours = _greedy_without_cache(side.model, prompts)
    theirs = ours if _is_inside(side) or _counts_no_prompts(side) else side.model.generate(**prompts, **GREEDY)
    side.record("theirs", side.whole(theirs))
    side.record("ours", side.whole(ours))
    side.model.train()


# rows that generate are apart: their ids are inputs, of which a wider head would give others, and so would rounding
NO_CACHE = {
    "cut-model": "no stage has the whole model",
    "cache-over-cp": "caches of gathered modules are not divided",
    "generate-over-ep": "data ranks may generate other numbers of tokens, and experts take those of all",
}


CONTEXT_MATTERS = {"": {"initializer_range": 0.1}}
"""With the weights of a model that was just built, a token depends on the one before it alone."""


@at(
    "between", needs=GENERATES, names=("generate",), overrides=CONTEXT_MATTERS, refused=NO_CACHE, apart={"ids", "dtype"}
)
def generated(side: Side, number: int) -> None:
    _generated(side, padded=False)


@feature(on=lambda axis: not {"pp", "cp"} & axis.sizes.keys(), needs=GENERATES, refused=NO_CACHE)
def cached_logits(side: Side) -> None:
    """Of a prompt, and then of one token at a time."""
    side.place()
    side.model.eval()
    ids, cache = side.inputs()["input_ids"], None
    for number, tokens in enumerate((ids[:, :6], ids[:, 6:7], ids[:, 7:8])):
        with torch.no_grad():
            out = side.model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = out.logits if side.alone or not hasattr(out.logits, "full_tensor") else out.logits.full_tensor()
        side.record(f"logits {number}", side.whole(logits[:, -1]))


@at("gradients", needs=GENERATES, overrides=CONTEXT_MATTERS, refused=NO_CACHE, apart={"ids", "dtype"})
def generated_padded(side: Side, number: int) -> None:
    """Prompts of different lengths, padded on the left, between a backward and the update."""
    _generated(side, padded=True)


@feature(needs=GENERATES, overrides=CONTEXT_MATTERS, refused=NO_CACHE)
def generated_by_chance(side: Side) -> None:
    """The tokens of a seed, by our loop, do not depend on the mesh."""
    side.place()
    side.model.eval()
    rows = side.local(torch.arange(ROWS))
    ids = parallelize.generate(
        side.model, **_prompts(side, True), max_new_tokens=3, top_p=0.9, seed=4, rows=rows, eos_token_id=[]
    )
    side.record("ids", side.whole(ids))


# -- reinforcement learning ------------------------------------------------------------------------------------------


def _clipped(log_probs: T, stored: dict[str, T]) -> T:
    """The sum of a policy's clipped gains; 0 where the old log-probabilities and the advantages are."""
    ratio = (log_probs - stored["old"]).exp()
    return -torch.minimum(ratio * stored["gain"], ratio.clamp(0.8, 1.2) * stored["gain"]).sum()


def _policy_loss(side: Side) -> Any:
    def loss(output: Any, stored: dict[str, T]) -> T:
        logits, ids = logits_of(output), stored["targets"]
        return _clipped(_plain(logits, ids)[0] if side.alone else token_log_probs(logits, ids), stored)

    return loss


def _answers(side: Side, seed: int) -> tuple[T, dict[str, T]]:
    """Two answers to each prompt, and what a step needs of them: the group's normalized rewards, and the
    log-probabilities by which they were drawn."""
    prompts = side.kind.batch(0)[0]["input_ids"][0::2, :6].repeat_interleave(2, 0)
    rows = side.local(torch.arange(ROWS))
    ids, log_probs = parallelize.generate(
        side.model,
        side.local(prompts),
        max_new_tokens=2,
        temperature=1.0,
        seed=seed,
        rows=rows,
        eos_token_id=[],
        output_log_probs=True,
    )
    side.record("ids", side.whole(ids))
    side.record("log-probabilities", side.whole(log_probs))
    groups = (ids[:, 6:] % 7).double().sum(1).view(-1, 2)
    normalized = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 0.1)
    old, gain = (torch.zeros(ids.shape, dtype=torch.float64) for _ in range(2))
    old[:, 5:7], gain[:, 5:7] = log_probs, normalized.view(-1, 1) + 0.3  # else the first loss would be 0
    targets = torch.full_like(ids, IGNORED)
    targets[:, 5:7] = ids[:, 6:]
    return ids, {"targets": targets, "old": old, "gain": gain}


@feature(needs=GENERATES, without={"recurrent"}, overrides=CONTEXT_MATTERS, refused=NO_CACHE)
def answers_that_train(side: Side) -> None:
    """One model generates, and trains on its answers with a clipped ratio, twice on each."""
    side.place(loss=_policy_loss(side), count=lambda stored: (stored["targets"] != IGNORED).sum())
    for seed in range(2):
        side.model.eval()
        ids, stored = _answers(side, seed)
        side.model.train()
        for _ in range(2):
            side.step(input_ids=ids, targets=stored, attention_mask=None, position_ids=None)
            side.update()
    side.step(input_ids=ids, targets=stored, attention_mask=None, position_ids=None)
