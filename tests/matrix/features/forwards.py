"""What changes a forward: dropout and other draws, recomputation, hooks, overlap, dtypes, compilation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.matrix.axes import AXES, Axis
from tests.matrix.feature import at, change, feature
from tests.matrix.sides import Side

DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.2},
    "t5": {"dropout_rate": 0.2},
    "vit": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1},
    "": {"attention_dropout": 0.2},
}


def _over_tp(axis: Axis) -> bool:
    return axis.ranks("tp") > 1


def layers_of(side: Side) -> nn.ModuleList:
    """The list of layers; of an encoder and decoder the encoder's."""
    return next(m for m in side.model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)


def _with_first_layer(forward: Any) -> Any:
    """Prepares a model whose first layer runs `forward(layer, stock, *args, **kwargs)`; stock is its own forward."""

    def prepare(model: nn.Module) -> nn.Module:
        layer = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)[0]
        kind = type(layer)
        layer.__class__ = type(
            f"Random{kind.__name__}",
            (kind,),
            {"forward": lambda self, *args, **kwargs: forward(self, kind.forward, *args, **kwargs)},
        )
        return model

    return prepare


def _adds_noise(layer: nn.Module, stock: Any, *args: Any, **kwargs: Any) -> Any:
    out = stock(layer, *args, **kwargs)
    if not layer.training:
        return out
    first = out[0] if isinstance(out, tuple) else out
    noisy = first + 0.1 * torch.randn_like(first)
    return (noisy, *out[1:]) if isinstance(out, tuple) else noisy


def _is_dropped(layer: nn.Module, stock: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """LayerDrop: one draw for the whole layer, so that all ranks must make the same."""
    if layer.training and torch.rand(()) < 0.5:
        return x
    return stock(layer, x, *args, **kwargs)


NO_GRADIENT = {"stage-output-changed": "what a stage sends has no gradient where its only layer that trains is dropped"}
RANDOM_DECODERS = {"one_rank": True, "needs": {"causal", "stock"}, "without": {"recurrent"}}
change("noise", prepare=_with_first_layer(_adds_noise), apart={"first layer"}, **RANDOM_DECODERS)
change(
    "layer_drop",
    prepare=_with_first_layer(_is_dropped),
    apart={"first layer"},
    refused_with=dict.fromkeys(("adapter", "frozen*"), NO_GRADIENT),
    one_rank=True,
    needs={"causal"},
    without={"recurrent", "experts"},
)
change("attention_dropout", overrides={"": {"attention_dropout": 0.2}}, **RANDOM_DECODERS)

DROPS: dict[str, Any] = {
    "one_rank": True,
    "needs": {"stock"},
    "without": {"recurrent"},
    "overrides": {kind: fields for kind, fields in DROPOUT.items() if kind},
}
change("dropout", **DROPS)
change("recomputed_dropout", options={"recompute": "full"}, meets=False, **DROPS)
change("selectively_recomputed_dropout", options={"recompute": "selective"}, meets=False, **DROPS)
change("recompute_full", options={"recompute": "full"})
change("recompute_selective", options={"recompute": "selective"})
change("recompute_every_second", options={"recompute": "full", "recompute_every": 2})


def _checkpointed(side: Side) -> None:
    side.model.gradient_checkpointing_enable()


_OTHER_SEQUENCES = {"ambiguous-sequence": "over cp and pp, forwards of different sequences wait for backward"}


change(
    "checkpointing_of_transformers",
    placed=_checkpointed,
    needs={"stock"},
    apart={"replay"},
    refused_with={
        "*dropout": {
            "ambiguous-dropout": "a module runs twice in a layer, and PyTorch's recompute does not say which call"
        },
        "recompute*": {"foreign-recompute": "a forward would run three times"},
        "*padding": _OTHER_SEQUENCES,
        "packed*": _OTHER_SEQUENCES,
        "first layer": {"unplaceable-draw": "a replay by PyTorch's checkpoint has no module by which draws are placed"},
    },
)
change(  # without vision, whose layers call one dropout twice, so that a recompute cannot place its draws
    "dropout_checkpointed_by_transformers",
    placed=_checkpointed,
    meets=False,
    **{**DROPS, "without": {"recurrent", "vision"}},
)


def _with_checkpointing(side: Side, reentrant: bool, **options: Any) -> None:
    """By `transformers`; the second step has sequences of a length that no mesh divides."""
    side.place(**options)
    side.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        side.model.enable_input_require_grads()
    side.step(0)
    side.update()
    inputs, targets = side.kind.batch(1)
    side.step(1, input_ids=side.local(inputs["input_ids"][:, :7]), targets=side.local(targets[:, :7]))


@feature(needs={"causal", "stock"})
def checkpointing_of_other_lengths(side: Side) -> None:
    _with_checkpointing(side, reentrant=False)


@feature(needs={"causal", "stock"}, on=lambda axis: axis.ranks("cp") == 1)
def reentrant_checkpointing(side: Side) -> None:
    _with_checkpointing(side, reentrant=True)


@feature(needs={"causal", "stock"}, on=_over_tp)
def overlap_under_checkpointing(side: Side) -> None:
    _with_checkpointing(side, reentrant=False, overlap="chunked")


@feature(needs={"causal", "stock"}, on=lambda axis: _over_tp(axis) and axis.ranks("cp") == 1)
def overlap_under_reentrant_checkpointing(side: Side) -> None:
    _with_checkpointing(side, reentrant=True, overlap="chunked")


NO_LINEAR = {
    "no-overlap": "all linears have adapters",
    "ranks-disagree": "those of a stage have",
    "added-parameter": "a linear that overlaps has no place for an adapter that comes later",
}
change("overlap_in_chunks", options={"overlap": "chunked"}, on=_over_tp, refused_with={"adapter": NO_LINEAR})


def _runs_pairs(axis: Axis) -> bool:
    of_tp = axis.ranks("tp") > 1 and axis.ranks("pp") == 1
    return of_tp and axis.options.get("zero") != 3 and axis.world_size <= 4


@feature(on=_runs_pairs, processes=True)
def overlapped_microbatches(side: Side) -> None:
    """Where ranks are threads, no two microbatches run at a time."""
    side.place(overlap_microbatches=True, num_microbatches=2)
    side.train()


@at("placed")
def forward_hooks(side: Side) -> None:
    """Of a layer: one that changes its output, and one that changes its gradient."""
    layer = layers_of(side)[1]
    layer.register_forward_hook(lambda module, inputs, output: _scaled(output, 1.05))
    layer.register_full_backward_hook(lambda module, gradients, _: tuple(_scaled(g, 0.9) for g in gradients))


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, tuple):
        return (_scaled(value[0], factor), *value[1:])
    return value * factor if isinstance(value, torch.Tensor) else value


