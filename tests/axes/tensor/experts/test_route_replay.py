"""Routes recorded in one forward are chosen in another, as by a model whose routers choose them. On meshes:
`given_routes` of tests/matrix/."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch

from parallelize import (
    build_mesh,
    parallelize_model,
    recompute,
    record_routes,
    replay_routes,
    shard_data,
)
from parallelize.tools.verification.precision import InFloat64, widen_recompute
from tests.support.models import MIXTURES, tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

BATCH, LENGTH, EXPERTS, K = 4, 7, 6, 2
GROUPS = {"topk_method": "group_limited_greedy"}


def batch():
    """(ids, labels, mask); two sequences are padded."""
    ids, _ = tiny_batch(batch=BATCH, length=LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, 5:] = 0
    return ids, ids.masked_fill(mask == 0, -100), mask


def gradients_of(model):
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def alone(model, routes=None):
    """(loss, gradients) of the unsharded model, which replays routes."""
    model = copy.deepcopy(model)
    ids, labels, mask = batch()
    with InFloat64():
        if routes is None:
            loss = model(input_ids=ids, labels=labels, attention_mask=mask).loss
        else:
            with replay_routes(model, routes):
                loss = model(input_ids=ids, labels=labels, attention_mask=mask).loss
        loss.backward()
    return loss.detach(), gradients_of(model)


def recorded(model):
    ids, labels, mask = batch()
    with record_routes(model) as routes, InFloat64():
        model(input_ids=ids, labels=labels, attention_mask=mask)
    return routes.gather()


def random_routes(layers, missing=0.0):
    """Routes that no router would choose; some of them are missing."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(BATCH * LENGTH, layers, EXPERTS, generator=generator)
    routes = scores.topk(K, -1).indices
    routes[torch.rand(BATCH * LENGTH, layers, generator=generator) < missing] = -1
    return routes


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("family", [name for name in MIXTURES if name not in ("jetmoe", "llama4_text")])
def test_a_replay_of_ones_own_routes_has_the_same_bits(family):
    model = tiny_model(family)
    ids, labels, _ = batch()
    replayed = copy.deepcopy(model)
    torch.manual_seed(0)  # of the router of phimoe, which draws in training
    with record_routes(model) as routes:
        expected = model(input_ids=ids, labels=labels)
    torch.manual_seed(0)
    with replay_routes(replayed, routes.gather()):
        actual = replayed(input_ids=ids, labels=labels)
    assert torch.equal(actual.logits, expected.logits)
    expected.loss.backward()
    actual.loss.backward()
    assert len(routes.layers) == routes.gather().shape[1] > 0
    for (name, a), b in zip(replayed.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad)), name


# -- routers by hand: the weights of given choices -------------------------------------------------------------------


def softmax_and_norm(router, logits, choices):
    weights = logits.softmax(-1).gather(1, choices)
    return weights / weights.sum(-1, keepdim=True)


def softmax_of_chosen(router, logits, choices):
    return logits.gather(1, choices).softmax(-1)


def scaled_softmax(router, logits, choices):
    return logits.softmax(-1).gather(1, choices) * router.routed_scaling_factor


def scaled_sigmoid(router, logits, choices):
    weights = logits.sigmoid().gather(1, choices)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor


