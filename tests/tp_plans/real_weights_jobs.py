"""What each rank does in the test of real weights: sentence embeddings of MiniLM, a BERT of six layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from parallelize import build_mesh, load_pretrained, parallelize_module
from parallelize.state.randomness.init.initialize import build_on_meta
from tests.support.parity import worst

SENTENCES = [
    "The cat sits on the mat.",
    "A kitten is lying on a rug.",
    "Interest rates were raised by a quarter of a percent, and the markets, which had expected no more, hardly moved.",
    "Banks charge more for loans.",
    "?",
]


def embeddings(model: Any, folder: str) -> torch.Tensor:
    """[sentences, hidden]: the mean over a sentence's tokens, normalized, as the model's own card has it."""
    from transformers import AutoTokenizer

    batch = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def unsharded(folder: str) -> torch.Tensor:
    from transformers import AutoModel

    return embeddings(AutoModel.from_pretrained(folder).eval(), folder)


def error_of_embeddings(rank: int, folder: str, tp: int, options: dict[str, Any]) -> tuple[float, float, float]:
    """(relative error against the unsharded model, bytes read per byte stored, the fraction of the file not read)."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder)
    model = build_on_meta(lambda: AutoModel.from_config(config)).eval()
    parallelize_module(model, build_mesh("cpu", tp=tp), "bert", **options)
    # the file has a buffer of older releases: position_ids
    loaded = load_pretrained(model, folder, allow_unexpected=True)
    error, _ = worst({"": embeddings(model, folder)}, {"": unsharded(folder)})
    size = (Path(folder) / "model.safetensors").stat().st_size
    return error, loaded.bytes_read / loaded.bytes_held, 1 - loaded.bytes_read / size
