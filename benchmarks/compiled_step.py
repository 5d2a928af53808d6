"""A training step of a planned model, eager and with each layer compiled by inductor; and how often a layer is
compiled.

    torchrun --nproc-per-node 2 -m benchmarks.compiled_step

A stock Llama of `transformers` over tp, with and without sequence parallelism and overlap. After the timed rounds the
batch changes its size three times: a layer may be compiled once more, for sizes that it then takes all of.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import build_mesh, cross_entropy, destroy_groups, next_tokens, overlap_report, parallelize_module

FORMS = {
    "tensor": {},
    "sequence": {"sequence_parallel": True},
    "sequence, chunked": {"sequence_parallel": True, "overlap": "chunked"},
    "sequence, auto": {"sequence_parallel": True, "overlap": "auto"},
}
VOCABULARY = 512


def llama(hidden: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=8, num_key_value_heads=4, **sizes))


def step_of(model: Any, batch: int, length: int) -> Callable[[], float]:
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = cross_entropy(model(input_ids=ids, use_cache=False).logits, next_tokens(ids))
        loss.backward()
        return float(loss)

    return step


def measure(hidden: int, form: str, args: argparse.Namespace) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    models = {}
    for name in ("eager", "compiled"):
        models[name] = llama(hidden, args.layers)
        parallelize_module(models[name], build_mesh("cpu", tp=dist.get_world_size()), loss_parallel=True, **FORMS[form])
    for layer in models["compiled"].model.layers:
        layer.compile(fullgraph=True)
    steps = {name: step_of(model, 2, args.length) for name, model in models.items()}
    losses = {name: step() for name, step in steps.items()}
    assert abs(losses["compiled"] - losses["eager"]) < 1e-5 * losses["eager"], losses
    first = counters["stats"]["unique_graphs"]
    times = interleaved(steps, args.rounds, before=dist.barrier)
    for batch in (3, 4, 5):
        step_of(models["compiled"], batch, args.length)()
    result = {
        "hidden": hidden,
        "form": form,
        "ms": medians_ms(times),
        "compiled over eager": ratio(times, "compiled", "eager"),
    }
    result |= {"graphs": first, "graphs of other batches": counters["stats"]["unique_graphs"] - first}
    return result | {"overlap": str(overlap_report(models["compiled"])) if "overlap" in FORMS[form] else ""}


def tell(result: dict[str, Any]) -> None:
    spread, ms = result["compiled over eager"], result["ms"]
    print(
        f"hidden {result['hidden']:5} {result['form']:18} eager {ms['eager']:6.1f} ms  compiled {ms['compiled']:6.1f} "
        "ms  "
        f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f}) times; "
        f"{result['graphs']} graphs, {result['graphs of other batches']} more for other batches",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    join(300.0)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    results = []
    for hidden in args.hidden:
        for form in args.forms:
            results.append(measure(hidden, form, args))
            if dist.get_rank() == 0:
                tell(results[-1])
    if dist.get_rank() == 0:
        write_record(args.json, {"results": results})
    dist.barrier()
    destroy_groups()


if __name__ == "__main__":
    main()
