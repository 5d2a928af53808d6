"""Linears that are called on one tensor share its input conversion: one gather or one reduction, and the same
numbers."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from parallelize.axes.tensor.shared_input import SharedConversion
from parallelize.ops.collectives import copy_to_read
from parallelize.ops.replay_cache import RecomputePass, ReplayCache
from tests.axes.tensor import shared_conversion_jobs as jobs


def counting() -> tuple[SharedConversion, list[int]]:
    calls: list[int] = []

    def convert(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2

    return SharedConversion(convert), calls


def test_the_same_tensor_is_converted_once():
    conversion, calls = counting()
    x, y = torch.ones(2), torch.ones(2)
    assert conversion(x) is conversion(x) and len(calls) == 1
    conversion(y)
    conversion(x)
    assert len(calls) == 3, "only the last input is remembered"


@pytest.mark.parametrize("change", ["written", "detached from gradients", "no_grad", "inference"])
def test_whatever_changes_the_result_is_converted_again(change):
    conversion, calls = counting()
    x = torch.ones(2)
    first = conversion(x)
    if change == "written":
        x.mul_(3)
        assert not torch.equal(conversion(x), first) and len(calls) == 2
    elif change == "detached from gradients":
        x.requires_grad_()
        assert conversion(x).requires_grad and len(calls) == 2
    elif change == "no_grad":
        with torch.no_grad():
            conversion(x)
        assert len(calls) == 2
    else:
        with torch.inference_mode():
            y = torch.ones(2)
            conversion(y)
            y.mul_(3)
            assert torch.equal(conversion(y), torch.full((2,), 6.0)) and len(calls) == 3


@pytest.mark.parametrize("trains", [True, False])
def test_nothing_is_kept_once_the_input_is_gone(trains):
    group = SimpleNamespace(size=2)
    conversion = SharedConversion(partial(copy_to_read, group=group))
    x = torch.ones(2, requires_grad=trains) * 1
    conversion(x)
    assert conversion._last is not None
    del x
    assert conversion._last is None


def test_a_write_to_a_read_copy_is_seen_by_the_readers_of_the_original():
    x = torch.ones(2, requires_grad=True) * 1
    squared = x.square()  # saves x
    copy_to_read(x, SimpleNamespace(size=2)).detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_a_recomputed_unit_shares_with_nothing_outside_and_keeps_nothing():
    conversion, calls = counting()
    x, cache = torch.ones(2), ReplayCache()
    conversion(x)
    with RecomputePass(cache, replay=False):
        conversion(x)
        conversion(x)
    assert len(calls) == 2 and conversion._last is None
    conversion(x)
    with RecomputePass(cache, replay=True):
        conversion(x)
    assert len(calls) == 4


def test_copies_share_nothing_with_the_original():
    conversion = SharedConversion(torch.neg)
    x = torch.ones(2)
    out = conversion(x)
    for other in (copy.deepcopy(conversion), pickle.loads(pickle.dumps(conversion))):
        assert other(x) is not out and torch.equal(other(x), out)


# A layer of TP: two all-reduces forward and two backward. Of TP + SP: two gathers and two reduce-scatters each. Besides
# them: embedding, head, and the sum of the norms' gradients. A plan reduces the embedding before the region begins.
EXPECTED = {
    (True, False): {"all_reduce": 4 * jobs.LAYERS + 2, "all_gather": 1},
    (False, False): {"all_reduce": 4 * jobs.LAYERS + 2, "all_gather": 1},
    (True, True): {"all_reduce": 3, "all_gather": 4 * jobs.LAYERS + 3, "reduce_scatter": 4 * jobs.LAYERS},
    (False, True): {"all_reduce": 1, "all_gather": 4 * jobs.LAYERS + 3, "reduce_scatter": 4 * jobs.LAYERS + 2},
}


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("form", ["plan", "dict", "PyTorch's dict"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_one_collective_for_all_that_read_one_tensor(two_processes, form, sequence_parallel, flat):
    for counts, error in two_processes.run(jobs.collectives_of_a_step, form, sequence_parallel, flat):
        assert counts == EXPECTED[form == "plan", sequence_parallel], counts
        assert error < 1e-12


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("form", ["plan", "dict"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "way", ["written before", "written in between", "checkpoint", "reentrant checkpoint", "recompute", "no_grad first"]
)
def test_right_in_every_way_of_calling(two_processes, form, sequence_parallel, way):
    for error in two_processes.run(jobs.ways_of_calling, form, sequence_parallel, way):
        assert error < 1e-12


def test_a_dtensor_that_the_forward_reads_has_its_gradient(two_processes):
    for errors in two_processes.run(jobs.a_read_dtensor):
        assert max(errors.values()) < 1e-12, errors
