"""`transformers` models for which no plan is shipped: parity with their own plan translated, or a named error.

python -m tests.plans.other_models docs/other-models.md        # writes the published table
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
from tests.support.models import tiny_batch
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
        "mixtral",
        "mpt",
    ),
    *(
        "nanochat",
        "nemotron",
        "olmo",
        "olmo3",
        "olmo_hybrid",
        "qwen3_5_text",
        "qwen3_moe",
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
BOUND = 5e-6


def build(model_type: str) -> nn.Module:
    """A tiny stock causal model of that type."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**{**SIZES, **EXTRA.get(model_type, {})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def outcome(model_type: str) -> tuple[str, str]:
    """("equal", worst error) or ("refused", slug): what a user meets with `parallelize_module(model, mesh)`."""
    model = build(model_type)
    ids, labels = tiny_batch()
    reference = copy.deepcopy(model)
    loss = loss_of(reference(input_ids=ids, use_cache=False).logits, labels)
    loss.backward()
    want = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    models = [copy.deepcopy(model) for _ in range(2)]
    shapes = {n: p.shape for n, p in model.named_parameters()}

    def body(rank: int) -> Any:
        try:
            parallelize_module(models[rank], build_mesh("cpu", tp=2))
        except ParallelizeError as error:
            assert {n: p.shape for n, p in models[rank].named_parameters()} == shapes, "changed before the error"
            return "refused", error.slugs[0], error
        got = loss_of(models[rank](input_ids=ids, use_cache=False).logits, labels)
        got.backward()
        error = max(worst(full_gradients(models[rank]), want)[0], worst({"": got.detach()}, {"": loss.detach()})[0])
        return ("equal" if error <= BOUND else "DIFFERS"), f"{error:.0e}", None

    return run_ranks(2, body)[0][:2]


def table() -> str:
    """The published table."""
    rows = ["| model type | without a shipped plan, tp=2 | |", "| --- | --- | --- |"]
    for model_type in TYPES:
        kind, detail = outcome(model_type)
        words = "equals the unsharded model" if kind == "equal" else kind
        rows.append(f"| {model_type} | {words} | {'error ' + detail if kind != 'refused' else '`' + detail + '`'} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    text = (
        __doc__.splitlines()[0]
        + "\n\nWritten by `python -m tests.plans.other_models docs/other-models.md`.\n\n"
        + table()
    )
    Path(sys.argv[1]).write_text(text) if len(sys.argv) > 1 else print(text)


if __name__ == "__main__":
    main()
