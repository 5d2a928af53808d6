"""The runs of which an earlier version has written checkpoints: what `make.py` built then, and what the tests build now.

Public names only: both versions import this file.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.optim import lr_scheduler
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from parallelize import (
    GlobalBatches,
    IterableBatches,
    Muon,
    Streams,
    build_mesh,
    build_on_meta,
    full_state_dict,
    parallelize_model,
    parallelize_module,
    quantize,
    random_state,
    set_random_state,
    shard_info,
)

SIZES = dict(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=2, max_position_embeddings=16)
SIZES |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
TOKENS = 6


def llama(**fields: Any) -> nn.Module:
    """A Llama whose weights are a function of their place, so that they are the same on every rank and in every version."""
    return with_values(LlamaForCausalLM(LlamaConfig(**{**SIZES, **fields})))


def with_values(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            places = torch.arange(parameter.numel(), dtype=torch.float64)
            values = torch.sin(places * 0.7 + number) * 0.2 + (parameter.dim() == 1)
            parameter.copy_(values.view(parameter.shape))
    return model


def adapted_llama(**fields: Any) -> nn.Module:
    """The same in 4 bits, with adapters."""
    import peft

    model = peft.get_peft_model(quantize(llama(**fields), "nf4(block=8)"), lora_config())
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.copy_(torch.cos(torch.arange(parameter.numel()) * 0.3 + number).view(parameter.shape) * 0.1)
    return model


def lora_config() -> Any:
    import peft

    return peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)


def rows(indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets of the samples with these numbers."""
    places = torch.arange(TOKENS + 1)
    tokens = torch.stack([(index * 7 + places * (3 + index % 5)) % 29 + 3 for index in indices])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Average:
    """An average of losses with a history and a tensor, as a user's object: plain data, nothing, numbers that JSON lacks."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "value": 0.0,
            "history": [],
            "shadow": torch.zeros(3),
            "best": math.inf,
            "at": None,
        }

    def add(self, loss: float) -> None:
        self.state["value"] = 0.9 * self.state["value"] + 0.1 * loss
        self.state["history"] = [*self.state["history"], (loss, "step")]
        self.state["shadow"] = self.state["shadow"] * 0.5 + torch.tensor([loss, -loss, 1.0])
        self.state["best"] = min(self.state["best"], loss)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


@dataclass
class Objects:
    """A run on a mesh: all that `Checkpointer` takes."""

    parallel: Any
    optimizer: Any
    scheduler: Any = None
    streams: Any = None
    data: Any = None
    user: dict[str, Any] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)  # the samples of the last step of this data rank

    @property
    def saved(self) -> dict[str, Any]:
        names = ("optimizer", "scheduler", "streams", "data", "user")
        return {
            name: getattr(self, name) for name in names if getattr(self, name) is not None and getattr(self, name) != {}
        }

    @property
    def module(self) -> nn.Module:
        return self.parallel.module

    def step(self) -> float:
        """One step on the next batch of this data rank."""
        self.taken = next(iter(self.data))
        ids, targets = rows(self.taken)
        for name in self.streams.declared if self.streams is not None else ():
            with self.streams(name):
                torch.rand(2)  # the stream moves
        loss = float(self.parallel.step(input_ids=ids, targets=targets))
        for optimizer in named(self.optimizer).values():
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in named(self.scheduler).values():
            scheduler.step()
        for average in self.user.values():
            average.add(loss)
        return loss


def named(value: Any) -> dict[str, Any]:
    """Optimizers or schedulers by name, of one or several."""
    return value if isinstance(value, dict) else {} if value is None else {"": value}


# -- the runs ---------------------------------------------------------------------------------------------------------


def adamw(parallel: Any, mesh: Any) -> Objects:
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9))
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    scheduler = lr_scheduler.SequentialLR(
        optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)], milestones=[2]
    )
    streams = Streams(3, mesh)
    streams.declare("augment", differs_over=("dp",))
    return Objects(
        parallel, optimizer, scheduler, streams, GlobalBatches(23, 8, seed=5, mesh=mesh), {"loss": Average()}
    )


def two_groups(parallel: Any, mesh: Any) -> Objects:
    """Groups with and without decay, a state that only amsgrad has, and a scheduler that sets betas too."""
    parameters = [p for p in parallel.module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = parallel.optimizer(torch.optim.AdamW, groups, lr=1e-2, amsgrad=True)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=[2e-2, 1e-2], total_steps=12)
    data = IterableBatches([range(11), range(11, 30)], 8, mesh=mesh)
    return Objects(parallel, optimizer, scheduler, None, data)


def muon(parallel: Any, mesh: Any) -> Objects:
    optimizer = parallel.optimizer(Muon, lr=0.02, adamw_lr=3e-3, momentum=0.9)
    return Objects(
        parallel, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9), None, GlobalBatches(16, 8, mesh=mesh)
    )


def momentum(parallel: Any, mesh: Any) -> Objects:
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
    return Objects(parallel, optimizer, None, None, GlobalBatches(16, 8, shuffle=False, mesh=mesh))


def by_name(parallel: Any, mesh: Any) -> Objects:
    """Two optimizers, of which one has a state of another shape than its parameters, and two schedulers."""
    parameters = list(parallel.module.parameters())
    optimizers = {
        "matrices": parallel.optimizer(torch.optim.Adafactor, [p for p in parameters if p.dim() > 1], lr=1e-2),
        "norms": parallel.optimizer(torch.optim.NAdam, [p for p in parameters if p.dim() == 1], lr=1e-3),
    }
    schedulers = {
        "matrices": lr_scheduler.StepLR(optimizers["matrices"], 2, gamma=0.5),
        "norms": lr_scheduler.CosineAnnealingWarmRestarts(optimizers["norms"], 3),
    }
    return Objects(parallel, optimizers, schedulers, None, GlobalBatches(16, 8, seed=1, mesh=mesh), {"loss": Average()})


def adapters(parallel: Any, mesh: Any) -> Objects:
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
    return Objects(parallel, optimizer, None, None, GlobalBatches(16, 8, seed=2, mesh=mesh))


# -- how they were saved ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Attributes:
        axes, options: the mesh that saved it.
        objects: what trains on it.
        others: meshes that read it, with their options.
        fields: of the model's config.
        build: the model.
        saving: arguments of `Checkpointer`.
    """

    axes: dict[str, int]
    options: dict[str, Any]
    objects: Callable[[Any, Any], Objects]
    others: tuple[tuple[dict[str, int], dict[str, Any]], ...]
    fields: dict[str, Any] = field(default_factory=dict)
    build: Callable[..., nn.Module] = llama
    saving: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        return self.build(**self.fields)

    def on(self, model: nn.Module, axes: dict[str, int], options: dict[str, Any]) -> Objects:
        """The run of a model on a mesh. A collective."""
        mesh = build_mesh("cpu", **axes)
        return self.objects(parallelize_model(model, mesh, "llama", **options), mesh)


