"""Tokens per second of generation under a plan, against `transformers`' own tensor parallelism on the same model.

    torchrun --nproc-per-node 2 -m benchmarks.generate      # needs `accelerate`, which transformers' loading requires

A Llama of `transformers` with random float32 weights, saved by `transformers` and loaded by each contender. The prompts are the
same, decoding is greedy, and the number of new tokens is fixed. Contenders are interleaved, and generate the same tokens.

| contender | |
|---|---|
| transformers | `from_pretrained` with `DistributedConfig(tp_size=...)`, its `generate` |
| stock loop | `parallelize_module` with the llama plan, `transformers`' `generate` |
| ours | the same plan with `loss_parallel=True`, `parallelize.generate`: logits stay sharded |
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.record import write_record
from benchmarks.timing import Times, interleaved, join, medians_ms, ratio
from parallelize import build_mesh, destroy_groups, generate, parallelize_module

PAIRS = [("stock loop", "transformers"), ("ours", "transformers"), ("ours", "stock loop")]


def saved(args: argparse.Namespace) -> str:
    """The folder of the model, which rank 0 writes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folders = [tempfile.mkdtemp(prefix="generate-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    if dist.get_rank() == 0:
        config = LlamaConfig(
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 11 // 4,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=args.vocab,
            initializer_range=0.2,  # tokens that depend on the prompt
        )
        LlamaForCausalLM(config).save_pretrained(folders[0])
    dist.barrier()
    return folders[0]


def contenders(folder: str, args: argparse.Namespace) -> dict[str, Callable[[], torch.Tensor]]:
    """Each returns [batch, prompt + new] tokens."""
    from transformers import LlamaForCausalLM

    size = dist.get_world_size()
    mesh = build_mesh("cpu", tp=size)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, args.vocab, (args.batch, args.length), generator=generator)
    fixed = dict(max_new_tokens=args.new, do_sample=False, eos_token_id=None, pad_token_id=0)

    def loaded(**how: Any) -> Any:
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()

    def stock(model: Any) -> Callable[[], torch.Tensor]:
        return lambda: model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **fixed)

    work = {}
    if find_spec("accelerate"):
        from transformers.distributed import DistributedConfig

        work["transformers"] = stock(loaded(distributed_config=DistributedConfig(tp_size=size)))
    elif dist.get_rank() == 0:
        print("accelerate is not installed, which transformers' parallel loading asks for: left out")
    work["stock loop"] = stock(parallelize_module(loaded(), mesh, "llama", src_data_rank=None))
    sharded = parallelize_module(loaded(), mesh, "llama", src_data_rank=None, loss_parallel=True)
    options = dict(max_new_tokens=args.new, temperature=0.0, eos_token_id=[], pad_token_id=0)
    work["ours"] = lambda: generate(sharded, ids, **options)
    return work


def check_equal(work: dict[str, Callable[[], torch.Tensor]], args: argparse.Namespace) -> None:
    """Check that all contenders generate the same tokens on every rank, and enough different ones."""
    tokens = {name: run() for name, run in work.items()}
    first = tokens["ours"].clone()
    dist.broadcast(first, 0)
    for name, output in tokens.items():
        if not torch.equal(output, first):
            raise SystemExit(f"tokens of {name!r} differ on rank {dist.get_rank()}")
    if first.shape != (args.batch, args.length + args.new) or len(first[:, args.length :].unique()) < args.new // 4:
        raise SystemExit("tokens are too few or too much alike to compare anything")


def report(times: Times, args: argparse.Namespace) -> dict[str, Any]:
    """Medians, and ratios of tokens per second, which are inverse ratios of times."""
    seconds = {name: ms / 1e3 for name, ms in medians_ms(times).items()}
    rates = {name: args.batch * args.new / value for name, value in seconds.items()}
    pairs = [pair for pair in PAIRS if set(pair) <= set(times)]
    ratios = {f"{top} / {bottom}": ratio(times, bottom, top) for top, bottom in pairs}
    if dist.get_rank() == 0:
        for name, rate in rates.items():
            print(f"  {name:<14} {rate:9.1f} tokens/s  {seconds[name] / args.new * 1e3:7.2f} ms a token")
        for name, value in ratios.items():
            print(f"  {name:<28} {value['median']:.3f} [{value['low']:.3f}, {value['high']:.3f}]")
    return {"tokens_per_s": rates, "ratios": ratios}


def quiet() -> None:
    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 512, "layers": 8, "vocab": 32000, "batch": 4, "length": 32, "new": 32, "rounds": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    join()
    quiet()
    folder = saved(args)
    try:
        work = contenders(folder, args)
        check_equal(work, args)
        results = report(interleaved(work, args.rounds, before=dist.barrier), args)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    if dist.get_rank() == 0:
        setting = {"ranks": dist.get_world_size()} | {name: getattr(args, name) for name in sizes}
        write_record(args.json, setting | results)
    destroy_groups()


if __name__ == "__main__":
    main()
