"""What `ParallelTrainer` serves of the stock Trainer: each other setting is refused by name, with what to use
instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.base.errors import DataError, MeshError, ModelError, Problem
from parallelize.state.records import resolution_of
from parallelize.training.trainers.own_losses import own_compute_loss

SAMPLING = ("random", "sequential", "group_by_length")
"""The values of `train_sampling_strategy` whose order is a function of the epoch: see `stock_order`."""
_COMPILED = "layers that compile themselves: `for layer in parallel.module.model.layers: layer.compile()`"
_OWN_LOADER = (
    "override get_train_dataloader: `return IterableBatches([read], global_batch_size, mesh=self.mesh).loader(...)`, "
    "whose batches are those of the data rank"
)


class _Refused(NamedTuple):
    """A setting that is not served. `applies`: whether the arguments have it. `fix`: what to use instead."""

    setting: str
    applies: bool
    fix: str


def refuse_other_models(model: Any) -> None:
    """Raises: ModelError `trainer-model` for anything but a `ParallelModel`."""
    if not isinstance(model, ParallelModel):
        what = f"the model is a {type(model).__name__}, and a ParallelTrainer trains what parallelize_model returns"
        raise ModelError(Problem("trainer-model", what, fix="MyTrainer(parallelize_model(model, mesh), args, ...)"))


def refuse_other_trainers(trainer: Any, served: Collection[str]) -> None:
    """Refuse trainers of TRL, which compute losses in forwards of their own.

    Args:
        trainer: the trainer. served: modules of TRL whose trainers are served.

    Raises: ModelError `trainer-option`.
    """
    others = [
        cls for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.") and cls.__module__ not in served
    ]
    if others:
        what = f"TRL's {others[0].__name__} is not served by {type(trainer).__name__}"
        fix = "class MyTrainer(ParallelSFTTrainer, SFTTrainer) for SFT; for others a loop: examples/pretrain.py"
        raise ModelError(Problem("trainer-option", what, fix=fix))


def refuse_other_meshes(parallel: ParallelModel, args: Any) -> None:
    """Raises: MeshError `trainer-mesh` for a mesh that is not of all processes that the trainer knows."""
    spec = parallel.pipeline.mesh.spec
    if args.world_size != spec.world_size:
        what = f"the mesh has {spec.world_size} ranks, and the trainer sees {args.world_size} processes"
        raise MeshError(
            Problem("trainer-mesh", what, fix="start the script with torchrun, and use all ranks in the mesh")
        )


def refuse_options(trainer: Any, args: Any, keywords: dict[str, Any]) -> None:
    """Refuse settings that would be wrong on a mesh, before the trainer is built.

    Args:
        trainer: the trainer, of which only the class and `parallel` exist yet.
        args: its `TrainingArguments`.
        keywords: the other arguments of its constructor.

    Raises: ModelError `trainer-option`, with every such setting.
    """
    rows = (
        *_everywhere(args, keywords),
        *_refused_on_stages(trainer, args, keywords),
        *_refused_over_cp(trainer, args, keywords),
        *_refused_with_logits(trainer, args),
    )
    refused = [row for row in rows if row.applies]
    if refused:
        raise ModelError(
            *(
                Problem("trainer-option", f"{row.setting} is not served by {type(trainer).__name__}", fix=row.fix)
                for row in refused
            )
        )


def _everywhere(args: Any, keywords: dict[str, Any]) -> Iterator[_Refused]:
    """Settings that no mesh serves."""
    on_mesh = "what the mesh and the options of parallelize_model say: zero=3 for FSDP, tp=, pp="
    loaders = args.accelerator_config
    yield _Refused("fsdp", bool(args.fsdp), on_mesh)
    yield _Refused("deepspeed", args.deepspeed is not None, on_mesh)
    yield _Refused("parallelism_config", args.parallelism_config is not None, on_mesh)
    yield _Refused(
        "model_init", keywords.get("model_init") is not None, "a planned model: parallelize_model(model, mesh)"
    )
    yield _Refused(
        "auto_find_batch_size", args.auto_find_batch_size, "`parallelize fit`, which knows the largest batch"
    )
    yield _Refused("use_liger_kernel", args.use_liger_kernel, "parallelize_model(..., fuse_loss=True)")
    noise = "no noise: each rank would draw its own"
    yield _Refused("neftune_noise_alpha", args.neftune_noise_alpha is not None, noise)
    strategy = args.train_sampling_strategy
    fix = f"one of {', '.join(SAMPLING)}, or a get_train_dataloader of your own"
    yield _Refused(f"train_sampling_strategy={strategy!r}", strategy not in SAMPLING, fix)
    unseeded = not getattr(loaders, "use_seedable_sampler", True)
    yield _Refused("use_seedable_sampler=False", unseeded, "True, with which each epoch has an order of its own seed")
    yield _Refused("batch_eval_metrics", args.batch_eval_metrics, "compute_metrics of all predictions")
    yield _Refused("eval_use_gather_object", args.eval_use_gather_object, "predictions that are tensors")
    for name in ("split_batches", "dispatch_batches"):
        yield _Refused(
            name, bool(getattr(loaders, name)), "global_batch_size=, which every mesh divides over its data ranks"
        )


def _refused_with_logits(trainer: Any, args: Any) -> Iterator[_Refused]:
    """Settings that read logits in a way of their own, of which a rank may have a part, or none."""
    resolved = resolution_of(trainer.parallel.module)
    if resolved is None or not (resolved.options.loss_parallel or resolved.options.fuse_loss):
        return
    fix = "parallelize_model without loss_parallel and fuse_loss"
    yield _Refused("label_smoothing_factor with sharded or deferred logits", args.label_smoothing_factor != 0, fix)
    yield _Refused("torch_compile with sharded or deferred logits", args.torch_compile, f"{fix}; or {_COMPILED}")


def _refused_on_stages(trainer: Any, args: Any, keywords: dict[str, Any]) -> Iterator[_Refused]:
    """Settings that pipeline stages do not serve: a stage runs a part of the model, and the last one computes the
    loss."""
    if not trainer.has_stages:
        return
    fix = "parallelize_model(..., loss=a function of (output, targets) that returns a sum)"
    yield _Refused("compute_loss_func on a mesh with pp", keywords.get("compute_loss_func") is not None, fix)
    yield _Refused("a compute_loss of its own on a mesh with pp", own_compute_loss(trainer) is not None, fix)
    yield _Refused("label_smoothing_factor on a mesh with pp", args.label_smoothing_factor != 0, fix)
    yield _Refused("fp16 on a mesh with pp", args.fp16, "bf16=True, or parallelize_model(..., dtype=torch.bfloat16)")
    yield _Refused("torch_compile on a mesh with pp", args.torch_compile, _COMPILED)


def refuse_own_losses(trainer: Any) -> None:
    """Refuse losses of the user that were set after the trainer was built, and that stages would not call.

    Raises: ModelError `trainer-option`.
    """
    keywords = {"compute_loss_func": trainer.compute_loss_func}
    refused = [row for row in _refused_on_stages(trainer, trainer.args, keywords) if row.applies]
    if refused:
        what = f"{refused[0].setting} is not served by {type(trainer).__name__}"
        raise ModelError(Problem("trainer-option", what, fix=refused[0].fix))


def _refused_over_cp(trainer: Any, args: Any, keywords: dict[str, Any]) -> Iterator[_Refused]:
    """Settings that read labels and logits of the same tokens: over `cp` logits are those of a rank, labels those of
    all."""
    if trainer.mesh_view.spec.ranks("cp") == 1:
        return
    fix = "the loss of the model, which takes labels of full sequences; or a mesh without cp"
    yield _Refused("compute_loss_func on a mesh with cp", keywords.get("compute_loss_func") is not None, fix)
    yield _Refused("label_smoothing_factor on a mesh with cp", args.label_smoothing_factor != 0, fix)
    yield _Refused("torch_compile on a mesh with cp", args.torch_compile, _COMPILED)


def refuse_iterated(dataset: Any, what: str) -> None:
    """Raises: DataError `trainer-data` for data without an index, which each data rank would read in full."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        what = f"the {what} data ({type(dataset).__name__}) can only be iterated, so no rank can find its samples"
        raise DataError(Problem("trainer-data", what, fix=f"data with a length and an index; or {_OWN_LOADER}"))


