"""Exports in the forms that inference engines and reinforcement-learning frameworks take. Nothing of them is required.

| of | form | here |
|---|---|---|
| vLLM (0.27 and newer) | `WeightSource`: `metadata()`, and an iterator of (name, full tensor) on every rank of the trainer | `vllm_weight_source` |
| vLLM (all) | `update_weights({"names", "dtype_names", "shapes", "packed"})`, and an iterator to `trainer_send_weights` | `vllm_update_info`, `named_tensors` |
| verl | `engine.get_per_tensor_param()`: (iterator of (name, full tensor), PEFT's config or None) | `verl_per_tensor_param` |

Sources: vLLM's documents of weight transfer (`docs/training/weight_transfer`), verl's `BaseEngine`.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from parallelize.checkpoint.export.export_weights import WeightExporter
from parallelize.checkpoint.export.iteration import BucketIterator
from parallelize.checkpoint.export.weight_buckets import TensorMetadata

T = torch.Tensor
Only = Callable[[str], bool] | None


class NamedTensors(Iterator[tuple[str, T]]):
    """(name, full tensor) of each tensor of an export: views of the current bucket, which are right until the next one.

    On a rank that receives nothing, iterating takes part in all exchanges, and yields nothing.
    """

    def __init__(self, buckets: BucketIterator):
        self._buckets = buckets
        self._current: Iterator[tuple[str, T]] = iter(())

    def __iter__(self) -> NamedTensors:
        return self

    def __next__(self) -> tuple[str, T]:
        while True:
            for pair in self._current:
                return pair
            self._current = iter(())  # lets go of the tensors before the next bucket is made
            self._current = iter(list(next(self._buckets).tensors.items()))

    def close(self) -> None:
        """Stop on this rank; see `BucketIterator.close`."""
        self._buckets.close()


def named_tensors(exporter: WeightExporter, *, only: Only = None, changed: bool = False) -> NamedTensors:
    """(name, full tensor), one after the other: what `load_weights` of most engines takes. A collective, as `export`.

    Args:
        exporter: built on every rank.
        only: which names are exported; the same on every rank.
        changed: leave out what has not changed; see `WeightExporter.export`.

    Returns: an iterator, empty on a rank that receives nothing; it takes part in all exchanges there too.
    Raises: those of `WeightExporter.export`.
    """
    return NamedTensors(exporter.export(only=only, changed=changed))


class WeightSourceOfExporter:
    """The trainer's weights for vLLM: what `metadata()` lists is what each pass yields, in the same order."""

    def __init__(self, exporter: WeightExporter, only: Only, metadata_class: Callable[..., Any] | None):
        self._exporter, self._only, self._metadata_class = exporter, only, metadata_class

    def metadata(self) -> list[Any]:
        """Name, dtype and full shape of every tensor. Sends nothing."""
        listed = self._exporter.metadata(self._only)
        if self._metadata_class is None:
            return list(listed)
        return [self._metadata_class(m.name, m.dtype, m.shape) for m in listed]

    def __iter__(self) -> NamedTensors:
        return named_tensors(self._exporter, only=self._only)


def vllm_weight_source(exporter: WeightExporter, *, only: Only = None) -> Any:
    """A `WeightSource` for `WeightTransferTrainerFactory.trainer_init(..., source=...)` of vLLM, on every rank of the
    trainer.

    Args:
        exporter: built with `receive=` true on the rank that sends (vLLM's rank 0 of the trainer), and false elsewhere.
        only: which names are sent; the same on every rank.

    Returns: an instance of vLLM's class, with its `ParamMeta`, where vLLM is installed; else one with the same methods.
    """
    try:
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource
    except ImportError:
        return WeightSourceOfExporter(exporter, only, None)
    cls = type("ParallelizeWeightSource", (WeightSourceOfExporter, WeightSource), {})
    return cls(exporter, only, ParamMeta)


def vllm_update_info(exporter: WeightExporter, *, only: Only = None, packed: bool = True) -> dict[str, Any]:
    """The argument of vLLM's `update_weights`. Sends nothing.

    Args:
        exporter: built on every rank.
        only: which names are sent; the same on every rank.
        packed: whether the sender packs tensors into buffers, as vLLM's does.

    Returns: names, dtypes and shapes in the order of an export, plain enough for JSON.
    """
    listed: tuple[TensorMetadata, ...] = exporter.metadata(only)
    return {
        "names": [m.name for m in listed],
        "dtype_names": [m.dtype_name for m in listed],
        "shapes": [list(m.shape) for m in listed],
        "packed": packed,
    }


def verl_per_tensor_param(
    exporter: WeightExporter, *, peft_config: dict[str, Any] | None = None, only: Only = None
) -> tuple[NamedTensors, dict[str, Any] | None]:
    """What `get_per_tensor_param` of a verl engine returns. A collective; each rank iterates to the end.

    Args:
        exporter: built with `receive=True` on every rank whose rollout loads weights.
        peft_config: PEFT's config as a dict, beside adapters alone. None: that of an exporter with names="peft"; none
            for full weights.
        only: which names are sent; the same on every rank.

    Returns: (an iterator of (name, full tensor), `peft_config`).
    """
    return named_tensors(exporter, only=only), exporter.adapter_config() if peft_config is None else peft_config
