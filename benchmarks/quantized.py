"""A quantized base against one in bfloat16: memory while a Hub folder is loaded over tp, and the time of a linear.

    torchrun --nproc-per-node 2 -m benchmarks.quantized

| figure | |
|---|---|
| stored | bytes on a rank of the weights of linears in layers |
| risen | bytes by which the largest resident set of a rank grew while the folder was loaded (Linux) |
| read | bytes of the folder that a rank read |
| times | forward and backward of one linear in float32, without the gradient of its weight, over `nn.Linear` |
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.fused_loss import largest_resident
from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import QuantizedLinear, build_mesh, destroy_groups, load_pretrained, parallelize_module, quantize

DENSE, FORMATS = "bfloat16", ("nf4", "int8")


def config(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, "num_hidden_layers": args.layers}
    return LlamaConfig(**sizes, vocab_size=1024, num_attention_heads=8, num_key_value_heads=8)


def model_of(args: argparse.Namespace) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(config(args)).to(torch.bfloat16)


def loaded(form: str, folder: str, args: argparse.Namespace) -> dict[str, float]:
    """What loading takes on the rank that it takes most of."""
    with torch.device("meta"):
        model = model_of(args)
    if form != DENSE:
        quantize(model, form)
    model = parallelize_module(model, build_mesh("cpu", tp=dist.get_world_size()))
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident set begins anew
    before = largest_resident()
    read = load_pretrained(model, folder).bytes_read
    risen = largest_resident() - before
    linears = (p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2)
    stored = sum(p.to_local().nbytes for p in linears)
    figures = torch.tensor([stored, risen, read], dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return dict(zip(("stored", "risen", "read"), figures.tolist(), strict=True))


def linears(args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Forward and backward of a frozen linear."""
    x = torch.randn(args.tokens, args.hidden, requires_grad=True)
    modules: dict[str, nn.Module] = {}
    for form in (DENSE, *FORMATS):
        model = nn.Sequential(nn.Linear(args.hidden, args.hidden, bias=False).requires_grad_(False))
        modules[form] = model[0] if form == DENSE else quantize(model, form, modules="0")[0]
    assert all(isinstance(modules[form], QuantizedLinear) for form in FORMATS)

    def run(module: nn.Module) -> None:
        module(x).sum().backward()
        x.grad = None

    return {form: lambda module=module: run(module) for form, module in modules.items()}  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    join()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model_of(args).save_pretrained(folder[0])
    dist.barrier()
    sizes = {form: loaded(form, folder[0], args) for form in ("nf4", DENSE)}  # after another, memory is used again
    times = interleaved(linears(args), args.rounds, before=dist.barrier)
    if dist.get_rank() == 0:
        count = sizes[DENSE]["stored"] / 2
        for form, figures in sizes.items():
            text = ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in figures.items())
            print(f"{form:<10} {figures['stored'] / count:.5f} bytes a weight: {text}", flush=True)
        for form, milliseconds in medians_ms(times).items():
            print(f"{form:<10} {milliseconds:.1f} ms for forward and backward of a linear", flush=True)
        ratios = {form: ratio(times, form, DENSE) for form in FORMATS}
        shape = {"hidden": args.hidden, "layers": args.layers, "tokens": args.tokens}
        per_weight = {form: figures["stored"] / count for form, figures in sizes.items()}
        result = {**shape, "bytes": sizes, "bytes a weight": per_weight, "ms": medians_ms(times), "ratios": ratios}
        write_record(args.json, result)
    destroy_groups()


if __name__ == "__main__":
    main()
