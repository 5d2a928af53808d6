"""Rows of public measurements -> what the planner takes: a decoder, a setting, a machine. Lenient with spellings.

Rows come from many systems, and each names kernels, recompute and GPUs in its own way. A row is left out only where a
fact is missing that no default can stand for: the model's sizes, its batch, or what was measured.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from parallelize.base.mesh import MeshSpec
from parallelize.tools.analysis.cost.machine import Machine, load_machine
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.outline.decoder import Decoder


class LeftOutError(Exception):
    """A row without a fact that the planner needs."""


@dataclass(frozen=True)
class Case:
    """One row as the planner takes it.

    Attributes:
        measured_s: of a step; None where only memory was measured, or nothing ran.
        peak_bytes: as measured; None where it was not.
        ran: False where it ran out of memory.
        group: rows of one group differ in their layout alone.
        kind: "dense", "mixture", "8 bits" or "other": scored apart.
    """

    number: str
    source: str
    model: str
    decoder: Decoder
    setting: Setting
    machine: Machine
    measured_s: float | None
    peak_bytes: float | None
    ran: bool
    group: tuple
    kind: str
    row: Mapping[str, str]


def read_rows(path: Path, source: str | None = None) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if source is None or source.lower() in (row.get("source") or "").lower()]


def case_of(row: Mapping[str, str]) -> Case:
    """Raises: LeftOutError."""
    decoder = _decoder(row)
    machine = machine_of(row)
    setting = _setting(row, decoder)
    ran = not re.search("oom|out of mem|fail", _text(row, "outcome"))
    measured = _seconds(row, setting, decoder, machine) if ran else None
    peak = _float(row, "mem_gb")
    if ran and measured is None and peak is None:
        raise LeftOutError("nothing was measured")
    unit = 2.0**30 if "gib" in _text(row, "mem_kind") else 1e9
    if "nvidia-smi" in _text(row, "mem_kind"):  # MiB, over 1,000: of 80 GiB it shows up to 81.6
        unit = 1000 * 2.0**20
    gpus = setting.mesh.world_size
    return Case(
        row.get("id", ""), row.get("source", ""), row.get("model", ""), decoder, setting, machine, measured,
        peak * unit if peak else None, ran,
        (row.get("source"), row.get("model"), gpus, _sequences(setting), setting.sequence),
        _kind(decoder, setting), row,
    )  # fmt: skip


def _sequences(setting: Setting) -> int:
    """Of a step."""
    return setting.batch * setting.size("dp_replicate", "dp")


def _kind(decoder: Decoder, setting: Setting) -> str:
    if decoder.experts:
        return "mixture"
    return "8 bits" if setting.matmul_dtype else "dense"


# -- numbers ----------------------------------------------------------------------------------------------------------


def _text(row: Mapping[str, str], *keys: str) -> str:
    return " ".join((row.get(key) or "") for key in keys).lower()


def _float(row: Mapping[str, str], key: str) -> float | None:
    found = re.search(r"[-+]?\d*\.?\d+(?:e[-+]?\d+)?", (row.get(key) or "").replace(",", ""))
    return float(found[0]) if found else None


def _int(row: Mapping[str, str], key: str, default: int | None = None) -> int | None:
    value = _float(row, key)
    return default if value is None else round(value)


def _needed(row: Mapping[str, str], key: str) -> int:
    value = _int(row, key)
    if value is None or value < 1:
        raise LeftOutError(f"no {key}")
    return value


def _seconds(row: Mapping[str, str], setting: Setting, decoder: Decoder, machine: Machine) -> float | None:
    """Of a step: as measured, or from tokens per second, or from operations."""
    if (step := _float(row, "step_s")) is not None:
        return step
    gpus = setting.mesh.world_size
    if rate := _float(row, "tok_s_gpu"):
        return setting.tokens / (rate * gpus)
    operations = 3.0 * decoder.forward_flops(setting.sequence) * setting.tokens / setting.sequence
    if rate := _float(row, "tflops_gpu"):
        return operations / (rate * 1e12 * gpus)
    if share := _float(row, "mfu_pct"):
        return operations / (share / 100 * machine.peak_flops["bfloat16"] * gpus)
    return None


# -- models -----------------------------------------------------------------------------------------------------------

_NAMES = ("source", "system")
_GATED = r"llama|mistral|mixtral|qwen|intern|deepseek|gemma|\byi\b|olmo|baichuan|palm|phi-?3|granite|aquila|vicuna"
_PLAIN = r"gpt|mpt|opt|bloom|megatron|turing|mt-nlg|nemotron|falcon|bert|\bt5\b|neox|pythia|cerebras"
_UNGATED_RMS = "nemotron"

KNOWN = {  # published sizes: layers, hidden, ffn, heads, key/value heads, vocabulary
    r"llama.*34b": (48, 8192, 22016, 64, 8, 32000),
    r"llama.*3.*405b": (126, 16384, 53248, 128, 8, 128256),
    r"llama.*3.*70b": (80, 8192, 28672, 64, 8, 128256),
    r"llama.*3.*8b": (32, 4096, 14336, 32, 8, 128256),
    r"llama.*2.*70b": (80, 8192, 28672, 64, 8, 32000),
    r"llama.*65b": (80, 8192, 22016, 64, 64, 32000),
    r"llama.*(30b|33b)": (60, 6656, 17920, 52, 52, 32000),
    r"llama.*13b": (40, 5120, 13824, 40, 40, 32000),
    r"llama.*7b": (32, 4096, 11008, 32, 32, 32000),
    r"internlm.*20b": (60, 5120, 13824, 40, 40, 103168),
    r"gpt.*175b": (96, 12288, 49152, 96, 96, 51200),
    r"gpt.*530b": (105, 20480, 81920, 128, 128, 51200),
}


def _decoder(row: Mapping[str, str]) -> Decoder:
    names = _text(row, "model", "family", "source")
    sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
    published = next((numbers for pattern, numbers in KNOWN.items() if re.search(pattern, _text(row, "model"))), None)
    given = {key: _int(row, key) for key in sizes}
    if published is not None and (given["layers"] is None or given["hidden"] is None):
        given = {key: given[key] or value for key, value in zip(sizes, published, strict=True)}
    if not given["layers"] or not given["hidden"]:
        raise LeftOutError("no sizes of the model")
    hidden = given["hidden"]
    heads = given["heads"] or max(1, hidden // 128)
    ffn = given["ffn"] or 4 * hidden
    experts = _int(row, "experts", 0) or 0
    model = _text(row, "model", "family")
    plain = _is_plain(model or names, ffn, hidden, experts)
    gpt = plain and _UNGATED_RMS not in model
    return Decoder(
        layers=given["layers"],
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=given["kv_heads"] or heads,
        vocab=given["vocab"] or (50304 if gpt else 32000),
        gated=not plain,
        experts=experts if experts > 1 else 0,
        chosen=(_int(row, "topk", 2) or 2) if experts > 1 else 0,
        positions=_int(row, "seq", 0) or 0 if gpt else 0,
        biases=gpt,
        centered=gpt,
        tied=gpt,
    )


def _is_plain(model: str, ffn: int, hidden: int, experts: int) -> bool:
    """Whether the feed-forward part has no gate: by the model's name, else by its width."""
    if re.search("-like", model):  # sizes of another model in Megatron's GPT, which has no gate
        return True
    if re.search(_GATED, model):
        return False
    if re.search(_PLAIN, model):
        return True
    return not experts and abs(ffn - 4 * hidden) <= 0.05 * hidden


