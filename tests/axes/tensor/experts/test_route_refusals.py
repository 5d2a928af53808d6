"""Routes that do not fit, and models whose routers cannot replay them: refused on every rank, before anything is
changed."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import DynamicCache

from parallelize import (
    HandshakeError,
    ModelError,
    PipelineError,
    ShapeError,
    build_mesh,
    parallelize_model,
    recompute,
    record_routes,
    replay_routes,
)
from tests.axes.tensor.experts.test_route_replay import LENGTH, batch, random_routes
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

ROUTES = random_routes(2)


def changed(index, value):
    routes = ROUTES.clone()
    routes[index] = value
    return routes


WRONG = [
    (ROUTES[0], r"wrong-routes: routes have the shape \[2, 2\]"),
    (ROUTES.float(), "wrong-routes: routes are torch.float32"),
    (random_routes(3), "wrong-routes: routes of 3 layers, and 2 of the 2 layers of the model have experts"),
    (ROUTES[..., :1], "wrong-routes: model.layers.0.mlp.gate chooses 2 experts for a token, and the routes have 1"),
    (
        changed((3, 1, 0), 6),
        r"impossible-routes: routes of model.layers.1.mlp.experts[\s\S]*outside of \[0, 6\) *1 tokens, such as 3",
    ),
    (changed((3, 1, 0), -2), r"impossible-routes[\s\S]*outside of \[0, 6\)"),
    (
        changed((4, 0), 5),
        r"impossible-routes: routes of model.layers.0[\s\S]*an expert twice *1 tokens, such as 4: \[5, 5\]",
    ),
    (changed((0, 0, 1), -1), r"impossible-routes[\s\S]*some choices and some -1 *1 tokens, such as 0"),
]


@pytest.mark.parametrize(("routes", "text"), WRONG)
def test_routes_that_do_not_fit(routes, text):
    model = tiny_model("mixtral")
    with pytest.raises(ShapeError, match=text), replay_routes(model, routes):
        pass
    assert not hasattr(model, "_applied")


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}])
def test_they_are_refused_on_every_rank(sizes):
    """Also by the stages that do not have the layer; and by ranks whose own routes are right."""
    models = [tiny_model("mixtral") for _ in range(2)]
    wrong = changed((3, 1, 0), 6)

    def body(rank):
        parallelize_model(models[rank], build_mesh("cpu", **sizes), num_microbatches=1)
        with (
            pytest.raises(ShapeError, match=r"impossible-routes: routes of model.layers.1"),
            replay_routes(models[rank], wrong),
        ):
            pass
        expected = (
            (ShapeError, "impossible-routes") if rank else (HandshakeError, "ranks-disagree[\\s\\S]*impossible-routes")
        )
        with pytest.raises(expected[0], match=expected[1]), replay_routes(models[rank], wrong if rank else ROUTES):
            pass
        with pytest.raises(HandshakeError, match="ranks-disagree"), replay_routes(models[rank], ROUTES.roll(rank, 0)):
            pass

    run_ranks(2, body)


@pytest.mark.parametrize("step", [False, True])
def test_another_number_of_tokens(step):
    ids, labels, _ = batch()
    models = [tiny_model("mixtral") for _ in range(2)]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2))
        rows = slice(2 * rank, 2 * rank + 2)
        routes = ROUTES[: 3 * LENGTH] if step else ROUTES[: 2 * LENGTH]
        kinds = (PipelineError,) if step else (ShapeError,)
        with replay_routes(models[rank], routes), pytest.raises(kinds, match="wrong-routes: routes of"):
            if step:
                parallel.step(ids[rows], labels=labels[rows])
            else:
                models[rank](input_ids=ids[rows])

    run_ranks(2, body)


def test_a_part_of_the_tokens():
    model = tiny_model("mixtral")
    ids, _, _ = batch()
    with (
        pytest.raises(ShapeError, match="wrong-routes: routes of 28 tokens for forwards of 7 tokens"),
        replay_routes(model, ROUTES),
    ):
        model(input_ids=ids[:1])
    with replay_routes(model, ROUTES):
        model(input_ids=ids)
        model(input_ids=ids)


def test_routers_that_do_not_choose_by_topk():
    model = tiny_model("mixtral")
    model.model.layers[0].mlp.gate = nn.Linear(48, 6)
    with (
        pytest.raises(ModelError, match=r"unknown-router: the router of model.layers.0.mlp.experts is not known"),
        replay_routes(model, ROUTES),
    ):
        pass
    model = tiny_model("mixtral")
    twice = model.model.layers[0].mlp.gate
    stock = type(twice).forward
    twice.forward = lambda x: (stock(twice, x), stock(twice, x))[1]
    with (
        replay_routes(model, ROUTES),
        pytest.raises(ModelError, match=r"unknown-router: model.layers.0.mlp.gate calls torch.topk 2 times"),
    ):
        model(input_ids=batch()[0])
    with pytest.raises(ModelError, match="no-experts"), replay_routes(tiny_model("jetmoe"), ROUTES):
        pass
    with pytest.raises(ModelError, match="no-experts"), record_routes(tiny_model("jetmoe")):
        pass


def test_a_router_that_chooses_by_other_maxima():
    model = tiny_model("phimoe").eval()
    router = model.model.layers[0].mlp.router
    stock = type(router).forward
    router.forward = lambda x: (stock(router, x), stock(router, x))[1]
    with (
        replay_routes(model, ROUTES),
        pytest.raises(ModelError, match=r"unknown-router: .* took 4 maxima and 4 masks of its scores for 2 choices"),
    ):
        model(input_ids=batch()[0])


def test_a_router_that_says_nothing_of_k_is_checked_when_it_chooses():
    model = tiny_model("mixtral")
    gate, stock = model.model.layers[0].mlp.gate, type(model.model.layers[0].mlp.gate).forward

    def forward(x):
        gate.top_k = 2
        try:
            return stock(gate, x)
        finally:
            del gate.top_k

    for layer in model.model.layers:
        del layer.mlp.gate.top_k
    gate.forward = forward
    with (
        replay_routes(model, ROUTES[..., :1]),
        pytest.raises(ShapeError, match=r"wrong-routes: model.layers.0.mlp.gate chooses 2"),
    ):
        model(input_ids=batch()[0])


def test_one_block_at_a_time():
    model = tiny_model("mixtral")
    with (
        replay_routes(model, ROUTES),
        pytest.raises(ModelError, match="already-replaying"),
        replay_routes(model, ROUTES),
    ):
        pass
    with replay_routes(model, ROUTES):
        pass


def test_recompute_by_others():
    """It does not say which forward a router is recomputed for: refused before, and where it was switched on since."""
    model = tiny_model("mixtral")
    with replay_routes(model, ROUTES):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        out = model(input_ids=batch()[0], use_cache=False).logits.sum()
        with pytest.raises(ModelError, match=r"foreign-recompute: model.layers.1.mlp.gate is recomputed"):
            out.backward()
    with pytest.raises(ModelError, match="foreign-recompute"), replay_routes(model, ROUTES):
        pass


def test_forwards_with_a_cache():
    model, cache = tiny_model("mixtral").eval(), DynamicCache()
    model(input_ids=batch()[0][:, :4], past_key_values=cache)
    for block in (record_routes(model), replay_routes(model, ROUTES)):
        with block, pytest.raises(ModelError, match="routes-with-cache"):
            model(input_ids=batch()[0][:, 4:], past_key_values=cache)


def test_layers_that_choose_differently():
    model = tiny_model("mixtral")
    model.model.layers[1].mlp.gate.top_k = 3
    with record_routes(model) as routes:
        model(input_ids=batch()[0])
    with pytest.raises(ModelError, match=r"uneven-choices: layers choose \[2, 3\] experts"):
        routes.gather()


def test_a_router_that_is_a_recomputed_unit_itself():
    model = recompute(tiny_model("mixtral"), units="model.layers.*.mlp.gate")
    with (
        pytest.raises(ModelError, match=r"unknown-router: model.layers.0.mlp.gate is a recomputed unit"),
        replay_routes(model, ROUTES),
    ):
        pass
