"""Packed weights and shared key/value heads are, to PyTorch's interfaces, the full parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parallelize import build_mesh, parallelize_module
from parallelize.base.errors import ModelError, ParallelizeError
from parallelize.state.layout_tensor.layout_dtensor import LayoutDTensor, ask_by_mode
from tests.state.layout_tensor import layout_tensor_jobs as jobs
from tests.state.layout_tensor.layout_tensor_jobs import error, full, gradients, largest_error, moments, parameters
from tests.support.threads import run_ranks

EXACT = 1e-12
KINDS = list(jobs.KINDS)


def on_ranks(kind: str, body: Callable[[Any, Any], Any], tp: int = 2) -> list[Any]:
    """`body(planned model, unsharded model)` on each rank."""
    original = jobs.model_of(kind)

    def run(rank: int) -> Any:
        model, reference = copy.deepcopy(original), copy.deepcopy(original)
        parallelize_module(model, build_mesh("cpu", tp=tp))
        assert any(type(parameter) is LayoutDTensor for parameter in model.parameters())
        return body(model, reference)

    return run_ranks(tp, run)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_is_the_full_tensor_to_pytorch(kind, tp):
    def body(model, reference):
        assert [p.shape for p in model.parameters()] == [p.shape for p in reference.parameters()]
        assert largest_error(parameters(model), parameters(reference)) == 0
        assert largest_error(model.state_dict(), parameters(reference)) == 0
        jobs.backward(model, reference)
        assert largest_error(gradients(model), gradients(reference)) < EXACT
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, reference)]
        assert error(full(norms[0]), norms[1]) < EXACT
        sums = [[full(p.sum()) for p in m.parameters()] for m in (model, reference)]
        assert max(map(error, *sums)) < 1e-11
        return largest_error(gradients(model), gradients(reference))

    assert max(on_ranks(kind, body, tp)) < EXACT


@pytest.mark.variants(every=9)
@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}, {}])
@pytest.mark.parametrize("kind", KINDS)
def test_stock_optimizers_step_it_and_their_states_are_full_tensors(kind, how):
    def body(model, reference):
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, **how) for m in (model, reference)]
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            jobs.backward(model, reference)
            for optimizer in optimizers:
                optimizer.step()
        assert largest_error(moments(model, optimizers[0]), moments(reference, optimizers[1])) < 1e-11
        options = dcp_state.StateDictOptions(full_state_dict=True)
        state = dcp_state.get_optimizer_state_dict(model, optimizers[0], options=options)["state"]
        shown = {name: state[name]["exp_avg"] for name in parameters(model) if name in state}
        assert not shown or largest_error(shown, moments(reference, optimizers[1])) < 1e-11
        return largest_error(parameters(model), parameters(reference))

    assert max(on_ranks(kind, body)) < 1e-11


@torch.no_grad()
def edit(model: Any) -> None:
    """Elementwise, over a dim, of the whole, broadcast, by index, out of another tensor, random."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.mul_(2)
        parameter.add_(parameter.abs().sum().sqrt())
        parameter.sub_(parameter.mean(0))
        parameter.clamp_(max=3.0)
        parameter.copy_(parameter.flip(0))
        parameter.add_(torch.where(parameter > 0, 0.25, -0.25))


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("kind", KINDS)
def test_operations_do_to_it_what_they_do_to_the_full_tensor(kind):
    def body(model, reference):
        edit(model)
        edit(reference)
        for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
            if type(mine) is LayoutDTensor and mine.ndim == 2:
                assert error(full(mine.t() @ mine), its.t() @ its) < EXACT
                assert error(full((mine * mine).max()), (its * its).max()) < EXACT
                with torch.no_grad():
                    mine.normal_(generator=torch.Generator().manual_seed(5))
                    its.normal_(generator=torch.Generator().manual_seed(5))
        return largest_error(parameters(model), parameters(reference))

    assert max(on_ranks(kind, body)) < EXACT


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_differentiable(kind):
    uses: list[Callable[[Any], Any]] = [
        lambda weight: (full(weight) ** 2).sum(),
        lambda weight: (weight * weight).sum(),
        lambda weight: (weight.t() @ weight).sum(),
        lambda weight: full(
            weight.redistribute(placements=[Shard(1)]) if isinstance(weight, DTensor) else weight
        ).sum(),
    ]

    def body(model, reference):
        worst = 0.0
        for name, weight in parameters(model).items():
            its = parameters(reference)[name]
            for use in uses if type(weight) is LayoutDTensor and weight.ndim == 2 else ():
                weight.grad = its.grad = None
                use(weight).backward()
                use(its).backward()
                worst = max(worst, error(full(weight.grad), its.grad))
        return worst

    assert max(on_ranks(kind, body)) < EXACT


