"""Other libraries are changed while a planned model lives, and are then as their authors wrote them."""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import io
import pickle
import sys
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.optimizer import _global_optimizer_post_hooks

from parallelize import ColwiseParallel, ModelError, build_mesh, parallelize_model, parallelize_module
from parallelize.base.patches import active as patches
from parallelize.base.patches.table import TABLE, row_of
from parallelize.base.torch_private import torch_tensors as private
from parallelize.cli.environment import known_patches
from tests.policy.sources import PATHS, nodes_of, tree_of
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "einops", "Python")
MODULES = ("torch", "transformers", "peft", "accelerate", "trl", "lightning", "gc", "sys")
FOREIGN = (
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (nn.Module, "register_forward_hook"),
    (nn.ModuleList, "insert"),
    (nn.parallel.DistributedDataParallel, "__init__"),
    (torch.nn.utils.clip_grad, "_get_total_norm"),
    (torch.nn.utils, "get_total_norm"),
    (torch.amp.GradScaler, "_unscale_grads_"),
    (DTensor, "data"),
)


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process(monkeypatch):
    """Models of other tests may live in caches: their changes stay below those of a test."""
    monkeypatch.setattr(patches, "_active", {})
    monkeypatch.setattr(patches, "_lease", None)
    monkeypatch.delattr(torch, "_parallelize", raising=False)
    yield
    gc.collect()
    for key in reversed([*patches._active]):  # of models that something still refers to
        patches._end(key)


def attributes() -> dict[tuple[str, str], object]:
    of_foreign = {(owner.__name__, name): vars(owner).get(name) for owner, name in FOREIGN}
    handlers = {("handler", str(op)): handler for op, handler in private.dtensor_handlers.items()}
    hooks = _global_optimizer_post_hooks, nn.modules.module._global_module_registration_hooks
    return of_foreign | handlers | {("hooks", str(i)): len(hook) for i, hook in enumerate(hooks)}


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def planned_linears() -> nn.Module:
    model = linears()
    run_ranks(1, lambda rank: parallelize_module(model, build_mesh("cpu", tp=1), {"0": ColwiseParallel()}))
    return model


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}, {"dp": 2, "zero": 3}, {"pp": 2}], ids=str)
def test_all_is_undone_with_the_last_planned_model(axes):
    before = attributes()
    sizes = {axis: size for axis, size in axes.items() if axis != "zero"}
    models = [tiny_model("llama", torch.float32) for _ in range(2)]

    def body(rank, models=models):
        parallel = parallelize_model(
            models[rank], build_mesh("cpu", **sizes), zero=axes.get("zero", 0), num_microbatches=2
        )
        parallel.optimizer(torch.optim.AdamW, lr=0.1)
        if rank == 0:
            assert len(patches.active()) > 5
            assert attributes() != before

    run_ranks(2, body)
    del models, body
    gc.collect()
    assert attributes() == before
    assert not hasattr(torch, "_parallelize")


def test_a_deep_copy_keeps_what_its_original_needed():
    model = planned_linears()
    second = copy.deepcopy(model)
    del model
    gc.collect()
    assert "torch.autograd.backward" in dict(patches.active())
    del second
    gc.collect()
    assert not patches.active()


def test_a_plan_that_fails_leaves_nothing_changed():
    before = attributes()

    def body(rank):
        with pytest.raises(ModelError, match="already-parallelized"):
            model = parallelize_module(linears(), build_mesh("cpu", tp=1), {"0": ColwiseParallel()})
            parallelize_module(model, build_mesh("cpu", tp=1), {"0": ColwiseParallel()})

    run_ranks(1, body)
    gc.collect()
    assert attributes() == before


def test_what_another_library_has_wrapped_since_stays_and_is_not_made_twice(monkeypatch):
    module = SimpleNamespace(__name__="torch.autograd", backward=lambda: "stock")
    patches.replace(module, "backward", _doubling)
    ours = module.backward
    module.backward = lambda: ours() + " wrapped"
    lease = patches.lease()
    patches.replace(module, "backward", _doubling)
    del lease
    assert module.backward() == "stock stock wrapped"
    patches.replace(module, "backward", _doubling)
    assert module.backward() == "stock stock wrapped"
    module.backward = ours
    lease = patches.lease()
    del lease
    assert module.backward() == "stock"


def _doubling(stock):
    return lambda: f"{stock()} {stock()}"


def test_a_function_runs_other_code_under_every_name_until_the_lease_is_gone():
    def stock(x, factor=1):
        return factor * x

    def other(x, factor=1):
        return _served(x, factor)  # noqa: F821

    function = FunctionType(stock.__code__, {}, "flex_attention", stock.__defaults__)
    function.__module__, function.__qualname__ = "torch.nn.attention.flex_attention", "flex_attention"
    name, lease = function, patches.lease()
    for _ in range(2):
        patches.change_code(function, "_served", lambda: lambda x, factor: -factor * x, other.__code__)
    assert name(3) == -3
    undo_inner = patches._run_other_code(function, "_served", lambda x, factor: 7, other.__code__)  # of an inner block
    assert name(3) == 7 and undo_inner() and name(3) == -3
    del lease
    assert name(3) == 3 and function.__code__ is stock.__code__ and not function.__globals__


