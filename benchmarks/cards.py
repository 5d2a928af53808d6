"""A card for each type of model that a shipped plan serves, and for 150 that derived ones serve: what was proven.

    python -m benchmarks.cards                   # docs/cards.yaml, from the record of `benchmarks.every_type`
    python -m benchmarks.cards --only bloom t5   # the sizes of these are looked up anew

A card has the class and plan, the sizes of the small model on which the plan was proven in float64, the meshes with the
largest relative error of the loss and every gradient, the share of parameters that are sharded, and the command that
proves it again. The sizes of types that the file lacks are looked up: about a second each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.every_type_sources import source_of_type
from benchmarks.record import read_record
from parallelize.base.errors import ParallelizeError
from parallelize.plan.choose import shipped_plan_of
from parallelize.tools.derivation.small_model import small_model

CARDS = Path(__file__).parents[1] / "docs" / "cards.yaml"
MOST_DERIVED = 150
_FIRST = (
    "causal language models",
    "sequence to sequence",
    "masked language models",
    "classification of texts",
    "vision: images and text",
    "classification of images",
)
"""Kinds of models, in the order in which derived plans get a card."""
_SIZES = (
    "hidden_size",
    "hidden_sizes",
    "depths",
    "d_model",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "vocab_size",
)
_HEAD = """# What was proven of each plan: written by `python -m benchmarks.cards`, by which it is also checked.
# meshes: the largest relative error of the loss and every gradient in float64, of one process.
"""


def served_types(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the record that may get a card: all of shipped plans, then those of derived ones by their kind."""
    proven = [row for row in rows if isinstance(row.get("errors", {}).get("2"), float)]
    shipped = [row for row in proven if row["kind"] == "shipped"]
    derived = [row for row in proven if row["kind"] == "derived"]
    derived.sort(key=lambda row: (min(map(_order, row["mappings"]), default=len(_FIRST)), row["type"]))
    return [*shipped, *derived]


def _order(kind: str) -> int:
    return _FIRST.index(kind) if kind in _FIRST else len(_FIRST)


def card_of(row: Mapping[str, Any], day: str, sizes: Mapping[str, int], plan: str) -> dict[str, Any]:
    """One card. plan: the name of a shipped plan, or "derived"."""
    return {
        "class": row["class"],
        "plan": plan,
        "sizes": dict(sizes),
        "meshes": {
            f"tp={tp}": float(f"{error:.1e}") if isinstance(error, float) else f"refused: {error}"
            for tp, error in row["errors"].items()
        },
        "sequence_parallel": row["sequence"],
        "sharded": round(row["all"], 3),
        "command": f"python -m benchmarks.every_type --only {row['type']}",
        "day": day,
    }


def looked_up(model_type: str) -> dict[str, Any]:
    """The sizes of the small model of a type, and the name of its plan."""
    source = source_of_type(model_type)
    _, model = small_model(source, 2)
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    fields = text.to_dict()
    sizes = {name: fields[name] for name in _SIZES if isinstance(fields.get(name), (int, list))}
    shipped = shipped_plan_of(source.config)
    return {"sizes": sizes, "plan": "derived" if shipped is None else shipped.name}


def cards(known: Mapping[str, Any], again: Sequence[str] = ()) -> dict[str, Any]:
    """Type -> its card. known: the cards of before, whose sizes and plans are taken."""
    record = read_record("every_type")
    made: dict[str, Any] = {}
    derived = 0
    for row in served_types(record["result"]):
        name = row["type"]
        if row["kind"] == "derived" and derived == MOST_DERIVED:
            break
        try:
            facts = known[name] if name in known and name not in again else looked_up(name)
        except ParallelizeError as error:  # in this environment
            print(f"no card of {name}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        made[name] = card_of(row, row.get("day", record["day"]), facts["sizes"], facts["plan"])
        derived += row["kind"] == "derived"
    return dict(sorted(made.items()))


def text_of(made: Mapping[str, Any]) -> str:
    return _HEAD + yaml.safe_dump(dict(made), sort_keys=False, width=120)


def read_cards(path: Path = CARDS) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cards", description=__doc__)
    parser.add_argument("--only", nargs="*", default=(), metavar="TYPE", help="look these up anew")
    made = cards(read_cards(), parser.parse_args().only)
    CARDS.write_text(text_of(made), encoding="utf-8")
    derived = sum(card["plan"] == "derived" for card in made.values())
    print(f"{len(made) - derived} cards of shipped plans and {derived} of derived ones: {CARDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
