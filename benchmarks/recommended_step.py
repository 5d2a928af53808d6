"""The call that the documents recommend, `parallel.step` with its checks, against a loop over the same planned model.

    python -m benchmarks.recommended_step --json benchmarks/results/recommended_step.json

The loop runs forward, `cross_entropy` and backward of what `parallelize_module` planned. A Llama of `transformers`,
hidden 64, batches of 2 x 16 tokens, on one rank of a fake group: processor time of the host alone, by number of layers
and of ranks, with and without sequence parallelism. Every round times each form once; ratios are medians over rounds,
with a 95% interval of the median.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.record import write_record
from benchmarks.timing import interleaved, ratio
from parallelize import build_mesh, cross_entropy, destroy_groups, next_tokens, parallelize_model, parallelize_module

VOCAB = 512


def llama(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=64, intermediate_size=192, num_attention_heads=8, num_key_value_heads=8)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=layers, **sizes))


def forms(layers: int, tp: int, sequence_parallel: bool) -> dict[str, Callable[[], None]]:
    """A step of each form, after which no gradient is left."""
    mesh, options = build_mesh("cpu", tp=tp), {"sequence_parallel": sequence_parallel, "loss_parallel": True}
    ids = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    targets = next_tokens(ids)
    model = parallelize_module(llama(layers), mesh, **options)
    parallel = parallelize_model(llama(layers), mesh, **options)

    def loop() -> None:
        cross_entropy(model(input_ids=ids, use_cache=False).logits, targets).backward()
        model.zero_grad()

    def step() -> None:
        parallel.step(input_ids=ids, targets=targets)
        parallel.module.zero_grad()

    return {"loop": loop, "step": step}


def measure(layers: int, tp: int, sequence_parallel: bool, rounds: int) -> dict[str, Any]:
    times = interleaved(forms(layers, tp, sequence_parallel), rounds, clock=time.process_time)
    return {
        "layers": layers,
        "tp": tp,
        "sequence_parallel": sequence_parallel,
        "loop_ms": sorted(times["loop"])[rounds // 2] * 1e3,
        "step over loop": ratio(times, "step", "loop"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 32])
    parser.add_argument("--tp", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    results = []
    for tp in options.tp:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
        for layers in options.layers:
            for sequence_parallel in (False, True):
                result = measure(layers, tp, sequence_parallel, options.rounds)
                value, form = result["step over loop"], "TP + SP" if sequence_parallel else "TP"
                print(
                    f"tp {tp}, {layers:2d} layers, {form:<7}  loop {result['loop_ms']:6.1f} ms  step over loop ", end=""
                )
                print(f"{value['median']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]", flush=True)
                results.append(result)
        destroy_groups()
    write_record(options.json, {"group": "fake", "results": results})


if __name__ == "__main__":
    main()
