"""Imports point down: every room has a floor, no cycle of rooms or of files, and each lazy import has a reason.

Imports inside functions and under TYPE_CHECKING count like all others. A room is a folder at the top of the package.
Inside of each folder, the folders in it form no cycle either. `__init__.py` is the map of public names and is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.policy.sources import PATHS, ROOT, module_name, nodes_of, tree_of

pytestmark = pytest.mark.xdist_group("sources")
ROOMS_BY_FLOOR = (
    "base",
    "comm plan",
    "ops",
    "state",
    "watchdog",
    "axes",
    "adapters",
    "checkpoint",
    "training",
    "tools",
    "launch",
    "cli",
    "__main__",
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS_BY_FLOOR) for room in rooms.split()}
MAX_ENTRIES = 16

COMMAND = "the command line answers without torch: a command imports what it runs when it runs"
OPTIONAL = "an optional package"
PRIVATE = "private names of torch, each with the version that has it"
FLEX = "torch.nn.attention.flex_attention loads a compiler; what calls these has a model that has loaded it"
LAZY = {  # file to what its functions import: modules of this package in full, of others the package
    "tools.analysis.commands": {
        "tools.analysis.cost.load_balance": COMMAND,
        "tools.analysis.cost.machine": COMMAND,
        "tools.analysis.cost.setting": COMMAND,
        "tools.analysis.default_mesh": COMMAND,
        "tools.analysis.explain": COMMAND,
        "tools.analysis.fit": COMMAND,
        "tools.analysis.linting": COMMAND,
        "tools.analysis.profiling": COMMAND,
        "tools.analysis.show.page": COMMAND,
        "tools.analysis.show.terminal_report": COMMAND,
        "tools.analysis.subject": COMMAND,
        "tools.analysis.trace_notes": COMMAND,
        "state.transaction": COMMAND,
        "state.report_tables": COMMAND,
        "plan.models.model_source": COMMAND,
    },
    "checkpoint.tools.commands": {
        "checkpoint.tools.contents": COMMAND,
        "checkpoint.tools.file_check": COMMAND,
        "checkpoint.tools.from_hub": COMMAND,
        "checkpoint.tools.reshape": COMMAND,
        "checkpoint.tools.to_hub": COMMAND,
    },
    "cli.completion": {"shtab": COMMAND},
    "cli.plans": {"cli.derived_plans": COMMAND, "cli.transformers_plans": COMMAND, "plan.hf_plans": COMMAND},
    "cli.schedule": {
        "axes.pipeline.schedule_chart": COMMAND,
        "axes.pipeline.schedules": COMMAND,
        "axes.pipeline.timeline": COMMAND,
    },
    "cli.transformers_plans": {
        "plan.models.model_source": COMMAND,
        "plan.model_facts": COMMAND,
        "transformers": OPTIONAL,
    },
    "tools.verification.commands": {
        "plan.models.model_source": COMMAND,
        "tools.verification.verify": COMMAND,
        "tools.verification.processes": COMMAND,
    },
    "axes.pipeline.schedules": {
        "base.torch_private.torch_tensors": (
            "describing a schedule needs no torch; only comparing it with PyTorch's does"
        ),
    },
    "checkpoint.export.engines": {"vllm": OPTIONAL},
    "checkpoint.format.folders": {"fcntl": "missing on Windows, where folders are not locked"},
    "checkpoint.hub.adapter_folder": {"peft": OPTIONAL},
    "checkpoint.hub.hf_conversions": {"transformers": OPTIONAL},
    "checkpoint.tools.model_class": {"transformers": OPTIONAL},
    "axes.context.cached_calls": {"transformers": OPTIONAL},
    "axes.context.inputs": {"transformers": OPTIONAL},
    "axes.context.stock_attention": {"transformers": OPTIONAL},
    "launch.commands": {
        "launch.environment.head_node": COMMAND,
        "launch.local_ranks": COMMAND,
        "launch.name_checks": COMMAND,
        "launch.run_rank": COMMAND,
        "launch.start.supervisor": COMMAND,
    },
    "launch.local_ranks": {
        "launch.preflight.mesh_choice": "a launcher starts ranks at once, and rarely needs what `fit` needs",
        "launch.preflight.prediction": "a launcher starts ranks at once, and rarely needs what `fit` needs",
    },
    "launch.loop.token_files": {"transformers": OPTIONAL},
    "adapters.lora": {"peft": OPTIONAL},
    "state.loop.wandb_logger": {"wandb": OPTIONAL},
    "state.loop.loggers": {"huggingface_hub": OPTIONAL, "torch": "its writer needs tensorboard, an optional package"},
    "plan.models.transformers_models": {"transformers": OPTIONAL},
    "ops.vocabulary.kernel_choice": {
        "ops.vocabulary.logit_kernels": "it needs triton, which torch for CPUs does not bring"
    },
    "ops.attention.flex_attention": {"torch": FLEX},
    "ops.attention.flex_masks": {"torch": FLEX},
    "base.torch_private.torch_dynamo": {"torch": PRIVATE},
    "base.torch_private.torch_groups": {"torch": PRIVATE},
    "base.torch_private.torch_tensors": {"torch": PRIVATE},
    "training.trainers.stock_order": {"transformers": OPTIONAL},
    "training.trainers.trainer": {"transformers": OPTIONAL},
    "training.trainers.trainer_loaders": {"transformers": OPTIONAL},
    "axes.vocabulary.generation.caches": {"transformers": OPTIONAL},
    "tools.verification.runner": {
        "tools.verification.threads": (
            "they load torch.testing, which is slow to import, and serve one backend of three"
        ),
    },
}
TYPES_ONLY = {
    "tools.analysis.commands": COMMAND,
    "checkpoint.run.checkpointer": "a type of typing_extensions in older versions of Python",
    "checkpoint.run.load_checkpoint": "the class that it describes is only named",
    "checkpoint.tools.commands": COMMAND,
    "plan.option_keywords": "dtypes of torch, and a plan file is checked without torch",
    "training.apply_axes": "a type of typing_extensions in older versions of Python",
    "tools.verification.verify": "a type of typing_extensions in older versions of Python",
}


FILES = {module_name(file): path for file, path in PATHS.items()}


def room_of(name: str) -> str:
    """The folder at the top of the package in which a file stands, as a newcomer sees it."""
    return name.partition(".")[0]


def part_of(name: str, folder: str) -> str:
    """The folder inside of `folder` in which a file stands; "" for the files that lie in it."""
    inside = name.removeprefix(f"{folder}.")
    return inside.partition(".")[0] if "." in inside else ""


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules of the package that a file imports, wherever in the file the import stands.

    Raises: AssertionError for an import that would hide a module: `import parallelize`, and public names from the
        package.
    """
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name != "parallelize", "import what is used, from its module"
                yield from filter(None, [module_of(alias.name)])
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            yield from filter(None, (target_of(f"{node.module}", alias.name) for alias in node.names))


