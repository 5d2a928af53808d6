"""Steps of planned models of many families on one GPU, where the host is slower than the GPU: what a plan costs there.

    python -m benchmarks.one_gpu_families                     # bfloat16, 6 layers of 1,024, 2,048 tokens
    python -m benchmarks.one_gpu_families --device cpu        # small ones, to try the script

A step is forward and backward, of the same weights and tokens; losses are compared first. Beside the bare module:

| form | |
|---|---|
| plan | `parallelize_module` at tp 1 with the family's plan |
| loss parallel | the same with `loss_parallel=True` |
| fused loss | `parallelize_model(fuse_loss=True).step` of one microbatch |

Peaks are of the step, gradients included, without the weights. "waits" are those of the host for the GPU in a step, by
the line that waits.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.one_device import peak_of, start, until_done, wait
from benchmarks.record import write_record
from benchmarks.timing import interleaved, medians_ms, ratio
from parallelize import build_mesh, destroy_groups, parallelize_model, parallelize_module
from parallelize.base.torch_private.torch_cuda import noted_waits

LARGE = dict(hidden=1024, layers=6, vocab=32000, length=1024, rounds=10)
SMALL = dict(hidden=64, layers=2, vocab=512, length=64, rounds=3)
FORMS = ("plan", "loss parallel", "fused loss")
EIGHT = dict(num_local_experts=8, num_experts_per_tok=2)
SIXTEEN = dict(num_experts=16, num_experts_per_tok=2)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3", {"sliding_window": 256}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "gpt2": ("GPT2", {}),
    "mixtral": ("Mixtral", EIGHT),
    "qwen3_moe": ("Qwen3Moe", SIXTEEN),
    "olmoe": ("Olmoe", SIXTEEN),
    "gpt_oss": ("GptOss", EIGHT),
    "deepseek_v3": ("DeepseekV3", {"n_routed_experts": 16, "num_experts_per_tok": 2}),
}


def model_of(family: str, args: argparse.Namespace) -> torch.nn.Module:
    """A model with random weights, the same at each call."""
    import transformers

    name, options = FAMILIES[family]
    heads = args.hidden // 64 or 1
    sizes: dict[str, Any] = dict(vocab_size=args.vocab, attention_dropout=0.0)
    if family == "gpt2":
        sizes = dict(vocab_size=args.vocab, n_embd=args.hidden, n_layer=args.layers, n_head=heads)
        sizes |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    else:
        sizes |= dict(hidden_size=args.hidden, intermediate_size=args.hidden * 11 // 4, num_hidden_layers=args.layers)
        sizes |= dict(num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), head_dim=64)
    if family == "deepseek_v3":
        sizes |= dict(num_key_value_heads=heads, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64)
        sizes |= dict(q_lora_rank=None, kv_lora_rank=args.hidden // 4, n_group=1, topk_group=1, first_k_dense_replace=1)
    if family == "qwen3_moe" or family == "deepseek_v3":
        sizes |= dict(moe_intermediate_size=args.hidden // 2)
    text = "Text" if family == "gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**sizes, **options)
    model_class = getattr(transformers, f"{name}LMHeadModel" if family == "gpt2" else f"{name}ForCausalLM")
    torch.manual_seed(0)
    with torch.device(args.device):
        return model_class(config).to(torch.bfloat16).train()


def steps_of(family: str, args: argparse.Namespace) -> dict[str, Callable[[], torch.Tensor]]:
    """A step of the bare module and of each form."""
    mesh = build_mesh(args.device, tp=1)
    ids = torch.randint(args.vocab, (2, args.length), generator=torch.Generator().manual_seed(1)).to(args.device)

    def plainly(model: Any) -> Callable[[], torch.Tensor]:
        def step() -> torch.Tensor:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            model.zero_grad()
            return loss.detach()

        return step

    def by_engine(model: Any) -> Callable[[], torch.Tensor]:
        parallel = parallelize_model(model, mesh, fuse_loss=True, num_microbatches=1)

        def step() -> torch.Tensor:
            loss = parallel.step(input_ids=ids, labels=ids, use_cache=False)
            parallel.module.zero_grad()
            return loss

        return step

    return {
        "bare": plainly(model_of(family, args)),
        "plan": plainly(parallelize_module(model_of(family, args), mesh)),
        "loss parallel": plainly(parallelize_module(model_of(family, args), mesh, loss_parallel=True)),
        "fused loss": by_engine(model_of(family, args)),
    }


def waits_of(step: Callable[[], torch.Tensor]) -> list[str]:
    """Where a step waits for the GPU, as folder/file:line."""
    places: list[str] = []
    with noted_waits(places):
        step()
    return sorted("/".join(Path(place).parts[-2:]) for place in places)


def measure(family: str, args: argparse.Namespace) -> dict[str, Any]:
    steps = steps_of(family, args)
    losses = {name: float(step()) for name, step in steps.items()}
    if any(abs(loss - losses["bare"]) > 1e-3 * losses["bare"] for loss in losses.values()):
        raise SystemExit(f"losses of {family} differ: {losses}")
    peaks = {name: peak_of(step) / 2**20 for name, step in steps.items()}
    waits = {name: waits_of(step) for name, step in steps.items()}
    times = interleaved(until_done(steps), args.rounds, before=wait)
    return {
        "ms": medians_ms(times),
        **{f"{form}/bare": ratio(times, form, "bare") for form in FORMS},
        "peak_mib": peaks,
        "waits": waits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name, value in (LARGE if args.device == "cuda" else SMALL).items():
        setattr(args, name, value)
    start(args.device)
    results: dict[str, Any] = {}
    for family in args.families:
        row = results[family] = measure(family, args)
        ratios = ", ".join(f"{form} {row[f'{form}/bare']['median']:.2f}" for form in FORMS)
        peaks = ", ".join(f"{name} {mib:.0f}" for name, mib in row["peak_mib"].items())
        counts = ", ".join(f"{name} {len(places)}" for name, places in row["waits"].items())
        print(f"{family:<12} {row['ms']['bare']:.1f} ms; times: {ratios}; MiB: {peaks}; waits: {counts}", flush=True)
        gc.collect()  # modules of a model refer to each other
        if args.device == "cuda":
            torch.cuda.empty_cache()
    setting = {name: getattr(args, name) for name in LARGE} | {"device": args.device, "batch": 2}
    write_record(args.json, {"setting": setting, "families": results})
    destroy_groups()


if __name__ == "__main__":
    main()
