"""Head and loss in one: every option against torch, any vocabulary, stock models, memory of one chunk."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from parallelize import (
    DeferredLogits,
    ModelError,
    PlanError,
    ShapeError,
    ShardedLogits,
    build_mesh,
    cross_entropy,
    full_gradients,
    full_parameter,
    linear_cross_entropy,
    parallelize_model,
    parallelize_module,
    recompute,
)
from parallelize.comm.groups import Group
from parallelize.layout import even_interval
from parallelize.ops.vocabulary import linear_cross_entropy as op
from parallelize.ops.vocabulary.vocabulary_shard import Vocabulary
from parallelize.vocabulary.logits.sharded_logits import mark
from tests.support.memory import peak_bytes
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import compare, planned_run, reference_run, worst
from tests.support.threads import run_ranks

LEAD, HIDDEN = (3, 5), 7


def example_inputs(vocab: int, dtype: torch.dtype, soft: bool, weighted: bool):
    """(hidden, weight, bias, targets, class weights), whole. A constant in the bias: only relative sums survive it."""
    torch.manual_seed(0)
    hidden = torch.randn(*LEAD, HIDDEN, dtype=dtype)
    weight, bias = torch.randn(vocab, HIDDEN, dtype=dtype), torch.randn(vocab, dtype=dtype) + 20
    targets = torch.randint(0, vocab, LEAD)
    targets[1, :2] = -100
    if soft:
        targets = torch.rand(*LEAD, vocab, dtype=dtype).softmax(-1)
    return hidden, weight, bias, targets, torch.rand(vocab, dtype=dtype) + 0.1 if weighted else None


def softcapped(z: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return z if softcap is None else softcap * torch.tanh(z * 0.7 / softcap)


def torch_loss(z, targets, class_weight, smoothing, z_loss, reduction):
    """Torch's own, and a z-loss over the tokens that count."""
    vocab, soft = z.shape[-1], targets.is_floating_point()
    flat, flat_targets = z.reshape(-1, vocab), targets.reshape(-1, vocab) if soft else targets.reshape(-1)
    valid = torch.ones(len(flat), dtype=torch.bool) if soft else flat_targets != -100
    plain = F.cross_entropy(flat, flat_targets, class_weight, label_smoothing=smoothing, reduction=reduction)
    extra = z_loss * torch.logsumexp(flat, -1).square() * valid
    count = valid.sum() if class_weight is None or soft else class_weight[flat_targets[valid]].sum()
    if reduction == "none":
        return (plain + extra).view(z.shape[:-1])
    return plain + (extra.sum() if reduction == "sum" else extra.sum() / count)


