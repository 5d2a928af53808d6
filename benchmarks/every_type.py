"""Every model type of `transformers` that can be built small: which plan serves it, and whether that is right on 2 and
4 ranks.

    python -m benchmarks.every_type                               # the types that the record lacks
    python -m benchmarks.every_type --again                       # and those that were not proven
    python -m benchmarks.every_type --only bloom whisper          # these
    python -m benchmarks.every_type --page docs/other-models.md   # writes the table of the page from the record

A type has a process of its own, forked from one that has imported everything, which is ended after `--timeout` seconds
of its CPU. What is compared is compared by `verify`, in float64, on a small version of the model. About 5 s a type.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.every_type_sources import source_of_type
from benchmarks.every_type_table import OUT_OF_MEMORY, with_table
from benchmarks.record import RESULTS, read_record, write_record
from parallelize import derive_plan
from parallelize.base.errors import ParallelizeError, PlanError
from parallelize.base.mesh import MeshSpec
from parallelize.plan.choose import choose_plan, shipped_plan_of
from parallelize.plan.model_facts import describe
from parallelize.plan.models.example_inputs import inputs_of
from parallelize.plan.models.model_source import ModelSource, read_model
from parallelize.plan.resolve import resolve
from parallelize.plan.schema import Plan
from parallelize.tools.derivation.gathered_linears import is_in_layer
from parallelize.tools.derivation.proof import Proof, provable, prove
from parallelize.tools.derivation.small_model import small_model

NAME = "every_type"
TP = (2, 4)
_WAIT = 8  # times the seconds of CPU that a type may take, until its process is ended although it waits
MEMORY = 12 << 30
"""Bytes of address space of a type's process."""

Row = dict[str, Any]


_MAPPINGS = {
    "CAUSAL_LM": "causal language models",
    "MASKED_LM": "masked language models",
    "SEQ_TO_SEQ_CAUSAL_LM": "sequence to sequence",
    "SEQUENCE_CLASSIFICATION": "classification of texts",
    "IMAGE_CLASSIFICATION": "classification of images",
    "IMAGE": "vision: images alone",
    "IMAGE_TEXT_TO_TEXT": "vision: images and text",
}
"""Of the classes of `transformers`, in words: types with one of these come first."""


def model_types() -> list[str]:
    """All model types that have a class of model, those of language and images first."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    first = {name for names in _names_of_mappings().values() for name in names}
    known = first | set(modeling_auto.MODEL_MAPPING_NAMES)
    return sorted(known & set(CONFIG_MAPPING.keys()), key=lambda name: (name not in first, name))


def _names_of_mappings() -> dict[str, set[str]]:
    from transformers.models.auto import modeling_auto

    return {words: set(getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")) for kind, words in _MAPPINGS.items()}


def row_of(model_type: str) -> Row:
    """What is known of one type: its class, the plan that serves it, and the error on each number of ranks."""
    row: Row = {"type": model_type}
    try:
        source = source_of_type(model_type)
        model = _small(source, TP[0])[1]
    except ImportError as error:
        return row | {"kind": "unbuilt", "reason": f"needs a package: {_first_line(error)}"}
    except ParallelizeError as error:
        if isinstance(error.__cause__, ImportError):
            return row | {"kind": "unbuilt", "reason": f"needs a package: {_first_line(error.__cause__)}"}
        kind = "unbuilt" if set(error.slugs) & {"unknown-model", "untraceable-model"} else "refused"
        return row | {"kind": kind, "reason": f"{error.slugs[0]}: {_reason(error)}"}
    row["class"] = type(model).__name__
    if shipped_plan_of(source.config) is not None:
        return row | _proven(source, choose_plan(model)[0], "shipped")
    translated = _translated(source, model)
    row["own"] = translated["errors"]["2"] if "errors" in translated else translated["reason"]
    return row | _derived(source, translated)


def _translated(source: ModelSource, model: Any) -> Row:
    try:
        plan = choose_plan(model)[0]
    except PlanError as error:
        return {"kind": "refused", "reason": error.slugs[0]}
    return _proven(source, plan, "translated", TP[:1])


def _derived(source: ModelSource, otherwise: Row) -> Row:
    """The row of a derived plan; `otherwise` where there is none and the model's own is right."""
    try:
        derived = derive_plan(source)
    except ParallelizeError as error:
        refused = {"kind": "refused", "reason": f"{error.slugs[0]}: {_reason(error)}"}
        return otherwise if otherwise["kind"] == "translated" else refused
    known = {str(TP[0]): derived.proof.error} if derived.proof else {}
    row = _proven(source, derived.plan, "derived", TP[1:], known)
    if row["kind"] == "derived" and row["layers"] >= otherwise.get("layers", 0):
        return row
    return row if otherwise["kind"] != "translated" else _proven(source, choose_plan(derived.model)[0], "translated")


