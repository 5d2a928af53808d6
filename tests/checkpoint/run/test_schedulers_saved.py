"""Every scheduler of PyTorch, saved as JSON and rebuilt, goes on exactly as the one that was saved."""

from __future__ import annotations

import copy
import json
import warnings
from types import MethodType

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as stock
from torch.optim.swa_utils import SWALR

from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.run.run_state import (
    build_scheduler,
    describe_optimizer_class,
    describe_scheduler,
    load_scheduler,
    optimizer_class,
)


def sequential(optimizer):
    warm, end = stock.LinearLR(optimizer, start_factor=0.1, total_iters=4), stock.ExponentialLR(optimizer, 0.9)
    return stock.SequentialLR(optimizer, [warm, stock.CosineAnnealingLR(optimizer, 6), end], [4, 9])


BUILT = {
    "ConstantLR": lambda o: stock.ConstantLR(o, factor=0.3, total_iters=6),
    "LinearLR": lambda o: stock.LinearLR(o, start_factor=0.2, total_iters=9),
    "ExponentialLR": lambda o: stock.ExponentialLR(o, 0.97),
    "StepLR": lambda o: stock.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: stock.MultiStepLR(o, [2, 5, 5, 11], gamma=0.7),
    "CosineAnnealingLR": lambda o: stock.CosineAnnealingLR(o, 7, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: stock.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "PolynomialLR": lambda o: stock.PolynomialLR(o, total_iters=15, power=1.5),
    "OneCycleLR": lambda o: stock.OneCycleLR(o, max_lr=[0.3, 0.1], total_steps=40, three_phase=True),
    "CyclicLR": lambda o: stock.CyclicLR(o, 0.01, 0.2, step_size_up=3, step_size_down=4, mode="exp_range", gamma=0.99),
    "ReduceLROnPlateau": lambda o: stock.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1, min_lr=[1e-4, 1e-3]),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda o: stock.ChainedScheduler([sequential(o), stock.StepLR(o, 3, gamma=0.8)], o),
}
FUNCTIONS = {
    "LambdaLR": lambda o: stock.LambdaLR(o, [lambda epoch: 0.9**epoch, Decay(0.8)]),
    "MultiplicativeLR": lambda o: stock.MultiplicativeLR(o, lambda epoch: 0.9),
    "CyclicLR": lambda o: stock.CyclicLR(o, 0.01, 0.2, step_size_up=3, scale_fn=Decay(0.9)),
}
OPTIMIZERS = {"SGD": lambda groups: SGD(groups, momentum=0.9), "AdamW": AdamW}


class Decay:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, epoch):
        return self.factor**epoch


class CustomScheduler(stock.LRScheduler):
    def get_lr(self):
        return [group["lr"] * 0.5 for group in self.optimizer.param_groups]


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def groups_of(lrs=(0.1, 0.05)):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in lrs]
    for param in params:
        param.grad = torch.ones(2)
    return [{"params": [param], "lr": lr} for param, lr in zip(params, lrs, strict=True)]


def resumed(optimizer: Optimizer) -> Optimizer:
    """A new optimizer of the same class, with the groups' values and a `step` of its own as `build_optimizer` makes."""
    restored = type(optimizer)(groups_of(), **({"momentum": 0.5} if isinstance(optimizer, SGD) else {}))
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    inner = restored.step
    restored.step = MethodType(lambda self, closure=None: inner(closure), restored)
    return restored