def gradients(loss: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    loss.square().sum().backward()
    return {"loss": loss.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


CASES = [
    (1, 11, torch.float64, False, False, 0.0, 0.0, "mean", None),
    (1, 11, torch.float32, True, True, 0.1, 0.01, "sum", 3.0),
    *(
        (2, 11, torch.float64, False, weighted, 0.1, 0.02, how, None)
        for weighted in (False, True)
        for how in ("mean", "none")
    ),
    *(
        (2, 11, torch.float64, True, weighted, e, 0.0, how, None)
        for weighted, e, how in ((0, 0, "mean"), (1, 0.1, "none"))
    ),
    *(
        (4, 10, torch.float64, soft, True, 0.1, 0.02, how, 3.0)
        for soft in (False, True)
        for how in ("mean", "sum", "none")
    ),
    *((4, 3, torch.float64, soft, False, 0.0, 0.0, how, None) for soft in (False, True) for how in ("mean", "none")),
    *((4, 3, torch.float64, False, True, 0.2, 0.02, how, 3.0) for how in ("mean", "none")),
    *((tp, 11, torch.float32, False, False, 0.1, 0.02, how, 3.0) for tp in (2, 4) for how in ("mean", "sum", "none")),
]


@pytest.mark.parametrize(
    ("tp", "vocab", "dtype", "soft", "weighted", "smoothing", "z_loss", "reduction", "softcap"), CASES
)
def test_equals_torch(tp, vocab, dtype, soft, weighted, smoothing, z_loss, reduction, softcap):
    """The fused loss on a weight sharded as a DTensor, and the unfused one on sharded logits."""
    hidden, weight, bias, targets, class_weight = example_inputs(vocab, dtype, soft, bool(weighted))
    leaves = {"hidden": hidden.clone(), "weight": weight.clone(), "bias": bias.clone()}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    z = softcapped(F.linear(*leaves.values()), softcap)
    expected = gradients(torch_loss(z, targets, class_weight, smoothing, z_loss, reduction), leaves)
    options = dict(label_smoothing=smoothing, z_loss=z_loss, reduction=reduction)
    cap = {} if softcap is None else dict(softcap=softcap, scale=0.7)

    def fused(rank):
        mesh = build_mesh("cpu", tp=tp)
        ours = {"hidden": hidden.clone().requires_grad_()}
        start, stop = even_interval(vocab, tp, rank)
        for name, full in (("weight", weight), ("bias", bias)):
            local = full[start:stop].clone()
            ours[name] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
            ).requires_grad_()
        loss = linear_cross_entropy(
            ours["hidden"],
            ours["weight"],
            targets,
            bias=ours["bias"],
            class_weight=class_weight,
            chunk=4,
            **options,
            **cap,
        )
        result = gradients(loss, ours)
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in result.items()}

    def unfused(rank):
        group = Group(build_mesh("cpu", tp=tp).get_group())
        start, stop = even_interval(vocab, tp, rank)
        leaf = z.detach()[..., start:stop].clone().requires_grad_()
        local_targets = targets[..., start:stop] if soft and rank else targets  # whole, or this rank's part of it
        loss = cross_entropy(mark(leaf * 1, Vocabulary(vocab, group)), local_targets, weight=class_weight, **options)
        return gradients(loss, {"": leaf})

    bound = 1e-12 if dtype == torch.float64 else 5e-6
    for result in run_ranks(tp, fused):
        error, name = worst(result, expected)
        assert error <= bound, f"{name} differs by {error:.2e}"
    leaf = z.detach().requires_grad_()
    expected = gradients(torch_loss(leaf, targets, class_weight, smoothing, z_loss, reduction), {"": leaf})
    result = run_ranks(tp, unfused)
    assert worst({"": result[0]["loss"]}, {"": expected["loss"]})[0] <= bound
    assert worst({"": torch.cat([values[""] for values in result], -1)}, {"": expected[""]})[0] <= bound


def test_plain_tensors_without_processes():
    hidden, weight, _, targets, _ = example_inputs(11, torch.float64, False, False)
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
    for chunk in (None, 1, 100):
        assert abs(linear_cross_entropy(hidden, weight, targets, chunk=chunk) - expected) < 1e-12
    transposed = weight.T.contiguous().T.requires_grad_()  # as GPT-2's Conv1D would have it
    linear_cross_entropy(hidden.transpose(0, 1), transposed, targets.T).backward()
    leaf = weight.clone().requires_grad_()
    F.cross_entropy((hidden @ leaf.T).flatten(0, 1), targets.flatten()).backward()
    assert worst({"": transposed.grad}, {"": leaf.grad})[0] < 1e-12
    empty = linear_cross_entropy(hidden[:0], leaf, targets[:0], reduction="sum")
    empty.backward()
    assert empty == 0 and worst({"": leaf.grad}, {"": transposed.grad})[0] < 1e-12
    nothing = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert nothing.isnan() and F.cross_entropy(hidden.flatten(0, 1), torch.full((15,), -100)).isnan()