ONE_LAYER = {"num_hidden_layers": 1}
BLOCKS = {"hidden_size": 16, "head_dim": 4}
"""Sizes of which tp=2 splits no block of 8 elements."""
NO_GENERATORS = {"generators": False}
"""Their states are 12 KB for each rank, so only the run of one rank has them."""
CASES = {
    "adamw": Case(
        {"dp": 2, "tp": 2},
        {"zero": 1, "sequence_parallel": True},
        adamw,
        (({"dp": 2, "cp": 2}, {"zero": 2}), ({"dp": 4}, {"zero": 3})),
        fields={"attention_dropout": 0.1, **ONE_LAYER},
        saving=NO_GENERATORS,
    ),
    "stages": Case(
        {"pp": 2, "dp": 2},
        {"zero": 2, "num_microbatches": 2, "dtype": torch.bfloat16},
        two_groups,
        (({"dp": 2, "tp": 2}, {"zero": 1, "dtype": torch.bfloat16}), ({"tp": 2}, {})),
        saving={"asynchronous": True, **NO_GENERATORS},
    ),
    "muon": Case(
        {"dp": 2, "tp": 2},
        {"zero": 2},
        muon,
        (({"tp": 2}, {}), ({"dp": 2}, {"zero": 1})),
        fields=ONE_LAYER,
        saving={"shared": False, **NO_GENERATORS},
    ),
    "zero3": Case(
        {"dp": 2},
        {"zero": 3},
        momentum,
        (({"tp": 2}, {}), ({"pp": 2, "tp": 2}, {"num_microbatches": 2})),
        saving=NO_GENERATORS,
    ),
    "by-name": Case({"dp": 1}, {}, by_name, (({"dp": 2}, {}),), fields={"tie_word_embeddings": True, **ONE_LAYER}),
    "adapters": Case(
        {"tp": 2},
        {},
        adapters,
        (({"dp": 2, "tp": 2}, {"zero": 1}), ({"dp": 2}, {"zero": 2})),
        fields={**ONE_LAYER, **BLOCKS},
        build=adapted_llama,
        saving=NO_GENERATORS,
    ),
}
STEPS = 3
VALUES = {
    "text": "größer als ☃",
    "numbers": [1, -(2**70), 0.1, -0.0, math.inf],
    "nested": {"a": (True, None), "b": {}},
    "half": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "counts": torch.arange(4).view(2, 2),
}
"""What a user passes to `save`."""


