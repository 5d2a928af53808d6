"""Weights and states: saved, loaded, exported, initialized, copied and averaged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize import (
    Checkpointer,
    WeightExporter,
    build_on_meta,
    export_weights,
    full_gradients,
    full_parameter,
    initialize,
    load_checkpoint,
    load_pretrained,
    named_tensors,
    random_state,
    rebuild,
    save_pretrained,
    set_random_state,
    shard_info,
    tied_names,
)
from parallelize.state.stored_slices import stored_parameters
from tests.matrix.axes import AXES
from tests.matrix.feature import at, change, feature
from tests.matrix.features.optimizers import ADAFACTOR, CLASSES, with_class
from tests.matrix.sides import Alone, Side, seeded
from tests.support.models import keep_float64

COPIED = {"sharded-copy": "fully_shard does not support copies of a module whose parameters are shards"}
ADAMW = {"cls": torch.optim.AdamW, "lr": 1e-3, "weight_decay": 0.1}


def first_step(side: Side, **optimizer: Any) -> None:
    side.place()
    side.optimizer(**optimizer)
    side.step(0)
    side.update()


def _second_step(side: Side) -> None:
    side.step(1)
    side.update()
    side.step(2)


def _save(side: Side) -> None:
    with Checkpointer(f"{side.folder}/run", side.parallel, optimizer=side.optimizers[0]) as checkpoints:
        checkpoints.save(1)


def _resumed(side: Side, model: nn.Module, **optimizer: Any) -> None:
    """The run of the folder, gone on with by a model that was just built."""
    side.model, side.optimizers = model, []
    side.place()
    side.optimizer(**optimizer)
    with Checkpointer(f"{side.folder}/run", side.parallel, optimizer=side.optimizers[0]) as checkpoints:
        assert checkpoints.resume() == 1


def go_on_elsewhere(side: Side, model: nn.Module, **optimizer: Any) -> None:
    if not side.alone:
        _save(side)
        other = side.elsewhere()
        _resumed(other, model, **optimizer)
        side.axis, side.mesh, side.parallel = other.axis, other.mesh, other.parallel
        side.model, side.optimizers = other.model, other.optimizers
    _second_step(side)


def _checkpoints(side: Side, folder: str) -> Checkpointer:
    optimizers = {f"optimizer {number}": optimizer for number, optimizer in enumerate(side.optimizers)}
    return Checkpointer(f"{folder}/run", side.parallel, optimizer=optimizers)


def begin_anew(side: Side) -> None:
    """A model that was just built takes the place of the one that trains."""
    side.model, side.optimizers = side.fresh, []
    side.loop.begin(side)


def _saved(side: Side, folder: str) -> None:
    with _checkpoints(side, folder) as checkpoints:
        checkpoints.save(1)


def _gone_on_with(side: Side, folder: str) -> None:
    begin_anew(side)
    with _checkpoints(side, folder) as checkpoints:
        assert checkpoints.resume() == 1


@at("restored", names=("Checkpointer",))
def resume(side: Side, folder: str) -> None:
    if not side.alone:
        _saved(side, folder)
        _gone_on_with(side, folder)


def _resume_on_another_mesh(side: Side, folder: str) -> None:
    if not side.alone:
        _saved(side, folder)
        other = side.elsewhere()
        _gone_on_with(other, folder)
        side.axis, side.mesh, side.parallel = other.axis, other.mesh, other.parallel
        side.model, side.optimizers = other.model, other.optimizers


RESIZED = {"reads-full-parameters": "stages, and units of ZeRO 3, are not resized in place"}


def _with_more_tokens(model: nn.Module) -> nn.Module:
    """Tokens that no rank count divides, whose rows depend on no generator."""
    before = model.config.vocab_size
    model.resize_token_embeddings(before + 5, mean_resizing=False)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[before:] = module.weight[:5] * 0.5
    return model


def _resume_with_more_tokens(side: Side, folder: str) -> None:
    """New tokens keep the rows of the model that is built, and their states are zero."""
    model, optimizers = side.model, side.optimizers
    if not side.alone:
        _saved(side, folder)
    side.fresh = _with_more_tokens(side.fresh).double()
    begin_anew(side)
    if not side.alone:
        with _checkpoints(side, folder) as checkpoints:
            checkpoints.resume(resize_vocabulary=True)
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {names[id(p)]: state for optimizer in optimizers for p, state in optimizer.state.items()}
    saved, stepped = (
        dict(model.named_parameters()),
        {id(p) for o in side.optimizers for g in o.param_groups for p in g["params"]},
    )
    with torch.no_grad():
        for name, parameter in side.model.named_parameters():
            parameter[: len(saved[name])] = saved[name]
            for optimizer in side.optimizers:
                if name in states and id(parameter) in stepped:
                    optimizer.state[parameter] = {
                        k: _lengthened(v, saved[name], parameter) for k, v in states[name].items()
                    }


def _lengthened(value: Any, before: torch.Tensor, after: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != before.shape:
        return value
    longer = torch.zeros_like(after)
    longer[: len(before)] = value
    return longer


@feature(needs={"causal", "stock"}, without={"recurrent"}, refused=RESIZED)
def resized_later(side: Side) -> None:
    """Between two steps; the optimizer is built afterwards."""
    side.place()
    side.step(0)
    side.model.zero_grad()
    side.model = _with_more_tokens(side.model)
    side.train()


change(
    "resume_with_more_tokens",
    restored=_resume_with_more_tokens,
    apart={"head", "mesh"},
    needs={"causal", "stock"},
    without={"recurrent"},
)
ON_ADAMW = {"optimizer": with_class(ADAMW["cls"], {"lr": ADAMW["lr"], "weight_decay": ADAMW["weight_decay"]})}
change("resume_adamw", restored=resume, meets=False, **ON_ADAMW)
change("resume_elsewhere", restored=_resume_on_another_mesh, apart={"mesh"})  # on which a row may have no meaning
change("resume_adamw_elsewhere", restored=_resume_on_another_mesh, meets=False, **ON_ADAMW)
change(
    "resume_adamw_with_more_tokens",
    restored=_resume_with_more_tokens,
    meets=False,
    needs={"causal", "stock"},
    without={"recurrent"},
    on=lambda axis: axis in WITH_EVERY_CLASS,
    **ON_ADAMW,
)


@feature()
def resume_from_elsewhere(side: Side) -> None:
    """Another mesh has saved what this one goes on with."""
    fresh = copy.deepcopy(side.model)
    before = side if side.alone else side.elsewhere()
    first_step(before, **ADAMW)
    if not side.alone:
        _save(before)
        _resumed(side, fresh, **ADAMW)
    _second_step(side)


WITH_EVERY_CLASS = [AXES[name] for name in ("dp-zero0", "dp-zero1", "dp-zero3", "tp", "pp-1f1b")]

for _name, _class in {**CLASSES, "adafactor": ADAFACTOR}.items():
    change(
        f"{_name}_resumed",
        optimizer=with_class(*_class),
        restored=resume,
        meets=False,
        needs={"own"},
        on=WITH_EVERY_CLASS.__contains__,
    )


@at("restored", names=("load_checkpoint",))
def load_weights_of_checkpoint(side: Side, folder: str) -> None:
    """Without the states of the optimizer, which begin again."""
    if side.alone:
        for optimizer in side.optimizers:
            optimizer.state.clear()
    else:
        _saved(side, folder)
        begin_anew(side)
        load_checkpoint(f"{folder}/run", side.parallel)


def _without_values(side: Side, model: nn.Module) -> nn.Module:
    """The model on the meta device, with its ties, which PyTorch's move parts."""
    model = model.to("meta")
    if "stock" in side.kind.traits:
        model.tie_weights()
    return model


