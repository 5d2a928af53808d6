"""The first forward of a planned model refuses operations that need all of a sharded dim, and no others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parallelize import ModelError, build_mesh, parallelize_module
from parallelize.plan.plan_file import parse_plan
from tests.axes.tensor.odd_models import WIDTH, OddModel, outcome, plan_text
from tests.axes.tensor.watch.odd_operations import BY_HEAD, BY_TOKEN, HEADS_FIRST, MIXED, OVER_TOKENS, PARTS_FIRST
from tests.support.threads import run_ranks

STYLES = {"layers.*.inner.up": ColwiseParallel(), "layers.*.inner.down": RowwiseParallel()}


@pytest.mark.variants(every=13)
@pytest.mark.parametrize("name", OVER_TOKENS)
def test_operations_over_tokens_are_refused_inside_the_region_alone(name):
    operation = OVER_TOKENS[name]
    assert outcome(lambda: OddModel(operation), plan_text(), sequence_parallel=True) == ("mixed-sequence",)
    assert outcome(lambda: OddModel(operation), plan_text(), sequence_parallel=False) == "right"


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("name", BY_TOKEN)
def test_operations_on_each_token_run(name):
    assert outcome(lambda: OddModel(BY_TOKEN[name]), plan_text(), sequence_parallel=True) == "right"


def test_the_error_names_the_operation_the_module_and_the_line():
    body = lambda rank: parallelize_module(  # noqa: E731
        OddModel(OVER_TOKENS["roll"]), build_mesh("cpu", tp=2), parse_plan(plan_text()), sequence_parallel=True
    )(torch.zeros(1, 8, dtype=torch.long))
    line = OVER_TOKENS["roll"].__code__.co_firstlineno
    with pytest.raises(ModelError, match=rf"roll in Layer \(odd_operations.py:{line}\).*all tokens"):
        run_ranks(2, body)


class Failing(nn.Module):
    """A model whose forward fails, with a hook of the user's that is called then too."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.fails = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), True

    def forward(self, x):
        if self.fails:
            raise KeyError("of the model")
        return self.down(self.up(x).relu())


def test_a_forward_that_fails_keeps_its_error_and_the_next_is_watched():
    models = [Failing()]
    models += [copy.deepcopy(models[0]) for _ in range(3)]

    def body(rank: int) -> None:
        plain, model = models[rank], models[2 + rank]
        parallelize_module(model, build_mesh("cpu", tp=2), {"up": "colwise", "down": "rowwise"})
        x, results = torch.ones(2, WIDTH), []
        model.register_forward_pre_hook(lambda module, args: None)
        for _ in range(2):
            late = model.register_forward_pre_hook(
                lambda module, args: results.append(module.register_forward_hook(lambda *_: None, always_call=True))
            )
            with pytest.raises(KeyError, match="of the model"):
                model(x)
            late.remove()
        hooks = len(model._forward_hooks)
        model.fails = plain.fails = False
        torch.testing.assert_close(model(x), plain(x))
        assert len(model._forward_hooks) == hooks - 1  # that of the failed forward is gone

    run_ranks(2, body)


# -- features -----------------------------------------------------------------------------------------------------


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_functions_over_all_features_are_refused(name, sequence_parallel):
    plan = plan_text("colwise(heads)", "rowwise(heads)")
    assert outcome(lambda: OddModel(between=MIXED[name]), plan, sequence_parallel) == ("mixed-features",)


@pytest.mark.parametrize("name", [name for name in MIXED if "head" not in name])
def test_functions_over_all_features_are_refused_in_dicts(name):
    assert outcome(lambda: OddModel(between=MIXED[name]), STYLES, False) == ("mixed-features",)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("name", BY_HEAD)
