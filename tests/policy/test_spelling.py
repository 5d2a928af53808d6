"""American spelling everywhere: in the package, the tests, the benchmarks, the plans and the documents, and in file
names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = {".py", ".md", ".yaml", ".json", ".toml"}
FOLDERS = ("parallelize", "tests", "benchmarks", "docs", "tp_plans")

# what stands before -ise, -ising, -isation of the words that are in use or likely; `raise`, `noise`, `otherwise` are
# not among them
VERBS = (
    "anal|author|capital|categor|critic|custom|discret|equal|final|formal|general|global|initial|local|material|maxim|memor"
    "|minim|modular|normal|optim|organ|parallel|penal|pipelin|prior|priorit|quant|random|real|recogn|regular|serial|special"
    "|stabil|standard|summar|symmetr|synchron|token|util|vector|visual"
)
BRITISH = re.compile(
    rf"""(?:
    (?:{VERBS}|factor)is(?:e|ation|ing|able) | analys(?:e[dr]?\b|ing)
    | (?:behavi|col|fav|flav|hon|lab|neighb|rig|vig)our
    | (?:cancel|label|model|signal|travel|level|fuel)l(?:ed|ing|er) | (?:cent|fib|theat|lit)re\b | metre
    | judgement | acknowledgement | artefact | catalogue | grey | licence | defence | offence | whilst | amongst | learnt
    | spelt | burnt | mould | programme\b | fulfil\b | sceptic | ageing
    )""",  # noqa: E501
    re.IGNORECASE | re.VERBOSE,
)
KEPT = {
    "unknown-initialiser": "an error's slug is stable",
    "unrecordable-initialisation": "an error's slug is stable",
    'f"initialise {first': "the text is hashed into the random numbers of initialization",
    "test_misspelt_rules_suggest_the_right_name": "the name of a test",
}


def files() -> list[Path]:
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS)
    return sorted(path for path in [*ROOT.glob("*.md"), *inside] if path != Path(__file__))


def british_words(text: str) -> list[str]:
    for kept in KEPT:
        text = text.replace(kept, "")
    return [word for word in re.findall(r"\w+", text) if is_british(word)]


@cache
def is_british(word: str) -> bool:
    return BRITISH.search(word) is not None


@pytest.mark.torch_free
def test_spelling_is_american():
    british_words_of = {
        str(path.relative_to(ROOT)): british_words(path.name + "\n" + path.read_text()) for path in files()
    }
    assert len(british_words_of) > 200
    assert not {file: words for file, words in british_words_of.items() if words}


@pytest.mark.torch_free
def test_every_exception_is_needed():
    texts = [path.read_text() for path in files()]
    assert not [kept for kept in KEPT if not any(kept in text for text in texts)]


@pytest.mark.torch_free
@pytest.mark.parametrize(
    "word",
    [
        "Behaviour",
        "a_neighbour_of",
        "initialises",
        "optimiser",
        "Initialisation",
        "analysed",
        "labelled",
        "centre",
        "misspelt",
    ],
)
def test_british_words_are_noticed(word):
    assert british_words(f"it is {word} here") == [word]


@pytest.mark.torch_free
def test_words_that_both_spell_alike_are_left_alone():
    same = "raise precise otherwise noise revise promise analysis analyses neighbor initialized towards four hour tour"
    assert not british_words(same)
