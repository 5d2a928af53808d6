"""Models whose output for one sequence depends on the other sequences of its batch: a part of the batch has other numbers.

Every data rank and every microbatch would compute the numbers of a smaller batch, where all else here computes those of the full one.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import DATA_AXES, MeshSpec

MIXING = {"DogeCDMoE": "its router views the scores of all tokens of the batch as two halves"}
"""Class of a module to what mixes the rows of its batch. [transformers 5.23, modeling_doge.py]"""


def check_batch_parts(objects: Mapping[str, Any], mesh: MeshSpec, num_microbatches: int = 1) -> None:
    """Raises: ModelError `mixes-rows` where the batch of a model that mixes its rows is divided.

    Args:
        objects: the modules of the model, by fqn.
        mesh: of its axes those that divide the batch.
        num_microbatches: of a step.
    """
    parts = [(f"{axis}={mesh.ranks(axis)}", mesh.ranks(axis)) for axis in DATA_AXES]
    parts.append((f"num_microbatches={num_microbatches}", num_microbatches))
    dividing = [text for text, count in parts if count > 1]
    mixing = _mixing(objects.items()) if dividing else None
    if mixing is not None:
        fqn, why = mixing
        what = f"{fqn} mixes the rows of its batch, which {' and '.join(dividing)} would divide: {why}"
        fix = "one data rank, and num_microbatches=1"
        raise ModelError(Problem("mixes-rows", what, fix=fix))


def _mixing(modules: Iterable[tuple[str, Any]]) -> tuple[str, str] | None:
    """(fqn, why) of the first module that mixes rows."""
    for fqn, module in modules:
        if why := MIXING.get(type(module).__name__):
            return fqn, why
    return None