# -- machines ---------------------------------------------------------------------------------------------------------

_GPUS = (
    (r"gb300|gb200", "gb200"),
    (r"b300|b200|b100", "b200"),
    (r"h200|gh200", "h200"),
    (r"h800", "h800"),
    (r"500 ?w|hbm2e|h100.*9[4-6] ?gb", "h100-500w"),
    (r"h100|h20", "h100-sxm"),
    (r"(?<!\d)40 ?g(?!b?ps)", "a100-40"),
    (r"a[18]00", "a100"),
    (r"l40", "l40s"),
    (r"4090|3090|rtx", "rtx-4090"),
)


def machine_of(row: Mapping[str, str]) -> Machine:
    """The profile of a row's GPU, with the network that the row states."""
    return _with_network(_text(row, "gpu"), bool(re.search("torchtitan", _text(row, "source", "system"))))


@lru_cache(maxsize=256)
def _with_network(gpu: str, in_torchtitan: bool) -> Machine:
    """The network's rate is that of a node, unless the row says of a GPU."""
    name = next((name for pattern, name in _GPUS if re.search(pattern, gpu)), "h100-sxm")
    if name == "h100-sxm" and in_torchtitan:
        name = "h100-500w"
    machine = load_machine(name)
    if "b300" in gpu:  # the same rates in 16 bits, with more memory; source: NVIDIA DGX B300 data sheet, 288 GB a GPU
        machine = replace(machine, memory_bytes=machine.memory_bytes * 288 / 192)
    found = re.search(r"(\d+) ?x ?(\d+) ?gb\w* ?(?:roce|ib|infiniband|hdr|ndr|/s)?|(\d+) ?gb(?:ps|it/s)", gpu)
    if found is None or "hbm" in found[0]:
        return machine
    bits = float(found[1]) * float(found[2]) if found[1] else float(found[3])
    ranks = 1 if re.search("a gpu|per gpu|/gpu", gpu) else machine.node_ranks
    return replace(machine, between=replace(machine.between, bytes_per_s=bits * 1e9 / 8 / ranks))


