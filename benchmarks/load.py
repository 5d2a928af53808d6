"""Pretrained weights into tensor-parallel shards: this package, `transformers`' own loading, and reading everything.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.load

A Llama of `transformers` in float32, random weights, saved as it saves them. Each contender begins with the folder and ends
with a model that is planned over tp and holds its shards; files are in the page cache, repeats are interleaved.

| contender | |
|---|---|
| ours | model on meta, `parallelize_module`, `load_pretrained` |
| transformers | `from_pretrained` with `DistributedConfig(tp_size=...)` |
| everything | each rank reads the whole model, and `parallelize_module` cuts it |
| slices alone | `safetensors`' own slices of the same shards, into new tensors, no model: the floor |
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from benchmarks.timing import join, ratio
from parallelize import build_mesh, destroy_groups, load_pretrained, parallelize_module, shard_info
from parallelize.checkpoint.pretrained import Loaded

PAIRS = [("ours", "transformers", 0.6), ("ours", "everything", None), ("ours", "slices alone", None)]


def config_of(given: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=given.hidden,
        intermediate_size=given.hidden * 11 // 4,
        num_hidden_layers=given.layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=given.vocab,
        architectures=["LlamaForCausalLM"],
    )


def write_source(given: argparse.Namespace, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(config_of(given)).save_pretrained(folder, max_shard_size="500MB")


class Contenders:
    """Each makes a planned model that holds its shards."""

    def __init__(self, folder: Path, given: argparse.Namespace):
        self.folder, self.config = folder, config_of(given)
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

    def ours(self) -> Any:
        model = self.planned(torch.device("meta"))
        self.loaded = load_pretrained(model, self.folder)
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
        found = {}
        for name, boxes in self.slices.items():
            part = files[index[name]].get_slice(name)
            found[name] = [part[box].clone(memory_format=torch.contiguous_format) for box in boxes]
        return found


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(p, "to_local", lambda p=p: p)().detach() for name, p in model.named_parameters()}


def same(one: Any, other: Any) -> bool:
    a, b = weights_of(one), weights_of(other)
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def timed(work: Callable[[], Any]) -> float:
    gc.collect()
    dist.barrier()
    began = time.perf_counter()
    made = work()
    dist.barrier()
    took = time.perf_counter() - began
    del made
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 1024), ("layers", 19), ("vocab", 32000), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    join()
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    found: list[Any] = [tempfile.mkdtemp(prefix="load-", dir=given.folder)]
    dist.broadcast_object_list(found)
    folder = Path(found[0])
    try:
        if dist.get_rank() == 0:
            write_source(given, folder)
        dist.barrier()
        results = measure(Contenders(folder, given), given)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if given.json is not None and dist.get_rank() == 0:
        given.json.write_text(
            json.dumps({"torch": torch.__version__, "ranks": dist.get_world_size()} | results, indent=1) + "\n"
        )
    destroy_groups()


def measure(contenders: Contenders, given: argparse.Namespace) -> dict[str, Any]:
    work = {
        "ours": contenders.ours,
        "transformers": contenders.transformers,
        "everything": contenders.everything,
        "slices alone": contenders.slices_alone,
    }
    if not same(contenders.ours(), contenders.everything()):
        raise SystemExit("shards differ from those of the model that was read whole")
    for name in ("transformers", "slices alone"):
        timed(work[name])
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(given.rounds):
        for name in list(work)[turn % len(work) :] + list(work)[: turn % len(work)]:
            times[name].append(timed(work[name]))
    loaded = contenders.loaded
    assert loaded is not None
    ratios = {f"{top} / {bottom}": ratio(times, top, bottom) | {"bound": bound} for top, bottom, bound in PAIRS}
    medians = {name: statistics.median(values) for name, values in times.items()}
    if dist.get_rank() == 0:
        print(f"{loaded.bytes_held / 1e6:.0f} MB a rank; read {loaded.bytes_read / loaded.bytes_held:.4f} of that")
        for name, seconds in medians.items():
            print(f"  {name:<14} {seconds:7.3f} s")
        for name, one in ratios.items():
            bound = f"  (bound {one['bound']})" if one["bound"] else ""
            print(f"  {name:<24} {one['median']:.3f} [{one['low']:.3f}, {one['high']:.3f}]{bound}")
    return {
        "bytes_held": loaded.bytes_held,
        "bytes_read": loaded.bytes_read,
        "seconds": medians,
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