def values(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def run(optimizer, scheduler, steps, start=0):
    history = []
    for step in range(start, start + steps):
        optimizer.step()
        scheduler.step(*([1.0 + step % 3] if isinstance(scheduler, stock.ReduceLROnPlateau) else []))
        history.append((copy.deepcopy(values(optimizer)), scheduler.get_last_lr()))
    return history


def saved(scheduler):
    return json.loads(json.dumps(describe_scheduler(scheduler), allow_nan=False))


def refused(slug, call, *words):
    with pytest.raises(CheckpointError) as caught:
        call()
    assert caught.value.slugs == (slug,), caught.value
    for word in words:
        assert word in str(caught.value), caught.value


def test_every_scheduler_of_this_torch_is_tested():
    assert {*BUILT, *FUNCTIONS} == set(stock.__all__) - {"LRScheduler"}


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("steps", [0, 1, 4, 10])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", BUILT)
def test_rebuilt_goes_on_as_the_saved_one(name, kind, steps):
    optimizer = OPTIMIZERS[kind](groups_of())
    scheduler = BUILT[name](optimizer)
    run(optimizer, scheduler, steps)
    restored = resumed(optimizer)
    before = copy.deepcopy(values(restored))
    built = build_scheduler(restored, saved(scheduler))
    assert type(built) is type(scheduler) and built.optimizer is restored
    assert values(restored) == before == values(optimizer)
    assert saved(built) == saved(scheduler)
    assert run(restored, built, 12, steps) == run(optimizer, scheduler, 12, steps)


@pytest.mark.parametrize("name", {**BUILT, **FUNCTIONS})
def test_a_scheduler_of_the_user_is_loaded(name):
    make = FUNCTIONS.get(name) or BUILT[name]
    optimizer = SGD(groups_of(), momentum=0.9)
    scheduler = make(optimizer)
    run(optimizer, scheduler, 5)
    described = saved(scheduler)
    restored = SGD(groups_of(), momentum=0.9)
    loaded = make(restored)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = copy.deepcopy(values(restored))
    load_scheduler(loaded, described)
    assert values(restored) == before
    assert run(restored, loaded, 12, 5) == run(optimizer, scheduler, 12, 5)


def test_the_state_of_callable_objects_is_loaded():
    optimizer = SGD(groups_of(), lr=0.1)
    described = saved(stock.LambdaLR(optimizer, Decay(0.25)))
    loaded = stock.LambdaLR(SGD(groups_of(), lr=0.1), Decay(0.5))
    load_scheduler(loaded, described)
    assert loaded.lr_lambdas[0].factor == 0.25


@pytest.mark.parametrize("loading", [False, True], ids=["built", "loaded"])
def test_a_save_between_the_two_steps_causes_no_warning(loading):
    optimizer = SGD(groups_of(), momentum=0.9)
    scheduler = stock.StepLR(optimizer, 3)
    optimizer.step()
    described = saved(scheduler)
    restored = resumed(optimizer)
    if loading:
        loaded = stock.StepLR(restored, 3)
        load_scheduler(loaded, described)
    else:
        loaded = build_scheduler(restored, described)
    loaded.step()


def test_a_wrong_order_still_warns():
    optimizer = SGD(groups_of(), momentum=0.9)
    built = build_scheduler(resumed(optimizer), saved(stock.StepLR(optimizer, 3)))
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        built.step()


def test_groups_without_initial_lr_stay_so():
    optimizer = SGD(groups_of(), momentum=0.9)
    described = saved(stock.ReduceLROnPlateau(optimizer))
    build_scheduler(optimizer, described)
    assert not any("initial_lr" in group for group in optimizer.param_groups)


def test_learning_rates_that_are_tensors():
    optimizer = AdamW([{**group, "lr": torch.tensor(group["lr"])} for group in groups_of()])
    scheduler = stock.StepLR(optimizer, 2)
    run(optimizer, scheduler, 3)
    restored = resumed(optimizer)
    built = build_scheduler(restored, saved(scheduler))
    assert all(type(lr) is torch.Tensor for lr in built.base_lrs)
    assert run(restored, built, 4) == run(optimizer, scheduler, 4)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_not_rebuilt(name):
    optimizer = SGD(groups_of(), momentum=0.9)
    described = saved(FUNCTIONS[name](optimizer))
    refused("unsaved-function", lambda: build_scheduler(optimizer, described), name, "same functions")
    both = stock.ChainedScheduler([stock.StepLR(optimizer, 2), FUNCTIONS[name](optimizer)])
    refused("unsaved-function", lambda: build_scheduler(optimizer, saved(both)), "scheduler[1]")


def test_unknown_classes_are_loaded_and_not_built():
    optimizer = SGD(groups_of(), lr=0.1)
    described = saved(CustomScheduler(optimizer))
    refused("unknown-class", lambda: build_scheduler(optimizer, described), "CustomScheduler", "build it yourself")
    load_scheduler(CustomScheduler(optimizer), described)
    average = saved(SWALR(optimizer, 0.1))
    refused("unknown-class", lambda: build_scheduler(optimizer, average), "SWALR")


@pytest.mark.parametrize("name", ["warnings", "LRScheduler", "_LRScheduler", "Optimizer", "StepLR.step", "nothing"])
def test_only_schedulers_are_looked_up(name):
    optimizer = SGD(groups_of(), lr=0.1)
    described = saved(stock.StepLR(optimizer, 2))
    described["class"]["name"] = name
    refused("unknown-class", lambda: build_scheduler(optimizer, described))


def test_other_schedulers_are_not_loaded():
    optimizer = SGD(groups_of(), lr=0.1)
    step, decay = stock.StepLR(optimizer, 2), stock.ExponentialLR(optimizer, 0.5)
    refused("other-scheduler", lambda: load_scheduler(decay, saved(step)), "StepLR", "ExponentialLR")
    chain = stock.ChainedScheduler([step, decay])
    before = saved(chain)
    swapped = saved(stock.ChainedScheduler([decay, step]))
    refused("other-scheduler", lambda: load_scheduler(chain, swapped), "scheduler[0]")
    refused("other-scheduler", lambda: load_scheduler(chain, saved(stock.ChainedScheduler([step]))), "2", "1")
    assert saved(chain) == before


def test_another_number_of_groups_is_refused_and_nothing_wrapped():
    described = saved(stock.StepLR(SGD(groups_of(), lr=0.1), 2))
    optimizer = SGD(groups_of((0.1,)), lr=0.1)
    refused("other-scheduler", lambda: build_scheduler(optimizer, described), "2 parameter groups", "has 1")
    assert "step" not in vars(optimizer)


def test_damaged_descriptions_are_refused():
    optimizer = SGD(groups_of(), lr=0.1)
    good = saved(stock.StepLR(optimizer, 2))
    damaged = [None, {}, {**good, "state": []}, {**good, "more": 1}, {**good, "functions": 0}]
    damaged += [{**good, "schedulers": [3]}, {**good, "schedulers": [good]}, {**good, "class": {"name": "StepLR"}}]
    damaged += [{**good, "class": {"module": [], "name": "StepLR"}}, {**good, "state": {"$": "list"}}]
    damaged += [{**good, "state": {**good["state"], name: 1}} for name in ("step", "optimizer", "__class__")]
    for name in ("ReduceLROnPlateau", "CyclicLR"):
        damaged.append({**good, "class": {**good["class"], "name": name}, "state": {}})
    deep = {**good, "class": {**good["class"], "name": "ChainedScheduler"}}
    for _ in range(20):
        deep = {**deep, "schedulers": [deep if deep["schedulers"] else good]}
    for described in [*damaged, deep]:
        refused("bad-value", lambda described=described: build_scheduler(optimizer, described))


def test_state_that_is_not_a_plain_value_is_refused_by_path():
    optimizer = SGD(groups_of(), lr=0.1)
    loaded = CustomScheduler(optimizer)
    loaded.curve = Decay(2)
    both = stock.ChainedScheduler([stock.StepLR(optimizer, 2), loaded])
    refused("unsavable-value", lambda: describe_scheduler(both), "scheduler[1].curve")


# -- classes of optimizers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in torch.optim.__all__ if name not in ("Optimizer", "lr_scheduler")])
def test_classes_of_optimizers_are_found(name):
    kind = getattr(torch.optim, name, None)
    if isinstance(kind, type):
        assert optimizer_class({"module": kind.__module__, "name": name}) is kind


def test_optimizers_with_patched_methods_keep_their_class():
    patched = resumed(AdamW(groups_of()))
    assert optimizer_class(json.loads(json.dumps(describe_optimizer_class(patched)))) is AdamW


def test_other_optimizers_are_not_looked_up():
    class Own(SGD):
        pass

    refused(
        "unknown-class", lambda: optimizer_class(describe_optimizer_class(Own(groups_of(), lr=0.1))), "Own", "pass it"
    )
    for module, name in [
        ("torch.optim", "Optimizer"),
        ("os", "SGD"),
        ("torch.optimist", "SGD"),
        ("torch.optim", "sgd"),
    ]:
        refused("unknown-class", lambda module=module, name=name: optimizer_class({"module": module, "name": name}))
    refused("bad-value", lambda: optimizer_class({"name": "SGD"}))