def test_the_gradient_of_its_local_tensor_is_stored_as_it_is():
    def body(model, reference):
        jobs.backward(model, reference)
        stored = {name: copy.deepcopy(p.grad) for name, p in model.named_parameters()}
        for name, weight in model.named_parameters():
            if type(weight) is LayoutDTensor:
                weight.grad = None
                (weight.to_local() * stored[name].to_local()).sum().backward()
        return largest_error(gradients(model), gradients(reference))

    assert max(on_ranks("two equal chunks", body)) < EXACT


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("kind", KINDS)
def test_distributed_full_tensors_are_copied_in_at_their_place(kind):
    other = jobs.model_of(kind, seed=9)

    def body(model, _):
        with torch.no_grad():
            for mine, its in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(distribute_tensor(its.detach(), mine.device_mesh, mine.placements))
        assert largest_error(parameters(model), parameters(other)) == 0
        for name, weight in model.named_parameters():  # what `from_local` makes with these placements
            if type(weight) is LayoutDTensor:
                shape, stride = weight.shape, weight.stride()
                twice = DTensor.from_local(
                    weight.to_local().detach() * 2,
                    weight.device_mesh,
                    weight.placements,
                    run_check=False,
                    shape=shape,
                    stride=stride,
                )
                its = parameters(other)[name].detach()
                assert error(twice.full_tensor(), 2 * its) == 0 and error((twice + twice).full_tensor(), 4 * its) == 0
                replicated = DTensor.from_local(its, weight.device_mesh, [Replicate()], run_check=False)
                assert error(replicated.redistribute(placements=weight.placements).full_tensor(), its) == 0
                with torch.no_grad():
                    weight.copy_(twice)
                assert error(weight.full_tensor(), 2 * its) == 0
        return True

    assert all(on_ranks(kind, body))


def test_a_size_and_an_offset_are_refused_by_name():
    def body(model, _):
        weight = next(p for p in model.parameters() if type(p) is LayoutDTensor)
        with pytest.raises(ParallelizeError, match="several-intervals"):
            torch.distributed.tensor.zeros(*weight.shape, device_mesh=weight.device_mesh, placements=weight.placements)
        return True

    assert all(on_ranks("two equal chunks", body))


def test_copies_moves_and_saved_files_keep_it():
    def body(model, reference):
        name = next(name for name, p in model.named_parameters() if type(p) is LayoutDTensor)
        copied = copy.deepcopy(model)
        assert error(copied.get_parameter(name).full_tensor(), reference.get_parameter(name)) == 0
        model.float()
        assert type(model.get_parameter(name)) is LayoutDTensor
        assert error(model.get_parameter(name).full_tensor().double(), reference.get_parameter(name)) < 1e-6
        return True

    assert all(on_ranks("two equal chunks", body))


def test_loading_takes_full_tensors_and_dtensors_of_any_layout():
    other = jobs.model_of("unequal chunks", seed=9)

    def body(model, _):
        mesh = next(model.parameters()).device_mesh  # type: ignore[attr-defined]
        full_state = other.state_dict()
        spread = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in full_state.items()}
        for state in (full_state, spread):
            for parameter in model.parameters():
                parameter.data.zero_()
            model.load_state_dict(state)
            assert largest_error(parameters(model), parameters(other)) == 0
        own = {name: value.clone() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_state_dict(own)
        return largest_error(parameters(model), parameters(other))

    assert max(on_ranks("unequal chunks", body)) == 0


def test_state_dicts_are_no_collective(two_processes):
    assert all(two_processes.run(jobs.state_dict_of_one_rank))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["unequal chunks", "shared heads"])
def test_compiled_steps_give_gradients_of_its_class(two_processes, kind):
    for largest, alike in two_processes.run(jobs.compiled, kind):
        assert largest < EXACT and alike


@pytest.mark.sweep
@pytest.mark.variants(every=7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["shard_data", "fully_shard"])
def test_fully_sharded_it_steps_is_saved_and_loads_on_another_mesh(four_processes, tmp_path, kind, how):
    for errors in four_processes.run(jobs.sharded_further, kind, how, str(tmp_path)):
        assert all(value < 1e-11 for value in errors.values()), errors


def test_pickled_files_hold_the_local_tensor_and_its_layout(two_processes):
    for name, wrong in two_processes.run(_pickled):
        assert name == "LayoutDTensor" and wrong == 0


def _pickled(rank: int) -> tuple[str, float]:
    reference = jobs.model_of("two equal chunks")
    model = copy.deepcopy(reference)
    parallelize_module(model, build_mesh("cpu", tp=2))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    name = next(name for name, p in model.named_parameters() if type(p) is LayoutDTensor)
    return type(state[name]).__name__, largest_error(state, parameters(reference))


def test_where_pytorch_does_not_ask_the_class_a_mode_does():
    """As on torch 2.11. What autograd would differentiate there in the order of the shards is refused."""

    class AskedByMode(LayoutDTensor):
        pass

    ask_by_mode(AskedByMode)

    def body(model, reference):
        for name, weight in model.named_parameters():
            if type(weight) is not LayoutDTensor:
                continue
            expected, asked = reference.get_parameter(name).detach(), weight.detach()
            asked.__class__ = AskedByMode
            assert type(asked.detach()) is type(asked * 2) is AskedByMode and asked.shape == expected.shape
            assert torch.equal((asked * 2).full_tensor(), expected * 2)
            assert float(asked.norm().full_tensor()) == pytest.approx(float(expected.norm()), abs=EXACT)
            with pytest.raises(ModelError) as caught:
                asked.requires_grad_().pow(2)
            assert caught.value.slugs == ("layout-gradient",)
            return [name]
        return []

    assert all(on_ranks("two equal chunks", body))