def refuse_uncounted(trainer: Any, count: Any) -> None:
    """Refuse smoothed labels whose loss is not divided by the count over all data ranks: it would count once for each
    of them.

    The losses that models compute themselves are divided in their forward; those of the user see `own_losses`.

    Raises: ModelError `trainer-option`.
    """
    if count is not None or trainer.mesh_view.sample_place[1] == 1:
        return
    if trainer.label_smoother is not None:
        model = type(trainer.model).__name__
        what = (
            f"label_smoothing_factor of {model} is a mean over one data rank, of which the gradients would be summed "
            "over all"
        )
        fix = "compute_loss_func=a function of (outputs, labels, num_items_in_batch): a sum, divided by that count"
        raise ModelError(Problem("trainer-option", what, fix=fix))


def refuse_other_versions(trainer: Any, mixin: type, overridden: Iterable[str]) -> None:
    """Refuse a stock class that lacks a method which `mixin` overrides: it would call another one, in silence.

    Raises: ModelError `trainer-version`.
    """
    stock = [cls for cls in type(trainer).__mro__ if not issubclass(mixin, cls) and not issubclass(cls, mixin)]
    missing = [name for name in overridden if not any(name in vars(cls) for cls in stock)]
    if missing:
        what = f"{type(trainer).__name__} has no stock method {', '.join(missing)}"
        fix = "class MyTrainer(ParallelTrainer, Trainer), in this order, with a version of transformers near 5.23"
        raise ModelError(Problem("trainer-version", what, fix=fix))
