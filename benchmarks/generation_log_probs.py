"""Log-probabilities of generated tokens by the decoding that drew them, against those of training's forward.

    python -m benchmarks.generation_log_probs                            # one rank
    torchrun --nproc-per-node 2 -m benchmarks.generation_log_probs       # tp 2, logits that stay sharded (gloo)

A Llama with random weights, whose scale makes tokens depend on each other and some far more probable than most,
continues random prompts. Each new token has the log-probability that `generate` returns (`output_log_probs=True`): of
one token at a time, beside a cache. A forward of the whole sequences gives those that a step trains with. Compared with
these: decoding, the same forward again, forwards of fewer rows at a time, and of sequences that are padded on the right
or, with a mask, on the left. Distances do not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import write_record
from benchmarks.timing import join
from parallelize import build_mesh, destroy_groups, generate, parallelize_module, token_entropy, token_log_probs

T = torch.Tensor
PROMPT, CLIP = 32, 0.2


def model_of(dtype: torch.dtype, tp: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.08,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.5)
    model = model.to(dtype).eval()
    return model if tp == 1 else parallelize_module(model, build_mesh("cpu", tp=tp), loss_parallel=True)


def of_forward(model: nn.Module, ids: T, *, rows: int, left: int = 0, right: int = 0) -> T:
    """Log-probabilities [B, new] of the new tokens, by forwards of so many rows, padded by so many tokens."""
    extra: dict[str, T] = {}
    if left:
        mask = F.pad(torch.ones_like(ids[:rows]), (left, right))
        extra = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    first, stop = left + PROMPT - 1, left + ids.shape[1] - 1
    parts = []
    for part in ids.split(rows):
        padded = F.pad(part, (left, right))
        logits = model(input_ids=padded, use_cache=False, **extra).logits
        parts.append(token_log_probs(logits[:, first:stop], padded[:, first + 1 : stop + 1]))
    return torch.cat(parts)


def distance(actual: T, expected: T) -> dict[str, float]:
    """Between log-probabilities [B, new]: of tokens, of their ratios of probabilities, and of whole answers."""
    difference = (actual - expected).double()
    ratio = difference.exp()
    return {
        "equal": float((difference == 0).double().mean()),
        "mean": float(difference.abs().mean()),
        "largest": float(difference.abs().max()),
        "bias": float(difference.mean()),
        "ratios outside": float(((ratio - 1).abs() > CLIP).double().mean()),
        "largest of an answer": float(difference.sum(1).abs().max()),
    }


@torch.no_grad()
def measured(dtype: torch.dtype, tp: int, rows: int, new: int) -> dict[str, Any]:
    model = model_of(dtype, tp)
    prompts = torch.randint(8192, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    ids, decoded = generate(model, prompts, max_new_tokens=new, seed=2, eos_token_id=[], output_log_probs=True)
    expected = of_forward(model, ids, rows=rows)
    others = {
        "decoding": decoded,
        "the same forward again": of_forward(model, ids, rows=rows),
        "half of the rows": of_forward(model, ids, rows=rows // 2),
        "one row": of_forward(model, ids, rows=1),
        "7 tokens on the right": of_forward(model, ids, rows=rows, right=7),
        "7 tokens on the left": of_forward(model, ids, rows=rows, left=7),
    }
    entropy = token_entropy(model(input_ids=ids[:1], use_cache=False).logits).mean()
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "mean log-probability": float(expected.mean()),
        "entropy": float(entropy),
        "distances": {name: distance(log_probs, expected) for name, log_probs in others.items()},
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['tokens']:,} tokens, tp {result['tp']}; ratios outside of 1 +- {CLIP}")
    columns = ("equal", "mean", "largest", "bias", "ratios outside", "largest of an answer")
    print(" " * 36 + "".join(f"{name:>22}" for name in columns))
    for row in result["rows"]:
        for name, values in row["distances"].items():
            print(f"{row['dtype']:10}{name:26}" + "".join(f"{values[column]:22.3g}" for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=80, help="answers (80)")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each (128)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tp = 1
    if "WORLD_SIZE" in os.environ:
        join()
        tp = dist.get_world_size()
    rows = [measured(dtype, tp, args.rows, args.new) for dtype in (torch.float32, torch.bfloat16)]
    result = {"tokens": args.rows * args.new, "new": args.new, "prompt": PROMPT, "tp": tp, "clip": CLIP, "rows": rows}
    if tp == 1 or dist.get_rank() == 0:
        show(result)
        write_record(args.json, result)
    if tp > 1:
        destroy_groups()


if __name__ == "__main__":
    main()
