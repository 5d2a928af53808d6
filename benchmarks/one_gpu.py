"""What one GPU can tell: a planned step against the bare module, MFU, memory against its prediction, loads and saves,
generation.

    python -m benchmarks.one_gpu                     # a Llama 3 8B of as many layers as fit, bfloat16
    python -m benchmarks.one_gpu --device cpu        # a small one, to try the script

Of tp 1 a plan sends nothing, so that its step may cost no more than the bare module's: what remains is host time.
Communication between GPUs, and everything that is made of it, cannot be tried with one.

| figure | |
|---|---|
| step | forward, backward and AdamW step, planned at tp 1 (with `local_optimizer`) over the bare module, in turns; losses are compared first |
| mfu | the model's operations (6 for each parameter and token, and attention's) over `--peak-tflops`, planned and bare |
| prediction | the planned step's time over what `explain` predicts of it, and |
| memory | the allocator's peak of a planned step over what `explain` predicts of it |
| load, save | `load_pretrained` and `load_checkpoint` (with hashes) onto the device and `Checkpointer.save`, in GB/s, files in the page cache; one thread's reads of them |
| generate | tokens/s of `transformers`' `generate` on the planned and on the bare model, and of ours, greedy and sampled; tokens are compared |
"""  # noqa: E501

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.one_device import peak_of, start, until_done, wait
from benchmarks.record import write_record
from benchmarks.timing import interleaved, ratio
from parallelize import (
    Checkpointer,
    build_mesh,
    build_on_meta,
    destroy_groups,
    explain,
    generate,
    load_checkpoint,
    load_pretrained,
    local_optimizer,
    parallelize_module,
)
from parallelize.comm.link_profile import known_peak
from parallelize.tools.analysis.cost.machine import profile_of

SMALL = {"hidden": 256, "layers": 2, "vocab": 1024, "batch": 2, "length": 128, "new": 8, "rounds": 3}
LARGE = {"hidden": 4096, "layers": 8, "vocab": 32000, "batch": 1, "length": 4096, "new": 64, "rounds": 10}


