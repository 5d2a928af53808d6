"""`transformers` models without a shipped plan: parity under their own plan, translated, or a named error.

python -m tests.tp_plans.other_models                         # prints the table
python -m tests.tp_plans.other_models docs/other-models.md    # replaces the table of the page, which ends with it
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize import ParallelizeError, build_mesh, full_gradients, parallelize_module
from tests.support.models import choose_unevenly, tiny_batch
from tests.support.parity import loss_of, worst
from tests.support.threads import run_ranks

TYPES = [
    *("apertus", "arcee", "bloom", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "glm"),
    *(
        "glm4",
        "gpt_bigcode",
        "granite",
        "granite_swa",
        "helium",
        "hyperclovax",
        "jais2",
        "mamba",
        "ministral",
        "mpt",
    ),
    *(
        "nanochat",
        "nemotron",
        "olmo",
        "olmo3",
        "olmo_hybrid",
        "qwen3_5_text",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
        "vaultgemma",
    ),
]
SIZES = dict(
    vocab_size=67,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    intermediate_size=72,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    residual_dropout=0.0,
    embedding_dropout=0.0,
)
EXTRA: dict[str, dict[str, Any]] = {"codegen": {"rotary_dim": 4}}
WITH_EXPERTS = [
    *("afmoe", "aria_text", "axk1", "bailing_hybrid", "cohere2_moe", "deepseek_v4", "doge"),
    *("exaone_moe", "flex_olmo", "flint", "gemma4_text", "granitemoehybrid", "hy_v3"),
    *("jamba", "jetmoe", "kimi_linear", "laguna", "lfm2_moe", "llama4_text", "longcat_flash", "mellum"),
    *("mimo_v2_flash", "minimax", "nemotron_h", "qwen3_5_moe_text", "qwen3_next", "solar_open", "zaya"),
]
EXPERTS = dict(
    intermediate_size=96,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    num_experts=6,
    num_local_experts=6,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    head_dim=8,
)
LATENT = {"num_key_value_heads": 8}
EXTRA |= dict.fromkeys(("axk1", "longcat_flash"), LATENT)
EXTRA |= {"granitemoehybrid": {"mamba_n_heads": 8}, "zaya": {"num_experts_per_tok": 1}}
EXTRA |= {"lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1}}
BOUND = 5e-6
IN_FLOAT64 = ("deepseek_v4",)  # whose unsharded forward differs as much from itself in float64
HEADER = "| model type | result on tp=2, without a shipped plan | error or slug |"


def build(model_type: str) -> nn.Module:
    """A tiny stock causal model of that type."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    experts = EXPERTS if model_type in WITH_EXPERTS else {}
    config = CONFIG_MAPPING[model_type](**{**SIZES, **experts, **EXTRA.get(model_type, {})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    choose_unevenly(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if model_type in IN_FLOAT64:
        model.double().set_experts_implementation("eager")
    return model


def outcome(model_type: str) -> tuple[str, str]:
    """("equal", largest error), ("DIFFERS", largest error) or ("refused", slug) of `parallelize_module(model, mesh)`."""
    model = build(model_type)
    ids, labels = tiny_batch()
    reference = copy.deepcopy(model)
    loss = loss_of(reference(input_ids=ids, use_cache=False).logits, labels)
    loss.backward()
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    models = [copy.deepcopy(model) for _ in range(2)]
    shapes = {n: p.shape for n, p in model.named_parameters()}

    def body(rank: int) -> Any:
        try:
            parallelize_module(models[rank], build_mesh("cpu", tp=2))
        except ParallelizeError as error:
            assert {n: p.shape for n, p in models[rank].named_parameters()} == shapes, "changed before the error"
            return "refused", error.slugs[0], error
        sharded_loss = loss_of(models[rank](input_ids=ids, use_cache=False).logits, labels)
        sharded_loss.backward()
        error = max(
            worst(full_gradients(models[rank]), expected)[0],
            worst({"": sharded_loss.detach()}, {"": loss.detach()})[0],
        )
        return ("equal" if error <= BOUND else "DIFFERS"), f"{error:.0e}", None

    return run_ranks(2, body)[0][:2]


def table() -> str:
    """The published table."""
    rows = [HEADER, "| --- | --- | --- |"]
    for model_type in sorted([*TYPES, *WITH_EXPERTS]):
        kind, detail = outcome(model_type)
        result = "equals the unsharded model" if kind == "equal" else kind
        rows.append(f"| {model_type} | {result} | {f'`{detail}`' if kind == 'refused' else f'error {detail}'} |")
    return "\n".join(rows) + "\n"


def with_table(page: str, rows: str) -> str:
    """The page with its table, from the header row to the end, replaced by `rows`."""
    before, header, _ = page.partition(HEADER)
    assert header, f"the page has no row {HEADER!r}"
    return before + rows


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        print(table())
        return
    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text(), table()))


if __name__ == "__main__":
    main()
