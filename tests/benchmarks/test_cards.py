"""docs/cards.yaml has a card for every shipped plan and for 150 types of derived ones, from the record of what was
proven."""

from __future__ import annotations

import re

import pytest

from benchmarks import cards as written
from benchmarks.record import read_record
from parallelize.plan.plan_file import shipped_plans

CARDS = written.read_cards()
TYPES = {"class": str, "plan": str, "sizes": dict, "meshes": dict, "sequence_parallel": bool, "sharded": float}


def test_the_file_is_what_the_record_gives():
    assert written.CARDS.read_text(encoding="utf-8") == written.text_of(written.cards(CARDS))


def test_there_is_a_card_for_every_shipped_plan_and_for_150_derived_ones():
    named = {card["plan"] for card in CARDS.values()}
    # Gemma 4's default config has inputs of each layer, beside which its plan refuses sequence parallelism
    assert set(shipped_plans()) - named == {"gemma4"}
    assert sum(card["plan"] == "derived" for card in CARDS.values()) == written.MOST_DERIVED


@pytest.mark.sweep
@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_whole(name):
    card = CARDS[name]
    assert {key: type(card[key]) for key in TYPES} == TYPES and {"command", "day"} == card.keys() - TYPES.keys()
    sizes = [size for value in card["sizes"].values() for size in (value if isinstance(value, list) else [value])]
    assert sizes and all(type(size) is int and size > 0 for size in sizes)
    assert card["meshes"]["tp=2"] < 1e-10 and 0 < card["sharded"] <= 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", card["day"]) and card["command"].endswith(f"--only {name}")


def test_a_failed_proof_gives_no_card():
    rows = read_record("every_type")["result"]
    failed = {row["type"] for row in rows if row["kind"] not in ("shipped", "derived")}
    assert failed and not failed & CARDS.keys()
