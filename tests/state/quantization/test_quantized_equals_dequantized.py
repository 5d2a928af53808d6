"""Models with quantized linears on shards equal the unsharded models with the dequantized weights, in every value and
gradient."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import build_mesh, parallelize_module
from tests.axes.tensor.install.adapted_models import EXPERTS
from tests.state.quantization.quantized_models import quantized, reference_of, trained, with_lora
from tests.support.models import tiny_batch
from tests.support.parity import compare, planned_run, reference_run, worst
from tests.support.threads import run_ranks

pytest.importorskip("peft")

DATA = [tiny_batch(67, seed=1), tiny_batch(67, seed=2)]
BOTH = {"sequence_parallel": True, "loss_parallel": True}


def check(model: torch.nn.Module, tp: int, dtype: torch.dtype, **options) -> None:
    expected = reference_run(reference_of(model), DATA)
    expected["weights"] = trained(expected["weights"], model)
    models = [copy.deepcopy(model) for _ in range(tp)]
    for actual in run_ranks(tp, lambda rank: planned_run(models[rank], tp, DATA, **options)):
        compare({**actual, "weights": trained(actual["weights"], model)}, expected, dtype)


@pytest.mark.variants(every=20)
@pytest.mark.parametrize("options", [{}, BOTH], ids=["tensor", "sequence+loss"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt2", "mixtral"])
def test_families(family, tp, options):
    form = "int8(block=16)" if tp == 4 and options else "nf4(block=16)"
    lora = {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS} if family == "mixtral" else {}
    check(with_lora(quantized(family, form), **lora), tp, torch.float64, **options)


def test_outputs_in_float32():
    model = with_lora(quantized("llama", dtype=torch.float32)).eval()
    models, (ids, _) = [copy.deepcopy(model) for _ in range(2)], DATA[0]

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), sequence_parallel=True)
        return models[rank](input_ids=ids).logits.detach()

    expected = {"logits": reference_of(model)(input_ids=ids).logits.detach()}
    assert worst({"logits": model(input_ids=ids).logits.detach()}, expected)[0] == 0  # bit-equal without a mesh
    assert max(worst({"logits": logits}, expected)[0] for logits in run_ranks(2, body)) < 1e-6
