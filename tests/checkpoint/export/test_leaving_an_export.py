"""A rank that leaves an export early, in whatever way, keeps no other rank waiting."""

from __future__ import annotations

import gc
import threading
import time
from copy import deepcopy

import pytest
import torch

from parallelize import build_mesh, parallelize_model
from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.export.export_weights import WeightExporter, export_weights
from tests.support.models import tiny_model
from tests.support.threads import run_ranks


@pytest.fixture(scope="module")
def base():
    return tiny_model("llama", num_key_value_heads=2)


def on_ranks(base, body, timeout_s=30.0):
    def run(rank):
        model = parallelize_model(deepcopy(base), build_mesh("cpu", tp=2))
        return body(rank, model)

    return run_ranks(2, run, timeout_s=timeout_s)


def consume(model, leave, **options):
    """How an export ended on this rank, and the number of buckets. `leave`: what this rank does after its second
    bucket."""
    count = 0
    try:
        for _ in export_weights(model, bucket="8KB", **options):
            count += 1
            if leave is not None and count == 2:
                leave()
    except StopIteration:
        pass
    except CheckpointError as error:
        return error.slugs[0], count
    except ValueError:
        return "raised", count
    return "ended", count


def fail():
    raise ValueError("the consumer failed")


def test_an_exception_in_a_consumer_ends_all_ranks(base):
    (ended, count), (other, other_count) = on_ranks(base, lambda r, m: consume(m, fail if r == 0 else None))
    assert (ended, count) == ("raised", 2) and (other, other_count) == ("export-stopped", 2)


def test_a_rank_that_receives_nothing_just_ends(base):
    results = on_ranks(base, lambda r, m: consume(m, fail if r == 0 else None, receive=r == 0))
    assert results == [("raised", 2), ("ended", 2)]


def test_a_loop_that_breaks_ends_the_others_at_their_next_bucket(base):
    def body(rank, model):
        count = 0
        if rank:
            return consume(model, None)
        for _ in export_weights(model, bucket="8KB"):
            count += 1
            if count == 3:
                break
        return "broke", count

    assert on_ranks(base, body) == [("broke", 3), ("export-stopped", 3)]


def test_an_export_that_no_loop_uses_is_stopped_by_the_garbage_collector(base):
    def body(rank, model):
        buckets = export_weights(model, bucket="8KB")
        if rank:
            try:
                return len(list(buckets))
            except CheckpointError as error:
                return error.slugs[0]
        holder = {"buckets": buckets}
        holder["itself"] = holder  # a cycle, which only the collector finds
        del buckets, holder
        time.sleep(0.1)
        gc.collect()
        return "dropped"

    assert on_ranks(base, body) == ["dropped", "export-stopped"]


def test_all_ranks_may_stop_together_and_export_again(base):
    def body(rank, model):
        exporter = WeightExporter(model, bucket="8KB")
        for _ in range(3):
            next(iter(exporter.export()))
        return sum(len(bucket.tensors) for bucket in exporter.export())

    assert on_ranks(base, body) == [len(base.state_dict())] * 2


def test_slow_consumers_are_waited_for_and_silent_ones_named(base):
    def body(rank, model):
        if rank == 0:
            return consume(model, lambda: time.sleep(0.7), timeout_s=20.0)
        return consume(model, None, timeout_s=20.0)

    assert on_ranks(base, body) == [consume(deepcopy(base), None)] * 2

    finished = threading.Event()

    def silent(rank, model):
        buckets = export_weights(model, bucket="8KB", timeout_s=20.0)
        next(buckets)
        buckets._rounds._timeout_s = 0.3  # from here on, so that a busy machine has time to begin
        if rank == 0:
            finished.wait(20.0)
            return ""
        try:
            next(buckets)
        except CheckpointError as error:
            return str(error)
        finally:
            finished.set()

    message = on_ranks(base, silent)[1]
    assert "rank-lost" in message and "0.3 s: 0" in message


def test_a_failure_of_one_rank_is_told_before_the_exchange(base, monkeypatch):
    from parallelize.checkpoint.export.exchange import BucketExchange

    stock = BucketExchange.prepare

    def prepare(self):
        if self.to.rank == 0 and self.plan.tensors[0].name.startswith("model.layers.1"):
            raise MemoryError("no memory for a bucket")
        stock(self)

    monkeypatch.setattr(BucketExchange, "prepare", prepare)

    def body(rank, model):
        try:
            for _ in export_weights(model, bucket="8KB"):
                pass
        except MemoryError:
            return "failed"
        except CheckpointError as error:
            return str(error)

    failed, other = on_ranks(base, body)
    assert failed == "failed" and "export-stopped" in other and "no memory for a bucket" in other


def test_nothing_of_an_export_stays_in_the_store(base):
    from parallelize.base.torch_private import torch_groups as private_groups

    def body(rank, model):
        exporter = WeightExporter(model, bucket="8KB")
        store = private_groups.default_store()
        for stops in (False, True, False):
            buckets = exporter.export()
            for number, _ in enumerate(buckets):
                if stops and number == 2:
                    break
            buckets.close()
        torch.distributed.barrier()
        keys = [
            f"parallelize/export/{exporter._key}/{n}/{kind}" for n in (1, 2, 3) for kind in ("left", f"last/{rank}")
        ]
        keys += [f"parallelize/export/{exporter._key}/{n}/verdict/{k}" for n in (1, 2, 3) for k in range(40)]
        return [key for key in keys if store.check([key])]

    assert on_ranks(base, body) == [[], []]