def forget_machines() -> None:
    """Where constants have changed."""
    _with_network.cache_clear()


# -- settings ---------------------------------------------------------------------------------------------------------


def _setting(row: Mapping[str, str], decoder: Decoder) -> Setting:
    tp, pp, cp = (max(1, _int(row, key, 1) or 1) for key in ("tp", "pp", "cp"))
    gpus = _needed(row, "gpus")
    dp = _int(row, "dp") or gpus // (tp * pp * cp)
    if dp < 1 or dp * tp * pp * cp != gpus:
        dp = gpus // (tp * pp * cp)
        if dp < 1 or dp * tp * pp * cp != gpus:
            raise LeftOutError(f"tp {tp}, pp {pp}, cp {cp} do not divide {gpus} GPUs")
    mbs, count = _batch(row, dp)
    ep, etp = max(1, _int(row, "ep", 1) or 1), _int(row, "etp") or tp
    ep = ep if decoder.experts and decoder.experts % ep == 0 else 1
    stages = max(1, _int(row, "vpp", 1) or 1) if pp > 1 else 1
    zero, replicas = _zero(row, dp)
    data = [("dp_replicate", replicas), ("dp", dp // replicas)] if replicas > 1 else [("dp", dp)]
    mesh = MeshSpec([("pp", pp), *data, ("cp", cp), ("tp", tp)])
    system, kernels = _system(row), _kernels(row, decoder)
    sp = _int(row, "sp", 1 if system in ("nemo", "fsdp2") else 0)  # what these do where nothing is said
    once = system == "fsdp2" and zero == 3 and pp > 1  # torchtitan keeps parameters and gradients whole over a step
    return Setting(
        mesh,
        batch=mbs * count,
        num_microbatches=count,
        sequence=_needed(row, "seq"),
        schedule="interleaved_1f1b" if stages > 1 else "1f1b",
        stages_per_rank=stages if stages > 1 else None,
        zero=2 if once else zero,
        defer=once,
        sequence_parallel=bool(sp) and tp > 1,
        overlap="auto" if tp > 1 and bool(sp) and _overlaps_tp(row) else "off",
        ulysses=cp if re.search(r"a2a|all.?to.?all|ulysses", _text(row, "notes", "where")) else 1,
        gathers_keys=cp > 1 and bool(re.search(r"(cp|kv|context).{0,12}all.?gather", _text(row, "notes", "where"))),
        loss_parallel=system in ("megatron", "nemo", "deepspeed", "internevo") or "torchtitan" in _text(row, *_NAMES),
        ep=ep,
        etp=etp if ep > 1 else 1,
        dtype="float16" if re.search("fp16|float16|half", _text(row, "precision")) else "bfloat16",
        matmul_dtype=_narrow(row),
        kernels=kernels,
        system=system,
        **_recompute(row, decoder, pp, system),
    ).complete()


def _overlaps_tp(row: Mapping[str, str]) -> bool:
    """Whether messages over tp run behind matmuls: where a row says so, and in NeMo, whose recipes turn it on.
    Source: NVIDIA NeMo, performance guide: `tp_comm_overlap`."""
    text = _text(row, "system", "source", "kernels", "notes")
    return _system(row) == "nemo" or bool(re.search(r"tp.?comm.?overlap|userbuffer|tp overlap|async.?tp", text))


def _batch(row: Mapping[str, str], dp: int) -> tuple[int, int]:
    """(sequences of a microbatch, microbatches)."""
    mbs, gbs, count = (_int(row, key) for key in ("mbs", "gbs", "microbatches"))
    if mbs is None and gbs and count:
        mbs = max(1, gbs // (dp * count))
    if mbs is None and gbs:
        mbs = max(1, gbs // dp)
    if mbs is None:
        raise LeftOutError("no batch")
    if gbs:
        count = max(1, round(gbs / (dp * mbs)))
    return max(1, mbs), count or 1


def _narrow(row: Mapping[str, str]) -> str | None:
    precision = _text(row, "precision")
    if re.search("fp4|float4", precision):
        return "float4"
    if re.search("mxfp8", precision):
        return "mxfp8"
    return "float8" if re.search("fp8|float8|8.?bit", precision) else None


def _zero(row: Mapping[str, str], dp: int) -> tuple[int, int]:
    """(ZeRO stage, copies of the model over which it does not split)."""
    text = _text(row, "zero")
    system = _system(row)
    fsdp = system in ("fsdp1", "fsdp2")
    number = _int(row, "zero")
    if number is None:
        number = 3 if fsdp or "full" in text or "fsdp" in text else 1 if "dist" in text else 0
    number = min(max(number, 0), 3)
    if system in ("megatron", "nemo", "aleph-alpha") and number == 2:
        number = 1  # the distributed optimizer: gradients stay whole until the step ends
    group = re.search(r"group (\d+)", text)
    size = int(group[1]) if group else 8 if re.search("within|hsdp|hybrid", text) else dp
    return number, dp // size if 0 < size < dp and dp % size == 0 else 1


def _system(row: Mapping[str, str]) -> str:
    text = _text(row, "system") or _text(row, "source")
    every = _text(row, "system", "source")
    patterns = (
        (r"deepspeed.*zero|megatron-deepspeed|deepspeed", "deepspeed"),
        (r"internevo|internlm", "internevo"),
        (r"aleph", "aleph-alpha"),
        (r"torchtitan|fsdp2|fully_shard|simplefsdp|automodel", "fsdp2"),
        (r"nemo|bridge|dgxc", "nemo"),
        (r"fsdp|foundry|mosaic|composer", "fsdp1"),
        (r"megatron|transformer ?engine|colossal|\bte\b", "megatron"),
    )
    for words in (text, every):
        for pattern, name in patterns:
            if re.search(pattern, words):
                return name
    return "fsdp2" if re.search("3|fsdp", _text(row, "zero")) else "megatron"


def _kernels(row: Mapping[str, str], decoder: Decoder) -> str:
    text, system = _text(row, "kernels"), _system(row)
    plain = re.search(r"eager|(no|without|w/o) (torch\.)?compile", text)
    fused = "fused-dropout" if system == "megatron" and decoder.positions else "fused"
    if re.search(r"\bte\b|transformer ?engine|transformerengine|nemo", text):
        return fused
    if re.search(r"compile|inductor", text) and not plain:
        return "compiled" if re.search("cudnn|flash.?attention.?[34]|fa[34]", text) else "compiled-flash-2"
    if plain and system == "fsdp2":
        return "eager-flash-2"
    if "cudnn" in text:
        return fused
    if re.search(r"unfused|softmax|torch attention|math|megatron (kernel|attention)", text):
        return "unfused-2022"
    if re.search("aleph", _text(row, "system", "source")):
        if not re.search("flash", text):
            return "unfused-2022"
        return "flash-2023" if re.search("rms", text) else "flash-2023-norms"
    if re.search(r"flash|apex|fused|triton|xformers", text):
        pure = "flash-pure" if "triton" in text else "flash-2-pure"
        return pure if "pure" in _text(row, "precision") else "flash-2023"
    of_systems = {
        "megatron": fused, "nemo": fused, "deepspeed": "unfused-2022", "internevo": "flash-2023",
        "fsdp2": "compiled-flash-2",
    }  # fmt: skip
    return of_systems.get(system, "flash-2023" if re.search("a100", _text(row, "gpu")) else "eager")


def _recompute(row: Mapping[str, str], decoder: Decoder, pp: int, system: str) -> dict[str, Any]:
    text = _text(row, "recompute").strip()
    if re.match(r"(none|no|off|false|0)\b", text) or text in ("", "-"):
        return {"recompute": "off"}
    if "select" in text or "core" in text or re.search(r"\battn|attention", text):
        if re.search(r"norm|act\b|mlp|moe", text) and "attn" not in text and "attention" not in text:
            return {"recompute": "selective"}  # modules by name, as in Megatron-Core
        if re.search(r"block|layer|every|\b2\b", text):
            every = re.search(r"every (\d+)|(\d+)", text)
            return {"recompute": "full", "recompute_every": int(every[1] or every[2]) if every else 2}
        if re.search(r"\bop\b|op-?level|per-?op", text) or system in ("fsdp1", "fsdp2"):
            return {"recompute": "selective", "matmuls_again": "torchtitan" in _text(row, *_NAMES)}
        return {"recompute": "off", "attention_again": True}
    numbered = re.search(r"(\d+)", text)
    if numbered and re.search("layer|block|full", text):
        per_stage = max(1, decoder.layers // pp)
        share = min(1.0, int(numbered[1]) / per_stage)
        return {"recompute": "full", "recompute_every": max(1, round(1 / share))} if share > 0 else {"recompute": "off"}
    return {"recompute": "full"}


def cases(rows: list[dict[str, str]]) -> Iterator[tuple[dict[str, str], Case | str]]:
    """Each row with its case, or with the reason why it is left out."""
    for row in rows:
        try:
            yield row, case_of(row)
        except LeftOutError as reason:
            yield row, str(reason)
        except Exception as error:  # a row in a form that was not foreseen: told, never in the way of the others
            yield row, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