def config_of(args: argparse.Namespace) -> Any:
    """Llama 3 8B's ratios at another hidden width."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32 if args.hidden < 4096 else args.hidden // 128,
        num_key_value_heads=args.hidden // 128 if args.hidden < 4096 else args.hidden // 512,
        vocab_size=args.vocab,
        max_position_embeddings=8192,
        initializer_range=0.2 if args.device == "cpu" else 0.02,
    )


class Contenders:
    """The same weights twice: bare, and planned at tp 1."""

    def __init__(self, args: argparse.Namespace):
        from transformers import LlamaForCausalLM

        self.args, self.config = args, config_of(args)
        self.device = torch.device(args.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.mesh = build_mesh(self.device.type, tp=1)
        torch.manual_seed(0)
        with self.device:
            self.bare = LlamaForCausalLM(self.config).to(self.dtype)
            planned = LlamaForCausalLM(self.config).to(self.dtype)
        planned.load_state_dict(self.bare.state_dict())
        self.planned = parallelize_module(planned, self.mesh, "llama")
        shape = (args.batch, args.length)
        self.ids = torch.randint(0, args.vocab, shape, generator=torch.Generator().manual_seed(1)).to(self.device)

    def step_of(self, model: Any) -> Callable[[], float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=self.device.type == "cuda")
        if model is self.planned:
            optimizer = local_optimizer(optimizer)

        def step() -> float:
            loss = model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())  # waits for the device

        return step


def measure(args: argparse.Namespace, predicted: dict[str, float]) -> dict[str, Any]:
    contenders = Contenders(args)
    generated = {} if args.compile else generation(contenders)  # before a step, whose rounding separates their weights
    steps = {name: contenders.step_of(getattr(contenders, name)) for name in ("planned", "bare")}
    losses = {name: step() for name, step in steps.items()}
    if abs(losses["planned"] - losses["bare"]) > 1e-3 * abs(losses["bare"]):
        raise SystemExit(f"losses differ: {losses}")
    times = interleaved(steps, args.rounds, before=wait)
    result: dict[str, Any] = {
        "setting": {name: getattr(args, name) for name in SMALL}
        | {"device": args.device, "dtype": str(contenders.dtype)},
        "step_ms": {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()},
        "step planned/bare": ratio(times, "planned", "bare"),
    }
    tflops = args.peak_tflops or _known_tflops(contenders)
    if tflops:
        flops = step_flops(contenders.config, args.batch, args.length)
        result["mfu"] = {name: flops / (ms / 1e3) / (tflops * 1e12) for name, ms in result["step_ms"].items()}
    result["step measured/predicted"] = result["step_ms"]["planned"] / 1e3 / predicted["step_s"]
    if args.compile:
        result["compiled"] = compiled(contenders, steps, args.rounds)
        return result
    result["generate"] = generated
    result["files"] = files(contenders)
    contenders.bare = None
    measured = peak_with_state(contenders, steps.pop("planned"), steps)
    peak = predicted["peak"]
    result["memory"] = {"measured": measured, "predicted": peak, "measured/predicted": measured / peak}
    return result


def compiled(contenders: Contenders, steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """The same steps, each layer compiled by inductor, beside those before."""
    for model in (contenders.planned, contenders.bare):
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    times = interleaved(steps, rounds, before=wait)
    return {
        "step_ms": {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()},
        "step planned/bare": ratio(times, "planned", "bare"),
    }


def _known_tflops(contenders: Contenders) -> float:
    if contenders.device.type != "cuda":
        return 0.0
    return (known_peak(torch.cuda.get_device_name(), str(contenders.dtype).removeprefix("torch.")) or 0.0) / 1e12


def step_flops(config: Any, batch: int, length: int) -> float:
    """Floating-point operations of a training step: three times the forward's matmuls, causal attention counted as
    half."""
    hidden, kv = config.hidden_size, config.hidden_size * config.num_key_value_heads // config.num_attention_heads
    weights = config.num_hidden_layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * config.intermediate_size)
    weights += hidden * config.vocab_size
    attention = config.num_hidden_layers * 4 * hidden * length / 2
    return 3 * batch * length * (2 * weights + attention)


def peak_with_state(contenders: Contenders, step: Callable[[], object], other_steps: dict[str, Any]) -> int:
    """The peak bytes of a planned step, with weights and optimizer state.

    A GPU's allocator says it, once the other model is gone; of the CPU stored bytes are added to what a step allocates.
    """
    other_steps.clear()
    if contenders.device.type == "cuda":
        gc.collect()  # modules of the other model refer to each other
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() + peak_of(step)
    stored = sum(parameter.to_local().nbytes for parameter in contenders.planned.parameters())
    return 3 * stored + peak_of(step)  # weights, and the two moments of AdamW


def prediction(args: argparse.Namespace) -> dict[str, float]:
    """What `explain` predicts: peak bytes, and seconds of a step. Before there is a process group."""
    from transformers import LlamaForCausalLM

    options: dict[str, Any] = {"hardware": "cpu"}
    if args.device == "cuda":
        options = {"weights_dtype": "bfloat16", "hardware": profile_of(torch.cuda.get_device_name())}
    predicted = explain(
        lambda: LlamaForCausalLM(config_of(args)), "llama", "tp=1", batch=args.batch, sequence=args.length, **options
    )
    return {"peak": predicted.ranks[0].memory.peak, "step_s": predicted.time.in_turn_s}


def generation(contenders: Contenders) -> dict[str, Any]:
    """Tokens per second, greedy and sampled, of `transformers`' loop on both models and of `parallelize.generate`.

    The latter runs captured forwards, whose attention is another kernel: in half precision it chooses another token
    where two have about the same logit. So its tokens are checked by the logits of a forward of all of them.
    """
    args, planned = contenders.args, contenders.planned.eval()
    prompt, new = contenders.ids[:, :32], args.new
    length = dict(max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
    models = {"planned": planned, "bare": contenders.bare}
    draws = dict(do_sample=True, temperature=0.8, top_p=0.9, top_k=0)
    work = {
        name: lambda model=model: model.generate(prompt, do_sample=False, **length) for name, model in models.items()
    }
    work["ours"] = lambda: generate(planned, prompt, max_new_tokens=new, temperature=0.0, eos_token_id=[])
    work["bare, sampled"] = lambda: contenders.bare.generate(prompt, **draws, **length)
    work["ours, sampled"] = lambda: generate(
        planned, prompt, max_new_tokens=new, temperature=0.8, top_p=0.9, eos_token_id=[]
    )
    work = until_done(work)
    results = {name: run() for name, run in work.items()}
    if not torch.equal(results["planned"], results["bare"]):
        raise SystemExit("the planned model generates other tokens than the bare one")
    shortfall = largest_shortfall(contenders.bare, results["ours"], prompt.shape[1])
    if shortfall > 0.03:
        raise SystemExit(f"parallelize.generate chooses tokens whose logits are {shortfall} of the highest below it")
    times = interleaved(work, max(2, args.rounds // 2), before=wait)
    planned.train()
    tokens = args.batch * new
    return {
        "tokens_per_s": {name: tokens / statistics.median(seconds) for name, seconds in times.items()},
        "bare/planned": ratio(times, "bare", "planned"),
        "bare/ours": ratio(times, "bare", "ours"),
        "bare/ours, sampled": ratio(times, "bare, sampled", "ours, sampled"),
        "largest shortfall of a logit": shortfall,
    }


@torch.no_grad()
def largest_shortfall(model: Any, ids: torch.Tensor, start: int) -> float:
    """By how much the logits of the tokens from `start` on are below the highest at their positions, relative to the
    largest logit."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, start - 1 :].float()
    chosen = logits.gather(-1, ids[:, start:, None]).squeeze(-1)
    return float((logits.amax(-1) - chosen).max() / logits.abs().max())