# -- what is compared -------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Any state as JSON that is equal only where the state is, bit by bit: floats as hexadecimal text, tensors with dtype."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {"dtype": str(value.dtype), "shape": list(value.shape), "bytes": data.hex()}
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [plain(item) for item in value]}
    if isinstance(value, float):
        return value.hex()
    return value if isinstance(value, str | int | None) else repr(value)


def full(value: Any) -> torch.Tensor:
    """The full tensor of a parameter or of a state. A collective where it is stored as shards."""
    value = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    full_tensor = getattr(value, "full_tensor", None)
    return (value if full_tensor is None else full_tensor()).detach().clone()


def stepped(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]:
    """Each tensor that the optimizers step: itself, in full, and its state in full."""
    for name, each in named(optimizer).items():
        for group in each.param_groups:
            for parameter in group["params"]:
                state = each.state[parameter]
                yield parameter, full(parameter), {f"{name}/{key}": full(state[key]) for key in sorted(state)}


def digest(value: Any) -> str:
    """Of any state; equal only where the state is, bit by bit."""
    return hashlib.sha256(json.dumps(plain(value)).encode()).hexdigest()[:16]


def expected_digests(objects: Objects) -> dict[str, str]:
    """Of the weights and the optimizer state of a run of one process, by names; of weights also as bfloat16."""
    digests = {}
    for name, value in objects.module.state_dict().items():
        digests[f"model/{name}"] = digest(full(value))
        digests[f"bfloat16/{name}"] = digest(full(value).bfloat16())
    names = {id(parameter): name for name, parameter in objects.module.named_parameters()}
    for parameter, _, state in stepped(objects.optimizer):
        digests |= {f"optimizer/{names[id(parameter)]}/{key}": digest(value) for key, value in state.items()}
    return digests


def differences(objects: Objects, expected: dict[str, str]) -> list[str]:
    """How weights and optimizer differ from the full tensors of these digests. A collective.

    The weight that an optimizer steps is recognized by its bits, because no public name says which parameter a shard is of.
    """
    states: dict[str, dict[str, str]] = {}
    for key, value in expected.items():
        kind, name, *state = key.split("/", 2)
        if kind == "optimizer":
            states.setdefault(name, {})[state[0]] = value
    by_digest = {expected[f"model/{name}"]: name for name in states}
    wrong, seen = [], []
    for _, weight, state in stepped(objects.optimizer):
        name = by_digest.get(digest(weight), "")
        seen.append(name)
        if not name:
            wrong.append(f"a weight of shape {tuple(weight.shape)} that was not saved")
        elif {key: digest(value) for key, value in state.items()} != states[name]:
            wrong.append(f"the optimizer's state of {name}")
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, seen)
    wrong += [f"no optimizer has {name}" for name in set(states) - {name for names in of_ranks for name in names}]
    weights = full_state_dict(objects.module)  # of rank 0 alone
    return wrong + (different_weights(weights, expected) if dist.get_rank() == 0 else [])


def different_weights(weights: dict[str, torch.Tensor], expected: dict[str, str]) -> list[str]:
    """How full weights differ from those of these digests."""
    saved = {key[6:] for key in expected if key.startswith("model/")}
    wrong = [f"the name {name}" for name in sorted(saved ^ set(weights))]
    for name in sorted(saved & set(weights)):
        value = weights[name]
        kind = "bfloat16" if value.dtype == torch.bfloat16 else "model"
        wrong += [f"the weight {name}"] if digest(value) != expected[f"{kind}/{name}"] else []
    return wrong


