"""Messages of real processes in a step of a decoder that calls `flex_attention`, and those that `explain` predicts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from parallelize import build_mesh, parallelize_model
from parallelize.base.mesh import MeshSpec
from parallelize.comm.meshes import mesh_spec
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.subject import Subject
from tests.support.flex_models import PLAN, VOCAB, Decoder
from tests.tools.analysis.cost.explain_jobs import Counting

ROWS = 2


def inputs_of(rows: int, length: int) -> dict[str, Any]:
    ids, targets = torch.randint(VOCAB, (2, rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "documents": (torch.arange(length) // 5).expand(rows, -1).clone(), "targets": targets}


def sent_messages(rank: int, sizes: dict[str, int], length: int, options: dict[str, Any]) -> Any:
    """(pp rank, 0 for ranks of which the messages are predicted, counts of messages)."""
    torch.manual_seed(0)
    mesh = build_mesh("cpu", **sizes)
    parallel = parallelize_model(Decoder(), mesh, parse_plan(PLAN), **options)
    optimizer, inputs = parallel.optimizer(torch.optim.AdamW, lr=1e-3), inputs_of(ROWS, length)
    parallel.step(**inputs)
    optimizer.step()
    optimizer.zero_grad()
    with Counting(mesh_spec(mesh)) as counting:
        parallel.step(**inputs)
        optimizer.step()
    coordinates = mesh_spec(mesh).coordinates(dist.get_rank())
    return coordinates.get("pp", 0), coordinates.get("tp", 0) + coordinates.get("cp", 0), dict(counting.counts)


def predicted_messages(sizes: dict[str, int], length: int, options: dict[str, Any]) -> dict[int, dict[tuple, int]]:
    """For each pp rank."""
    setting = Setting(MeshSpec(**sizes), batch=ROWS, sequence=length, transport="gloo", **options).complete()
    source = ModelSource("flex", lambda _: Decoder(), extras={"inputs": inputs_of})
    subject = Subject(source, parse_plan(PLAN))
    predictions = {}
    for pp_rank in range(setting.size("pp")):
        counts: Counter[tuple] = Counter()
        for message, times in subject.rank_step(setting, setting.pipeline(), pp_rank, False, False).messages:
            counts[message.op, message.axis, message.ranks, message.bytes] += times
        predictions[pp_rank] = dict(counts)
    return predictions