def files(contenders: Contenders) -> dict[str, Any]:
    """GB/s of loads onto the device, ours and `transformers`', of a save and of its load, and of reading the files in
    one thread."""
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory(prefix="one-gpu-") as folder:
        source = Path(folder) / "source"
        contenders.bare.save_pretrained(source)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        reads = _seconds(lambda: [path.read_bytes() for path in source.glob("*.safetensors")])

        def load() -> None:
            model = build_on_meta(LlamaForCausalLM, contenders.config).to(contenders.dtype)
            load_pretrained(parallelize_module(model, contenders.mesh, "llama"), source, device=contenders.device)
            wait()

        def load_by_transformers() -> None:
            LlamaForCausalLM.from_pretrained(source, dtype=contenders.dtype, device_map={"": contenders.device})
            wait()

        work = {"ours": load, "transformers": load_by_transformers}
        times = interleaved(work, 3, before=wait)
        loads = {name: size / statistics.median(seconds) / 1e9 for name, seconds in times.items()}
        run = Path(folder) / "run"
        with Checkpointer(run, contenders.planned) as checkpoints:
            checkpoints.save(1)
            saves = _seconds(lambda: checkpoints.save(2))

        def load_saved() -> None:
            model = build_on_meta(LlamaForCausalLM, contenders.config).to(contenders.dtype)
            load_checkpoint(run, parallelize_module(model, contenders.mesh, "llama"))

        restores = statistics.median(_seconds(load_saved) for _ in range(3))
    return {
        "read_gb_s": size / reads / 1e9,
        "load_gb_s": loads["ours"],
        "transformers_load_gb_s": loads["transformers"],
        "load ours/transformers": ratio(times, "ours", "transformers"),
        "save_gb_s": size / saves / 1e9,
        "restore_gb_s": size / restores / 1e9,
    }


def _seconds(work: Callable[[], object]) -> float:
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def show(result: dict[str, Any]) -> None:
    for name, value in result.items():
        print(f"{name}: {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    for name in SMALL:
        parser.add_argument(f"--{name}", type=int, help=f"default: {LARGE[name]} on a GPU, {SMALL[name]} on the CPU")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for MFU; default: what the vendor says of it")
    parser.add_argument(
        "--compile", action="store_true", help="the step with each layer compiled, too, and nothing else"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU is here; --device cpu tries the script")
    for name, value in (LARGE if args.device == "cuda" else SMALL).items():
        setattr(args, name, getattr(args, name) or value)
    predicted = prediction(args)
    start(args.device)
    result = measure(args, predicted)
    show(result)
    write_record(args.json, result)
    destroy_groups()


if __name__ == "__main__":
    main()