def _proven(source: ModelSource, plan: Plan, kind: str, tps: Sequence[int] = TP, known: Row | None = None) -> Row:
    """The errors of a plan on so many ranks, beside those that are known, and its shares; where a proof fails, the
    reason."""
    row: Row = {"kind": kind, "errors": dict(known or {}), "sequence": bool(plan.regions)}
    for tp in tps:
        try:
            proof = _proof(source, plan, tp, tp)
            if not proof.ok and "uneven-heads" in proof.slugs:  # heads of a fixed number of blocks, as of CodeGen
                proof = _proof(source, plan, tp, _MORE * tp)
        except ParallelizeError as error:
            row["errors"][str(tp)] = error.slugs[0]
            continue
        row["errors"][str(tp)] = proof.error if proof.ok else _slug_of(proof)
        if not proof.ok:
            row["reason"] = proof.text[:400]
    if not isinstance(row["errors"][str(TP[0])], float):
        kinds = {"DIFFERS": "wrong", OUT_OF_MEMORY: "failed"}
        return row | {"kind": kinds.get(row["errors"][str(TP[0])], "refused")}
    return row | _shares(source, plan)


def _slug_of(proof: Proof) -> str:
    """By what a proof failed: a refusal, the limit of memory, or another result."""
    if proof.slugs:
        return proof.slugs[0]
    return OUT_OF_MEMORY if "[enforce fail at" in proof.text or "not enough memory" in proof.text else "DIFFERS"


_SMALL: dict[tuple[str, int], tuple[ModelSource, nn.Module]] = {}
"""The small models of this process, by the name of the source and the number of ranks."""


def _small(source: ModelSource, tp: int) -> tuple[ModelSource, nn.Module]:
    if (source.text, tp) not in _SMALL:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _SMALL[source.text, tp] = small_model(source, tp)
    return _SMALL[source.text, tp]


_MORE = 4
"""For how many times as many ranks a small model is made, where the heads of another one are too few for a plan."""