@at("placed")
def eval_of_a_layer(side: Side) -> None:
    layers_of(side)[0].eval()


@at("gradients")
def forward_without_backward(side: Side, number: int) -> None:
    with torch.no_grad():
        side.forward(number + 1) if side.alone else side.parallel.forward(**side.inputs(number + 1))


def _fails_first(side: Side, number: int, step: Any, handle: Any) -> None:
    """The step after one that failed is as if it had not been."""
    try:
        step(number)
    except Exception as error:
        if "deliberate" not in str(error):
            raise
    handle.remove()
    for parameter in side.model.parameters():
        parameter.grad = None
    step(number)


@at("around", apart={"error"})
def error_in_a_forward(side: Side, number: int, step: Any) -> None:
    _fails_first(side, number, step, layers_of(side)[1].register_forward_pre_hook(raise_deliberately))


@at("around", apart={"error"}, needs={"causal"})
def error_in_a_backward(side: Side, number: int, step: Any) -> None:
    """Gradients of later layers are there by then."""
    _fails_first(side, number, step, layers_of(side)[0].register_full_backward_pre_hook(raise_deliberately))


class DeliberateError(RuntimeError):
    pass


def raise_deliberately(module: nn.Module, inputs: Any) -> None:
    raise DeliberateError("deliberate")


def _compile_layers(side: Side) -> None:
    for module in side.model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.compile(backend="aot_eager")


COMPILED = [AXES[name] for name in ("dp-zero3", "tp-sp-lp", "pp-1f1b")]  # seconds a cell, whatever the axis


@feature(needs={"causal", "stock"}, without={"recurrent", "experts"}, on=COMPILED.__contains__)
def compiled_layers(side: Side) -> None:
    side.place()
    if not side.alone:
        _compile_layers(side)
    side.step(0)
    side.update()


@feature(needs={"causal", "stock"}, without={"recurrent", "experts"}, on=COMPILED.__contains__)
def compiled_recomputed_layers(side: Side) -> None:
    side.place(recompute="full")
    if not side.alone:
        _compile_layers(side)
    side.step(0)