def test_functions_on_the_features_of_a_head_run(name):
    plan = plan_text("colwise(heads)", "rowwise(heads)")
    assert outcome(lambda: OddModel(between=BY_HEAD[name]), plan, False) == "right"
    assert outcome(lambda: OddModel(between=BY_HEAD[name]), plan, True) == "right"


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("name", PARTS_FIRST)
def test_a_packed_projection_is_cut_as_its_rule_says(name):
    make = lambda: OddModel(between=PARTS_FIRST[name], inner=48)  # noqa: E731
    assert outcome(make, plan_text("colwise(heads)", "rowwise(heads)"), False) == ("divided-features",)
    assert outcome(make, plan_text("colwise(chunks=3)", "rowwise"), False) == "right"


@pytest.mark.parametrize("name", ["chunk", "split by width", "split by sizes", "slices"])
def test_a_packed_projection_is_refused_in_dicts(name):
    make = lambda: OddModel(between=PARTS_FIRST[name], inner=48)  # noqa: E731
    assert outcome(make, STYLES, False) == ("divided-features",)


@pytest.mark.parametrize("name", HEADS_FIRST)
def test_a_projection_packed_by_heads_is_cut_as_its_rule_says(name):
    make = lambda: OddModel(between=HEADS_FIRST[name], inner=48)  # noqa: E731
    assert outcome(make, plan_text("colwise(heads)", "rowwise(heads)"), False) == "right"
    refused = outcome(make, plan_text("colwise(chunks=3)", "rowwise"), False)
    assert refused == ("divided-features",)


# -- when ---------------------------------------------------------------------------------------------------------


def test_evaluation_is_watched_too():
    make = lambda: OddModel(OVER_TOKENS["mean"])  # noqa: E731
    assert outcome(make, plan_text(), True, training=False) == ("mixed-sequence",)


def test_the_first_forward_of_each_mode_is_watched_and_copies_have_their_own():
    def body(rank: int):
        model = OddModel(lambda m, x: x if m.training else x - x.mean(1, keepdim=True))
        parallelize_module(model, build_mesh("cpu", tp=2), parse_plan(plan_text()), sequence_parallel=True)
        ids = torch.zeros(1, 8, dtype=torch.long)
        model(ids)
        for candidate in (copy.deepcopy(model), model):
            with pytest.raises(ModelError, match="mixed-sequence"):
                candidate.eval()(ids)
        return len(torch.overrides._get_current_function_mode_stack())

    assert run_ranks(2, body) == [0, 0]


def test_later_forwards_are_not_watched():
    def body(rank: int):
        seen = []
        model = OddModel(lambda m, x: seen.append(len(torch.overrides._get_current_function_mode_stack())) or x)
        parallelize_module(model, build_mesh("cpu", tp=2), parse_plan(plan_text()), sequence_parallel=True)
        for _ in range(2):
            model(torch.zeros(1, 8, dtype=torch.long))
        return seen

    assert run_ranks(2, body) == [[1, 1, 0, 0]] * 2


def test_a_refused_forward_is_refused_again():
    def body(rank: int):
        model = OddModel(lambda m, x: x - x.mean(1, keepdim=True))
        parallelize_module(model, build_mesh("cpu", tp=2), parse_plan(plan_text()), sequence_parallel=True)
        for _ in range(2):
            with pytest.raises(ModelError, match="mixed-sequence"):
                model(torch.zeros(1, 8, dtype=torch.long))
        return True

    assert all(run_ranks(2, body))


def test_no_hook_stays_on_the_parts_of_a_model_that_ran():
    def hooks(model) -> tuple[int, int]:
        """(on the model, on its parts)"""
        counts = [len(module._forward_pre_hooks) for module in model.modules()]
        return counts[0], sum(counts[1:])

    def body(rank: int):
        model = OddModel(lambda m, x: x)
        parallelize_module(model, build_mesh("cpu", tp=2), parse_plan(plan_text()), sequence_parallel=True)
        seen = [hooks(model)]
        for training in (True, False):
            model.train(training)(torch.zeros(1, 8, dtype=torch.long))
            seen.append(hooks(model))
        return seen

    for at_first, trained, evaluated in run_ranks(2, body):
        assert trained[1] < at_first[1] and trained[0] == at_first[0]
        assert evaluated == (trained[0] - 1, trained[1])


