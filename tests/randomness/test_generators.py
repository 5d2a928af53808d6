"""The states of generators are made equal over a group, and restored."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from parallelize import ModelError
from parallelize.randomness.generators import random_state, set_random_state
from parallelize.randomness.streams import Streams
from tests.randomness import generator_jobs


@pytest.mark.parametrize("source", [0, 1])
def test_ranks_of_a_group_continue_from_the_state_of_one_of_them(four_processes, source):
    drawn = four_processes.run(generator_jobs.synchronized, source)
    own = [result["own"] for result in drawn]
    assert len(set(own)) == 4
    assert [result["tp"] for result in drawn] == [own[source]] * 2 + [own[2 + source]] * 2
    assert [result["own again"] for result in drawn] == own
    assert len({result["all"] for result in drawn}) == 1


def test_a_state_with_one_wrong_part_sets_nothing():
    good = random_state()
    version, words, gauss = good["python"]
    kind, numbers, *rest = good["numpy"]
    wrong = [
        {"torch": "junk"},
        {"torch": good["torch"][:100]},
        {"python": "junk"},
        {"python": (version, words[:5], gauss)},
        {"python": (version, words, "junk")},
        {"numpy": (kind, numbers[:5], *rest)},
        {"numpy": ("junk", numbers, *rest)},
        {"cuda": "junk"},
        {"cuda": torch.ones(2)},
    ]
    for part in wrong:
        torch.rand(1), random.random(), numpy.random.rand()
        before = random_state()
        with pytest.raises(ModelError) as caught:
            set_random_state(good | part)
        assert caught.value.slugs == ("not-a-random-state",) and next(iter(part)) in str(caught.value)
        after = random_state()
        assert torch.equal(before["torch"], after["torch"]) and torch.equal(before["python"][1], after["python"][1])
        assert torch.equal(before["numpy"][1], after["numpy"][1])


def test_states_are_kept_whatever_the_default_device_is():
    streams = Streams(1)
    streams.declare("a")
    before = random_state()
    with torch.device("meta"):
        with streams("a"):
            random.random(), numpy.random.rand()
        after = random_state()
    assert all(torch.equal(before[name][1], after[name][1]) for name in ("python", "numpy"))
    assert torch.equal(before["torch"], after["torch"])
