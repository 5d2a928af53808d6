"""Every model type of `transformers` that has experts: its plan, and whether small models of it equal the unsharded
one.

python -m tests.tp_plans.mixtures                      # prints the table
python -m tests.tp_plans.mixtures docs/experts.md      # replaces the table of the page, which ends with it
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize import ParallelizeError, build_mesh, full_gradients, parallelize_module
from parallelize.plan.choose import choose_plan
from parallelize.tools.verification.precision import InFloat64
from tests.support.models import COMMON, MIXTURES, choose_unevenly, perturb, tiny_batch
from tests.support.parity import worst
from tests.support.threads import run_ranks

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
EXTRA: dict[str, dict[str, Any]] = {
    "doge": {"is_moe": True},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "flint": {"mlp_only_layers": [0]},
    "zaya": {"num_experts_per_tok": 1},
}
MODES: dict[str, dict[str, Any]] = {"tp=2": {}, "tp=2, sequence": {"sequence_parallel": True}, "tp=2, ep=2": {"ep": 2}}
BOUND = 1e-10
LARGEST = 40_000_000
"""Parameters of a model that is still run; a type whose sizes have other names than those above may have more."""
HEADER = "| model type | plan | tp=2 | tp=2, sequence parallel | tp=2, ep=2 |"
_DEFINES_EXPERTS = re.compile(r"use_experts_implementation|class \w*(?:Experts?|SparseMLP|CDMoE)\w*\(")


def candidates() -> list[str]:
    """The registered model types whose code, or plan, names experts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return sorted(model_type for model_type in CONFIG_MAPPING if _names_experts(CONFIG_MAPPING[model_type]))


def _names_experts(config: Any) -> bool:
    words = [
        word for plan in ("tp", "ep") for word in (getattr(config, f"base_model_{plan}_plan", None) or {}).values()
    ]
    if "moe_tp_experts" in words or "ep_dispatch_experts" in words:
        return True
    try:
        module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return False
    return bool(_DEFINES_EXPERTS.search(inspect.getsource(module)))


def build(model_type: str, device: str = "cpu", **more: Any) -> nn.Module:
    """A small stock model of that type in float64: with a language model's head, where there is one. On meta: of its
    own sizes."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {**COMMON, **MIXTURES[model_type][2]} if model_type in MIXTURES else {**SIZES, **EXPERTS}
    if device == "meta":
        config = CONFIG_MAPPING[model_type]()
    else:
        config = CONFIG_MAPPING[model_type](**{**sizes, **EXTRA.get(model_type, {}), **more})
    torch.manual_seed(0)
    with torch.device("meta"):
        try:
            model, maker = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM
        except ValueError:
            model, maker = AutoModel.from_config(config), AutoModel
    if device == "meta":
        return model
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
        raise ValueError("too large")
    model = maker.from_config(config).train()
    choose_unevenly(model)
    perturb(model)
    model.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def has_experts(model: nn.Module) -> bool:
    """Whether a parameter belongs to experts, or to a router."""
    return any("expert" in name or "router" in name for name, _ in model.named_parameters())


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with InFloat64():
        out = model(input_ids=ids, use_cache=False)[0]
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        return (out * weights).sum() / out[..., 0].numel()


def _gradients(loss: torch.Tensor, gradients: Any) -> dict[str, torch.Tensor]:
    with InFloat64():
        loss.backward()
    return {"loss": loss.detach(), **gradients()}


def unsharded(model: nn.Module) -> dict[str, torch.Tensor]:
    """Loss and gradients of a copy of the model, on one process."""
    model, (ids, _) = copy.deepcopy(model), tiny_batch()
    return _gradients(_loss(model, ids), lambda: {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def outcome(model: nn.Module, **options: Any) -> tuple[str, str]:
    """("equal" or "DIFFERS", largest error) on two ranks, or ("refused", slug) where an error is raised before a
    change."""
    ids, _ = tiny_batch()
    expected = unsharded(model)
    models = [copy.deepcopy(model) for _ in range(2)]
    shapes = {n: p.shape for n, p in model.named_parameters()}

    def body(rank: int) -> tuple[str, str]:
        try:
            parallelize_module(models[rank], build_mesh("cpu", tp=2), **options)
        except ParallelizeError as error:
            assert {n: p.shape for n, p in models[rank].named_parameters()} == shapes, "changed before the error"
            return "refused", error.slugs[0]
        try:
            actual = _gradients(_loss(models[rank], ids), lambda: full_gradients(models[rank]))
        except ParallelizeError as error:
            return "refused in its forward", error.slugs[0]
        except RuntimeError as error:
            return "FAILS", type(error).__name__
        error, _ = worst({n: actual[n] for n in expected}, expected)
        return ("equal" if error <= BOUND else "DIFFERS"), f"{error:.0e}"

    return run_ranks(2, body)[0]


def plan_kind(model: nn.Module) -> str:
    """Which plan a model gets: a shipped one, its own, or the slug of the error."""
    try:
        plan, _ = choose_plan(model)
    except ParallelizeError as error:
        return f"refused: `{error.slugs[0]}`"
    return "translated" if plan.source == "base_model_tp_plan" else f"shipped: {plan.name}"


def _is_built_by_itself(model_type: str) -> bool:
    """Whether the type is a model, rather than a part of one without an Auto class."""
    from transformers.models.auto import modeling_auto as auto

    names = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    return any(model_type in mapping for mapping in names)


def row(model_type: str) -> str | None:
    """The row of a type; None for one whose model has no experts."""
    if not _is_built_by_itself(model_type):
        return None
    model = _runnable(model_type)
    if model is None or not has_experts(model):
        return _row_without_running(model_type)
    kind = plan_kind(model)
    if kind.startswith("refused"):
        return _cells(model_type, kind, "-", "-", "-")
    results = []
    for options in MODES.values():
        result, detail = outcome(model, **options)
        results.append(result if result == "equal" else f"{result}: `{detail}`")
    return _cells(model_type, kind, *results)


def _runnable(model_type: str) -> nn.Module | None:
    """A small model whose unsharded step runs; None where these sizes are not valid for the type."""
    for more in ({}, {"num_key_value_heads": 8}):
        try:
            model = build(model_type, **more)
            if has_experts(model) and not plan_kind(model).startswith("refused"):
                unsharded(model)
            return model
        except Exception:  # a stock model may raise anything for sizes that it does not expect
            continue
    return None


def _row_without_running(model_type: str) -> str | None:
    try:
        model = build(model_type, "meta")
    except Exception as error:
        return _cells(model_type, f"not built ({type(error).__name__})", "-", "-", "-")
    is_whole = model.config.model_type == model_type  # of some types, the language model is a type of its own
    kind = plan_kind(model) if is_whole else f"as {model.config.model_type}"
    return _cells(model_type, kind, "-", "-", "-") if has_experts(model) else None


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def rows() -> Iterator[str]:
    """The published table, line by line."""
    yield HEADER
    yield "| --- | --- | --- | --- | --- |"
    for model_type in candidates():
        line = row(model_type)
        if line is not None:
            yield line


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        for line in rows():
            print(line, flush=True)
        return
    page = Path(sys.argv[1])
    before, header, _ = page.read_text().partition(HEADER)
    assert header, f"the page has no row {HEADER!r}"
    page.write_text(before + "\n".join(rows()) + "\n")


if __name__ == "__main__":
    main()
