"""The parts that `parallelize_model` is made of, each called alone, and what is asked of a model between them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn

from parallelize import (
    GlobalBatches,
    Pipeline,
    accumulate_gradients,
    axis_group,
    build_on_meta,
    build_optimizer,
    building,
    context_parallel,
    cut_pipeline,
    full_gradients,
    full_parameter,
    initialize,
    install_dropout,
    linear_token_log_probs,
    materialize,
    parallelize_module,
    recompute,
    recomputed,
    set_recompute,
    shard_data,
    synchronize_random_state,
    tie_parameters,
    tied_names,
)
from tests.matrix.axes import Axis
from tests.matrix.feature import feature
from tests.matrix.features.losses import NOT_BY_HAND, by_hand
from tests.matrix.kinds import IGNORED, LENGTH, ROWS, VOCAB, logits_of, plan_of
from tests.matrix.sides import Side


def place_by_parts(side: Side) -> None:
    """In the order of docs/whole-mesh.md."""
    if side.alone:
        return
    axis, mesh, options = side.axis, side.mesh, side.axis.options
    plan = plan_of(side.kind, side.folder)
    schedule = {"schedule": options.get("schedule", "1f1b"), "stages_per_rank": 2 if axis.deep else 1}
    model = side.model
    if axis.ranks("pp") > 1:
        model = cut_pipeline(model, mesh, plan, **schedule)
    if axis.ranks("tp") > 1:
        names = ("sequence_parallel", "loss_parallel", "ulysses", "ep", "etp")
        model = parallelize_module(model, mesh, plan, **{name: options[name] for name in names if name in options})
    elif axis.ranks("cp") > 1:
        model = context_parallel(model, mesh, plan, ulysses=options.get("ulysses", 1))
    units = next(name for name, inner in model.named_modules() if isinstance(inner, nn.ModuleList))
    model = recompute(model, "full", units=f"{units}.*")
    side.record("recomputed", float(len(recomputed(model)) > 0))
    clock = install_dropout(model, 0, mesh)
    has_data = bool({"dp", "dp_replicate", "cp"} & axis.sizes.keys())
    if has_data:
        shard_data(model, mesh, options.get("zero", 0))
    tie_parameters(model)
    microbatches = 4 // axis.data_ranks if axis.ranks("pp") > 1 else 1
    side.model = model
    engine = Pipeline(model, mesh, num_microbatches=microbatches, clock=clock, **schedule)
    side.parallel = SimpleNamespace(step=engine.step, optimizer=lambda cls, params, **given: None, module=model)


@feature(without={"vision"}, refused={"wrong-order": "ep needs data axes that are planned with it"})
def parts(side: Side) -> None:
    """Cut, plan, recompute, shard, tie, and run the steps of a pipeline, each by its own call."""
    if side.alone:
        side.record("recomputed", 1.0)
    place_by_parts(side)
    side.step(0)
    side.record_gradients()
    optimizer = torch.optim.SGD(side.model.parameters(), lr=0.05) if side.alone else None
    optimizer = optimizer or build_optimizer(side.model, torch.optim.SGD, lr=0.05)
    optimizer.step()
    optimizer.zero_grad()


def _of_data_alone(axis: Axis) -> bool:
    return axis.data_ranks == axis.world_size and "ep" not in axis.options


@feature(on=lambda axis: _of_data_alone(axis) and axis.options.get("zero", 0) < 3)
def small_buckets(side: Side) -> None:
    """`shard_data` alone, with a sum over ranks for every few parameters; two backwards a step, one or two sums."""
    if not side.alone:
        side.model = shard_data(side.model, side.mesh, side.axis.options.get("zero", 0), bucket_bytes=2000)
    optimizer = torch.optim.SGD(side.model.parameters(), lr=0.05) if side.alone else None
    optimizer = optimizer or build_optimizer(side.model, torch.optim.SGD, lr=0.05)
    for together in (False, True):
        with accumulate_gradients(side.model) if together and not side.alone else nullcontext():
            by_hand(side, 0)
            by_hand(side, 1)
        side.record_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=together)


@feature(on=lambda axis: axis.sizes.keys() == {"tp"} and "ep" not in axis.options)
def module_alone(side: Side) -> None:
    """`parallelize_module`, a loop by hand, an optimizer of PyTorch."""
    if not side.alone:
        plan = plan_of(side.kind, side.folder)
        side.model = parallelize_module(side.model, side.mesh, plan, **side.axis.options)
    by_hand(side)
    side.record_gradients()
    torch.optim.SGD(side.model.parameters(), lr=0.05).step()


@feature(on=lambda axis: axis.sizes.keys() == {"cp"} and "ep" not in axis.options, without={"vision"})
def context_alone(side: Side) -> None:
    """`context_parallel`, and a loop that sums the gradients over cp itself."""
    if not side.alone:
        plan, ulysses = plan_of(side.kind, side.folder), side.axis.options.get("ulysses", 1)
        side.model = context_parallel(side.model, side.mesh, plan, ulysses=ulysses, own_reduction=True)
    by_hand(side)
    for parameter in side.model.parameters():
        parameter.grad = side.summed(parameter.grad)
    torch.optim.SGD(side.model.parameters(), lr=0.05).step()


@feature(refused=NOT_BY_HAND)
def recompute_turned_off(side: Side) -> None:
    side.place(recompute="full")
    if not side.alone:
        for name in recomputed(side.model):
            set_recompute(side.model.get_submodule(name), False)
            break
    by_hand(side)


@feature()
def same_random_state(side: Side) -> None:
    """Ranks that were seeded apart draw alike afterwards."""
    side.place()
    torch.manual_seed(3)
    if not side.alone:
        synchronize_random_state(axis_group(side.mesh, *side.axis.sizes))
    side.step(0)


@feature(needs={"stock"})
def names_of_ties(side: Side) -> None:
    ties = tied_names(side.model)
    side.place()
    side.step(0)
    side.record("ties", float(len(ties)))
    name = ties[0][-1] if ties else next(iter(side.kind.build().state_dict()))
    weight = side.model.state_dict()[name] if side.alone else full_parameter(side.model, name)
    side.record(f"one {name}", weight)
    gradients = side.gradients() if side.alone else full_gradients(side.model)
    side.record("how many", float(len(gradients)))


@feature(
    one_rank=True,
    needs={"causal", "stock"},
    without={"recurrent"},
    on=lambda axis: axis.sizes.keys() == {"tp"} and "ep" not in axis.options,
    overrides={"": {"tie_word_embeddings": False}},
)
def materialized(side: Side) -> None:
    """A model without values is planned, allocated, then filled from a seed."""
    model = build_on_meta(type(side.model), side.model.config).double()
    side.model = parallelize_module(model, side.mesh, **side.axis.options) if "tp" in side.axis.sizes else model
    initialize(materialize(side.model, "cpu"), seed=4)
    by_hand(side)


@feature(one_rank=True, needs={"causal", "stock"}, without={"recurrent", "experts"})
def built_in_a_context(side: Side) -> None:
    with building("meta"):
        side.model = type(side.model)(side.model.config)
    side.model.double()
    side.place(initialize=5)
    side.step(0)


@feature(needs={"text", "causal"})
def global_batches(side: Side) -> None:
    """Rows by the package's sampler: the same global batch on every mesh."""
    side.place()
    ids = torch.cat([side.kind.batch(number)[0]["input_ids"] for number in range(3)])
    rows = next(iter(GlobalBatches(3 * ROWS, ROWS, seed=1, mesh=None if side.alone else side.mesh)))
    chosen = ids[rows]
    targets = torch.cat([chosen[:, 1:], torch.full_like(chosen[:, :1], IGNORED)], dim=1)
    assert chosen.shape[1] == LENGTH
    side.step(0, input_ids=chosen, targets=targets)