def test_bad_input_is_named():
    hidden, weight, bias, targets, _ = example_inputs(11, torch.float64, False, False)
    grows = torch.rand(*LEAD, 11, dtype=torch.float64).requires_grad_()
    wrong = {
        "bad-head": [
            lambda: linear_cross_entropy(hidden, weight[:, :3], targets),
            lambda: linear_cross_entropy(hidden.float(), weight, targets),
            lambda: linear_cross_entropy(hidden, weight, targets, bias=bias[:4]),
            lambda: linear_cross_entropy(hidden, weight[0], targets),
        ],
        "bad-targets": [
            lambda: linear_cross_entropy(hidden, weight, targets[:2]),
            lambda: linear_cross_entropy(hidden, weight, grows),
            lambda: cross_entropy(hidden, grows[..., :7]),
        ],
        "bad-class-weight": [
            lambda: linear_cross_entropy(hidden, weight, targets, class_weight=torch.ones(4)),
            lambda: cross_entropy(hidden, targets.clamp(max=6), weight=torch.ones(7).requires_grad_()),
        ],
        "bad-reduction": [lambda: linear_cross_entropy(hidden, weight, targets, reduction="median")],
        "bad-chunk": [lambda: linear_cross_entropy(hidden, weight, targets, chunk=0)],
        "id-out-of-range": [lambda: linear_cross_entropy(hidden, weight, targets + 200)],
    }
    for slug, calls in wrong.items():
        for call in calls:
            with pytest.raises(ShapeError) as error:
                call()
            assert error.value.slugs == (slug,)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_what_needs_a_gradient_is_made(needs):
    hidden, weight, _, targets, _ = example_inputs(11, torch.float64, False, False)
    hidden, weight = hidden.requires_grad_(needs[0]), weight.requires_grad_(needs[1])
    made = []
    real = op._GradientAccumulator.add
    try:
        op._GradientAccumulator.add = lambda self, *args: (
            made.append((self.hidden is not None, self.weight is not None)),
            real(self, *args),
        )
        loss = linear_cross_entropy(hidden, weight, targets)
        with torch.no_grad():
            linear_cross_entropy(hidden, weight, targets)
    finally:
        op._GradientAccumulator.add = real
    assert made == ([needs] if any(needs) else []) and loss.requires_grad == any(needs)
    if any(needs):
        loss.backward()
        assert (hidden.grad is not None, weight.grad is not None) == needs


def test_backward_twice_and_for_one_gradient_at_a_time():
    """The gradients of the forward are given away once; what is asked for again is made again, and is the same."""
    hidden, weight, _, targets, _ = example_inputs(11, torch.float64, False, False)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    F.cross_entropy((h @ w.T).flatten(0, 1), targets.flatten()).backward()
    expected = {"h": h.grad, "w": w.grad}
    again = []
    real = op._recomputed_gradients
    try:
        op._recomputed_gradients = lambda *args: (again.append(1), real(*args))[1]
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy(h, w, targets, chunk=4)
        separate = {}
        (separate["h"],) = torch.autograd.grad(loss, h, retain_graph=True)
        (separate["w"],) = torch.autograd.grad(loss, w, retain_graph=True)
        assert not again  # as in a split backward of a pipeline
        (2 * loss).backward(retain_graph=True)
        assert len(again) == 1
    finally:
        op._recomputed_gradients = real
    assert worst(separate, expected)[0] < 1e-12
    assert worst({"h": h.grad, "w": w.grad}, {name: 2 * x for name, x in expected.items()})[0] < 1e-12
    with pytest.raises(ModelError) as error:
        linear_cross_entropy(h, w, targets).backward(create_graph=True)
    assert error.value.slugs == ("double-backward",)