def target_of(module: str, name: str) -> str:
    """The file behind `from module import name`, "" outside the package and for the version, which is text."""
    imported_module = module_of(f"{module}.{name}") or module_of(module)
    assert imported_module or module != "parallelize" or name == "__version__", (
        f"import {name} from the module that defines it"
    )
    return imported_module


def module_of(dotted: str) -> str:
    """The file behind a dotted name, "" for names outside the package and for the package itself."""
    inside = dotted.removeprefix("parallelize.")
    if inside == dotted:
        return ""
    return inside if inside in FILES else f"{inside}.__init__" if f"{inside}.__init__" in FILES else ""


@cache
def edges() -> dict[str, set[str]]:
    """Each file and the files that it imports."""
    return {name: {*imported(tree_of(path))} - {name} for name, path in FILES.items() if name != "__init__"}


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """Some cycle of a graph, empty where there is none."""
    done: set[str] = set()

    def search(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name in done:
            return []
        for target in sorted(edges.get(name, ())):
            if closed := search(target, [*above, name]):
                return closed
        done.add(name)
        return []

    return next((closed for name in sorted(edges) if (closed := search(name, []))), [])


def test_the_search_for_cycles_finds_one():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not cycle({"a": {"b", "c"}, "b": {"c"}})


def test_every_room_has_a_floor():
    rooms = {room_of(name) for name in FILES} - {"__init__"}
    assert rooms == set(FLOOR), f"unlisted {sorted(rooms - set(FLOOR))}, gone {sorted(set(FLOOR) - rooms)}"


def test_imports_point_down():
    assert not [
        f"{name} (floor {FLOOR[here]}) imports {target} (floor {FLOOR[there]})"
        for name, targets in edges().items()
        for target in targets
        if (here := room_of(name)) != (there := room_of(target)) and FLOOR[there] >= FLOOR[here]
    ]


def test_no_cycle_of_rooms():
    rooms: dict[str, set[str]] = {}
    for name, targets in edges().items():
        rooms.setdefault(room_of(name), set()).update(room_of(target) for target in targets)
    assert not cycle({room: targets - {room} for room, targets in rooms.items()})


FOLDERS = sorted({name.rpartition(".")[0] for name in FILES} - {""})


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_cycle_inside_of_a_folder(folder):
    """Of the folders in it, and of the files that lie in it, which count as one."""
    parts: dict[str, set[str]] = {}
    for name, targets in edges().items():
        if name.startswith(f"{folder}."):
            inner = {part_of(target, folder) for target in targets if target.startswith(f"{folder}.")}
            parts.setdefault(part_of(name, folder), set()).update(inner)
    assert not cycle({part: targets - {part} for part, targets in parts.items()})


def test_the_package_has_few_entries():
    entries = {path.name for path in ROOT.iterdir()} - {"__pycache__"}
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def test_no_import_up_is_hidden_in_a_string():
    """The package's map of public names, above all rooms, fills `base/providers.py`."""
    names = {
        (name, target)
        for name, path in FILES.items()
        if name != "__init__"
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (target := module_of(node.value))
    }
    assert not [(name, target) for name, target in names if FLOOR[room_of(target)] > FLOOR[room_of(name)]]


def test_no_cycle_of_files():
    assert not cycle(edges())


@pytest.mark.parametrize(
    "line",
    ["import parallelize", "import parallelize as p", "from parallelize import Plan", "def f():\n import parallelize"],
)
def test_public_names_do_not_go_around_the_floors(line):
    with pytest.raises(AssertionError, match="import"):
        list(imported(ast.parse(line)))


def test_the_targets_of_imports_are_found():
    lines = (
        "from parallelize import __version__, __main__, plan\nimport parallelize.base.layout, torch\nfrom torch import "
        "nn"
    )
    assert list(imported(ast.parse(lines))) == ["__main__", "plan.__init__", "base.layout"]


def inside_functions(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in nodes_of(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, (ast.Import, ast.ImportFrom)))


def lazy_imports(tree: ast.AST) -> set[str]:
    """What the functions of a file import: modules of this package in full, of others the package."""
    imports = set()
    for node in inside_functions(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [f"{node.module}"]
        outside = {module.split(".")[0] for module in modules} - {"parallelize"}
        imports |= outside | {*imported(ast.Module([node], []))}
    return imports


def test_lazy_imports_are_listed_with_their_reason():
    lazy = {(name, target) for name, path in FILES.items() for target in lazy_imports(tree_of(path))}
    listed = {(name, target) for name, targets in LAZY.items() for target in targets}
    assert lazy == listed, f"unlisted {sorted(lazy - listed)}, gone {sorted(listed - lazy)}"


def test_imports_for_types_alone_are_listed_with_their_reason():
    guarded = {
        name
        for name, path in FILES.items()
        if any(isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) for node in nodes_of(tree_of(path)))
    }
    assert guarded - {"__init__"} == set(TYPES_ONLY)


def test_no_module_lies_loose_at_the_top():
    assert {name for name in FILES if "." not in name} == {"__init__", "__main__"}


def test_every_room_says_what_it_is_for():
    silent = [
        name for name, path in FILES.items() if name.endswith("__init__") and not ast.get_docstring(tree_of(path))
    ]
    assert not silent, silent