def _proof(source: ModelSource, plan: Plan, tp: int, made_for: int) -> Proof:
    """The proof on `tp` ranks of a small model that was made for another number of them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small, model = _small(source, made_for)
        return prove(provable(small, model, inputs_of(small, model)), plan, tp)


def _shares(source: ModelSource, plan: Plan) -> Row:
    """Of the elements of parameters of the small model, and of those in its layers, the shares that are sharded."""
    model = _small(source, TP[0])[1]
    try:
        rows = resolve(plan, describe(model), MeshSpec.parse("tp=2")).parameters.values()
    except PlanError:
        model = _small(source, _MORE * TP[0])[1]
        rows = resolve(plan, describe(model), MeshSpec.parse("tp=2")).parameters.values()
    sizes = [(_elements(row), row.layout.dim is not None, is_in_layer(row.fqn, model)) for row in rows]
    layers = [(size, sharded) for size, sharded, inside in sizes if inside]
    return {
        "all": sum(size for size, sharded, _ in sizes if sharded) / max(1, sum(size for size, _, _ in sizes)),
        "layers": sum(size for size, sharded in layers if sharded) / max(1, sum(size for size, _ in layers)),
    }


def _elements(row: Any) -> int:
    return torch.Size(row.fact.shape).numel()


def _reason(error: ParallelizeError) -> str:
    problem = error.problems[0]
    rows = "; ".join(f"{name}: {value}" for name, value in problem.rows[:2])
    return f"{problem.what}{': ' if rows else ''}{rows}".partition("\n")[0][:300]


def _short(reason: str) -> str:
    """The beginning of a reason, which may quote any text."""
    words = " ".join(reason.split())
    return words if len(words) <= 100 else words[:100].rpartition(" ")[0]


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


# -- processes ---------------------------------------------------------------------------------------------------------


def _child(model_type: str, sender: Connection, timeout: int) -> None:
    os.nice(2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (timeout, timeout))
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        row = row_of(model_type)
    except BaseException as error:  # of code of any model
        row = {"type": model_type, "kind": "failed", "reason": f"{type(error).__name__}: {_first_line(error)}"}  # type: ignore[arg-type]
    sender.send(row)
    os._exit(0)


def run_types(types: Iterable[str], workers: int, timeout: int) -> Iterable[Row]:
    """The rows, as they come."""
    context = multiprocessing.get_context("fork")
    read_model("llama").build("meta")  # imports what each would import
    waiting, running = list(types), {}  # type: ignore[var-annotated]
    while waiting or running:
        while waiting and len(running) < workers:
            model_type = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(model_type, sender, timeout))
            process.start()
            sender.close()
            running[receiver] = (process, model_type, time.monotonic())
        for receiver in _ready(list(running)):
            process, model_type, began = running.pop(receiver)
            row = _received(receiver, process, model_type, timeout)
            yield row | {"seconds": round(time.monotonic() - began, 1)}
        for process, _, began in running.values():
            if time.monotonic() - began > _WAIT * timeout:
                process.kill()


def _ready(receivers: list[Any]) -> list[Any]:
    return wait(receivers, timeout=1.0)


def _received(receiver: Any, process: Any, model_type: str, timeout: int) -> Row:
    try:
        row: Row = receiver.recv()
    except EOFError:
        process.join()
        killed = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        return {"type": model_type} | (
            {"kind": "timeout", "reason": f"more than {timeout} s"}
            if killed
            else {"kind": "failed", "reason": f"its process ended with {process.exitcode}"}
        )
    process.join()
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE")
    parser.add_argument("--again", action="store_true", help="also types that were not proven")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=60, help="seconds of CPU of a type")
    parser.add_argument("--json", type=Path, default=RESULTS / f"{NAME}.json")
    parser.add_argument("--page", type=Path, help="write the table of this page, and run nothing")
    options = parser.parse_args(arguments)
    rows: dict[str, Row] = {}
    if options.json.exists():
        rows = {row["type"]: row for row in read_record(options.json.stem, options.json.parent)["result"]}
    if options.page:
        options.page.write_text(with_table(options.page.read_text(), rows.values()))
        return 0
    types = options.only or [name for name in model_types() if _is_open(rows.get(name), options.again)]
    mappings = _names_of_mappings()
    for row in run_types(types, options.workers, options.timeout):
        rows[row["type"]] = row
        row["reason"] = _short(row.get("reason", ""))
        row["mappings"] = [words for words, names in mappings.items() if row["type"] in names]
        write_record(options.json, [rows[name] for name in sorted(rows)])
        print(row["type"], row["kind"], row.get("errors", ""), row.get("reason", "")[:150], flush=True)
    return 0


def _is_open(row: Row | None, again: bool) -> bool:
    return row is None or (again and row["kind"] != "unbuilt" and not _is_proven(row))


def _is_proven(row: Row) -> bool:
    """Whether a plan shards half of the layers, on each number of ranks."""
    errors = row.get("errors", {}).values()
    return len(errors) == len(TP) and all(isinstance(e, float) for e in errors) and row.get("layers", 0) >= 0.5


if __name__ == "__main__":
    sys.exit(main())
