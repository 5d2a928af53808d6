"""What docs/measurements.md says of one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.claim import GPU, Claim


def _range(result: Any, figure: Callable[[Any], float]) -> list[float]:
    """The least and the most of all families."""
    figures = [figure(row) for row in result["families"].values()]
    return [min(figures), max(figures)]


def _waits(result: Any, form: str) -> int:
    return sum(len(row["waits"][form]) for row in result["families"].values())


GPU_CLAIMS = (
    Claim(
        GPU,
        "step of a plan at tp 1 over the bare module's",
        "one_gpu",
        lambda result: [result["step planned/bare"]],
    ),
    Claim(
        GPU,
        "MFU of the vendor's 989 TFLOP/s: the plan / the bare module",
        "one_gpu",
        lambda result: [100 * result["mfu"][name] for name in ("planned", "bare")],
        "%",
    ),
    Claim(
        GPU,
        "over what `explain` predicts: peak memory / time of a step",
        "one_gpu",
        lambda result: [result["memory"]["measured/predicted"], result["step measured/predicted"]],
    ),
    Claim(
        GPU,
        "`transformers`' greedy generation, 64 tokens: time of the bare module over the plan's",
        "one_gpu",
        lambda result: [result["generate"]["bare/planned"]],
    ),
    Claim(
        GPU,
        "64 tokens after 32, batch 1: time of `transformers`' loop on the bare module over that of "
        "`parallelize.generate`: greedy / sampled with top-p 0.9",
        "one_gpu",
        lambda result: [result["generate"][f"bare/ours{drawn}"] for drawn in ("", ", sampled")],
    ),
    Claim(
        GPU,
        "pretrained weights, files in the page cache, onto the GPU, over `transformers`",
        "one_gpu",
        lambda result: [result["files"]["load ours/transformers"]],
    ),
    Claim(
        GPU,
        "rates with the building of the model: these weights by this package / by `transformers` / a checkpoint of "
        "this package, compared with its hashes",
        "one_gpu",
        lambda result: [result["files"][f"{name}_gb_s"] for name in ("load", "transformers_load", "restore")],
        "GB/s",
    ),
    Claim(
        GPU,
        "step of a plan over the bare module's where the host is slower than the GPU (hidden 1,024, 512 tokens): "
        "eager / layers compiled",
        "one_gpu_small",
        lambda result: [result["step planned/bare"], result["compiled"]["step planned/bare"]],
    ),
    Claim(
        GPU,
        "a step without an optimizer of ten families (hidden 1,024, 6 layers, 2,048 tokens), over the bare module's, "
        "the least and the most: plan",
        "one_gpu_families",
        lambda result: _range(result, lambda row: row["plan/bare"]["median"]),
    ),
    Claim(
        GPU,
        "the same with `loss_parallel`",
        "one_gpu_families",
        lambda result: _range(result, lambda row: row["loss parallel/bare"]["median"]),
    ),
    Claim(
        GPU,
        "the same by `parallelize_model` with `fuse_loss`",
        "one_gpu_families",
        lambda result: _range(result, lambda row: row["fused loss/bare"]["median"]),
    ),
    Claim(
        GPU,
        "how often the host waits for the GPU in these steps, the ten families together: bare / plan / "
        "`loss_parallel` / `fuse_loss`",
        "one_gpu_families",
        lambda result: [_waits(result, form) for form in ("bare", "plan", "loss parallel", "fused loss")],
        "waits",
    ),
    Claim(
        GPU,
        "head and loss in one over `F.linear` and `F.cross_entropy`, 8,192 tokens, 128,256 entries: time / memory",
        "one_gpu_ops",
        lambda result: [
            result["head and loss"]["fused/stock"],
            result["head and loss"]["peak_mib"]["fused"] / result["head and loss"]["peak_mib"]["stock"],
        ],
    ),
    Claim(
        GPU,
        "loss of bfloat16 logits over `F.cross_entropy` of them in float32, 4,096 tokens, 128,256 entries, forward "
        "and backward",
        "one_gpu_ops",
        lambda result: [result["loss"]["ours/stock"]],
    ),
    Claim(
        GPU,
        "attention as a ring of one rank over `scaled_dot_product_attention`, causal, 8,192 tokens, forward and "
        "backward",
        "one_gpu_ops",
        lambda result: [result["attention"]["ring/stock"]],
    ),
)
