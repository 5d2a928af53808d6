"""Pretrained weights into tensor-parallel shards: this package, `transformers`' own loading, and reading everything.

    python -m benchmarks.load      # needs `accelerate`, which transformers' loading requires

A Llama of `transformers` with random float32 weights, saved by `transformers`. Each contender starts from the folder
and ends with a model that is parallelized over tp and stores its shards. Files are in the page cache. Every time is
measured in fresh processes, because a run loads once, into newly allocated memory. Contenders are interleaved.

Three times are measured, one after another: until the call returns; until every weight was read once, as a first
forward does; and until every weight was then written to once, as a first optimizer step does. `transformers` returns
weights of which most are mapped from the files, and copied when they are first written to.

| contender | |
|---|---|
| ours | model on meta, `parallelize_module`, `load_pretrained` |
| ours, mapped | the same with `mapped=True`: shards along dim 0 stay in the file |
| transformers | `from_pretrained` with `DistributedConfig(tp_size=...)` |
| everything | each rank reads the full model, and `parallelize_module` shards it |
| slices alone | the same shards read by `safetensors` into new tensors, without a model: the lower bound |
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from benchmarks.record import write_record
from benchmarks.timing import join, ratio
from parallelize import build_mesh, destroy_groups, load_pretrained, parallelize_module, shard_info
from parallelize.checkpoint.hub.pretrained import Loaded

NAMES = ("ours", "ours, mapped", "transformers", "everything", "slices alone")
MOMENTS = {
    "returns": "until the call returns",
    "read": "until every weight was read once",
    "written": "until every weight was then written to once",
}
PAIRS = [
    ("ours", "transformers"),
    ("ours, mapped", "transformers"),
    ("ours", "everything"),
    ("ours", "slices alone"),
]
RANKS = 2


def config_of(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=args.vocab,
        architectures=["LlamaForCausalLM"],
    )


def write_source(args: argparse.Namespace, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(config_of(args)).save_pretrained(folder, max_shard_size="500MB")


class Contenders:
    """Each returns a parallelized model with its shards loaded."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        self.folder, self.config = folder, config_of(args)
        self.mesh = build_mesh("cpu", tp=dist.get_world_size())
        self.loaded: Loaded | None = None
        model = self.planned(torch.device("meta"))
        rank = dist.get_rank()
        self.slices = {name: [pair.full for pair in info.slices(rank)] for name, info in shard_info(model).items()}

    def planned(self, device: torch.device) -> Any:
        from transformers import LlamaForCausalLM

        with device:
            model = LlamaForCausalLM(self.config)
        return parallelize_module(model, self.mesh, "llama")

    def ours(self, **how: Any) -> Any:
        model = self.planned(torch.device("meta"))
        self.loaded = load_pretrained(model, self.folder, **how)
        return model

    def transformers(self) -> Any:
        from transformers import LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        spread = DistributedConfig(tp_size=dist.get_world_size())
        return LlamaForCausalLM.from_pretrained(self.folder, distributed_config=spread, dtype=torch.float32)

    def everything(self) -> Any:
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        return parallelize_module(model, self.mesh, "llama", src_data_rank=None)

    def slices_alone(self) -> Any:
        index = json.loads((self.folder / "model.safetensors.index.json").read_text())["weight_map"]
        files = {name: safe_open(self.folder / name, "pt") for name in set(index.values())}
        shards = {}
        for name, boxes in self.slices.items():
            part = files[index[name]].get_slice(name)
            shards[name] = [part[box].clone(memory_format=torch.contiguous_format) for box in boxes]
        return shards


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(p, "to_local", lambda p=p: p)().detach() for name, p in model.named_parameters()}


def same_weights(first: Any, other: Any) -> bool:
    a, b = weights_of(first), weights_of(other)
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def once(args: argparse.Namespace) -> None:
    """One contender's times, in processes that torchrun has started; the first rank prints them."""
    contenders = Contenders(args.folder, args)
    work: dict[str, Callable[[], Any]] = {
        "ours": contenders.ours,
        "ours, mapped": lambda: contenders.ours(mapped=True),
        "transformers": contenders.transformers,
        "everything": contenders.everything,
        "slices alone": contenders.slices_alone,
    }
    from transformers import LlamaForCausalLM  # noqa: F401 - imports are not timed
    from transformers.distributed import DistributedConfig  # noqa: F401

    dist.barrier()
    began = time.perf_counter()
    model = work[args.only]()
    dist.barrier()
    loaded = time.perf_counter()
    weights = (
        [weight for parts in model.values() for weight in parts]
        if isinstance(model, dict)
        else list(weights_of(model).values())
    )
    with torch.no_grad():
        total = sum(weight.sum() for weight in weights)
        dist.barrier()
        read = time.perf_counter()
        for weight in weights:
            weight.mul_(1.0)
    dist.barrier()
    times = {"returns": loaded - began, "read": read - began, "written": time.perf_counter() - began}
    assert total == total, "a weight is NaN"
    if args.check and not same_weights(model, contenders.everything()):
        raise SystemExit("shards differ from those of the model that was read whole")
    if contenders.loaded is not None:
        times |= {"bytes_held": contenders.loaded.bytes_held, "bytes_read": contenders.loaded.bytes_read}
    if dist.get_rank() == 0:
        print("times", json.dumps(times), flush=True)


def launch(args: argparse.Namespace, folder: Path, name: str, *more: str) -> dict[str, float]:
    """One contender in fresh processes."""
    sizes = [f"--{key}={getattr(args, key)}" for key in ("hidden", "layers", "vocab")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", "benchmarks.load", *sizes, f"--only={name}", f"--folder={folder}", *more]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in out.stdout.splitlines() if line.startswith("times ")]
    if not lines:
        raise SystemExit(out.stderr[-2000:])
    return json.loads(lines[0].removeprefix("times "))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    for name in ("ours", "ours, mapped"):
        launch(args, folder, name, "--check")
    names = NAMES if find_spec("accelerate") else tuple(name for name in NAMES if name != "transformers")
    if names != NAMES:
        print("accelerate is not installed, which transformers' parallel loading asks for: left out")
    pairs = [pair for pair in PAIRS if set(pair) <= set(names)]
    launches_of: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            launches_of[name].append(launch(args, folder, name))
    first = launches_of["ours"][0]
    results: dict[str, Any] = {key: int(first[key]) for key in ("bytes_held", "bytes_read")}
    print(f"{first['bytes_held'] / 1e6:.0f} MB a rank; read {first['bytes_read'] / first['bytes_held']:.4f} of that")
    for moment, text in MOMENTS.items():
        times = {name: [seconds[moment] for seconds in launches] for name, launches in launches_of.items()}
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratios = {f"{top} / {bottom}": ratio(times, top, bottom) for top, bottom in pairs}
        print(f"\n{text}")
        for name, seconds in medians.items():
            print(f"  {name:<14} {seconds:7.3f} s")
        for name, value in ratios.items():
            print(f"  {name:<28} {value['median']:.3f} [{value['low']:.3f}, {value['high']:.3f}]")
        results[moment] = {"seconds": medians, "ratios": ratios}
    return results


def quiet() -> None:
    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 1024), ("layers", 19), ("vocab", 32000), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only is not None:
        join()
        quiet()
        once(args)
        destroy_groups()
        return
    with tempfile.TemporaryDirectory(prefix="load-", dir=args.folder) as folder:
        quiet()
        write_source(args, Path(folder))
        results = measure(args, Path(folder))
    write_record(args.json, {"ranks": RANKS} | results)


if __name__ == "__main__":
    main()
