"""`transformers` models without a shipped plan and without experts: parity under their own plan, translated, or a named error.

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
BOUND = 5e-6
HEADER = "| model type | result on tp=2, without a shipped plan | error or slug |"


def build(model_type: str) -> nn.Module:
    """A tiny stock causal model of that type."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**{**SIZES, **EXTRA.get(model_type, {})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    choose_unevenly(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
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
    for model_type in sorted(TYPES):
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
