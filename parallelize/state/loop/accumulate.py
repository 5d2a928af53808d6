"""Gradient accumulation: what data ranks sum is summed once, after all backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.state.records import applied, inside_adapters, not_parallelized, pipeline_cut, record_of


@contextmanager
def accumulate_gradients(module: AnyModel) -> Iterator[None]:
    """Run several backward passes inside; gradients are summed over the data axes once, when the block ends.

    Without it each backward pass sums its own: the same numbers, with more messages. Gradients may be dropped or edited
    between two passes, as on one process.

    Args:
        module: a model on any mesh.

    Returns: a context manager.
    Raises: ModelError `not-parallelized`.
    Cost: one set of reductions at the end of the block, of the gradients that `shard_data` reduces over the data axes.
        ZeRO 2 and 3 reduce in each backward pass, unless `defer` is set; so do norms and shared heads over tp.
    """
    module = module_of(module)
    root = inside_adapters(module)
    record, data = record_of(root), applied(root).data
    if record is None and data is None and pipeline_cut(root) is None:  # stages alone sum nothing
        raise not_parallelized(module)
    engine = data.engine if data is not None else None
    if engine is None:
        yield
        return
    engine.hold(auto_flush=True)
    try:
        yield
    except BaseException:
        engine.reset()
        raise
    engine.finish()
