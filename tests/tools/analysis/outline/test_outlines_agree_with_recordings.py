"""An outline has the operations, messages and parameters of the model that it stands for, and about its memory."""

from __future__ import annotations

import pytest

from parallelize.base.errors import ModelError
from parallelize.base.mesh import MeshSpec
from parallelize.plan.models.model_source import read_model
from parallelize.tools.analysis.cost.machine import load_machine
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.measure import measure, model_flops, outline_of
from parallelize.tools.analysis.subject import Subject

LLAMA = dict(hidden_size=512, num_hidden_layers=4, intermediate_size=1792, vocab_size=4096, num_attention_heads=8)
MODELS = {
    "llama": {**LLAMA, "num_key_value_heads": 4, "max_position_embeddings": 512},
    "gpt2": dict(n_embd=512, n_layer=4, n_head=8, vocab_size=4096, n_positions=512),
}
MODES = {"sequence_parallel": True, "loss_parallel": True}


def both(model: str, mesh: str, **options):
    """(of the recording, of the outline): steps of the first pp rank, memories and times."""
    subject = Subject(read_model(model, MODELS[model]), None)
    setting = subject.complete(Setting(MeshSpec.parse(mesh), sequence=512, dtype="bfloat16", **options))
    outline, machine = outline_of(subject), load_machine("h100-sxm")
    assert outline is not None
    found = [measure(of, setting, machine, by_segment=False) for of in (subject, outline)]
    return found, [model_flops(of, setting) for of in (subject, outline)]


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=2", {"batch": 2, "zero": 1}), ("dp=2,tp=2", {"batch": 2, **MODES}), ("pp=2,dp=2", {"batch": 4, "zero": 1})],
)
def test_operations_and_memory(model, mesh, options):
    (recorded, outlined), flops = both(model, mesh, **options)
    ours, its = (steps[0].totals(0) for steps, _, _ in (recorded, outlined))
    for mine, theirs in zip(ours, its, strict=True):
        assert mine.linear_flops == pytest.approx(theirs.linear_flops, rel=1e-6)
        assert mine.forward_flops == pytest.approx(theirs.forward_flops, rel=1e-6)
    assert flops[0] == pytest.approx(flops[1], rel=1e-6)
    stored = [
        (memory.parameters, memory.optimizer) for _, memories, _ in (recorded, outlined) for memory in memories[:1]
    ]
    assert stored[0] == pytest.approx(stored[1], rel=0.01)
    peaks = [max(memory.peak for memory in memories) for _, memories, _ in (recorded, outlined)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.2)


def test_messages_over_tp():
    """Those of layers. The recording has one more: what shards the embedding's output runs in the first layer."""
    (recorded, outlined), _ = both("llama", "dp=2,tp=2", batch=2, **MODES)
    sent, its = (
        sum(m.sent_bytes * times for m, times in steps[0].messages if m.axis == "tp" and "layers" in m.module)
        for steps, _, _ in (recorded, outlined)
    )
    hidden_states = 2 * 512 * 512 * 2
    assert 0 <= sent - its <= hidden_states / 2


def test_other_kernels_of_a_model_without_an_outline_are_refused():
    subject = Subject(read_model("bert", {}), None)
    setting = subject.complete(Setting(MeshSpec(dp=2), sequence=64, kernels="fused"))
    with pytest.raises(ModelError) as caught:
        measure(subject, setting, load_machine("h100-sxm"))
    assert caught.value.slugs == ("no-outline",)
