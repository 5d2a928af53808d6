"""What a review of the vocabulary end found: each of these was silently wrong, or failed far from its cause."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from parallelize import (
    DeferredLogits,
    ModelError,
    ShapeError,
    ShardedLogits,
    build_mesh,
    cross_entropy,
    full_gradients,
    generate,
    linear_cross_entropy,
    linear_token_log_probs,
    parallelize_model,
    parallelize_module,
    sample,
    token_entropy,
    token_log_probs,
)
from parallelize.deferred_logits import defer
from parallelize.groups import Group
from parallelize.head import Head
from parallelize.ops.vocabulary import Vocabulary
from parallelize.plan.choose import plan_of
from parallelize.sharded_logits import mark
from tests.dist.generation_jobs import lively_model
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

TOKENS, HIDDEN, VOCAB = 9, 6, 11


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, x):
        return self.head(self.first(x))


def small(seed: int = 0) -> tuple[Net, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return Net().double(), torch.randn(TOKENS, 5, dtype=torch.float64), torch.randint(0, VOCAB, (TOKENS,))


def planned(net: Net, **options) -> Net:
    plan = plan_of(net, {"first": "replicate", "head": "colwise(output=vocabulary)"})
    return parallelize_module(net, build_mesh("cpu", tp=2), plan, **{"fuse_loss": True, **options})


def on_two(net: Net, body, **options):
    """`body(planned copy of net)` on two ranks."""
    nets = [copy.deepcopy(net) for _ in range(2)]
    return run_ranks(2, lambda rank: body(planned(nets[rank], **options)))


def alone(hidden: torch.Tensor, weight: torch.Tensor) -> DeferredLogits:
    return defer(hidden, Head(weight, None, Vocabulary(len(weight), Group.alone())), False, (weight,))


def slug_of(error_type, call) -> str:
    with pytest.raises(error_type) as error:
        call()
    return error.value.slugs[0]


# -- deferred logits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_a_metric_before_the_loss_leaves_the_loss_its_gradients(sharded):
    net, x, targets = small()
    losses = {
        "stock": lambda z: F.cross_entropy(z, targets),
        "ours": lambda z: cross_entropy(z, targets),
        "log_probs": lambda z: -token_log_probs(z, targets).mean(),
        "shifted": lambda z: F.cross_entropy(z[:].view(-1, VOCAB), targets),
        "made": lambda z: F.cross_entropy(z.made(), targets),
    }
    F.cross_entropy(net(x), targets).backward()
    want = {name: p.grad for name, p in net.named_parameters()}
    highest = net(x).argmax(-1)

    def metric(z):
        whole = z.full_tensor() if sharded else z
        return whole.argmax(-1)

    def body(ours):
        found = []
        for loss_of in losses.values():
            ours.zero_grad()
            z = ours(x)
            with torch.no_grad():
                assert torch.equal(metric(z), highest) and torch.equal(metric(z.float()), highest)
            loss_of(z).backward()
            found.append(full_gradients(ours))
        with torch.no_grad():
            kept = ours(x)
            assert kept.to_local().grad_fn is None and not kept.requires_grad
        return found

    for found in on_two(net, body, loss_parallel=sharded):
        for name, gradients in zip(losses, found, strict=True):
            assert worst(gradients, want)[0] < 1e-12, name


def test_writes_into_logits_that_are_not_kept_are_refused():
    net, x, _ = small()

    def body(ours):
        z = ours(x)
        with torch.no_grad():
            for write in (lambda: z.__setitem__((..., 3), 0.0), lambda: z.masked_fill_(z > 0, 0.0)):
                assert slug_of(ModelError, write) == "deferred-logits"

    on_two(net, body)


def test_what_is_taken_under_no_grad_has_no_graph():
    hidden, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (TOKENS, VOCAB))
    z = alone(hidden, weight)
    with torch.no_grad():
        quiet = z[1:].float()
    assert not quiet.requires_grad and quiet.softmax(-1).shape == (TOKENS - 1, VOCAB) and z.requires_grad


@pytest.mark.parametrize("of", ["model", "head"])
def test_reentrant_checkpoints_are_refused_by_name(of):
    net, x, targets = small()
    F.cross_entropy(net(x), targets).backward()
    want = {name: p.grad for name, p in net.named_parameters()}

    def body(ours):
        part = ours if of == "model" else lambda x: ours.head(ours.first(x)).float() / 2
        z = checkpoint(part, x.clone().requires_grad_(), use_reentrant=True)
        for use in (
            lambda: F.cross_entropy(z, targets),
            lambda: cross_entropy(z, targets),
            lambda: token_log_probs(z, targets),
            lambda: z.view(-1, VOCAB),
            z.to_local,
            z.made,
        ):
            assert slug_of(ModelError, use) == "reentrant-checkpoint"
        ours.zero_grad()
        inside = lambda x: F.cross_entropy(ours(x), targets)  # noqa: E731
        checkpoint(inside, x.clone().requires_grad_(), use_reentrant=True).backward()
        return full_gradients(ours)

    net.zero_grad()
    for found in on_two(net, body):
        assert worst(found, want)[0] < 1e-12


STEPS = {
    "mul by keywords": lambda z: torch.mul(input=z, other=2.0),
    "mul from the left": lambda z: torch.mul(2.0, z),
    "clamp by keywords": lambda z: torch.clamp(input=z, min=-1),
    "clamp_min": lambda z: z.clamp_min(-0.5),
    "add": lambda z: torch.add(z, 1.5, alpha=2) * 0.5,
    "sub": lambda z: torch.sub(z, 0.5) * 2,
    "from one": lambda z: 1 - z,
    "itself": lambda z: z * z,
    "type_as": lambda z: z.type_as(torch.zeros(3, dtype=torch.float32)) / 2,
    "to": lambda z: z.to(torch.zeros(3, dtype=torch.float32)) / 2,
    "flatten by keywords": lambda z: torch.flatten(input=z, start_dim=0, end_dim=0),
    "reshape by keywords": lambda z: torch.reshape(input=z, shape=(-1, VOCAB)),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_before_the_loss(name):
    """Deferred, and sharded."""
    step = STEPS[name]
    net, x, targets = small()
    F.cross_entropy(step(net(x)), targets).backward()
    want = {n: p.grad for n, p in net.named_parameters()}
    net.zero_grad()

    def body(ours):
        z = step(ours(x))
        assert type(z) is (DeferredLogits if ours.head.__dict__.get("_parallelize_owes_logits") else ShardedLogits)
        F.cross_entropy(z, targets).backward()
        return full_gradients(ours)

    bound = 1e-12 if name not in ("type_as", "to") else 5e-6
    for options in ({}, {"fuse_loss": False, "loss_parallel": True}):
        for found in on_two(net, body, **options):
            assert worst(found, want)[0] < bound


def test_questions_that_need_no_logits():
    hidden, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (TOKENS, VOCAB))
    z = alone(hidden, weight)
    assert len(z) == TOKENS and z.is_contiguous() and z.deferred is not None
    assert torch.zeros(3, dtype=torch.float64).type_as(z).dtype == torch.float32
    marked = mark(torch.randn(TOKENS, VOCAB), Vocabulary(VOCAB, Group.alone()))
    assert len(marked) == TOKENS and type(torch.zeros(1, dtype=torch.float64).type_as(marked)) is torch.Tensor


@pytest.mark.parametrize("weighted", [False, True])
def test_widened_logits_with_smoothing_and_class_weights(weighted):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (TOKENS, VOCAB))
    targets, class_weight = torch.randint(0, VOCAB, (TOKENS,)), torch.rand(VOCAB) + 0.1
    class_weight = class_weight.double() if weighted else None

    def run(logits):
        hidden.grad = weight.grad = None
        loss = F.cross_entropy(logits.double(), targets, class_weight, label_smoothing=0.1)
        loss.backward()
        return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad}

    want, got = run(F.linear(hidden, weight)), run(alone(hidden, weight))
    assert got["loss"].dtype == torch.float64 and abs(got["loss"] - want["loss"]) < 1e-12
    assert worst(got, want)[0] < 5e-6


def test_logits_after_backward_under_zero_3_say_when_to_take_them():
    ids, labels = tiny_batch(batch=2, length=8)
    models = [tiny_model("llama") for _ in range(2)]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2), zero=3, fuse_loss=True)
        out = parallel.module(input_ids=ids, labels=labels)
        out.loss.backward()
        with torch.no_grad():
            for use in (lambda: out.logits.argmax(-1), out.logits.to_local, out.logits.made):
                with pytest.raises(ModelError, match="metrics before backward") as error:
                    use()
                assert error.value.slugs == ("weight-let-go",)

    run_ranks(2, body)


# -- values and gradients -----------------------------------------------------------------------------------------------


def test_where_no_token_counts_the_loss_is_nan_and_its_gradients_are_zero():
    """As torch has it."""
    hidden, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (TOKENS, VOCAB))
    nothing = torch.full((TOKENS,), -100)
    for rows in (slice(0, TOKENS), slice(0, 0)):
        for loss_of in (
            lambda h, t: F.cross_entropy(F.linear(h, weight), t),
            lambda h, t: cross_entropy(F.linear(h, weight), t),
            lambda h, t: linear_cross_entropy(h, weight, t),
            lambda h, t: F.cross_entropy(alone(h, weight), t),
            lambda h, t: linear_cross_entropy(h, weight, t, num_tokens=0),
        ):
            hidden.grad = weight.grad = None
            loss = loss_of(hidden[rows], nothing[rows])
            loss.backward()
            assert loss.isnan() and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
def test_entropy_of_masked_logits_under_large_gradients(masked, scale):
    torch.manual_seed(0)
    logits = torch.randn(3, 8)
    logits[:, 2] = masked
    leaf, kept = logits.clone().requires_grad_(), logits[:, [0, 1, 3, 4, 5, 6, 7]].double().requires_grad_()
    (token_entropy(leaf) * scale).sum().backward()
    log_p = kept.log_softmax(-1)
    (-(log_p.exp() * log_p).sum() * scale).backward()
    assert not leaf.grad[:, 2].any() and worst({"": leaf.grad[:, [0, 1, 3, 4, 5, 6, 7]]}, {"": kept.grad})[0] < 5e-6
    hidden, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (TOKENS, VOCAB))
    bias = torch.zeros(VOCAB)
    bias[7:] = masked
    ids = torch.zeros(TOKENS, dtype=torch.long)
    _, entropies = linear_token_log_probs(hidden, weight, ids, bias=bias, entropy=True)
    (found,) = torch.autograd.grad((entropies * scale).sum(), hidden)
    log_p = F.linear(hidden, weight[:7]).log_softmax(-1)
    (want,) = torch.autograd.grad(-(log_p.exp() * log_p).sum() * scale, hidden)
    assert worst({"": found}, {"": want})[0] < 1e-5


def test_a_temperature_divides_in_float32():
    """Narrow logits are what they are; their quotient is not rounded again."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 64).bfloat16(), torch.randn(500, 64).bfloat16()
    ids = torch.randint(0, 500, (64,))
    logits = F.linear(hidden, weight)
    want = (logits.double() / 0.7).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    forms = {
        "whole": lambda: token_log_probs(logits, ids, temperature=0.7),
        "linear": lambda: linear_token_log_probs(hidden, weight, ids, temperature=0.7)[0],
        "deferred": lambda: token_log_probs(alone(hidden, weight), ids, temperature=0.7),
        "widened": lambda: token_log_probs(alone(hidden, weight).float(), ids, temperature=0.7),
    }
    for name, form in forms.items():
        assert (form() - want).abs().max() < 2e-5, name
    capped = 3 * torch.tanh(logits.double() / 3)
    want = capped.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    got = linear_token_log_probs(hidden, weight, ids, softcap=3.0)[0]
    assert (got - want).abs().max() < 2e-5


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["dp", "dp_shard", "cp"])
def test_a_weight_that_data_ranks_share_is_no_vocabulary_shard(axis):
    def body(rank):
        mesh = build_mesh("cpu", **{axis: 2})
        head = nn.Linear(HIDDEN, 10, bias=False)
        hidden, targets = torch.randn(TOKENS, HIDDEN), torch.randint(0, 10, (TOKENS,))
        if axis == "dp":
            fully_shard(head, mesh=mesh)
            weight = head.weight
        else:
            weight = DTensor.from_local(head.weight.detach()[:5], mesh, [Shard(0)], run_check=False)
        logits = DTensor.from_local(torch.randn(TOKENS, 5), mesh, [Shard(-1)], run_check=False)
        assert slug_of(ShapeError, lambda: linear_cross_entropy(hidden, weight, targets)) == "bad-head"
        assert slug_of(ShapeError, lambda: linear_token_log_probs(hidden, weight, targets)) == "bad-head"
        for call in (cross_entropy, token_log_probs):
            assert slug_of(ShapeError, lambda call=call: call(logits, targets)) == "bad-logits"

    run_ranks(2, body)


