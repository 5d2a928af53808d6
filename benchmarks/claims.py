"""What docs/measurements.md says of speed and memory: each claim, and where its figure is in the records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.claim import CHECKS, STEP, WEIGHTS, Claim, Figures
from benchmarks.gpu_claims import GPU_CLAIMS

_BLOCKS = ("TP, nested", "TP + SP, nested", "TP, flat", "TP + SP, flat")


def _preflight(result: Any, ranks: int, silent: bool) -> float:
    return next(one["seconds"] for one in result["trials"] if one["ranks"] == ranks and one["silent"] is silent)


def _steps(top: str, bottom: str) -> Figures:
    return lambda result: [result["results"][0][f"step {top}/{bottom}, {block}"] for block in _BLOCKS]


def _each(key: str) -> Figures:
    return lambda result: [row[key] for row in result["results"]]


def _matmul(op: str, figure: Callable[[Any], Any]) -> Figures:
    """Of the forward, and of forward and backward, of the square shape."""

    def figures(result: Any) -> list[Any]:
        rows = {row["op"]: row for row in result["results"] if row["rows, inner, outs"] == [2048] * 3}
        return [figure(rows[name]) for name in (op, f"{op} forward+backward")]

    return figures


def _of_limit(row: Any) -> float:
    """Time of the automatic algorithm over the larger of communication and compute."""
    return row["ms"]["auto"] / row["limit_ms"]


def _longest(kinds: tuple[str, ...], key: str) -> Figures:
    def figures(result: Any) -> list[Any]:
        length = max(row["length"] for row in result["rows"])
        return [row[key] for kind in kinds for row in result["rows"] if row["kind"] == kind and row["length"] == length]

    return figures


def _seconds(*names: str) -> Figures:
    return lambda result: [result[name]["seconds"] for name in names]


def _of_load(result: Any, name: str) -> list[Any]:
    return [result[moment]["ratios"][f"{name} / transformers"] for moment in ("returns", "read", "written")]


def _of_generation(result: Any, name: str, phase: str) -> list[Any]:
    return [row["ratios"][phase][f"{name} / transformers"] for row in result["rows"]]


CLAIMS = (
    Claim(
        STEP,
        "host time of a step against hand-written Megatron style, hidden 64, by plan: TP, nested blocks / TP + SP, "
        "nested / TP, flat / TP + SP, flat",
        "host_overhead_fake",
        _steps("plan", "hand"),
    ),
    Claim(STEP, "the same by PyTorch's dict of styles", "host_overhead_fake", _steps("dict", "hand")),
    Claim(
        STEP,
        "host time of PyTorch's `parallelize_module` against hand-written, the same four forms",
        "host_overhead_fake",
        _steps("stock", "hand"),
    ),
    Claim(
        STEP,
        "processor time of `parallel.step`, with its checks, against forward, loss and backward of the same planned "
        "Llama in a loop, hidden 64: tp 2, 2 layers / and sequence parallel / 32 layers / and sequence parallel / tp "
        "4, 2 layers / and sequence parallel / 32 layers / and sequence parallel",
        "recommended_step",
        lambda result: [row["step over loop"] for row in result["results"]],
    ),
    Claim(
        STEP,
        "step on two gloo processes, hidden 256, against hand-written, by plan, the same four forms",
        "host_overhead_gloo_step",
        _steps("plan", "hand"),
    ),
    Claim(
        STEP,
        "AdamW step against plain tensors, hidden 64: fused / foreach / loop",
        "host_overhead_fake",
        lambda result: [result["results"][0][f"AdamW {kind}, ours/hand"] for kind in ("fused", "foreach", "loop")],
    ),
    Claim(
        STEP,
        "gradient clipping against plain tensors: foreach / loop",
        "host_overhead_fake",
        lambda result: [result["results"][0][f"clipping {kind}, ours/hand"] for kind in ("foreach", "loop")],
    ),
    Claim(
        STEP,
        "`all_gather_linear` [2048 x 2048] at 1 Gbit/s, two ranks, our own synchronous version over it: forward / "
        "forward and backward",
        "collective_matmul_1gbit",
        _matmul("all_gather_linear", lambda row: row["sync/chunked"]),
    ),
    Claim(
        STEP,
        "its time over the larger of communication and compute: forward / forward and backward",
        "collective_matmul_1gbit",
        _matmul("all_gather_linear", _of_limit),
    ),
    Claim(
        STEP,
        "`linear_reduce_scatter`, time over the larger of communication and compute: forward / forward and backward",
        "collective_matmul_1gbit",
        _matmul("linear_reduce_scatter", _of_limit),
    ),
    Claim(
        STEP,
        "`all_gather_linear`, time over the same messages and matmuls that do not wait for each other: forward / "
        "forward and backward",
        "collective_matmul_1gbit",
        _matmul("all_gather_linear", lambda row: row["chunked/unbound"]),
    ),
    Claim(
        STEP,
        "`linear_reduce_scatter`, the same: forward / forward and backward",
        "collective_matmul_1gbit",
        _matmul("linear_reduce_scatter", lambda row: row["chunked/unbound"]),
    ),
    Claim(
        STEP,
        "training step of a Llama-like model at 1 Gbit/s, PyTorch's TP + SP over ours: hidden 256 / 512",
        "llama_step_1gbit",
        _each("stock/auto"),
    ),
    Claim(
        STEP,
        "step of 4 microbatches at 1 Gbit/s with `overlap_microbatches`, PyTorch's TP + SP over ours: hidden 256 / 512",
        "microbatch_step_1gbit",
        _each("stock/paired"),
    ),
    Claim(
        STEP,
        "the same, written by hand without overlap over ours: hidden 256 / 512",
        "microbatch_step_1gbit",
        _each("hand/paired"),
    ),
    Claim(
        STEP,
        "the same, ours over computing and sending that do not wait for each other: hidden 256 / 512",
        "microbatch_step_1gbit",
        _each("paired/unbound"),
    ),
    Claim(
        STEP,
        "the same of two layers, hidden 1,024: PyTorch's TP + SP over ours / ours over what does not wait",
        "microbatch_step_1024_1gbit",
        lambda result: [result["results"][0][key] for key in ("stock/paired", "paired/unbound")],
    ),
    Claim(
        STEP,
        "the same by PyTorch's dict of styles, hidden 512: PyTorch's TP + SP over ours / by hand over ours",
        "microbatch_step_dict_1gbit",
        lambda result: [result["results"][0][key] for key in ("stock/paired", "hand/paired")],
    ),
    Claim(
        STEP,
        "the same by a plan on four ranks, two on each core, hidden 256: PyTorch's TP + SP over ours / by hand over "
        "ours",
        "microbatch_step_4_1gbit",
        lambda result: [result["results"][0][key] for key in ("stock/paired", "hand/paired")],
    ),
    Claim(
        STEP,
        'the same at 10 Gbit/s, hidden 256, with `overlap_microbatches="auto"`: PyTorch\'s TP + SP over ours / by '
        "hand over ours",
        "microbatch_step_10gbit",
        lambda result: [result["results"][0][key] for key in ("stock/auto", "hand/auto")],
    ),
    Claim(
        STEP,
        "step of a Qwen3-MoE with folded experts, `transformers`' expert parallelism over ours: loopback, `ep` 2",
        "experts_2_loopback",
        lambda result: [result["transformers/ours"]],
    ),
    Claim(
        STEP,
        "the same at 1 Gbit/s, `ep` 2: in one exchange / in chunks",
        "experts_2_1gbit",
        lambda result: [result["transformers/ours"], result["transformers/overlapped"]],
    ),
    Claim(
        STEP,
        "bytes of its all-to-alls over theirs, `ep` 2",
        "experts_2_loopback",
        lambda result: [result["bytes ours/transformers"]],
    ),
    Claim(
        STEP,
        "one block of experts: ours over one by hand in plain functions, `ep` 2 / at `ep` 1 with few tokens over the "
        "stock block",
        "experts_2_loopback",
        lambda result: [result["block by us/by hand"], result["block at ep 1/stock"]],
    ),
    Claim(
        STEP,
        "bytes of its all-to-alls over theirs, `ep` 4",
        "experts_4_loopback",
        lambda result: [result["bytes ours/transformers"]],
    ),
    Claim(
        STEP,
        "block of experts at 1 Gbit/s: longer of messages and compute over it / cores that wait for no message over it",
        "expert_dispatch_1gbit",
        lambda result: [result["hidden"], result["of both"]],
    ),
    Claim(STEP, "bubble of seven schedules on four ranks over their arithmetic", "pipeline_bubble", _each("ratio")),
    Claim(STEP, "step of seven schedules over PyTorch's pipelining by hand, two ranks", "pipeline", _each("ratio")),
    Claim(
        STEP,
        "step over PyTorch's on two ranks: ZeRO 0 against DDP / ZeRO 1 against ZeroRedundancyOptimizer / ZeRO 2 "
        "against `fully_shard` that keeps parameters / ZeRO 3 against `fully_shard`",
        "zero",
        _each("ratio"),
    ),
    Claim(STEP, "peak memory of the same", "zero_memory", _each("ratio")),
    Claim(
        STEP,
        "step of a Llama with attention over `cp`=2, 8,192 tokens, over the full sequence on one rank: Ulysses / ring",
        "long_context_2_loopback",
        _longest(("ulysses", "ring"), "times_of_none"),
    ),
    Claim(
        STEP,
        "the attention alone, ring over one rank, forward and backward: float32 causal / full / window / packed / "
        "bfloat16 causal / full / window / packed",
        "ring_attention",
        lambda result: [row["ring over one rank"] for row in result["rows"]],
    ),
    Claim(
        STEP,
        "its peak memory, over half of that of one rank: Ulysses / ring",
        "long_context_2_loopback",
        _longest(("ulysses", "ring"), "against_1_over_cp"),
    ),
    Claim(
        STEP,
        "step with each layer compiled over the eager one, two ranks: hidden 256 with tensor / sequence / sequence "
        "and chunked overlap / sequence and automatic overlap / hidden 1,024 with tensor / sequence / sequence and "
        "chunked overlap / sequence and automatic overlap",
        "compiled_step",
        lambda result: [row["compiled over eager"] for row in result["results"]],
    ),
    Claim(
        STEP,
        "head and loss in chunks over separate head and loss, vocabulary 32,768, 2,048 tokens: time / peak memory",
        "fused_loss",
        lambda result: [result[0]["time_ratio"]["fused"], result[0]["memory_ratio"]["fused"]],
    ),
    Claim(
        STEP,
        "tokens/s of decoding over `transformers`' tensor parallelism, two ranks of one host, `parallelize.generate`: "
        "batch 1 / 8",
        "generate",
        lambda result: _of_generation(result, "ours", "decode"),
    ),
    Claim(
        STEP,
        "the same, `transformers`' `generate` on a planned model: batch 1 / 8",
        "generate",
        lambda result: _of_generation(result, "stock loop", "decode"),
    ),
    Claim(
        STEP,
        "the same, `parallelize.generate` with every sum through gloo's sockets: batch 1 / 8",
        "generate",
        lambda result: _of_generation(result, "ours over sockets", "decode"),
    ),
    Claim(
        STEP,
        "prompts of 32 tokens and the first new one, `parallelize.generate` over `transformers`: batch 1 / 8",
        "generate",
        lambda result: _of_generation(result, "ours", "prefill"),
    ),
    *(
        Claim(
            STEP,
            f"share of a step that the comparison of inputs takes, over {axis}",
            f"step_check_{axis}",
            lambda result: [100 * result["share_of_the_check"]],
            "%",
        )
        for axis in ("tp", "dp")
    ),
    *(
        Claim(
            STEP,
            f"processor time of a step with an open `watch` against one without, {calls} collectives: a plan / "
            "PyTorch's dict",
            "watch_cost",
            lambda result, mode=mode: [result["forms"][f"{by} {mode}"]["cpu_ratio"] for by in ("plan", "dict")],
        )
        for mode, calls in (("tp", "two gloo processes, hidden 256, 19"), ("tp_sp", "with sequence parallelism, 38"))
    ),
    Claim(
        STEP,
        "time that it takes for one collective / for one turn of its thread, of which there are two in a second, in a "
        "loop",
        "watch_cost",
        lambda result: [result["call_us"], result["turn_us"]],
        "us",
    ),
    *GPU_CLAIMS,
    Claim(
        WEIGHTS,
        "1,000 weights of a tensor-parallel model as full tensors on both of two ranks, gathering tensor by tensor "
        "over: `WeightExporter` / `export_weights` / its first call, which plans",
        "export",
        lambda result: [result["ratios"][name] for name in ("buckets", "export_weights", "export_weights, first call")],
    ),
    Claim(
        WEIGHTS,
        "a Hub folder of 16 layers over tp 2, quantized to NF4 while it is read: bytes that a rank stores for a "
        "weight over tp",
        "quantized",
        lambda result: [round(result["bytes a weight"]["nf4"], 3)],
        "bytes",
    ),
    Claim(
        WEIGHTS,
        "growth of the largest resident set of a rank meanwhile, over what it stores then / over that of loading "
        "bfloat16",
        "quantized",
        lambda result: [
            result["bytes"]["nf4"]["risen"] / result["bytes"]["nf4"]["stored"],
            result["bytes"]["nf4"]["risen"] / result["bytes"]["bfloat16"]["risen"],
        ],
    ),
    Claim(
        STEP,
        "forward and backward of a frozen linear of 1,024 x 1,024 on 1,024 tokens, on the CPU, over `nn.Linear`: NF4 "
        "/ int8",
        "quantized",
        lambda result: [result["ratios"][form] for form in ("nf4", "int8")],
    ),
    Claim(
        WEIGHTS,
        "a save, hashed, over plain flushed safetensors / PyTorch's distributed checkpoint",
        "checkpoint",
        lambda result: [result["save"]["ratios"][f"ours / {name}"] for name in ("safetensors", "pytorch")],
    ),
    Claim(
        WEIGHTS,
        "a load, every hash compared / unchecked, over PyTorch's, which compares nothing",
        "checkpoint",
        lambda result: [result["load"]["ratios"][f"ours, {name} / pytorch"] for name in ("checked", "unchecked")],
    ),
    Claim(
        WEIGHTS,
        "pretrained weights into tp shards over `transformers`' own loading, which maps most of them: until the call "
        "returns / until every weight was read once / until it was then written to once",
        "load",
        lambda result: _of_load(result, "ours"),
    ),
    Claim(
        WEIGHTS,
        "the same with `mapped=True`",
        "load",
        lambda result: _of_load(result, "ours, mapped"),
    ),
    Claim(
        CHECKS,
        "`explain` of 8B on 64 ranks / 70B on 1,024 / 405B on 16,384",
        "predictions",
        _seconds(
            "explain llama-3-8b, 64 ranks", "explain llama-3-70b, 1,024 ranks", "explain llama-3.1-405b, 16,384 ranks"
        ),
        "s",
    ),
    Claim(
        CHECKS,
        "the same of Qwen3 235B / DeepSeek V3 on 1,024 ranks, experts over 64 of them",
        "predictions",
        _seconds("explain qwen3-235b-a22b, 1,024 ranks, ep=64", "explain deepseek-v3, 1,024 ranks, ep=64"),
        "s",
    ),
    Claim(CHECKS, "`verify` of a small Llama on tp 8", "predictions", _seconds("verify llama, tp=8, three modes"), "s"),
    Claim(
        CHECKS,
        "`lint` of a plan file alone / against Llama 3 8B on tp 8",
        "predictions",
        _seconds("lint llama.yaml", "lint llama.yaml against llama-3-8b, tp=8"),
        "s",
    ),
    Claim(CHECKS, "`fit` of Llama 3 8B on 8 GPUs", "predictions", _seconds("fit llama-3-8b on 8 GPUs"), "s"),
    Claim(
        CHECKS,
        "`parallelize_model` on meta, Llama 3.1 405B over 16,384 ranks, imports and the model's construction included",
        "scale",
        lambda result: [result["405b"]["total_s"]],
        "s",
    ),
    Claim(CHECKS, "its peak memory", "scale", lambda result: [result["405b"]["peak_gb"]], "GB"),
    Claim(
        CHECKS,
        "preflight of `parallelize run` on emulated hosts with two cores together: 4 / 16 / 32 ranks",
        "preflight",
        lambda result: [_preflight(result, ranks, silent=False) for ranks in (4, 16, 32)],
        "s",
    ),
    Claim(
        CHECKS,
        "the same with 16 ranks, one of whose 4 hosts does not answer, until all others have ended and named it",
        "preflight",
        lambda result: [_preflight(result, 16, silent=True)],
        "s",
    ),
    Claim(
        CHECKS,
        "its roll call of 1,000 ranks that are there",
        "preflight",
        lambda result: [call["seconds"] for call in result["roll_calls"] if call["ranks"] == 1000],
        "s",
    ),
)