def one_after_another(router, logits, choices):
    """Each choice is weighed among the experts that are left and not far below the largest of them."""
    weights, left = [], logits
    for chosen in choices.split(1, dim=1):
        largest = left.amax(-1, keepdim=True)
        far = (largest - logits) / logits.abs().clamp(min=largest) > 2 * router.router_jitter_noise
        weights.append(left.masked_fill(far.scatter(1, chosen, False), -torch.inf).softmax(-1).gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(weights, 1)


BY_HAND = [
    ("phimoe", {}, one_after_another),
    ("mixtral", {}, softmax_and_norm),
    ("deepseek_v2", GROUPS, scaled_softmax),
    ("deepseek_v3", {}, scaled_sigmoid),
    ("gpt_oss", {}, softmax_of_chosen),
]


@pytest.mark.variants(every=2)
@pytest.mark.parametrize(("family", "more", "weigh"), BY_HAND)
def test_other_choices_equal_a_router_that_makes_them(family, more, weigh):
    """Among them choices from groups that a router of limited groups would have left out."""
    model = tiny_model(family, torch.float64, **more).train(family != "phimoe")  # which draws in training
    with record_routes(model) as live, InFloat64():
        model(input_ids=batch()[0])
    routes = random_routes(len(live.layers))
    loss, gradients = alone(model, routes)
    by_hand = copy.deepcopy(model)
    for layer, name in enumerate(live.layers):
        block = by_hand.get_submodule(name.rpartition(".")[0])
        router = getattr(block, "gate", None) or block.router

        def forward(self, hidden, layer=layer):
            logits = torch.nn.functional.linear(
                hidden.reshape(-1, hidden.shape[-1]), self.weight, getattr(self, "bias", None)
            )
            return logits, weigh(self, logits, routes[:, layer]), routes[:, layer]

        router.forward = MethodType(forward, router)
    expected_loss, expected = alone(by_hand)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    error, name = worst(gradients, expected)
    assert error <= 1e-12, name
    assert worst(alone(model)[1], expected)[0] > 1e-3


def test_a_router_that_draws_chooses_what_is_replayed_in_training():
    """With its own noise and gradient: the choices alone are replaced."""
    model, routes = tiny_model("phimoe", torch.float64), random_routes(2, missing=0.4)
    ids, labels, _ = batch()
    with record_routes(model) as seen, replay_routes(model, routes), InFloat64():
        model(input_ids=ids, labels=labels).loss.backward()
    seen, absent = seen.gather().long(), routes[..., 0] < 0
    assert torch.equal(seen[~absent], routes[~absent]) and bool((seen[absent] >= 0).all())
    assert all(bool(layer.mlp.router.weight.grad.any()) for layer in model.model.layers)


def test_tokens_without_a_record_are_routed_as_before():
    model = tiny_model("mixtral", torch.float64)
    own, routes = recorded(model), random_routes(2, missing=0.4)
    loss, _ = alone(model, routes)
    ids, labels, mask = batch()
    with record_routes(model) as seen, replay_routes(model, routes.view(BATCH, LENGTH, 2, K)), InFloat64():
        again = model(input_ids=ids, labels=labels, attention_mask=mask).loss
    assert torch.equal(again, loss)
    seen = seen.gather().long()
    absent = routes[..., 0] < 0
    assert torch.equal(seen[~absent], routes[~absent])
    assert torch.equal(seen[:, 0][absent[:, 0]], own[:, 0][absent[:, 0]].long())  # the second layer has other inputs
    assert bool(((seen[:, 1] >= 0) & (seen[:, 1] < EXPERTS)).all())


# -- loops of one's own, and other routes ----------------------------------------------------------------------------


@pytest.mark.parametrize("local", [False, True])
def test_a_loop_of_ones_own_takes_its_tokens_in_order(local):
    """Two forwards on each of two data ranks, and a backward after the block, which recomputes."""
    model = tiny_model("mixtral", torch.float64)
    ids, labels, _ = batch()
    count = (labels[:, 1:] != -100).sum()
    routes = random_routes(2, missing=0.2).view(BATCH, LENGTH, 2, K)
    unsharded = copy.deepcopy(model)
    with replay_routes(unsharded, routes), InFloat64():
        unsharded(input_ids=ids, labels=labels, num_items_in_batch=count).loss.backward()
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        net = models[rank]
        shard_data(net, build_mesh("cpu", dp=2))
        recompute(net, units="model.layers.*")
        widen_recompute(net)
        rows = slice(2 * rank, 2 * rank + 2)
        with (
            replay_routes(net, routes[rows] if local else routes, local=local),
            record_routes(net) as seen,
            InFloat64(),
        ):
            calls = [(ids[n : n + 1], labels[n : n + 1]) for n in range(BATCH)[rows]]
            loss = sum(net(input_ids=x, labels=y, num_items_in_batch=count).loss for x, y in calls)
        loss.backward()
        return gradients_of(net), seen.gather(), seen.gather(local=True)

    with replay_routes(model, routes):
        chosen = recorded_without_padding(model)
    for rank, (actual, seen, own) in enumerate(run_ranks(2, body)):
        assert worst(actual, gradients_of(unsharded))[0] <= 1e-12
        assert torch.equal(seen, chosen) and torch.equal(own, chosen.chunk(2)[rank])


def recorded_without_padding(model):
    with record_routes(model) as routes, InFloat64():
        model(input_ids=batch()[0])
    return routes.gather()


def test_data_ranks_with_different_numbers_of_sequences():
    model, routes = tiny_model("mixtral", torch.float64), random_routes(2)
    ids, labels, mask = batch()
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2), check_replicated=False)
        rows = slice(3, 4) if rank else slice(0, 3)
        with replay_routes(models[rank], routes), InFloat64():
            parallel.step(ids[rows], labels=labels[rows], attention_mask=mask[rows])
        return gradients_of(models[rank])

    for actual in run_ranks(2, body):
        assert worst(actual, alone(model, routes)[1])[0] <= 1e-12


def test_a_backward_recomputes_with_the_choices_of_its_forward():
    """Also of tokens without a record, whose router would choose others by then."""
    model = tiny_model("deepseek_v3", torch.float64)
    routes, (ids, labels, mask) = random_routes(1, missing=0.5), batch()
    _, expected = alone(model, routes)
    recompute(model, units="model.layers.*")
    widen_recompute(model)
    with replay_routes(model, routes), InFloat64():
        loss = model(input_ids=ids, labels=labels, attention_mask=mask).loss
    model.model.layers[1].mlp.gate.e_score_correction_bias.data = torch.tensor([0.0, 9.0, 0.0, 9.0, 0.0, 9.0]).double()
    loss.backward()
    assert worst(gradients_of(model), expected)[0] <= 1e-12


def test_routes_of_all_decoder_layers_as_inference_engines_return_them():
    model = tiny_model("deepseek_v3", torch.float64, num_hidden_layers=4)  # the first layer is dense
    routes = random_routes(3)
    padded = torch.cat([torch.zeros_like(routes[:, :1]), routes], 1).to(torch.uint8)
    assert torch.equal(alone(model, padded.numpy())[0], alone(model, routes)[0])


def test_a_model_chooses_itself_after_the_block():
    model = tiny_model("mixtral")
    ids, _, _ = batch()
    expected = model(input_ids=ids).logits
    with record_routes(model) as routes:
        model(input_ids=ids)
    with replay_routes(model, random_routes(2)):
        assert not torch.equal(model(input_ids=ids).logits, expected)
    assert torch.equal(model(input_ids=ids).logits, expected)
    with replay_routes(copy.deepcopy(model), routes):
        assert torch.equal(model(input_ids=ids).logits, expected)