def options_of(optimizer: Any) -> Any:
    """Learning rates and other options of groups."""
    return plain(
        {
            name: [{key: value for key, value in group.items() if key != "params"} for group in each.param_groups]
            for name, each in named(optimizer).items()
        }
    )


def position(objects: Objects) -> dict[str, Any]:
    """What a checkpoint has beside tensors and random numbers, the same on every rank."""
    return {
        "options": options_of(objects.optimizer),
        "schedulers": plain({name: public(each.state_dict()) for name, each in named(objects.scheduler).items()}),
        "user": plain({name: each.state_dict() for name, each in objects.user.items()}),
    }


def stream_digests(objects: Objects) -> dict[str, str]:
    """Of the states of this rank's streams."""
    return {} if objects.streams is None else {name: digest(objects.streams[name]) for name in objects.streams.declared}


def public(state: Any) -> Any:
    """Without functions, which are not saved, and private keys, which a version of PyTorch may change."""
    if isinstance(state, dict):
        return {
            key: public(value) for key, value in state.items() if not str(key).startswith("_") and not callable(value)
        }
    return [public(each) for each in state] if isinstance(state, list) else state


def generator_draws() -> list[str]:
    """The next numbers of the process's generators, which do not move."""
    before = random_state()
    numbers = [*torch.rand(2).tolist(), random.random(), float(numpy.random.rand())]
    set_random_state(before)
    return [float(x).hex() for x in numbers]


# -- plans ------------------------------------------------------------------------------------------------------------


def mixtral() -> nn.Module:
    config = MixtralConfig(**{**SIZES, **ONE_LAYER}, num_local_experts=2, num_experts_per_tok=1)
    return with_values(MixtralForCausalLM(config))


WIDE = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "own": ("LlamaForCausalLM", dict(model_type="llama", **SIZES, tie_word_embeddings=True)),
    "bert": ("BertForMaskedLM", dict(model_type="bert", **WIDE, intermediate_size=48)),
    "bloom": ("BloomForCausalLM", dict(model_type="bloom", vocab_size=40, hidden_size=32, n_layer=2, n_head=4)),
    "falcon": ("FalconForCausalLM", dict(model_type="falcon", **WIDE, alibi=True, new_decoder_architecture=False)),
    "gpt_oss": (
        "GptOssForCausalLM",
        dict(
            model_type="gpt_oss", **WIDE, num_key_value_heads=2, head_dim=8, intermediate_size=16, num_local_experts=4
        ),
    ),
    "jamba": (
        "JambaForCausalLM",
        dict(model_type="jamba", **WIDE, num_key_value_heads=2, intermediate_size=48, num_experts=4)
        | dict(attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=6),
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        dict(model_type="mamba2", vocab_size=40, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8)
        | dict(state_size=4, n_groups=2),
    ),
    "mixtral": ("MixtralForCausalLM", dict(model_type="mixtral", **SIZES, num_local_experts=4)),
    "olmo2": ("Olmo2ForCausalLM", dict(model_type="olmo2", **WIDE, num_key_value_heads=2, intermediate_size=48)),
    "opt": ("OPTForCausalLM", dict(model_type="opt", **WIDE, ffn_dim=48, word_embed_proj_dim=32)),
    "t5": (
        "T5ForConditionalGeneration",
        dict(model_type="t5", vocab_size=40, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=48),
    ),
}
"""Plan -> the class and config of the model for which it is resolved."""
SHIPPED = [name for name in PLANS if name != "own"]


def parts(name: str, folder: Path) -> dict[str, list[Any]]:
    """Parameter -> the ranks that store parts of it, and for each rank of `tp` its slices. On two ranks; a collective."""
    class_name, fields = PLANS[name]
    model = build_on_meta(getattr(transformers, class_name), AutoConfig.for_model(**fields))
    mesh = build_mesh("cpu", tp=2)
    parallelize_module(model, mesh, str(folder / f"{name}.yaml"))
    return {name: [list(info.ranks), slices(info.layout)] for name, info in shard_info(model).items()}


def slices(layout: Any) -> list[Any]:
    """For each rank the slices of the full tensor that it stores."""
    pairs = [layout.slices(rank) for rank in range(layout.num_ranks)]
    return [[[[part.start, part.stop] for part in pair.full] for pair in of_rank] for of_rank in pairs]