def test_narrow_weights_sum_their_gradient_in_float32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(640, 16).bfloat16(), torch.randn(50, 16).bfloat16()
    targets = torch.randint(0, 50, (640,))
    h, w = hidden.float().requires_grad_(), weight.float().requires_grad_()
    F.cross_entropy(F.linear(h, w), targets, reduction="sum").backward()
    ours = [x.clone().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(*ours, targets, chunk=8, reduction="sum")
    loss.backward()
    assert loss.dtype == torch.float32 and ours[0].grad.dtype == ours[1].grad.dtype == torch.bfloat16
    error = (ours[1].grad.float() - w.grad).abs().max() / w.grad.abs().max()
    assert error < 4e-3  # one rounding of the result; eighty sums in bfloat16 would lose more
    with torch.autocast("cpu", torch.bfloat16):
        cast = [x.float().requires_grad_() for x in (hidden, weight)]
        under = linear_cross_entropy(*cast, targets, chunk=8, reduction="sum")
    under.backward()
    assert torch.equal(under, loss) and cast[1].grad.dtype == torch.float32
    assert (cast[1].grad - w.grad).abs().max() / w.grad.abs().max() < 4e-3


def test_a_whole_part_of_the_vocabulary_may_be_masked():
    hidden, weight, bias, targets, _ = example_inputs(10, torch.float64, False, False)
    bias[5:], targets = -torch.inf, targets.clamp(-100, 4)

    def body(rank):
        mesh = build_mesh("cpu", tp=2)
        parts = [DTensor.from_local(x.chunk(2)[rank], mesh, [Shard(0)], run_check=False) for x in (weight, bias)]
        leaf = hidden.clone().requires_grad_()
        loss = linear_cross_entropy(leaf, parts[0], targets, bias=parts[1])
        loss.backward()
        return {"loss": loss.detach(), "hidden": leaf.grad}

    leaf = hidden.clone().requires_grad_()
    loss = F.cross_entropy(F.linear(leaf, weight, bias).flatten(0, 1), targets.flatten())
    loss.backward()
    for result in run_ranks(2, body):
        assert worst(result, {"loss": loss.detach(), "hidden": leaf.grad})[0] < 1e-12


def test_one_collective_a_chunk():
    from unittest.mock import patch

    sent = []
    real = Group.all_gather

    def counted(self, x):
        sent.append(tuple(x.shape))
        return real(self, x)

    def body(rank):
        mesh = build_mesh("cpu", tp=2)
        weight = DTensor.from_local(torch.randn(4, 6).requires_grad_(), mesh, [Shard(0)], run_check=False)
        linear_cross_entropy(torch.randn(7, 6), weight, torch.zeros(7, dtype=torch.long), chunk=3).backward()

    with patch.object(Group, "all_gather", counted):
        run_ranks(2, body)
    assert sorted(sent) == [(4, 1)] * 2 + [(4, 3)] * 4  # two ranks; nothing backward


def test_peak_is_a_fifth_at_32k():
    """Unfused: F.linear and F.cross_entropy. Storages of one forward and backward, inputs not counted, gradients counted."""
    hidden, weight = (torch.empty(rows, 256, device="meta").requires_grad_() for rows in (2048, 32768))
    on_meta = torch.zeros(2048, dtype=torch.long, device="meta")
    unfused = peak_bytes(lambda: F.cross_entropy(F.linear(hidden, weight), on_meta).backward())
    hidden.grad = weight.grad = None
    fused = peak_bytes(lambda: linear_cross_entropy(hidden, weight, on_meta).backward())
    assert fused <= unfused / 5, (fused, unfused)
    own = weight.nbytes + hidden.nbytes
    hidden.grad = weight.grad = None
    none = peak_bytes(lambda: linear_cross_entropy(hidden, weight, on_meta, reduction="none").sum().backward())
    assert none <= own + 6 * 128 * 32768 * 4  # gradients, and a chunk's logits with what is made of them


# -- stock models -------------------------------------------------------------------------------------------------------


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bert"])
def test_planned_models_equal_the_unsharded(family, tp):
    """Logits, loss, gradients of inputs and weights, accumulation, SGD; sharded and whole logits, once they are made."""
    if (tp, family) in ((1, "gpt2"), (4, "bert")):
        pytest.skip("time: the others cover it")
    model = tiny_model(family, torch.float64)
    data = [tiny_batch(seed=1), tiny_batch(seed=2)]
    expected = reference_run(model, data)
    models = [copy.deepcopy(model) for _ in range(tp)]
    sharded = tp == 2

    def body(rank):
        return _run(models[rank], tp, data, fuse_loss=True, loss_parallel=sharded, sequence_parallel=tp == 4)

    for actual in run_ranks(tp, body):
        compare(actual, expected, torch.float64)


def _run(model, tp, data, **options):
    return planned_run(model, tp, data, **options)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "bert"])