@pytest.mark.parametrize("smoothing", [-0.1, 1.5, float("nan")])
def test_label_smoothing_is_from_0_to_1(smoothing):
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    targets = torch.zeros(TOKENS, dtype=torch.long)
    marked = mark(F.linear(hidden, weight), Vocabulary(VOCAB, Group.alone()))
    for call in (
        lambda: linear_cross_entropy(hidden, weight, targets, label_smoothing=smoothing),
        lambda: cross_entropy(F.linear(hidden, weight), targets, label_smoothing=smoothing),
        lambda: F.cross_entropy(marked, targets, label_smoothing=smoothing),
        lambda: F.cross_entropy(alone(hidden, weight), targets, label_smoothing=smoothing),
    ):
        assert slug_of(ShapeError, call) == "bad-label-smoothing"


@pytest.mark.parametrize("axes", [{"cp": 2, "tp": 1}, {"cp": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_generation_over_cp_is_refused(axes):
    model = lively_model("llama")
    ids = torch.randint(3, 67, (2, 8))
    world = 2 * axes.get("tp", 1)
    models = [copy.deepcopy(model) for _ in range(world)]

    def body(rank):
        mesh = build_mesh("cpu", **axes)
        net = parallelize_model(models[rank], mesh).module if "tp" not in axes else models[rank]
        net = net if "tp" not in axes else parallelize_module(net, mesh)
        net.eval()
        how = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
        assert slug_of(ModelError, lambda: net.generate(ids, use_cache=False, **how)) == "generate-over-cp"
        assert slug_of(ModelError, lambda: generate(net, ids, max_new_tokens=2)) == "generate-over-cp"

    run_ranks(world, body)


# -- sampling and generation --------------------------------------------------------------------------------------------


def test_options_of_one_number_may_be_tensors_of_no_dims():
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, temperature=torch.tensor(0.0)), logits.argmax(-1))
    assert sample(logits[0], temperature=torch.tensor(0.0)) == logits[0].argmax()
    for option, value in (("temperature", 0.5), ("top_p", 0.4), ("min_p", 0.3), ("top_p", 1.0), ("min_p", 0.0)):
        number, tensor = (
            sample(logits, **{option: kind}) for kind in (value, torch.tensor(value, dtype=torch.float64))
        )
        assert torch.equal(number, tensor), option


@pytest.mark.parametrize("temperature", [1e-308, 1e-31, torch.tensor([1.0, 1e-40, 0.0], dtype=torch.float64)])
def test_temperatures_that_no_quotient_survives_are_named(temperature):
    logits = torch.randn(3, 50)
    with pytest.raises(ShapeError, match="temperature") as error:
        sample(logits, temperature=temperature)
    assert error.value.slugs == ("bad-option",)
    assert torch.equal(sample(logits * 1e30, temperature=1e-30), logits.argmax(-1))


@pytest.mark.parametrize("tp", [2, 4])
def test_prompts_of_one_token_a_rank(tp):
    """gpt2's Conv1D takes a view of what was gathered."""
    model = lively_model("gpt2")
    ids = torch.randint(3, 67, (3, tp), generator=torch.Generator().manual_seed(1))
    want = model(input_ids=ids).logits
    models = [copy.deepcopy(model) for _ in range(tp)]

    def body(rank):
        net = parallelize_module(models[rank], build_mesh("cpu", tp=tp), sequence_parallel=True)
        return net(input_ids=ids).logits

    for found in run_ranks(tp, body):
        assert worst({"": found}, {"": want})[0] < 1e-12