@feature(names=("initialize=",))
def initialize_from_checkpoint(side: Side) -> None:
    """A model on the meta device takes its weights from the folder of a run."""
    fresh = copy.deepcopy(side.model)
    first_step(side)
    if not side.alone:
        _save(side)
        side.model, side.optimizers = _without_values(side, fresh), []
        side.place(initialize=f"{side.folder}/run")
    _second_step(side)


@feature(names=("rebuild", "Rebuilt"))
def rebuild_optimizer(side: Side) -> None:
    fresh = copy.deepcopy(side.model)
    first_step(side, **ADAMW)
    if not side.alone:
        _save(side)
        side.model, side.optimizers = fresh, []
        side.place()
        side.optimizers = list(rebuild(side.parallel, f"{side.folder}/run").optimizers.values())
    _second_step(side)


@feature()
def full_weights_by_name(side: Side) -> None:
    """In the order of the unsharded model, tied ones as one tensor; without `every_rank` on the first rank alone."""
    order = list(side.model.state_dict())
    ties = [names for names in tied_names(side.model) if set(names) <= set(order)]
    side.place()
    full = side.model.state_dict() if side.alone else side.every_weight()
    side.record("in order", float(list(full) == order))
    side.record("one tensor", float(all(len({full[name].data_ptr() for name in names}) == 1 for names in ties)))
    side.record("elsewhere", float(not side.alone and bool(side.weights()) != (torch.distributed.get_rank() == 0)))
    for name, value in full.items():
        side.record(f"value of {name}", value)


@feature(names=("full_state_dict",))
def full_weights_unsharded(side: Side) -> None:
    """The full weights, loaded into an unsharded copy, which is evaluated."""
    plain = Alone(side.kind, copy.deepcopy(side.model), side.folder)
    first_step(side)
    plain.model.load_state_dict(side.every_weight())
    side.record("unsharded", plain.evaluate(1))


