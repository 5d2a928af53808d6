"""Rows that meet in one loop are right, or refused by name. `python -m tests.matrix pairs` runs every two of them."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.matrix import pairs as module
from tests.matrix.axes import AXES, Axis
from tests.matrix.cells import CRASHED, REFUSED, RIGHT, WRONG, Verdict, run_cell
from tests.matrix.drawing import SLICES, number_of
from tests.matrix.feature import feature_of, load_features, together
from tests.matrix.journal import Entry
from tests.matrix.pairs import cell_of_turn, cover, drawn, is_on_processes, meets, partners, rows
from tests.matrix.record import lines
from tests.matrix.shrink import SmallCell, shrink
from tests.matrix.test_faults import OF_A_GATHER
from tests.matrix.test_matrix import made_small, params

_IN_MAKE_TEST = 14  # one of so many rows meets another one in `make test`
_OF_A_SLICE = 3  # others that a row meets in a slice of the sweep
_ON_PROCESSES = 10  # one of so many rows meets another one on processes


FOUND = {  # cells that were wrong, crashed or were refused untruly, and what they are
    ("loop_by_hand+lora_after", "llama", "cp-ring"): "right",  # targets were not split
    ("log_probs_without_gradient+lora_after", "llama", "cp-ring"): "right",
    ("lora_after+steps_in_one_block", "llama", "dp-zero1"): "right",  # refused: `not-parallelized`
    ("lora_after+optimizer_of_the_module", "llama", "dp-zero2"): "right",  # refused: `unsharded-optimizer`
    ("generated+lora_after", "llama", "pp-1f1b"): "refused cut-model",  # failed in an embedding of another stage
    ("generated+lora_before", "llama", "dp-zero3"): "right",  # refused: `no-cache`
    ("generated_padded+prompt_tuning", "llama", "tp"): "right",  # prompts came before each new token again
    ("generated_padded+prefix_tuning", "llama_published", "dp-zero3"): "right",  # the same
    ("generated+prefix_tuning", "llama", "dp-zero3"): "right",  # PEFT's own loop: `outside-unit`
    ("generated+prompt_tuning", "hybrid", "tp"): "right",  # so they did, and positions began anew
    ("generated", "hybrid", "tp-lp"): "right",  # Bamba counts from 0 beside a cache unless positions are given
    ("lora_after+resume", "own", "tp"): "right",  # weights of adapters that were not split yet
    ("lora_after+optimizer_state_dict", "llama", "tp"): "right",  # states of optimizers of the same
    ("clip_of_torch+prefix_tuning", "llama_published", "pp-tp"): "right",  # a stage without gradients joined no norm
    ("clip_values+prefix_tuning", "llama_published", "pp-tp"): "right",  # and had no list of gradients to clip
    ("modules_to_save_after+weights_put_back", "gpt2", "tp-sp-lp"): "right",  # a parameter that a wrapper has taken
    ("fused_loss+trained_tokens", "llama", "dp-zero0"): "right",  # refused: `wrong-module-for-style`
    ("fused_loss+trained_tokens", "gpt2", "dp-zero0"): "refused unplanned-adapter",  # the head is tied to them
    ("growing_lengths+labels", "llama", "dp-zero0"): "refused no-reference",
    ("noise+torch_checkpoint+unused_layer", "llama", "dp-zero1"): "refused no-reference",  # no state of it yet
    ("bfloat16_compute+deep_copy+zero_0", "gpt2", "dp-tp-zero1"): "right",  # a gradient wider than its parameter
    ("modules_to_save_after+preconditioned", "gpt2", "tp"): "right",  # lists follow planned parameters, ids do not
    ("adapters_off+adamw", "llama_published", "pp-dp-zero2"): "right",  # 1.3e-12, of a reference that an ulp moves more
    ("error_in_a_backward+steps_in_one_block", "own", "tp-sp-lp"): "right",  # what is dropped in a block stayed in sums
    ("error_in_a_backward+policy_gradient+steps_in_one_block", "own", "dp-zero2"): "refused failed-backward",
    ("dora+two_optimizers", "vit", "tp-sp"): "right",  # refused: an adapted layer that a default alone names
    ("ia3_after+resume", "vit", "tp"): "right",  # refused: a default that names none of what was added
    ("generated+modules_to_save_after", "llama", "tp-lp"): "right",  # a wrapper in the place of the head
    ("prefix_tuning+torch_checkpoint+two_optimizers", "llama_equal", "pp-tp"): "right",  # a stage that trains nothing
}


@pytest.mark.parametrize("cell", [pytest.param(cell, id="-".join(cell)) for cell in FOUND])
def test_what_rows_that_meet_have_found_stays_mended(cell):
    verdict = run_cell(*cell)
    assert str(verdict) == FOUND[cell], verdict.trace


def test_adapters_come_later_under_zero_3_on_one_data_rank():
    """The axis `one` has no ZeRO stage."""
    assert SmallCell("lora_after", "llama", Axis({"dp": 1}, {"zero": 3})).run().word == RIGHT


def check(cell, pool=None):
    verdict = run_cell(*cell, pool=pool)
    if verdict.word not in (RIGHT, REFUSED):
        command = f"alone: python -m tests.matrix run {' '.join(cell)}"
        text = [f"{' '.join(cell)}: {verdict}", command, verdict.trace, made_small(cell, pool)]
        pytest.fail("\n".join(text), pytrace=False)


@pytest.mark.drawn_anew
@pytest.mark.parametrize("name", params([(name,) for name in rows()], lambda row: number_of(*row) % _IN_MAKE_TEST == 0))
def test_a_row_that_meets_another_one_is_right_or_refused(name, request):
    """One that is drawn; in the sweep a few, others in each round of slices."""
    is_swept = request.node.get_closest_marker("sweep") is not None
    first = (request.config.getoption("slice") or 0) // SLICES * _OF_A_SLICE
    for turn in range(1, _OF_A_SLICE + 1) if is_swept else [-first]:
        check(cell_of_turn(name, first + turn))


@pytest.mark.drawn_anew
@pytest.mark.on_cpus("batches and models are made on the CPU")
@pytest.mark.parametrize(
    "name",
    params(
        [(name,) for name in rows() if number_of("processes", name) % _ON_PROCESSES == 0],
        lambda row: number_of(*row) % _ON_PROCESSES == 0,
    ),
)
def test_rows_meet_on_processes_as_on_threads(name, request, two_processes, four_processes):
    first = (request.config.getoption("slice") or 0) // SLICES
    turns = (cell_of_turn(name, first + turn) for turn in range(100))
    cell = next(cell for cell in turns if AXES[cell[2]].world_size in (2, 4))
    check(cell, two_processes if AXES[cell[2]].world_size == 2 else four_processes)


def test_many_rows_meet():
    assert len(rows()) >= 60
    assert len({next(iter(row.files)) for row in rows().values()}) >= 8


def test_what_wants_one_moment_option_or_field_for_itself_meets_no_other():
    assert not meets("adamw", "rmsprop")  # one optimizer
    assert not meets("recompute_full", "recompute_selective")
    assert not meets("lora_before", "dora")  # one adapter
    assert not meets("bfloat16_compute", "dropout")  # two references
    assert not meets("lora_of_experts", "tied_by_hand")  # no kind has both
    assert meets("adamw", "resume") and meets("clip", "lora_before")


def test_a_row_of_two_has_what_both_have():
    row, (first, second) = (
        feature_of("dropout+nf4_with_lora"),
        (load_features()[n] for n in ("dropout", "nf4_with_lora")),
    )
    assert row.one_rank and row.needs == first.needs | second.needs and row.files == first.files | second.files
    assert row.overrides["gpt2"] == {**first.overrides["gpt2"], **second.overrides["gpt2"]}
    assert together((first, second)).name == row.name


@pytest.mark.parametrize("size", [2, 3])
def test_a_cover_has_every_two_rows_in_a_cell(size, monkeypatch):
    few = dict(list(rows().items())[::12])
    monkeypatch.setattr(module, "rows", lambda: few)
    monkeypatch.setattr(module, "partners", partners.__wrapped__)  # what is kept is of all rows
    met = {pair for pair in combinations(sorted(few), 2) if meets(*pair)}
    monkeypatch.setattr(module, "pairs", lambda: tuple(met))
    cells = list(cover(size))
    assert {pair for name, _, _ in cells for pair in combinations(name.split("+"), 2)} == met
    assert len(cells) == len(met) if size == 2 else len(cells) < 0.8 * len(met)
    assert all(feature_of(name).on(AXES[axis]) for name, _, axis in cells)


def test_triples_are_drawn_alike_each_time():
    cells = drawn(3, 6)
    assert drawn(3, 3) == cells[:3]
    assert all(name.count("+") == 2 for name, _, _ in cells)
    assert not all(is_on_processes(cell) for cell in cells)


def test_a_pair_that_is_wrong_is_made_small_to_the_row_that_is():
    with OF_A_GATHER.applied():
        cell, verdict = shrink("clip+decay_by_name", "llama", "tp-sp-lp")
    assert verdict.word == WRONG
    assert cell.feature in ("clip", "decay_by_name") and cell.axis.world_size == 2


def test_the_record_counts_cells_by_their_rows_and_refusals_by_slug():
    two = [Entry("adamw+clip", "llama", axis, RIGHT, "", 1.0, "") for axis in ("tp", "one")]
    three = [Entry("adamw+clip+dora", "t5", "cp-ring", *word, 3.0, "") for word in ((REFUSED, "a-b"), (CRASHED, "x"))]
    text = lines([*two, *three])
    assert " 1 of these " in text[0]
    assert "| 2 | 2 | 2 | 0 | 0 | 1.0 |" in text and "| 3 | 2 | 0 | 1 | 1 | 3.0 |" in text
    assert text[-1] == "| `a-b` | 1 |"
    assert Verdict(REFUSED, "a-b").detail == "a-b"
