"""Random combinations of what people do when they train: model, mesh, options, loss, optimizer, inputs, habits.

A combination is drawn from a seed, and says by itself what both sides run: `combination_runs.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any

MESHES: tuple[dict[str, int], ...] = (
    {"tp": 2},
    {"tp": 4},
    {"dp": 2},
    {"dp": 2, "tp": 2},
    {"pp": 2},
    {"pp": 2, "tp": 2},
    {"cp": 2},
    {"cp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
    {"dp": 2, "cp": 2},
    {"dp_replicate": 2, "dp": 2},
)

VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": (
        {},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {"mlp_bias": True, "intermediate_size": 74},
        {"vocab_size": 61, "attention_bias": False},
        {"attention_dropout": 0.3},
        {"num_key_value_heads": 8, "hidden_size": 40, "head_dim": 10},
    ),
    "mistral": ({}, {"num_key_value_heads": 2, "head_dim": 10}, {"sliding_window": 3, "tie_word_embeddings": True}),
    "qwen2": ({}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1}),
    "qwen3": ({}, {"num_key_value_heads": 1, "head_dim": 10}, {"attention_bias": True, "attention_dropout": 0.2}),
    "gemma2": ({}, {"num_key_value_heads": 1}, {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 7.0}),
    "gemma3": ({}, {"num_key_value_heads": 2}),
    "phi3": (
        {},
        {"num_key_value_heads": 1},
        {"resid_pdrop": 0.2, "attention_dropout": 0.1},
        {"tie_word_embeddings": True},
    ),
    "olmo2": ({}, {"num_key_value_heads": 2}, {"attention_bias": True}),
    "gpt2": ({}, {"resid_pdrop": 0.2, "attn_pdrop": 0.3, "embd_pdrop": 0.1}, {"tie_word_embeddings": False}),
    "gpt_neox": ({}, {"use_parallel_residual": False}, {"rotary_pct": 0.5, "hidden_dropout": 0.2}),
    "opt": ({}, {"dropout": 0.1}, {"do_layer_norm_before": False}),
    "bert": ({}, {"hidden_dropout_prob": 0.2}, {"tie_word_embeddings": False}),
}

HABITS = (
    "eval between",
    "edit weights",
    "edit weights by data",
    "load weights",
    "load some weights",
    "state dict round trip",
    "optimizer state round trip",
    "freeze",
    "unfreeze",
    "zero_grad to zeros",
    "no zero_grad",
    "learning rate",
    "exception in a forward",
    "gradient hook",
    "activation hook",
    "full backward hook",
    "copy evaluates",
    "checkpointing by transformers",
    "forward without backward",
    "resume elsewhere",
    "moving average",
    "requires_grad twice",
    "reset optimizer",
    "eval of a part",
    "train call",
    "swap weights and back",
)
INPUTS = (
    "ids",
    "ids",
    "embeds",
    "positions",
    "shifted positions",
    "packed",
    "right padding",
    "left padding",
    "mask 4-D",
    "strided ids",
    "int32 ids",
)
OPTIMIZERS = ("sgd", "momentum", "adamw", "adamw foreach", "adamw fused", "groups", "two", "adagrad", "nesterov")
MANUAL_LOSSES = ("cross_entropy", "F.cross_entropy", "stock labels", "log probs", "smoothing", "z-loss", "retain graph")
NAMES = ("norm", "bias", "embed", "layers.0", "layers.1", "mlp", "attn", "q_proj", "weight", "head")


@dataclass(frozen=True)
class Combination:
    """What one test configuration does.

    Attributes:
        seed: what it was drawn from.
        family, overrides: the model, of `tests.support.models`, and the fields of its config that differ.
        axes, options: the mesh, and keywords of `parallelize_model`.
        weights: dtype of the stored weights.
        loop: "step" for `parallel.step`, "manual" for forward and backward by hand.
        loss: "targets" or "labels" of `step`; one of MANUAL_LOSSES.
        optimizer: one of OPTIMIZERS. clip: the largest norm, or 0.
        rows, length: of each data rank's batch, before `microbatches` multiplies the rows.
        microbatches: of the pipeline or of the accumulation by hand.
        inputs: one of INPUTS. ignored: whether all labels of the first microbatch are ignored.
        habits: (step after which, one of HABITS, a part of names) in order.
        resumes_on: axes and options after "resume elsewhere".
        generates: whether tokens are generated at the end.
    """

    seed: int
    family: str
    overrides: dict[str, Any]
    axes: dict[str, int]
    options: dict[str, Any]
    weights: str
    loop: str
    loss: str
    optimizer: str
    clip: float
    rows: int
    length: int
    microbatches: int
    inputs: str
    ignored: bool
    habits: tuple[tuple[int, str, str], ...]
    resumes_on: tuple[dict[str, int], dict[str, Any]] = field(default=({}, {}))
    generates: bool = False

    @property
    def size(self) -> int:
        product = 1
        for ranks in self.axes.values():
            product *= ranks
        return product

    @property
    def dropout(self) -> bool:
        return any("drop" in name and value for name, value in self.overrides.items())

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))


def draw(seed: int) -> Combination:
    """The combination of a seed."""
    rng = random.Random(seed)
    axes = rng.choice(MESHES)
    family = rng.choice(sorted(VARIANTS))
    overrides = dict(rng.choice(VARIANTS[family]))
    weights = rng.choice(["float64"] * 8 + ["float32"])
    options, microbatches = _options(rng, axes, weights)
    overrides["num_hidden_layers"] = (
        2 if "pp" not in axes else 2 * options.get("stages_per_rank", 2) + rng.randint(0, 1)
    )
    loop = "step" if "pp" in axes else rng.choice(["step", "manual", "manual"])
    loss = rng.choice(["targets", "labels"]) if loop == "step" else rng.choice(MANUAL_LOSSES)
    dropout = any("drop" in name and value for name, value in overrides.items())
    if dropout and loop == "manual":
        microbatches = 1
    inputs = rng.choice([kind for kind in INPUTS if kind != "mask 4-D" or "cp" not in axes])
    habits = tuple(
        (step, rng.choice(HABITS), rng.choice(NAMES)) for step in range(3) for _ in range(rng.choice([0, 1, 1, 2]))
    )
    return Combination(
        seed=seed,
        family=family,
        overrides=overrides,
        axes=axes,
        options=options,
        weights=weights,
        loop=loop,
        loss=loss,
        optimizer=rng.choice(OPTIMIZERS),
        clip=rng.choice([0.0, 0.0, 0.3, 1.0]),
        rows=rng.choice([1, 1, 2, 3]),
        length=rng.choice([5, 7, 8, 11]),
        microbatches=microbatches,
        inputs=inputs,
        ignored=rng.random() < 0.15,
        habits=habits,
        resumes_on=_elsewhere(rng, axes, plain=loop == "step"),
        generates=rng.random() < 0.2,
    )


def _options(rng: random.Random, axes: dict[str, int], weights: str) -> tuple[dict[str, Any], int]:
    options: dict[str, Any] = {}
    microbatches = rng.choice([1, 1, 2, 3])
    if "tp" in axes:
        for name in ("sequence_parallel", "loss_parallel"):
            if rng.random() < 0.5:
                options[name] = True
        if rng.random() < 0.25:
            options["overlap"] = "chunked"
    if rng.random() < 0.2:
        options["fuse_loss"] = True
    if "dp" in axes:
        options["zero"] = rng.randrange(4)
        if options["zero"] >= 2 and rng.random() < 0.3:
            options["defer"] = True
    if rng.random() < 0.25:
        options["recompute"] = rng.choice(["full", "selective"])
        if rng.random() < 0.3:
            options["recompute_every"] = 2
    if axes.get("cp") and rng.random() < 0.4:
        options["ulysses"] = 2
    if "pp" in axes:
        name = rng.choice(
            ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "looped_bfs", "dualpipe_v"]
        )
        options["schedule"] = name
        microbatches = rng.choice([2, 4])
        if name == "dualpipe_v":
            microbatches = 4
        if name not in ("gpipe", "1f1b"):
            options["stages_per_rank"] = 2
        options["num_microbatches"] = microbatches
    if weights == "float32" and rng.random() < 0.5:
        options["dtype"] = "bfloat16"
    return options, microbatches


def _elsewhere(rng: random.Random, axes: dict[str, int], plain: bool) -> tuple[dict[str, int], dict[str, Any]]:
    """A mesh of as many ranks, which can go on as the run has begun."""
    same_size = [other for other in MESHES if _product(other) == _product(axes)]
    possible = [other for other in same_size if plain or "pp" not in other]
    other = rng.choice(possible)
    options: dict[str, Any] = {}
    if "dp" in other:
        options["zero"] = rng.randrange(4)
    if "tp" in other and rng.random() < 0.5:
        options["sequence_parallel"] = True
    return other, options


def _product(axes: dict[str, int]) -> int:
    product = 1
    for ranks in axes.values():
        product *= ranks
    return product