@at("restored")
def load_state_dict(side: Side, folder: str) -> None:
    """Full tensors, loaded into a model that has a plan: of a stage, into what it has."""
    full = {name: value * 1.25 if value.is_floating_point() else value for name, value in side.every_weight().items()}
    side.model.load_state_dict({name: full[name] for name in side.model.state_dict()})


@feature(needs={"causal"}, on=lambda axis: axis.sizes.keys() == {"tp"} and "ep" not in axis.options)
def assigned_state_dict(side: Side) -> None:
    """Full tensors in the place of the parameters, and then what the model's own `state_dict` gives."""
    full = {name: value * 1.25 for name, value in side.model.state_dict().items()}
    side.place()
    side.model.load_state_dict(full, assign=True)
    side.model.load_state_dict(copy.deepcopy(side.model.state_dict()))
    side.evaluate(0)


@at("restored")
def optimizer_state_dict(side: Side, folder: str) -> None:
    """Each rank's states, by `torch.save` and `torch.load`; weights by the full ones."""
    if side.alone:
        return
    path = Path(folder) / f"optimizer-{torch.distributed.get_rank()}.pt"
    torch.save([optimizer.state_dict() for optimizer in side.optimizers], path)
    full = side.every_weight()
    begin_anew(side)
    side.model.load_state_dict({name: full[name] for name in side.model.state_dict()})
    for optimizer, state in zip(side.optimizers, torch.load(path, weights_only=False), strict=True):
        optimizer.load_state_dict(state)


@feature(names=("full_parameter", "full_gradients"))
def full_values(side: Side) -> None:
    """One after the other, and those of a part of the model."""
    names = [name for name, _ in side.model.named_parameters()]
    side.place()
    side.step()
    for name in names:
        value = side.model.get_parameter(name) if side.alone else full_parameter(side.model, name)
        side.record(f"weight {name} alone", value)
    full = side.gradients() if side.alone else full_gradients(side.model)
    side.record("names", len(full))


@feature(names=("save_pretrained", "load_pretrained"), needs={"stock"})
def pretrained(side: Side) -> None:
    fresh = copy.deepcopy(side.model)
    first_step(side)
    if side.alone:
        side.model.save_pretrained(side.folder)
        side.model.load_state_dict(type(side.model).from_pretrained(side.folder).state_dict())
    else:
        save_pretrained(side.parallel, f"{side.folder}/saved")
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        side.model, side.optimizers = fresh, []
        side.place()
        load_pretrained(side.parallel, f"{side.folder}/saved")
    _second_step(side)


@feature(names=("initialize=",), needs={"stock"})
def initialize_from_pretrained(side: Side) -> None:
    """Files that `transformers` wrote, read by a model on the meta device."""
    folder = f"{side.folder}/hub-{0 if side.alone else torch.distributed.get_rank()}"
    side.model.save_pretrained(folder)
    if side.alone:
        side.place()
    else:
        torch.distributed.barrier()
        side.model = _without_values(side, side.model)
        side.place(initialize=f"{side.folder}/hub-0")
    side.train()


@at("gradients", names=("export_weights",))
def export(side: Side, number: int) -> None:
    exported: dict[str, torch.Tensor] = {}
    if side.alone:
        exported = dict(side.model.named_parameters())
    else:
        for bucket in export_weights(side.parallel, names="model", bucket=4096):
            exported |= bucket.tensors
    around = "" if side.alone or side.model is side.parallel.module else "base_model.model."  # adapters that came later
    for name, value in exported.items():
        side.record(f"weight {around}{name} exported", value)
    side.record("names", len(exported))


@feature(names=("WeightExporter", "named_tensors"), needs={"stock"})
def export_for_engines(side: Side) -> None:
    """Under the names of the Hub, and again what has changed."""
    first_step(side)
    if side.alone:
        side.model.save_pretrained(side.folder)
        from safetensors.torch import load_file

        exported = load_file(f"{side.folder}/model.safetensors")
    else:
        exporter = WeightExporter(side.parallel)
        exported = dict(named_tensors(exporter, changed=True))
        side.record("unchanged", len(dict(named_tensors(exporter, changed=True))))
    if side.alone:
        side.record("unchanged", 0)
    for name, value in exported.items():
        side.record(f"weight {name} exported", value)


@feature(names=("build_on_meta", "initialize"), one_rank=True)
def initialize_seed(side: Side) -> None:
    def build() -> nn.Module:
        model = side.model
        built = type(model)(model.config) if "stock" in side.kind.traits else type(model)(layers=len(model.blocks))
        keep_float64(built)
        return built.double().train()

    side.model = build_on_meta(build)
    side.place(initialize=3)
    side.train()


