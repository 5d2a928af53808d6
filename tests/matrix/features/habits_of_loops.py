"""Shapes of training loops: groups, schedules, uneven accumulation, evaluation, generation and files in the middle."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from parallelize import Checkpointer, accumulate_gradients, generate
from tests.matrix.feature import at, change
from tests.matrix.features.forwards import layers_of
from tests.matrix.features.schedules import clipped
from tests.matrix.habits import descend, habit, of_habit, tokens, whole_model, whole_sequences
from tests.matrix.kinds import ROWS, VOCAB
from tests.matrix.sides import Side

STABLE = {"eps": 1e-2}
DECODERS = {"needs": {"causal", "stock"}}
LOGITS_OF_CLASSES = {"loss_parallel": False}  # there is no vocabulary to shard


@at("optimizer", **of_habit())
def decay_by_name(side: Side) -> None:
    """No weight decay of biases and norms, which are known by their names."""
    spared = ("bias", "norm", "ln_")
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in side.model.named_parameters():
        groups[any(part in name for part in spared)].append(parameter)
    decayed = [{"params": groups[False], "weight_decay": 0.2}, {"params": groups[True], "weight_decay": 0.0}]
    side.optimizer(optim.AdamW, [group for group in decayed if group["params"]], **STABLE)


@habit()
def rates_by_layer(side: Side) -> None:
    """A learning rate of its own for each parameter, smaller for lower layers, and a schedule over all of them."""
    side.place()
    groups = [
        {"params": [parameter], "lr": 0.05 if ".1." in name else 0.025}
        for name, parameter in side.model.named_parameters()
    ]
    schedule = optim.lr_scheduler.LambdaLR(side.optimizer(optim.SGD, groups), lambda step: 0.5**step)
    for number in range(3):
        side.step(number)
        side.update()
        schedule.step()


@at("gradients", **of_habit())
def rate_set_by_hand(side: Side, number: int) -> None:
    for optimizer in side.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (number + 1)


@habit()
def one_cycle(side: Side) -> None:
    """A schedule of rates and momenta."""
    side.place()
    optimizer = side.optimizer(optim.SGD, momentum=0.9)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=4)
    for number in range(3):
        side.step(number)
        side.update()
        schedule.step()
        side.record("rate", optimizer.param_groups[0]["lr"])


@habit()
def rate_by_evaluation(side: Side) -> None:
    """A rate that falls as the evaluated loss does not."""
    side.place()
    optimizer = side.optimizer(optim.SGD, momentum=0.9)
    schedule = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
    for number in range(3):
        side.step(number)
        side.update()
        schedule.step(side.evaluate(3))
        side.record("rate", optimizer.param_groups[0]["lr"])


@habit()
def warmup_by_microbatches(side: Side) -> None:
    """The schedule steps with each accumulated batch, the optimizer with every second one."""
    side.place()
    optimizer = side.optimizer(optim.SGD, momentum=0.9)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch wants the optimizer first
        for number in range(4):
            side.step(number)
            schedule.step()
            if number % 2:
                side.update()


@habit()
def another_optimizer_later(side: Side) -> None:
    """AdamW first, then SGD with momentum of its own."""
    side.place()
    side.optimizer(optim.AdamW, **STABLE)
    side.train()
    side.update()
    side.optimizers.clear()
    side.optimizer(optim.SGD, momentum=0.9)
    side.train(3)


@habit()
def optimizers_by_turns(side: Side) -> None:
    """Matrices and vectors are stepped in different steps, with all gradients dropped after each."""
    side.place()
    parameters = list(side.model.parameters())
    turns = [
        side.add_optimizer(optim.SGD, [p for p in parameters if (p.ndim > 1) == matrices], lr=0.05, momentum=0.9)
        for matrices in (True, False)
    ]
    for number in range(4):
        side.step(number)
        turns[number % 2].step()
        side.model.zero_grad()
    side.step(4)


@habit()
def ends_first_then_all(side: Side) -> None:
    """The last half trains alone, then everything with a new optimizer."""
    names = list(side.named())
    lower = set(names[: len(names) // 2])
    for name, parameter in side.named().items():
        parameter.requires_grad_(name not in lower)
    side.place()
    side.optimizer(optim.AdamW, **STABLE)
    side.train()
    side.update()
    for parameter in side.model.parameters():
        parameter.requires_grad_(True)
    side.optimizers.clear()
    side.optimizer(optim.AdamW, list(side.model.parameters()), **STABLE)
    side.train()


def _uneven(side: Side, number: int) -> None:
    """The first row of each rank in one backward, the others in the next."""
    inputs, targets = side.inputs(number), side.targets(number)
    cache = {"use_cache": False} if "stock" in side.kind.traits else {}
    for rows in (slice(0, 1), slice(1, None)):
        if len(targets[rows]):
            # what is one row for all stays so
            taken = {name: value[rows] if len(value) == len(targets) else value for name, value in inputs.items()}
            output = side.model(**taken, **cache)
            (side.summed_loss(output, targets[rows]) / side.count(number)).backward()


change("uneven_microbatches", step=_uneven, own_batches=True, **of_habit(whole_model))


@at("step", own_batches=True, **of_habit(whole_model))
def uneven_microbatches_in_a_block(side: Side, number: int) -> None:
    """As with `no_sync`: what is summed over ranks is summed once."""
    with nullcontext() if side.alone else accumulate_gradients(side.model):
        _uneven(side, number)


@habit(on=whole_model)
def evaluation_in_an_accumulation(side: Side) -> None:
    side.place()
    for number in range(2):
        read = tokens(side, number)
        read.mean(read.losses).backward()
        side.model.eval()
        with torch.inference_mode():
            seen = tokens(side, 3)
            side.record("evaluated", side.summed(seen.mean(seen.losses)).clone())
        side.model.train()
    side.update()
    side.step(1)


@at("around", **of_habit())
def saved_in_an_accumulation(side: Side, number: int, step: Any) -> None:
    """A checkpoint between two backwards changes neither."""
    step(number)
    if not side.alone:
        folder = f"{side.folder}/run-{next(vars(side).setdefault('saves', count()))}"  # each row may call this
        with Checkpointer(folder, side.parallel, optimizer=side.optimizers[0]) as checkpoints:
            checkpoints.save(1)
    step(number + 1)


@at("restored", **of_habit())
def weights_put_back(side: Side, folder: str) -> None:
    """The best weights so far are kept by `state_dict`, and loaded after a further step."""
    best = {name: value.clone() for name, value in side.model.state_dict().items()}
    side.loop.step(side, 1)
    side.update()
    side.model.load_state_dict(best)


@at("around", **of_habit(lambda axis: whole_sequences(axis) and axis.data_ranks == 1, apart={"ids"}, **DECODERS))
def generation_between_steps(side: Side, number: int, step: Any) -> None:
    """Greedy tokens before each step; of all tokens of the prompts, also of those that pad others."""
    prompts = {"input_ids": side.kind.batch(0)[0]["input_ids"][:, :5]}
    prompts["attention_mask"] = torch.ones_like(prompts["input_ids"])
    side.model.eval()
    with torch.no_grad():
        if side.alone:
            greedy: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            tokens_of = side.model.generate(**prompts, max_new_tokens=3, **greedy)
        else:
            tokens_of = generate(side.model, **prompts, max_new_tokens=3, temperature=0, eos_token_id=[])
    side.record("generated", tokens_of.double())
    side.model.train()
    step(number)


@habit(processes=True)
def profiled(side: Side) -> None:
    side.place()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        side.step(0)
        side.clip(0.5)
        side.update()
    side.step(1)


@habit(on=whole_model)
def anomalies_detected(side: Side) -> None:
    side.place()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=False):
            read = tokens(side)
            descend(side, read.mean(read.losses))


NO_MODULE = {"unplaceable-draw": "a replay by PyTorch's checkpoint has no module by which draws are placed"}


@at(
    "placed",
    apart={"replay"},
    refused_with=dict.fromkeys(("noise", "layer_drop", "*dropout"), NO_MODULE),
    **of_habit(whole_model),
)
def layers_checkpointed_by_hand(side: Side) -> None:
    """Each layer's forward is wrapped in PyTorch's checkpoint."""
    for layer in layers_of(side):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _with_fewer_layers(model: nn.Module) -> nn.Module:
    """Its second layer before its first one."""
    base = model.base_model
    name = next(name for name, child in base.named_children() if isinstance(child, nn.ModuleList))
    setattr(base, name, nn.ModuleList(reversed(list(getattr(base, name)))))
    for number, layer in enumerate(getattr(base, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    return model


change("layers_in_another_order", prepare=_with_fewer_layers, **of_habit(**DECODERS))


def _tied(model: nn.Module) -> nn.Module:
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


# by assignment of the parameter, with the config left as it was
change("tied_by_hand", prepare=_tied, gradients=clipped, apart={"head"}, **of_habit(**DECODERS))


def _resized(model: nn.Module) -> nn.Module:
    model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[VOCAB:] = module.weight[:4] * 0.5
    return model.double()


# new tokens, whose rows no rank count divides
change("resized_before", prepare=_resized, apart={"head"}, **of_habit(**DECODERS))


def _with_new_head(model: nn.Module) -> nn.Module:
    old = model.get_output_embeddings()
    head = nn.Linear(old.in_features, 2 * VOCAB, bias=old.bias is not None).double()
    with torch.no_grad():
        head.weight.normal_(std=0.05)
    model.set_output_embeddings(head)
    model.config.vocab_size = 2 * VOCAB
    model.config.tie_word_embeddings = False
    return model


# another head, wider than the vocabulary of the ids
change("head_replaced_before", prepare=_with_new_head, apart={"head", "ids"}, **of_habit(**DECODERS))


@at("batch", turn=1, **of_habit(apart={"lengths"}))
def growing_lengths(inputs: dict[str, Any], targets: Any, number: int) -> Any:
    """A curriculum: short sequences first."""
    length = (4, 8, 12)[min(number, 2)]
    return {name: value[:, -length:] for name, value in inputs.items()}, targets[:, -length:]


@at("batch", turn=1, **of_habit(lambda axis: axis.data_ranks == 1))
def batches_of_any_size(inputs: dict[str, Any], targets: Any, number: int) -> Any:
    """More rows in one step than in the next, as buckets of lengths give."""
    rows = (ROWS, 4, 4)[min(number, 2)]
    return {name: value[:rows] for name, value in inputs.items()}, targets[:rows]


def _classifier(model: nn.Module) -> nn.Module:
    """One that scores a sequence at its last token, with the layers of the decoder."""
    from transformers import AutoModelForSequenceClassification

    config = model.config
    config.num_labels = 3
    scored: Any = AutoModelForSequenceClassification.from_config(config).double().train()
    setattr(scored, scored.base_model_prefix, model.base_model)
    with torch.no_grad():
        scored.score.weight.normal_(std=0.2)
    return scored


@habit(**DECODERS, prepare=_classifier, on=whole_sequences)
def reward_of_pairs(side: Side) -> None:
    """A reward model: the score of each even row should exceed that of the row after it."""
    side.place(**LOGITS_OF_CLASSES)
    for number in range(2):
        scores = side.model(**side.inputs(number), use_cache=False).logits[:, 0]
        if len(scores) > 1:
            descend(side, -nn.functional.logsigmoid(scores[0::2] - scores[1::2]).sum() / (ROWS // 2))


@habit(**DECODERS, prepare=_classifier, on=whole_sequences)
def classified_sequences(side: Side) -> None:
    side.place(**LOGITS_OF_CLASSES)
    for number in range(2):
        scores = side.model(**side.inputs(number), use_cache=False).logits
        classes = side.local(torch.arange(ROWS) % 3)
        descend(side, nn.functional.cross_entropy(scores, classes, reduction="sum") / ROWS)