def test_two_copies_of_the_package_refuse_each_other_by_name(monkeypatch):
    model = planned_linears()
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "parallelize"}
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # a copy finds former names too
    try:
        for name in own:
            del sys.modules[name]
        second = importlib.import_module("parallelize.base.patches.active")
        errors = importlib.import_module("parallelize.base.errors")
        assert second is not patches
        for change in (
            second.refuse_other_copy,
            lambda: second.replace(torch.autograd, "backward", _doubling),
        ):
            with pytest.raises(errors.ModelError, match="imported twice") as error:
                change()
            assert error.value.slugs == ("two-copies",)
        del model
        gc.collect()
        second.refuse_other_copy()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "parallelize"]:
            del sys.modules[name]
        sys.modules.update(own)


def test_a_state_without_a_plan_is_pickled():
    model = linears()
    from parallelize.state.records import applied, mark_applied

    mark_applied(model)
    again = pickle.loads(pickle.dumps(model))
    assert applied(again).lease is patches.lease()
    torch.save(model, io.BytesIO())


def test_every_row_is_used_and_every_change_has_a_row():
    with pytest.raises(LookupError, match="has no row"):
        patches.replace(nn.Linear, "forward", _doubling)
    assert nn.Linear.forward.__module__ == "torch.nn.modules.linear"
    texts = " ".join(path.read_text() for file, path in PATHS.items() if not file.startswith("base/patches/"))
    for row in TABLE:
        last = max(row.target.rpartition(".")[2].split("*"), key=len)
        assert last in texts, row.target
        assert row_of(row.target.replace("*", "x")).why and row.versions.split()[0] in LIBRARIES
    assert len({row.target for row in TABLE}) == len(TABLE)


def test_env_lists_what_is_changed_now(tmp_path):
    def state() -> dict[str, bool]:
        return {row["target"]: row["active"] for row in known_patches()}

    assert not any(state().values())
    model = planned_linears()
    assert state()["torch.autograd.backward"]
    assert not state()["torch.distributed.distributed_c10d.ProcessGroup.*"]
    del model
    gc.collect()
    assert not any(state().values())


def test_dtensors_of_other_meshes_are_read_as_pytorch_reads_them():
    model = linears()
    models = [model, copy.deepcopy(model)]

    def body(rank):
        mesh = build_mesh("cpu", tp=2)
        model = parallelize_module(models[rank], mesh, {"0": ColwiseParallel()})
        other = torch.distributed.init_device_mesh("cpu", (2,))
        a, b = (distribute_tensor(torch.arange(8.0), other, [Shard(0)]) for _ in range(2))
        assert bool((a == b).all())
        torch.testing.assert_close(a, b)
        weight = model[0].weight
        torch.testing.assert_close(weight, weight.detach().clone())
        with pytest.raises(AssertionError):
            torch.testing.assert_close(weight, weight.detach() + 1)
        with pytest.raises(ModelError, match="partial-value"):
            bool((weight == weight).all())

    run_ranks(2, body)


def test_a_part_of_a_number_of_sharded_parameters_is_refused_under_zero_3_alone():
    models = [tiny_model("llama", torch.float32) for _ in range(2)]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2), zero=3)
        with pytest.raises(ModelError, match="partial-value"):
            next(parallel.module.parameters()).sum().item()

    run_ranks(2, body)


def names_of_libraries(tree: ast.AST) -> set[str]:
    """The names that a file imports from other libraries that it may change."""
    names = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            names |= {a.asname or a.name for a in node.names}
    return names


def root_of(node: ast.AST) -> str:
    """`x` of `x.a.b`, `x.a[0]` and `vars(x)[0]`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars":
        return root_of(node.args[0])
    return getattr(node, "id", "")


def changes_by_hand(tree: ast.AST) -> Iterator[str]:
    """Attributes of other libraries that code sets without the registry."""
    names = names_of_libraries(tree)
    for node in nodes_of(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in (each for listed in targets for each in getattr(listed, "elts", [listed])):
            if isinstance(target, ast.Attribute | ast.Subscript) and root_of(target) in names:
                yield ast.unparse(target)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and root_of(node.args[0]) in names:
            yield ast.unparse(node.args[0])


def test_nothing_is_changed_beside_the_registry():
    """What is set by hand has a row too: settings that end by themselves, and Python's hook of uncaught errors."""
    found = {(file, name) for file, path in PATHS.items() for name in changes_by_hand(tree_of(path))}
    assert found == {
        ("base/patches/active.py", "sys.modules['torch']"),
        ("base/torch_private/torch_dynamo.py", "config"),
        ("base/torch_private/torch_groups.py", "world.group_count"),
        ("comm/uncaught_errors.py", "sys.excepthook"),
        ("watchdog/watching.py", "sys.excepthook"),
    }
    source = "import torch as t\nfrom peft import a\n"
    source += "t.x.y = 1\na.b, c = 1, 2\nvars(t)['z'] = 1\nsetattr(a, 'n', 1)\no.p = 2"
    assert [*changes_by_hand(ast.parse(source))] == ["t.x.y", "a.b", "vars(t)['z']", "a"]
