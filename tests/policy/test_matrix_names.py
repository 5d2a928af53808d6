"""Every public name and every option of a run has a row in the matrix, or a reason why no row can have it.

A row has a name where its file, or the machinery that runs all rows, contains it: as an identifier, an attribute or a
string of the row's `names=`. An option counts where it is a keyword, or a key of an axis.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import parallelize
from parallelize.plan.options import NAMES, RECOMPUTE
from parallelize.plan.stage_ranks import SCHEDULES

pytestmark = pytest.mark.xdist_group("sources")

MATRIX = Path(__file__).parents[1] / "matrix"
FILES = [MATRIX / "axes.py", MATRIX / "sides.py", MATRIX / "kinds.py", *sorted((MATRIX / "features").glob("*.py"))]

_ERROR = "an error: the tests of refusals raise it"
_TYPE = "what a function returns or takes: rows use it without its name"
_TORCH_STYLE = "a style of PyTorch's on some layers, without a plan: tests/axes/tensor/torch_styles/"
_FORM = "of plans that users write: tests/plan/"
_OFFLINE = "computes on no mesh: tests/tools/"
_LOGGER = "writes numbers that a row has compared already: tests/state/loop/"
_TRAINER = "a loop of another library: tests/training/trainers/"
_COMM = "of processes and links, not of a model: tests/comm/"
_BY_LAYER = "a matmul of one layer, without a model: tests/ops/matmul/"
_ENGINE = "of other engines, which are not here: tests/checkpoint/export/"
_BIAS = "of routers with a bias, which no kind has: tests/axes/tensor/experts/"
_FOREIGN = "of weights that other libraries have quantized: tests/state/quantization/"
_DATA = "of the data before a batch is one: tests/training/data/"

WITHOUT_A_ROW: dict[str, str] = {
    "__version__": "a text",
    **dict.fromkeys(
        [name for name in parallelize.__all__ if name.endswith("Error")],
        _ERROR,
    ),
    "Problem": _ERROR,
    "balance_experts": _BIAS,
    "import_quantized": _FOREIGN,
    **dict.fromkeys(["PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"], _TORCH_STYLE),
    **dict.fromkeys(["SequenceParallel", "ColwiseParallel", "RowwiseParallel"], _TORCH_STYLE),
    **dict.fromkeys(["Cuts", "Plan", "Tie", "Contract", "Conversion", "Traits", "Use", "shipped_plans"], _FORM),
    **dict.fromkeys(["ModuleFacts", "Style", "StyleContext", "StyleText", "register_style"], _FORM),
    **dict.fromkeys(["explain", "Explanation", "lint", "Finding", "derive_plan", "Derived", "MeshSpec"], _OFFLINE),
    **dict.fromkeys(["LoadBalance", "LoadRecord"], _OFFLINE),
    **dict.fromkeys(["verify", "Verification", "assert_verified", "describe_plan", "bytes_per_rank"], _OFFLINE),
    **dict.fromkeys(
        ["build_schedule", "describe_schedule", "simulate", "Timeline", "recompute_cost", "Options"], _OFFLINE
    ),
    **dict.fromkeys(["ConsoleLogger", "HubLogger", "JSONLinesLogger", "Logger", "Loggers"], _LOGGER),
    **dict.fromkeys(["TensorBoardLogger", "WandbLogger"], _LOGGER),
    **dict.fromkeys(["ParallelSFTTrainer"], _TRAINER),
    **dict.fromkeys(["LinkProfile", "destroy_groups", "mesh_spec", "group_for"], _COMM),
    **dict.fromkeys(["all_gather_linear", "column_linear", "linear_all_reduce", "linear_reduce_scatter"], _BY_LAYER),
    **dict.fromkeys(["OverlappedLinears", "overlapped_linears", "calibrate", "DeferredGradients"], _BY_LAYER),
    **dict.fromkeys(["overlap_counts", "overlap_report", "deferred_gradients"], _BY_LAYER),
    **dict.fromkeys(["vllm_update_info", "vllm_weight_source", "verl_per_tensor_param"], _ENGINE),
    **dict.fromkeys(["PackedDocuments", "check_loader", "IterableBatches", "balanced_deal"], _DATA),
    **dict.fromkeys(["ParallelModel", "Schedule", "DeferredLogits", "ShardedLogits", "RoutingLoad"], _TYPE),
    **dict.fromkeys(["ExpertBalance", "RecordedRoutes", "Streams", "Position"], _TYPE),
    **dict.fromkeys(["Constant", "Normal", "TruncatedNormal", "Uniform"], _TYPE),
}
"""Public names that no row can have, or that say nothing of a model on a mesh, each with the reason."""

OPTIONS_WITHOUT_A_ROW: dict[str, str] = {
    "recompute off": "what every row without `recompute` runs with",
}


@cache
def words() -> frozenset[str]:
    """Identifiers, attributes and strings of `names=` in the rows and the machinery that runs all of them."""
    found: set[str] = set()
    for node in _nodes():
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg == "names":
            found |= _strings(node.value)
    return frozenset(found)


@cache
def settings() -> frozenset[tuple[str, str]]:
    """(keyword or key, its value as text) of every call and every dict; the value is empty where it is no literal."""
    found: set[tuple[str, str]] = set()
    for node in _nodes():
        pairs = [(node.arg, node.value)] if isinstance(node, ast.keyword) else []
        if isinstance(node, ast.Dict):
            pairs = [
                (next(iter(_strings(key)), None), value) for key, value in zip(node.keys, node.values, strict=True)
            ]
        for name, value in pairs:
            if name is not None:
                found.add((name, str(value.value) if isinstance(value, ast.Constant) else ""))
    return frozenset(found)


@cache
def _nodes() -> tuple[ast.AST, ...]:
    return tuple(node for path in FILES for node in ast.walk(ast.parse(path.read_text())))


def _strings(node: ast.AST | None) -> set[str]:
    inside = ast.walk(node) if node is not None else ()
    return {leaf.value for leaf in inside if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)}


def options() -> dict[str, bool]:
    """Each option, and each word that one takes, to whether a row or an axis has it."""
    names = {name for name, _ in settings()}
    return {
        **{name: name in names for name in NAMES},
        **{f"recompute {mode}": ("recompute", mode) in settings() for mode in RECOMPUTE},
        **{f"schedule {name}": ("schedule", name) in settings() for name in SCHEDULES},
        **{f"zero {stage}": ("zero", str(stage)) in settings() for stage in range(4)},
    }


def test_every_public_name_has_a_row():
    missing = sorted(set(parallelize.__all__) - words() - set(WITHOUT_A_ROW))
    assert not missing, f"no row of tests/matrix/features/ has {missing}"


def test_every_option_has_a_row():
    missing = sorted(name for name, is_there in options().items() if not is_there and name not in OPTIONS_WITHOUT_A_ROW)
    assert not missing, f"no row of tests/matrix/features/, and no axis, has {missing}"


def test_what_is_said_to_have_no_row_exists_and_has_none():
    assert set(WITHOUT_A_ROW) <= set(parallelize.__all__)
    assert set(OPTIONS_WITHOUT_A_ROW) <= set(options())
    assert not {name for name in OPTIONS_WITHOUT_A_ROW if options()[name]}
    assert not set(WITHOUT_A_ROW) & words(), "they have a row, and need no reason any more"
    assert all(WITHOUT_A_ROW.values()) and all(OPTIONS_WITHOUT_A_ROW.values())
