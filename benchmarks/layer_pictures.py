"""Draws the pictures of README.md and docs/plan-reference.md: one layer of Llama, as its plan shards it.

python -m benchmarks.layer_pictures
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from parallelize.base.mesh import MeshSpec
from parallelize.plan.choose import plan_of
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.resolve import resolve
from parallelize.tools.analysis.show.layer_chart import draw_layer, draw_lines

IMAGES = Path(__file__).parents[1] / "docs" / "images"
TITLES = {
    "layer_tensor_parallel": "A layer of Llama over tp=4: column and row parallel",
    "layer_sequence_parallel": "A layer of Llama over tp=4 with sequence parallelism",
}


def pictures() -> dict[str, str]:
    """File name, without its suffix, to the SVG."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=1
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    drawn = {}
    for name, title in TITLES.items():
        options = Options(sequence_parallel="sequence" in name)
        resolved = resolve(plan_of(model, None), describe(model), MeshSpec([("tp", 4)]), options)
        drawn[name] = draw_layer(resolved, "model.layers.0", title)
    options = Options(sequence_parallel=True)
    resolved = resolve(plan_of(model, None), describe(model), MeshSpec([("tp", 2)]), options)
    drawn["plan_lines"] = draw_lines(resolved, "model.layers.0", "mlp", "What four lines of a plan do to a stock MLP")
    return drawn


if __name__ == "__main__":
    for name, svg in pictures().items():
        (IMAGES / f"{name}.svg").write_text(svg)
        print(IMAGES / f"{name}.svg")
