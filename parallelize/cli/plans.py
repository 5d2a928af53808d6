"""`parallelize plans`: the shipped plans, listed, shown, copied to edit; and plans to and from `transformers`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from parallelize.console import FINE, add_json, print_json, say
from parallelize.errors import PlanError, Problem
from parallelize.plan.load import load_plan, plans_folder, read_plan, shipped_plans
from parallelize.plan.schema import Plan

_VERBS = ("list", "show", "copy", "import", "export")


def with_verb(arguments: list[str]) -> list[str]:
    """`plans` is `plans list`, and `plans NAME` is `plans show NAME`; options may stand before either."""
    if arguments[:1] != ["plans"] or {"-h", "--help"} & set(arguments):
        return arguments
    rest = arguments[1:]
    place = next((at for at, word in enumerate(rest) if not word.startswith("-")), None)
    if place is None:
        return ["plans", "list", *rest]
    if rest[place] in _VERBS:
        return ["plans", rest[place], *rest[:place], *rest[place + 1 :]]
    return ["plans", "show", *rest]


def add_commands(verbs: Any) -> None:
    about = "list the shipped plans, print or copy one, take one from transformers or give it one"
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
    _add_exchange(inner)


def _add_exchange(inner: Any) -> None:
    take = _command(inner, "import", _import, "a plan file out of a transformers plan")
    what = "a folder or config.json, a JSON file of {pattern: word}, or a model type such as qwen3"
    take.add_argument("source", metavar="SOURCE", help=what)
    take.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it there (default: print it)")
    take.add_argument("--force", action="store_true", help="overwrite FILE")
    take.add_argument("--base", metavar="NAME", help="of words in a file: where the base model stands (default: model)")
    take.add_argument("--model-type", metavar="NAME", help="of words in a file: which models the plan is for")
    give = _command(inner, "export", _export, "the transformers form of a plan: {pattern: word}")
    give.add_argument("name", metavar="PLAN", help="a shipped plan's name, or a file")
    give.add_argument("--format", choices=("json",), default="json", help="of the output (default: json)")
    give.add_argument("--lossy", action="store_true", help="leave out what has no equal there, and list it on stderr")


def _command(inner: Any, name: str, run: Any, about: str) -> argparse.ArgumentParser:
    parser = inner.add_parser(name, help=about, description=about)
    add_json(parser)
    parser.set_defaults(run=run)
    return parser


# -- the shipped ones -----------------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    found = [read_plan(path) for path in shipped_plans().values()]
    if options.json:
        print_json([_as_data(plan) for plan in found])
        return FINE
    rows = [(p.name, ", ".join(p.model_types), str(len(p.rules)), ", ".join(_serves(p))) for p in found]
    titles = ("plan", "model types", "rules", "options that it serves")
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for name, types, rules, serves in (titles, *rows):
        print(f"{name:<{widths[0]}}  {types:<{widths[1]}}  {rules:>{widths[2]}}  {serves}")
    return FINE


def _serves(plan: Plan) -> list[str]:
    """The options of `parallelize_module` and `parallelize_model` for which the plan has what they need."""
    vocabulary = any(rule.style.options.get("output") == "vocabulary" for rule in plan.rules)
    products = any(rule.style.word in ("colwise", "rowwise", "gather") for rule in plan.rules)
    has = {
        "sequence_parallel": plan.region is not None,
        "loss_parallel": vocabulary,
        "fuse_loss": vocabulary,
        "overlap": products,
        "pipeline": plan.cuts is not None or plan.region is not None,
    }
    return [name for name, there in has.items() if there]


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
    # the line by which editors that speak YAML find the schema
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
        fix = "name another file, or say --force"
        raise PlanError(Problem("file-exists", "is there already", str(target), fix=fix)) from None


# -- to and from transformers ---------------------------------------------------------------------------------------------


def _import(options: argparse.Namespace) -> int:
    from parallelize.cli.foreign import read_source
    from parallelize.plan.exchange import import_plan

    foreign = read_source(options.source, options.base, options.model_type)
    made = import_plan(foreign)
    notes = [*made.notes, *_better(foreign.model_type)]
    if options.output is not None:
        _write(options.output, made.text, options.force)
    if options.json:
        written = None if options.output is None else str(options.output)
        print_json({"plan": made.text, "notes": notes, "file": written})
        return FINE
    print(made.text.rstrip() if options.output is None else f"{options.output}: imported from {options.source}")
    for note in notes:
        say(f"{options.source}: {note}")
    return FINE


def _better(model_type: str) -> list[str]:
    """A plan written for the model says what the imported one cannot."""
    plans = map(read_plan, shipped_plans().values()) if model_type else ()
    return [f"the shipped plan {plan.name} serves {model_type} too" for plan in plans if model_type in plan.model_types]


def _export(options: argparse.Namespace) -> int:
    from parallelize.plan.exchange import export_plan

    plan = load_plan(options.name)
    made = export_plan(plan)
    if made.refused and not options.lossy:
        advice = Problem(
            "lossy-export", f"{len(made.refused)} rules have no equal", plan.source, fix="--lossy leaves them out"
        )
        raise PlanError(*made.refused, advice)
    print_json(made.words)
    if not options.json:
        for problem in made.refused:
            say(f"left out: {problem.where}: {problem.what}")
        for note in made.notes:
            say(f"{plan.source}: {note}")
    return FINE