@feature(
    refused={**NOT_BY_HAND, "bad-head": "ZeRO 3 gathers a weight in its module alone"},
    needs={"causal", "stock"},
    without={"recurrent"},
)
def log_probs_of_hidden_states(side: Side) -> None:
    """`linear_token_log_probs` of the model's own head, without its logits."""
    side.place()
    hidden: dict[str, torch.Tensor] = {}
    head = side.model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, inputs: hidden.update(x=inputs[0]))
    side.forward()
    handle.remove()
    ids = side.split(side.targets())
    valid = ids != IGNORED
    if side.alone:
        log_probs = logits_of(head(hidden["x"])).log_softmax(-1).gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    else:
        log_probs, _ = linear_token_log_probs(hidden["x"], head.weight, ids, bias=head.bias)
    loss = -(log_probs * valid).sum() / side.count()
    loss.backward()
    side.record("loss", side.summed(loss))


def _linear(inputs: int, outputs: int, seed: int, **options: bool) -> nn.Linear:
    """Values by a generator of its own: ranks that are threads share that of PyTorch."""
    layer, generator = nn.Linear(inputs, outputs, **options).double(), torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return layer


@feature(
    needs={"causal", "stock"},
    without={"recurrent", "experts"},
    on=lambda axis: axis.ranks("pp") == 1 and axis.options.get("zero") != 3,
)
def layers_swapped_later(side: Side) -> None:
    """Another head, which unties it, and a linear that has a bias now; the optimizer is built again."""
    side.place()
    optimizer = side.optimizer(torch.optim.AdamW, eps=1e-2)
    side.step(0)
    side.update()
    width, base = side.model.config.hidden_size, side.model.base_model
    side.model.lm_head = _linear(width, VOCAB, 1, bias=False)
    if hasattr(base, "layers"):
        attention = base.layers[1].self_attn
        attention.q_proj = _linear(width, attention.q_proj.out_features, 2)
    side.optimizers.remove(optimizer)
    side.optimizer(torch.optim.AdamW, eps=1e-2)
    for number in (1, 2):
        side.step(number)
        side.clip(0.5)
        side.update()