@feature(
    names=("initialize",),
    one_rank=True,
    refused={
        "unknown-initialiser": "an initializer that computes values of the full size of what a rank has a part of"
    },
)
def initialize_again(side: Side) -> None:
    """A model that has values and a plan gets others."""
    side.place()
    initialize(side.model, 5)
    side.train()


@feature(names=("shard_info", "ShardInfo", "Layout", "SlicePair"))
def shards_cover(side: Side) -> None:
    """Each element of each parameter is in the slices of as many ranks as the layout says, and of one at least."""
    full = {name: p.detach().clone() for name, p in side.model.named_parameters(remove_duplicate=False)}
    shapes = {name: list(value.shape) for name, value in full.items()}
    side.place()
    infos = {} if side.alone else shard_info(side.model)
    is_more = not side.alone and side.axis.options.get("zero") == 3  # which shards what a plan has sharded once more
    for stored in [] if side.alone or is_more else stored_parameters(side.model):
        pairs = infos[stored.fqn].slices(torch.distributed.get_rank())
        assert all(torch.equal(stored.local[pair.local], full[stored.fqn][pair.full]) for pair in pairs), stored.fqn
    side.record("more names", len(infos.keys() - shapes.keys()))
    for name, shape in shapes.items():
        stored = torch.ones(shape)
        if not side.alone:
            stored.zero_()
            for rank in range(len(infos[name].ranks)):
                for pair in infos[name].layout.slices(rank):
                    stored[pair.full] += 1
        side.record(f"stored {name}", stored.min().clamp(max=1))


@at("restored")
def torch_checkpoint(side: Side, folder: str) -> None:
    """PyTorch's distributed checkpoint, on one process too: it does not load what it saved where a parameter had no
    gradient yet."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizers = get_state_dict(side.model, side.optimizers)
    dcp.save({"model": model, "optimizer": optimizers}, checkpoint_id=f"{folder}/dcp")
    begin_anew(side)
    model, optimizers = get_state_dict(side.model, side.optimizers)
    try:
        dcp.load({"model": model, "optimizer": optimizers}, checkpoint_id=f"{folder}/dcp")
    except dcp.api.CheckpointException as error:  # no Exception: it would end a rank's process
        raise RuntimeError(str(error)) from error
    set_state_dict(side.model, side.optimizers, model_state_dict=model, optim_state_dict=optimizers)


@feature()
def loaded_late(side: Side) -> None:
    """Weights that are loaded after the optimizer was built are those that it steps."""
    values = {n: 0.9 * v if v.is_floating_point() else v for n, v in side.model.state_dict().items()}
    side.place()
    side.optimizer(momentum=0.9)
    side.model.load_state_dict(values, strict=False)
    side.train()


@feature(refused=COPIED)
def averaged(side: Side) -> None:
    """Moving averages of the weights, by PyTorch's class."""
    side.place()
    averages = torch.optim.swa_utils.AveragedModel(
        side.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)
    )
    for number in range(2):
        side.step(number)
        side.update()
        averages.update_parameters(side.model)
    side.model = averages.module


@feature(on=lambda axis: "pp" not in axis.sizes, refused=COPIED)
def averaged_evaluated(side: Side) -> None:
    side.place()
    averages = torch.optim.swa_utils.AveragedModel(side.model)
    for number in range(2):
        side.step(number)
        side.update()
        averages.update_parameters(side.model)
    side.beside(averages.module).evaluate_by_hand(2)


@at("around", refused=COPIED)
def deep_copy(side: Side, number: int, step: Any) -> None:
    """A copy of the module stays as it is while the model trains."""
    copied = copy.deepcopy(side.model)
    step(number)
    for name, value in side.beside(copied).every_weight().items():
        side.record(f"weight {name} copied", value)


@feature(on=lambda axis: "pp" not in axis.sizes, refused=COPIED)
def deep_copy_evaluated(side: Side) -> None:
    side.place()
    side.step(0)
    copied = copy.deepcopy(side.model)
    side.update()
    side.beside(copied).evaluate_by_hand(2)


@at("placed", apart={"dtype"})
def converted(side: Side) -> None:
    """Casts and moves of a model on a mesh, to what it is already."""
    side.model.to(torch.float64).double().cpu()


@feature(names=("random_state", "set_random_state"))
def random_states(side: Side) -> None:
    side.place()
    with seeded(7):
        state = random_state()
        side.record("drawn", torch.rand(3))
        set_random_state(state)
        side.record("drawn again", torch.rand(3))
    side.train()


@feature(others=(None,))
def two_models(side: Side) -> None:
    """Two models on one mesh, which train by turns."""
    second = side.beside(side.others[0])
    side.place()
    second.place()
    for number in range(2):
        for one in (side, second):
            one.step(number)
            one.update()
    second.step(2)
    side.step(2)
    second.finish()
