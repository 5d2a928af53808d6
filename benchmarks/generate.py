"""Prefill and decoding under a plan, against `transformers`' own tensor parallelism on the same model.

    torchrun --nproc-per-node 2 -m benchmarks.generate      # needs `accelerate`, which transformers' loading requires

A Llama of `transformers` with random float32 weights, saved by `transformers` and loaded by each contender. The prompts
are the same, decoding is greedy, and the number of new tokens is fixed. Contenders are interleaved, and generate the
same tokens. Prefill is the time of the prompt and the first new token; decoding is that of all tokens less that of the
first one, by round.

| contender | |
|---|---|
| transformers | `from_pretrained` with `DistributedConfig(tp_size=...)`, its `generate` |
| stock loop | `parallelize_module` with the llama plan, `transformers`' `generate` |
| ours | the same plan with `loss_parallel=True`, `parallelize.generate`: logits stay sharded |
| ours over sockets | the same where ranks share no memory: every sum goes through gloo |
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
from parallelize.comm.shared_memory import SharedMemory

PAIRS = [
    ("stock loop", "transformers"),
    ("ours", "transformers"),
    ("ours over sockets", "transformers"),
    ("ours", "stock loop"),
]
Generation = Callable[[int, int], torch.Tensor]
"""(batch, number of new tokens) -> tokens [batch, prompt + new]."""


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


def contenders(folder: str, args: argparse.Namespace) -> dict[str, Generation]:
    from transformers import LlamaForCausalLM

    size = dist.get_world_size()
    mesh = build_mesh("cpu", tp=size)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, args.vocab, (max(args.batch), args.length), generator=generator)
    fixed = dict(do_sample=False, eos_token_id=None, pad_token_id=0)

    def loaded(**how: Any) -> Any:
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()

    def stock(model: Any) -> Generation:
        def run(batch: int, new: int) -> torch.Tensor:
            ids = prompts[:batch]
            return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **fixed)

        return run

    work = {}
    if find_spec("accelerate"):
        from transformers.distributed import DistributedConfig

        work["transformers"] = stock(loaded(distributed_config=DistributedConfig(tp_size=size)))
    elif dist.get_rank() == 0:
        print("accelerate is not installed, which transformers' parallel loading asks for: left out")
    work["stock loop"] = stock(parallelize_module(loaded(), mesh, "llama", src_data_rank=None))
    sharded = parallelize_module(loaded(), mesh, "llama", src_data_rank=None, loss_parallel=True)
    options = dict(temperature=0.0, eos_token_id=[], pad_token_id=0)
    ours = work["ours"] = lambda batch, new: generate(sharded, prompts[:batch], max_new_tokens=new, **options)
    work["ours over sockets"] = lambda batch, new: over_sockets(lambda: ours(batch, new))
    return work


def over_sockets(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    SharedMemory.is_allowed = False
    try:
        return run()
    finally:
        SharedMemory.is_allowed = True


def check_equal(work: dict[str, Generation], batch: int, args: argparse.Namespace) -> None:
    """Check that all contenders generate the same tokens on every rank, and enough different ones."""
    tokens = {name: run(batch, args.new) for name, run in work.items()}
    first = tokens["ours"].clone()
    dist.broadcast(first, 0)
    for name, output in tokens.items():
        if not torch.equal(output, first):
            raise SystemExit(f"tokens of {name!r} differ on rank {dist.get_rank()}")
    if first.shape != (batch, args.length + args.new) or len(first[:, args.length :].unique()) < args.new // 4:
        raise SystemExit("tokens are too few or too much alike to compare anything")


def measure(work: dict[str, Generation], batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and ratios of rates, which are inverse ratios of times."""
    runs: dict[str, Callable[[], object]] = {}
    for name, run in work.items():
        runs[f"{name}, first"] = lambda run=run: run(batch, 1)
        runs[f"{name}, all"] = lambda run=run: run(batch, args.new)
    times = interleaved(runs, args.rounds, before=dist.barrier)
    first: Times = {name: times[f"{name}, first"] for name in work}
    rest = {name: [a - b for a, b in zip(times[f"{name}, all"], first[name], strict=True)] for name in work}
    pairs = [pair for pair in PAIRS if set(pair) <= set(work)]
    results: dict[str, Any] = {"batch": batch, "ms": {}, "ratios": {}}
    for phase, seconds, tokens in (("prefill", first, 1), ("decode", rest, args.new - 1)):
        results["ms"][phase] = {name: ms / tokens for name, ms in medians_ms(seconds).items()}
        results["ratios"][phase] = {f"{top} / {bottom}": ratio(seconds, bottom, top) for top, bottom in pairs}
    return results


def report(results: dict[str, Any]) -> None:
    if dist.get_rank() != 0:
        return
    print(f"\nbatch {results['batch']}: ms of the prompt, and of each further token")
    for name, ms in results["ms"]["prefill"].items():
        print(f"  {name:<18} {ms:9.2f} {results['ms']['decode'][name]:9.2f}")
    for phase, ratios in results["ratios"].items():
        print(f"rate of {phase}")
        for name, value in ratios.items():
            print(f"  {name:<32} {value['median']:.3f} [{value['low']:.3f}, {value['high']:.3f}]")


def quiet() -> None:
    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 512, "layers": 8, "vocab": 32000, "length": 32, "new": 32, "rounds": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    join()
    quiet()
    folder = saved(args)
    rows = []
    try:
        work = contenders(folder, args)
        for batch in args.batch:
            check_equal(work, batch, args)
            rows.append(measure(work, batch, args))
            report(rows[-1])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    if dist.get_rank() == 0:
        setting = {"ranks": dist.get_world_size()} | {name: getattr(args, name) for name in sizes}
        write_record(args.json, setting | {"rows": rows})
    destroy_groups()


if __name__ == "__main__":
    main()
