"""Head and loss in one op: every option against torch, any vocabulary, memory of one chunk."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from parallelize import ModelError, ShapeError, build_mesh, cross_entropy, linear_cross_entropy
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary import linear_cross_entropy as op
from parallelize.ops.vocabulary.class_targets import Vocabulary
from tests.support.memory import peak_bytes
from tests.support.parity import worst
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


@pytest.mark.variants(every=3)
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
    """Unfused: F.linear and F.cross_entropy. Storages of one forward and backward, inputs not counted, gradients
    counted."""
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


def test_a_weight_that_was_let_go_is_named():
    hidden, weight, _, targets, _ = example_inputs(11, torch.float64, False, False)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ModelError) as error:
        linear_cross_entropy(hidden, weight, targets)
    assert error.value.slugs == ("weight-let-go",)