def test_models_that_compute_their_own_loss(family):
    model = tiny_model(family)
    ids, labels = tiny_batch()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        net = models[rank]
        net.zero_grad()
        parallelize_module(net, build_mesh("cpu", tp=2), fuse_loss=True)
        with torch.no_grad():
            quiet = net(input_ids=ids, labels=labels)
        out = net(input_ids=ids, labels=labels)
        assert isinstance(out.logits, DeferredLogits) and out.logits.deferred is not None
        assert abs(quiet.loss - out.loss) < 1e-6 and quiet.logits.deferred is not None  # nothing was made
        counted = net(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss
        out.loss.backward()
        return out.loss.detach(), full_gradients(net), counted.detach()

    counted = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss.detach()
    for actual, grads, ours in run_ranks(2, body):
        assert abs(actual - loss.detach()) < 5e-6 * loss.detach() and abs(ours - counted) < 5e-6 * counted
        assert worst(grads, expected)[0] < 5e-6


@pytest.mark.parametrize(
    ("family", "mesh", "options"),
    [
        ("llama", {"dp": 1}, {"dtype": None}),
        ("gpt2", {"dp": 2}, {"zero": 2}),
        ("gemma2", {"dp": 2, "tp": 2}, {"zero": 1, "loss_parallel": True, "recompute": "full"}),
        ("gpt2", {"pp": 2, "tp": 2}, {"sequence_parallel": True, "num_microbatches": 2}),
        ("llama", {"pp": 2}, {"schedule": "zbv", "num_microbatches": 4}),
    ],
    ids=str,
)
def test_whole_meshes(family, mesh, options):
    """`step` on meshes with and without tp, pipelines, ZeRO, split backward: loss and the weights after one step."""
    overrides = {"num_hidden_layers": 4} if "schedule" in options else {}
    model = tiny_model(family, **overrides)
    ids, labels = tiny_batch(batch=4, length=8)
    world = 1
    for size in mesh.values():
        world *= size
    expected = copy.deepcopy(model)
    loss = F.cross_entropy(expected(input_ids=ids).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    torch.optim.SGD(expected.parameters(), 0.05).step()
    states = expected.state_dict()
    models = [copy.deepcopy(model) for _ in range(world)]

    def body(rank):
        device_mesh = build_mesh("cpu", **mesh)
        parallel = parallelize_model(models[rank], device_mesh, fuse_loss=True, **options)
        data = device_mesh.get_local_rank("dp") if "dp" in mesh else 0
        rows = slice(data * 4 // mesh.get("dp", 1), (data + 1) * 4 // mesh.get("dp", 1))
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.05)
        quiet = parallel.evaluate(input_ids=ids[rows], targets=labels[rows])
        actual = parallel.step(input_ids=ids[rows], targets=labels[rows])
        optimizer.step()
        logits = [out.logits.argmax(-1) for out in parallel.forward(input_ids=ids[rows])] if "tp" not in mesh else []
        net = parallel.module
        state = net.state_dict() if "tp" not in mesh else {n: full_parameter(net, n) for n, _ in net.named_parameters()}
        return float(quiet), float(actual), state, logits

    loaded: dict[str, torch.Tensor] = {}
    for quiet, actual, state, _ in run_ranks(world, body):
        assert abs(actual - loss.item()) < 5e-6 * loss.item() and abs(quiet - actual) < 1e-6
        loaded |= {name: value for name, value in state.items() if value is not None}
    assert loaded.keys() >= {name for name, _ in expected.named_parameters()}
    assert worst(loaded, {name: states[name] for name in loaded})[0] < 5e-6


def test_logits_are_there_when_somebody_looks_at_them():
    model = tiny_model("llama")
    ids, labels = tiny_batch()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        generated = model.generate(ids[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        net = models[rank]
        parallelize_module(net, build_mesh("cpu", tp=2), fuse_loss=True, loss_parallel=False)
        with torch.no_grad():
            logits = net(input_ids=ids).logits
            assert logits.shape == expected.shape and logits.dtype == expected.dtype and "deferred)" in repr(logits)
            last = logits[:, -1].float() / 2
            assert (
                last.deferred is not None
                and worst({"": last.softmax(-1)}, {"": (expected[:, -1] / 2).softmax(-1)})[0] < 5e-6
            )
            assert torch.equal(logits.argmax(-1), expected.argmax(-1)) and logits.deferred is None
            assert torch.allclose(logits[0, 0, :3], expected[0, 0, :3], atol=1e-5)
            logits[..., 3] = -torch.inf  # in what was made
            assert logits.softmax(-1)[..., 3].sum() == 0 and not (logits / 1).argmax(-1).eq(3).any()
            again = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=4).flatten())
            masked = expected.clone()
            masked[..., 3] = -torch.inf
            assert abs(again - F.cross_entropy(masked.flatten(0, 1), labels.clamp(min=4).flatten())) < 1e-5
            assert torch.equal(net.generate(ids[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0), generated)
        logits = net(input_ids=ids).logits
        assert worst({"": logits.detach().argmax(-1).float()}, {"": expected.argmax(-1).float()})[0] == 0
        made = logits.made()
        assert not isinstance(made, ShardedLogits) and made.requires_grad
        assert torch.allclose(logits.full_tensor(), expected, atol=1e-5) and logits.to_local().shape[-1] in (34, 33)

    run_ranks(2, body)


def test_what_needs_logits_is_refused_where_a_gradient_is_wanted():
    def body(rank):
        net = tiny_model("llama")
        parallelize_module(net, build_mesh("cpu", tp=2), fuse_loss=True)
        logits = net(input_ids=tiny_batch()[0]).logits
        for allowed in (
            lambda z: z[:, :-1],
            lambda z: z.float() / 2 * 3.0,
            lambda z: torch.tanh(z).view(-1, 67),
            lambda z: z.flatten(0, 1).contiguous(),
            lambda z: z * torch.tensor(0.5),
        ):
            assert isinstance(allowed(logits), DeferredLogits) and allowed(logits).requires_grad
        for refused in (
            lambda z: z.softmax(-1),
            lambda z: z.argmax(-1),
            lambda z: z.view(-1, 48),
            lambda z: z[..., 0],
            lambda z: z + torch.randn(67),
            lambda z: z * torch.ones((), requires_grad=True),
            lambda z: z.mul_(2),
            lambda z: torch.cat([z, z]),
            lambda z: z.register_hook(print),
            lambda z: nn.Linear(67, 2)(z),
            lambda z: F.cross_entropy(torch.randn(5, 67), z),
        ):
            with pytest.raises(ModelError) as error:
                refused(logits)
            assert error.value.slugs == ("deferred-logits",)

    run_ranks(2, body)


def test_recomputed_with_its_loss_inside():
    """A unit that holds head and loss: the forward runs twice, and sends what is saved once."""
    from unittest.mock import patch

    class Tail(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11)

        def forward(self, x, targets):
            return F.cross_entropy(50 * torch.tanh(self.head(self.norm(x)) / 50), targets)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.tail = nn.Linear(5, 6), Tail()

        def forward(self, x, targets):
            return self.tail(self.first(x), targets)

    net = Net().double()
    x, targets = torch.randn(9, 5, dtype=torch.float64), torch.randint(0, 11, (9,))
    net(x, targets).backward()
    expected = {name: p.grad for name, p in net.named_parameters()}
    plan = {"first": "replicate", "tail.norm": "replicate", "tail.head": "colwise(output=vocabulary)"}
    from parallelize.plan.choose import plan_of

    sent, runs = [], []
    real = Group.all_gather
    net.tail.norm.register_forward_hook(lambda *args: runs.append(1))

    def counted(self, x):
        sent.append(tuple(x.shape))
        return real(self, x)

    for save in (None, ["collectives"]):
        models = [copy.deepcopy(net) for _ in range(2)]
        sent.clear(), runs.clear()

        def body(rank, models=models, save=save):
            ours = models[rank]
            ours.zero_grad()
            parallelize_module(ours, build_mesh("cpu", tp=2), plan_of(ours, plan), fuse_loss=True)
            recompute(ours, "full" if save is None else "selective", units=["tail"], save=save)
            ours(x, targets).backward()
            return full_gradients(ours)

        with patch.object(Group, "all_gather", counted):
            for result in run_ranks(2, body):
                assert worst(result, expected)[0] < 1e-12
        gathered = 4 if save is None else 2  # of two ranks
        assert (sent.count((4, 9)), len(runs)) == (gathered, 4), save


def test_heads_that_cannot_be_fused_are_named():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def body(rank):
        mesh = build_mesh("cpu", tp=2)
        net = nn.Sequential(nn.Linear(4, 4), Scaled(4, 6))
        before = dict(net[1].__dict__)
        with pytest.raises(ModelError) as error:
            from parallelize.plan.choose import plan_of

            plan = plan_of(net, {"0": "replicate", "1": "colwise(output=vocabulary)"})
            parallelize_module(net, mesh, plan, fuse_loss=True)
        assert error.value.slugs == ("cannot-fuse-loss",) and net[1].__dict__ == before
        with pytest.raises(PlanError) as error:
            plan = plan_of(net, {"0": "colwise", "1": "rowwise"})
            parallelize_module(net, mesh, plan, fuse_loss=True)
        assert "no-vocabulary-output" in error.value.slugs

    run_ranks(2, body)

    def alone(rank):
        with pytest.raises(PlanError) as error:
            parallelize_model(nn.Linear(3, 4), build_mesh("cpu", dp=1), fuse_loss=True)
        assert error.value.slugs == ("no-vocabulary-output",)

    run_ranks(1, alone)


def test_weights_that_change_before_the_loss_are_named():
    def body(rank):
        net = tiny_model("llama")
        parallelize_module(net, build_mesh("cpu", tp=2), fuse_loss=True)
        ids, labels = tiny_batch()
        with torch.no_grad():
            logits = net(input_ids=ids).logits
            for parameter in net.parameters():
                parameter.mul_(0.5)
            for use in (lambda: logits.argmax(-1), lambda: cross_entropy(logits, labels), logits.to_local):
                with pytest.raises(ModelError) as error:
                    use()
                assert error.value.slugs == ("weight-changed",)

    run_ranks(2, body)


def test_a_weight_that_was_let_go_is_named():
    hidden, weight, _, targets, _ = example_inputs(11, torch.float64, False, False)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ModelError) as error:
        linear_cross_entropy(hidden, weight, targets)
    assert error.value.slugs == ("weight-let-go",)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize(("family", "mesh"), [("llama", "dp=2,tp=2"), ("gpt2", "pp=2"), ("gemma2", "dp=2")])
def test_verify_with_it(family, mesh):
    from parallelize import verify

    result = verify(family, None, mesh, fuse_loss=True)
    assert result.ok, str(result)


@pytest.mark.sweep
def test_explain_with_it():
    """Logits are not among what is stored at once, and the all-gather of each chunk is predicted."""
    from parallelize import explain

    options = dict(batch=8, sequence=256)
    plain, fused = (
        explain(lambda: tiny_model("llama", vocab_size=8192), "llama", "tp=2", fuse_loss=on, **options).ranks[0]
        for on in (False, True)
    )
    assert fused.memory.activations < plain.memory.activations - 2048 * 8192 * 4 // 2
    sent = [(line.op, line.bytes, line.count) for line in fused.messages if line.module == "loss" and line.axis == "tp"]
    assert [line for line in sent if line[0] == "all_gather"] == [("all_gather", 128 * 4 * 4 * 2, 16)]
