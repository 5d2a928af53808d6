"""The states of generators are made equal over a group, and restored."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from parallelize import MeshError, ModelError, Streams, random_state, set_random_state
from tests.state.randomness import generator_jobs


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


def test_a_state_with_a_wrong_part_changes_nothing():
    before = random_state()
    for wrong in ({"torch": before["torch"], "python": "junk"}, {"torch": "junk"}, {"python": (3, None, None)}):
        torch.rand(1)
        now = torch.get_rng_state()
        with pytest.raises(ModelError, match="not-a-random-state"):
            set_random_state(wrong)
        assert torch.equal(torch.get_rng_state(), now)


def test_states_are_on_the_cpu_whatever_the_default_device_is():
    streams = Streams(1)
    streams.declare("a")
    with torch.device("meta"):
        python = random.getstate()
        with streams("a"):
            random.random()
    assert random.getstate() == python
    assert not random_state()["python"][1].is_meta


def test_a_stream_that_gets_one_generator_continues_with_the_others():
    streams = Streams(1)
    streams.declare("a")
    with streams("a"):
        first = torch.rand(3)
    streams["a"] = {"python": random_state()["python"]}
    with streams("a"):
        assert not torch.equal(torch.rand(3), first)


def test_a_state_of_streams_that_does_not_fit_changes_nothing():
    streams = Streams(1)
    streams.declare("a")
    wrong = {"seed": 7, "over": {"a": ["dp"]}, "places": {"a": [0]}, "states": {}}
    with pytest.raises(MeshError):
        streams.load_state_dict(wrong)
    assert streams.seed == 1 and streams.state_dict()["over"] == {"a": []}
