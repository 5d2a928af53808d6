"""`parallelize plans`: list, show and copy plans; import them from and export them to `transformers`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from errno import ENOENT
from pathlib import Path
from typing import Any

from parallelize.base.errors import PlanError, Problem
from parallelize.base.terminal.console import FINE, add_json, add_quiet, print_json, say
from parallelize.plan.plan_file import load_plan, plans_folder, read_plan, shipped_plans
from parallelize.plan.schema import Plan

_VERBS = ("list", "show", "copy", "derive", "import", "export")


def with_verb(arguments: list[str]) -> list[str]:
    """Expand `plans` to `plans list`, and `plans NAME` to `plans show NAME`. Options may come first."""
    if arguments[:1] != ["plans"] or {"-h", "--help"} & set(arguments):
        return arguments
    rest = arguments[1:]
    index = next((index for index, word in enumerate(rest) if not word.startswith("-")), None)
    if index is None:
        return ["plans", "list", *rest]
    if rest[index] in _VERBS:
        return ["plans", rest[index], *rest[:index], *rest[index + 1 :]]
    return ["plans", "show", *rest]


def add_commands(verbs: Any) -> None:
    about = "list the shipped plans, print or copy one, import from or export to transformers"
    epilog = "`plans` alone is `plans list`; `plans NAME` is `plans show NAME`."
    inner = verbs.add_parser("plans", help=about, description=about, epilog=epilog).add_subparsers(
        metavar="COMMAND", required=True
    )
    _command(inner, "list", _list, "the shipped plans: what they serve, and with which options")
    show = _command(inner, "show", _show, "print a plan's file")
    show.add_argument("name", metavar="PLAN", help="a shipped plan's name, or a file")
    copy = _command(inner, "copy", _copy, "copy a plan's file to edit it")
    copy.add_argument("name", metavar="PLAN", help="a shipped plan's name, or a file")
    copy.add_argument("target", nargs="?", type=Path, metavar="DEST", help="a file or a folder (default: ./NAME.yaml)")
    copy.add_argument("--force", action="store_true", help="overwrite DEST")
    _add_derive(inner)
    _add_import_and_export(inner)


def _add_derive(inner: Any) -> None:
    derive = _command(inner, "derive", _derive, "derive a plan from a model's own forward, and prove it")
    what = "a config.json or its folder, a model type, a known size, or package.module:function"
    derive.add_argument("model", metavar="MODEL", help=what)
    derive.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it to FILE (default: print it)")
    derive.add_argument("--force", action="store_true", help="overwrite FILE")
    derive.add_argument("--mesh", default="tp=2", help="the ranks of the proof (default: tp=2)")
    derive.add_argument(
        "--inputs", metavar="FUNCTION", help="package.module:function that returns arguments of the forward"
    )
    derive.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="K=V", help="fields of the config, or arguments"
    )
    derive.add_argument("--no-verify", dest="verify", action="store_false", help="do not prove it; the file says so")
    derive.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures of its layers")
    add_quiet(derive)


def _add_import_and_export(inner: Any) -> None:
    importer = _command(inner, "import", _import, "write a transformers plan as a plan file")
    what = "a folder or config.json, a JSON file of {pattern: word}, or a model type such as qwen3"
    importer.add_argument("source", metavar="SOURCE", help=what)
    importer.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it to FILE (default: print it)")
    importer.add_argument("--force", action="store_true", help="overwrite FILE")
    importer.add_argument(
        "--base", metavar="NAME", help="for words in a file: the attribute of the base model (default: model)"
    )
    importer.add_argument(
        "--model-type", metavar="NAME", help="for words in a file: the model type that the plan is for"
    )
    exporter = _command(inner, "export", _export, "write a plan as a transformers plan: {pattern: word}")
    exporter.add_argument("name", metavar="PLAN", help="a shipped plan's name, or a file")
    exporter.add_argument("--format", choices=("json",), default="json", help="of the output (default: json)")
    exporter.add_argument(
        "--lossy", action="store_true", help="drop rules without an equivalent, and list them on stderr"
    )


def _command(inner: Any, name: str, run: Any, about: str) -> argparse.ArgumentParser:
    parser = inner.add_parser(name, help=about, description=about)
    add_json(parser)
    parser.set_defaults(run=run)
    return parser


# -- shipped plans -----------------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    plans = [read_plan(path) for path in shipped_plans().values()]
    if options.json:
        print_json([_as_data(plan) for plan in plans])
        return FINE
    rows = [(p.name, ", ".join(p.model_types), str(len(p.rules)), ", ".join(_serves(p))) for p in plans]
    titles = ("plan", "model types", "rules", "options that it serves")
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for name, types, rules, serves in (titles, *rows):
        print(f"{name:<{widths[0]}}  {types:<{widths[1]}}  {rules:>{widths[2]}}  {serves}")
    return FINE


def _serves(plan: Plan) -> list[str]:
    """The options of `parallelize_module` and `parallelize_model` that the plan supports."""
    vocabulary = any(rule.style.keeps_vocabulary for rule in plan.rules)
    matmuls = any("overlap" in rule.style.definition.options for rule in plan.rules)
    supported = {
        "sequence_parallel": bool(plan.regions),
        "loss_parallel": vocabulary,
        "fuse_loss": vocabulary,
        "overlap": matmuls,
        "pipeline": plan.cuts is not None or plan.layers_region is not None,
    }
    return [name for name, is_supported in supported.items() if is_supported]


def _as_data(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "source": plan.source,
        "model_types": list(plan.model_types),
        "serves": _serves(plan),
        "rules": {rule.pattern: str(rule.style) for rule in plan.rules},
    }


def _show(options: argparse.Namespace) -> int:
    plan = load_plan(options.name)
    if options.json:
        print_json(_as_data(plan))
    else:
        print(_text(plan), end="")
    return FINE


def _copy(options: argparse.Namespace) -> int:
    plan = load_plan(options.name)
    target = options.target or Path(f"{plan.name}.yaml")
    if target.is_dir():
        target = target / f"{plan.name}.yaml"
    # by this line the YAML language server of an editor finds the schema
    schema = f"# yaml-language-server: $schema={(plans_folder() / 'schema.json').resolve().as_uri()}\n"
    text = _text(plan)
    _write(target, text if text.startswith(schema[:25]) else schema + text, options.force)
    if options.json:
        print_json({"plan": plan.name, "file": str(target)})
    else:
        print(f"{target}: a copy of {plan.source}")
    return FINE


def _text(plan: Plan) -> str:
    return Path(plan.source).read_text(encoding="utf-8")


def _write(target: Path, text: str, force: bool) -> None:
    """Raises: PlanError `file-exists`; OSError."""
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _exists(target) from None


def _exists(target: Path) -> PlanError:
    return PlanError(Problem("file-exists", "the file exists", str(target), fix="name another file, or use --force"))


def _check_targets(targets: list[Path], force: bool) -> None:
    """Whether files can be written, before the work of minutes whose results they are. Raises: PlanError `file-exists`;
    OSError."""
    for target in targets:
        if target.exists() and not force:
            raise _exists(target)
        if not target.parent.is_dir():
            raise FileNotFoundError(ENOENT, "no such folder", str(target.parent))


# -- derived -----------------------------------------------------------------------------------------------------------


def _derive(options: argparse.Namespace) -> int:
    from parallelize.cli.derived_plans import derived, page, picture

    _check_targets([path for path in (options.html, options.output) if path is not None], options.force)
    result = derived(options)
    if options.html is not None:
        _write(options.html, page(result, options), options.force)
    if options.output is not None:
        _write(options.output, result.text, options.force)
    if options.json:
        written = None if options.output is None else str(options.output)
        data = {"plan": result.text, "share": result.share, "whole": dict(result.whole), "file": written}
        print_json({**data, "proof": None if result.proof is None else str(result.proof)})
        return FINE
    print(result.text.rstrip() if options.output is None else f"{options.output}: derived from {options.model}")
    say(f"\n{picture(result, options)}")
    return FINE


# -- to and from transformers ------------------------------------------------------------------------------------------


def _import(options: argparse.Namespace) -> int:
    from parallelize.cli.transformers_plans import read_source
    from parallelize.plan.hf_plans import import_plan

    foreign = read_source(options.source, options.base, options.model_type)
    imported = import_plan(foreign)
    notes = [*imported.notes, *_shipped_for(foreign.model_type)]
    if options.output is not None:
        _write(options.output, imported.text, options.force)
    if options.json:
        written = None if options.output is None else str(options.output)
        print_json({"plan": imported.text, "notes": notes, "file": written})
        return FINE
    print(imported.text.rstrip() if options.output is None else f"{options.output}: imported from {options.source}")
    for note in notes:
        say(f"{options.source}: {note}")
    return FINE


def _shipped_for(model_type: str) -> list[str]:
    """Notes about shipped plans for this model type, which say more than an imported plan can."""
    plans = map(read_plan, shipped_plans().values()) if model_type else ()
    return [f"the shipped plan {plan.name} serves {model_type} too" for plan in plans if model_type in plan.model_types]


def _expert_layouts(plan: Plan) -> list[Mapping[str, bool]]:
    """How each model type of a plan with experts stores their weights; of types that `transformers` cannot build,
    nothing."""
    from parallelize.plan.hf_plans import exports_experts

    if not exports_experts(plan):
        return []
    from parallelize.cli.transformers_plans import expert_layout

    layouts = (expert_layout(model_type) for model_type in plan.model_types)
    return [layout for layout in layouts if layout is not None]


def _export(options: argparse.Namespace) -> int:
    from parallelize.plan.hf_plans import export_plan

    plan = load_plan(options.name)
    exported = export_plan(plan, _expert_layouts(plan))
    if exported.refused and not options.lossy:
        what = f"{len(exported.refused)} rules have no equivalent"
        raise PlanError(*exported.refused, Problem("lossy-export", what, plan.source, fix="--lossy drops them"))
    print_json(exported.words)
    if not options.json:
        for problem in exported.refused:
            say(f"dropped: {problem.where}: {problem.what}")
        for note in exported.notes:
            say(f"{plan.source}: {note}")
    return FINE