class Lora(nn.Module):
    """A low-rank update beside a linear, as adapters are added by wrapping."""

    def __init__(self, base: nn.Module, width: int = WIDTH):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Scaled(nn.Module):
    def __init__(self, base: nn.Module):
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.base(x) * self.scale


def _wrap(model, name: str, wrapper: type[nn.Module]) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, wrapper(model.get_submodule(name)))


ADDED = [
    ("layers.0.inner.up", Lora, False),
    ("layers.0.inner.down", Lora, False),
    ("layers.0.inner", Lora, True),
    ("layers.0.inner", Scaled, True),
]


@pytest.mark.variants(every=3)
@pytest.mark.parametrize(("name", "wrapper", "only_in_region"), ADDED)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("after_a_forward", [False, True])
def test_parameters_added_after_the_plan_are_refused(name, wrapper, only_in_region, sequence_parallel, after_a_forward):
    ids = torch.zeros(1, 8, dtype=torch.long)

    def body(rank: int):
        model = OddModel(lambda m, x: x)
        plan = parse_plan(plan_text())
        parallelize_module(model, build_mesh("cpu", tp=2), plan, sequence_parallel=sequence_parallel)
        for training in (False, True) if after_a_forward else ():
            model.train(training)(ids)
        _wrap(model, name, wrapper)
        if only_in_region and not sequence_parallel:
            model(ids).sum().backward()  # every rank computes the same from the same tensor
            return ()
        with pytest.raises(ModelError) as error:
            model(ids)
        return error.value.slugs

    expected = () if only_in_region and not sequence_parallel else ("added-parameter",)
    assert run_ranks(2, body) == [expected] * 2


def test_frozen_wrappers_run():
    def body(rank: int):
        model = OddModel(lambda m, x: x)
        parallelize_module(model, build_mesh("cpu", tp=2), parse_plan(plan_text()), sequence_parallel=True)
        _wrap(model, "layers.0.inner", Scaled)
        model.layers[0].inner.scale.requires_grad_(False)
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        return True

    assert all(run_ranks(2, body))


KEEPS = {
    "the output": lambda kept: lambda module, args, out: kept.append(out),
    "a detached copy": lambda kept: lambda module, args, out: kept.append(out.detach().clone().float()),
    "the shape": lambda kept: lambda module, args, out: kept.append(out.shape),
}
HOOKED = [("layers.0.inner.up", "features"), ("layers.0.inner", "tokens"), ("layers.1", "tokens")]


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("after_a_forward", [False, True])
@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize(("name", "part"), HOOKED)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_shards_that_forward_hooks_keep_are_refused(sequence_parallel, name, part, keeps, after_a_forward):
    ids = torch.zeros(1, 8, dtype=torch.long)

    def body(rank: int) -> str:
        model = OddModel(lambda m, x: x)
        parallelize_module(model, build_mesh("cpu", tp=2), parse_plan(plan_text()), sequence_parallel=sequence_parallel)
        kept: list = []
        for training in (False, True) if after_a_forward else ():
            model.train(training)(ids)
        model.get_submodule(name).register_forward_hook(KEEPS[keeps](kept))
        try:
            model(ids)
        except ModelError as error:
            assert error.slugs == ("kept-shard",)
            return str(error)
        return ""

    is_shard = part == "features" or sequence_parallel
    for message in run_ranks(2, body):
        assert bool(message) == (is_shard and keeps in ("the output", "a detached copy"))
        assert not message or (name in message and part in message)


def test_functions_of_a_shard_in_a_forward_hook_are_refused():
    def body(rank: int) -> tuple[str, ...]:
        model = OddModel(lambda m, x: x)
        parallelize_module(model, build_mesh("cpu", tp=2), parse_plan(plan_text()))
        losses: list = []
        model.layers[0].inner.up.register_forward_hook(lambda module, args, out: losses.append(out.pow(2).mean()))
        with pytest.raises(ModelError) as error:
            model(torch.zeros(1, 8, dtype=torch.long))
        return error.value.slugs

    assert run_ranks(2, body) == [("mixed-features",)] * 2
