"""A link's profile decides what is overlapped."""

from __future__ import annotations

from dataclasses import replace

from parallelize import LinkProfile
from parallelize.comm.link_profile import choose, gather_work, reduce_work


def test_the_model_of_time():
    """Nothing is overlapped that hides nothing; where all is hidden and both take long, chunks win; a near tie stays
    sync."""
    work = gather_work(4096, 1024, 1024, 4, 4)
    hides = LinkProfile(10.0, 1e9, 1e12, 1.0, {"chunked": 1.0})
    assert choose(work, hides).algorithm.startswith("chunked/")
    assert choose(work, replace(hides, hidden={"chunked": 0.0})).algorithm == "sync"
    assert choose(work, replace(hides, hidden={})).algorithm == "sync"
    assert choose(work, replace(hides, bytes_per_s=1e13)).algorithm == "sync"  # nothing to gain: the link takes no time
    assert choose(work, replace(hides, step_us=1e6)).algorithm == "sync"
    assert choose(reduce_work(4096, 1024, 1024, 4, 4), hides).algorithm.startswith("chunked/")
    both = choose(work, replace(hides, hidden={"chunked": 0.5, "symm_mem": 1.0}))
    assert both.algorithm == "symm_mem" and "sequentially" in both.reason
