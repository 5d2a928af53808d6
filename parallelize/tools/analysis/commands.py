"""`parallelize lint`, `explain` and `fit`: check a plan before you launch.

Only commands that need torch import it: a plan file alone is checked without.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelize.base.errors import ParallelizeError, PlanError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.base.terminal.console import (
    FINE,
    MISTAKE,
    PROBLEM_FOUND,
    Progress,
    add_json,
    add_quiet,
    as_data,
    print_json,
    report,
    say,
    shows_progress,
)
from parallelize.plan.options import Options, add_options, options_given
from parallelize.plan.plan_file import load_plan
from parallelize.plan.schema import Plan

if TYPE_CHECKING:
    from parallelize.tools.analysis.cost.setting import Setting
    from parallelize.tools.analysis.fit import Fitted
    from parallelize.tools.analysis.show.explanation import Explanation
    from parallelize.tools.analysis.subject import Subject

MODEL = "a config.json or its folder, a transformers model type, llama-3-8b and the like, or package.module:function"
HARDWARE = (
    "a100, a100-40, h100-sxm, h100-500w, h800, h200, b200, gb200, l40s, rtx-4090, cpu, or a YAML file of that form"
)
_LINT_SIZES = (2, 3)  # of tp, where no mesh is chosen


def add_commands(verbs: Any) -> None:
    """Add the four verbs to a parser's subparsers."""
    _add_lint(verbs)
    _add_explain(verbs)
    _add_fit(verbs)
    _add_profile(verbs)


def _add_lint(verbs: Any) -> None:
    lint = verbs.add_parser("lint", help="check plans: every mistake that can be found without running them")
    lint.add_argument(
        "plans", nargs="*", metavar="PLAN", help="a file, or a shipped plan's name (default: the model's)"
    )
    lint.add_argument("--model", metavar="MODEL", help=f"check against it: {MODEL}")
    lint.add_argument(
        "--mesh", help="such as pp=2,dp=4,tp=8 (default with a model: tp=2, or tp=3 where 2 does not divide the heads)"
    )
    lint.add_argument("--world-size", type=int, metavar="N", help="processes that there will be")
    lint.add_argument(
        "--trace", action="store_true", help="also say how much of the plan was followed through the forward"
    )
    add_options(lint)
    _add_overrides(lint)
    add_json(lint)
    lint.set_defaults(run=_lint)


def _add_explain(verbs: Any) -> None:
    explain = verbs.add_parser("explain", help="predict memory, messages and time on a mesh of any size, without a GPU")
    explain.add_argument("model", metavar="MODEL", help=MODEL)
    explain.add_argument("--plan", metavar="PLAN", help="a file, or a shipped plan's name (default: the model's)")
    explain.add_argument("--mesh", default="tp=8", help="such as pp=2,dp=4,tp=8 (default: tp=8)")
    _add_setting(explain)
    explain.add_argument("--hardware", default="h100-sxm", help=HARDWARE)
    explain.add_argument("--every-layer", action="store_true", help="analyze every layer, not equal layers once")
    explain.add_argument(
        "--record", type=Path, metavar="FILE", help="JSON with recorded lengths and routes: how even their compute is"
    )
    explain.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    explain.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="two plans, or two meshes (with `=`), side by side"
    )
    explain.add_argument(
        "--why-not",
        metavar="MESH",
        help="what another mesh, with the same options, costs beside this one, part by part",
    )
    add_json(explain)
    add_quiet(explain)
    explain.set_defaults(run=_explain)


def _add_fit(verbs: Any) -> None:
    fit = verbs.add_parser("fit", help="search the mesh and options that train a model fastest on N GPUs")
    fit.add_argument("model_argument", nargs="?", metavar="MODEL", help=MODEL)
    fit.add_argument("--model", metavar="MODEL", help="the same")
    fit.add_argument("--gpus", type=int, required=True, metavar="N")
    fit.add_argument("--memory", metavar="SIZE", help="of one GPU, such as 80GB (default: the hardware's)")
    fit.add_argument("--plan", metavar="PLAN", help="a file, or a shipped plan's name (default: the model's)")
    fit.add_argument(
        "--global-batch", type=int, default=1024, metavar="N", help="sequences per step over all GPUs (default: 1024)"
    )
    fit.add_argument("--sequence", type=int, default=4096, metavar="N", help="tokens of a sequence (default: 4096)")
    add_options(fit, dtype="of compute (default: bfloat16); options that are given are not searched")
    fit.add_argument("--optimizer", default="adamw", help="adamw, adam, sgd, sgd_momentum, lion, adafactor, muon")
    fit.add_argument("--hardware", default="h100-sxm", help=HARDWARE)
    _add_system(fit)
    fit.add_argument("--show", type=int, default=5, metavar="N", help="how many meshes (default: 5)")
    _add_overrides(fit)
    add_json(fit)
    add_quiet(fit)
    fit.set_defaults(run=_fit)


def _add_profile(verbs: Any) -> None:
    profile = verbs.add_parser("profile", help="measure this device, and write the hardware profile of explain and fit")
    profile.add_argument("file", type=Path, metavar="FILE", help="the YAML file to write, for --hardware")
    profile.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    profile.add_argument("--base", metavar="PROFILE", help="the shipped profile with this device's data sheet")
    add_json(profile)
    profile.set_defaults(run=_profile)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    set_help = "a field of the config, or an argument of the function: num_hidden_layers=2"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=set_help)


def _add_system(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kernels",
        default="eager",
        help="what computes norms, activations and the loss: eager (what the model's code calls), compiled, fused, ...",
    )
    parser.add_argument(
        "--system", default="parallelize", help="whose step it is: parallelize, megatron, fsdp1, fsdp2, ..."
    )


def _add_setting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch", type=int, metavar="N", help="sequences per data rank and step (default: one per microbatch)"
    )
    parser.add_argument("--sequence", type=int, default=4096, metavar="N", help="tokens of a sequence (default: 4096)")
    add_options(parser, dtype="of compute, such as bfloat16; weights are stored as --weights-dtype")
    parser.add_argument("--weights-dtype", default="float32")
    parser.add_argument("--optimizer", default="adamw", help="adamw, adam, sgd, sgd_momentum, lion, adafactor, muon")
    parser.add_argument("--offload-state", action="store_true", help="optimizer state is in host memory between steps")
    _add_system(parser)
    parser.add_argument("--transport", choices=("nccl", "gloo"), help="backend (default: gloo for cpu, else nccl)")
    _add_overrides(parser)


def setting_of(options: argparse.Namespace, mesh: str) -> Setting:
    """The setting of the command line's options."""
    from parallelize.tools.analysis.cost.setting import Setting

    return Setting(
        MeshSpec.parse(mesh),
        batch=options.batch,
        sequence=options.sequence,
        weights_dtype=options.weights_dtype,
        optimizer=options.optimizer,
        offload_state=options.offload_state,
        kernels=options.kernels,
        system=options.system,
        transport=options.transport or ("gloo" if options.hardware == "cpu" else "nccl"),
        **options_given(options),
    )


def _subject(model: str, plan: Any, overrides: list[str]) -> Subject:
    from parallelize.plan.models.model_source import parse_overrides, read_model
    from parallelize.tools.analysis.subject import Subject

    return Subject(read_model(model, parse_overrides(overrides)), plan)


# -- lint ---------------------------------------------------------------------------------------------------------


def _lint(options: argparse.Namespace) -> int:
    if not options.plans and options.model is None:
        raise PlanError(Problem("nothing-to-lint", "no plan and no model was given", fix="parallelize lint my.yaml"))
    if options.trace and options.model is None:
        fix = "parallelize lint my.yaml --model llama --trace"
        raise PlanError(Problem("nothing-to-trace", "--trace follows a plan through a model's forward", fix=fix))
    findings: list[tuple[str, Problem]] = []
    passed: list[str] = []
    notes: list[str] = []
    for name in options.plans or [None]:
        plan_findings, plan = _lint_plan(name, options)
        findings += plan_findings
        if not any(severity == "error" or _is_unchecked(problem) for severity, problem in plan_findings):
            linted = f"{plan.source}: {len(plan.rules)} rules" if plan is not None else f"{options.model}"
            against = f", {options.model} on {_lint_mesh(plan, options)}" if options.model else ""
            passed.append(f"{linted}, no mistakes{against}")
        notes += _trace_notes(plan, options)
    if options.json:
        data = [{"severity": severity, **as_data(problem)} for severity, problem in findings]
        print_json({"findings": data, **({"trace": notes} if options.trace else {})})
    else:
        for severity, problem in findings:
            if severity == "error":
                report([problem], as_json=False)
            else:
                say(f"warning: {problem}")
        for line in (*passed, *notes):
            print(line)
    if any(severity == "error" for severity, _ in findings):
        return MISTAKE
    return PROBLEM_FOUND if any(_is_unchecked(problem) for _, problem in findings) else FINE


def _trace_notes(plan: Plan | None, options: argparse.Namespace) -> list[str]:
    if not options.trace or options.model is None:
        return []
    from parallelize.tools.analysis.cost.setting import Setting
    from parallelize.tools.analysis.trace_notes import trace_notes

    setting = Setting(_lint_mesh(plan, options), **options_given(options))
    try:
        return list(trace_notes(_subject(options.model, plan, options.set), setting))
    except ParallelizeError:  # which is among the findings
        return []


def _is_unchecked(problem: Problem) -> bool:
    """Whether the planned forward was not checked, so that nothing is known about what it computes."""
    return problem.slug == "cannot-run-forward"


def _lint_plan(name: str | None, options: argparse.Namespace) -> tuple[list[tuple[str, Problem]], Plan | None]:
    """(severity, problem) of one plan: of the file and, where the options name a model, of the file against the
    model."""
    plan = None
    try:
        plan = load_plan(name) if name is not None else None
    except ParallelizeError as error:
        return [("error", problem) for problem in error.problems], None
    if options.model is None:
        return [("error", problem) for problem in _wrong_on_mesh(plan, options)], plan
    from parallelize.tools.analysis.cost.setting import Setting
    from parallelize.tools.analysis.linting import findings

    subject = _subject(options.model, plan, options.set)
    setting = Setting(_lint_mesh(plan, options), **options_given(options))
    return [(finding.severity, finding.problem) for finding in findings(subject, setting, options.world_size)], plan


def _lint_mesh(plan: Plan | None, options: argparse.Namespace) -> MeshSpec:
    """The mesh that is given, or one of two or three ranks. Raises: MeshError `bad-mesh`; what `default_mesh`
    raises."""
    from parallelize.plan.models.model_source import parse_overrides, read_model
    from parallelize.tools.analysis.default_mesh import default_mesh

    if options.mesh is not None:
        return MeshSpec.parse(options.mesh)
    return default_mesh(read_model(options.model, parse_overrides(options.set)), plan, _LINT_SIZES)


def _wrong_on_mesh(plan: Plan | None, options: argparse.Namespace) -> list[Problem]:
    """What needs no model: the options on the mesh that is given. Raises: MeshError `bad-mesh`; ModelError
    `bad-option`."""
    if options.mesh is None:
        return []
    mesh, defaults = MeshSpec.parse(options.mesh), plan.options if plan is not None else None
    return Options(**options_given(options)).complete(defaults).check_on(mesh)


# -- explain ------------------------------------------------------------------------------------------------------


def _explain(options: argparse.Namespace) -> int:
    pairs = _plans_and_meshes(options)
    single = len(pairs) == 1
    explanations = []
    with Progress("explaining", shows_progress(options), len(pairs), unit="settings") as progress:
        for plan, mesh in pairs:
            explanations.append(_explain_setting(options, plan, mesh, advice=single))
            progress()
    if options.html is not None:
        from parallelize.tools.analysis.show.page import as_html, compare_html

        page = as_html(*explanations) if single else compare_html(*explanations)
        options.html.write_text(page, encoding="utf-8")
    if options.json:
        values = [explanation.as_dict() for explanation in explanations]
        print_json(values[0] if single else {"compared": values})
    else:
        from parallelize.tools.analysis.show.terminal_report import as_text, compare_text, why_not_text

        two = compare_text if options.why_not is None else why_not_text
        print(as_text(*explanations) if single else two(*explanations))
    if options.html is not None:
        say(f"written: {options.html}")
    return FINE


def _plans_and_meshes(options: argparse.Namespace) -> list[tuple[str | None, str]]:
    """(plan, mesh) of one or two explanations. Of `--compare`, an argument with `=` is a mesh."""
    if options.why_not is not None:
        return [(options.plan, options.mesh), (options.plan, options.why_not)]
    if options.compare is None:
        return [(options.plan, options.mesh)]
    return [(options.plan, name) if "=" in name else (name, options.mesh) for name in options.compare]


def _explain_setting(options: argparse.Namespace, plan: str | None, mesh: str, advice: bool) -> Explanation:
    from parallelize.tools.analysis.cost.load_balance import read_record
    from parallelize.tools.analysis.cost.machine import load_machine
    from parallelize.tools.analysis.explain import explain_subject

    record = read_record(options.record) if options.record is not None else None
    machine = load_machine(options.hardware)
    subject, setting = _subject(options.model, plan, options.set), setting_of(options, mesh)
    if options.why_not is not None and mesh == options.why_not:
        setting = setting.with_tokens_of(setting_of(options, options.mesh).complete())
    return explain_subject(subject, setting, machine, every_layer=options.every_layer, advice=advice, record=record)


# -- fit ----------------------------------------------------------------------------------------------------------


def _fit(options: argparse.Namespace) -> int:
    from parallelize.state.transaction import gc_paused
    from parallelize.tools.analysis.cost.machine import load_machine
    from parallelize.tools.analysis.fit import fit

    model = options.model or options.model_argument
    if model is None:
        raise PlanError(Problem("no-model", "no model was given", fix="parallelize fit llama-3-8b --gpus 64"))
    for name in ("gpus", "show", "global_batch"):
        if getattr(options, name) < 1:
            what = f"--{name.replace('_', '-')} {getattr(options, name)}"
            raise PlanError(Problem("bad-option", what, fix="give 1 or more"))
    with gc_paused(), Progress("fitting", shows_progress(options), unit="meshes") as progress:
        fitted = fit(
            _subject(model, options.plan, options.set),
            options.gpus,
            load_machine(options.hardware),
            memory_bytes=_bytes(options.memory),
            global_batch=options.global_batch,
            sequence=options.sequence,
            optimizer=options.optimizer,
            kernels=options.kernels,
            system=options.system,
            most=options.show,
            tell=lambda text: progress(),
            **options_given(options),
        )
    if options.json:
        print_json(asdict(fitted))
    else:
        print("\n".join(_fitted_lines(fitted, model, options)))
    return FINE


def _bytes(text: str | None) -> float | None:
    """Bytes of a size such as `80GB`, `141e9` or `40GiB`. Raises: PlanError `bad-option`."""
    if text is None:
        return None
    units = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    number, unit = text.strip().upper(), 1.0
    for name, size in units.items():
        if number.endswith(name):
            number, unit = number.removesuffix(name).strip(), float(size)
            break
    try:
        size = float(number) * unit
    except ValueError as error:
        raise PlanError(Problem("bad-option", f"--memory {text!r}", fix="write 80GB")) from error
    if not size > 0:
        raise PlanError(Problem("bad-option", f"--memory {text!r}", fix="write 80GB"))
    return size


def _fitted_lines(fitted: Fitted, model: str, options: argparse.Namespace) -> Sequence[str]:
    from parallelize.state.report_tables import table
    from parallelize.tools.analysis.cost.machine import load_machine

    folds = any(candidate.setting.ep > 1 for candidate in fitted.best)
    head = ("mesh", *(["ep"] if folds else []), "zero", "recompute", "schedule", "microbatches")
    head += ("step (estimate)", "90% of such steps", "MFU", "memory")
    rows = []
    for candidate in fitted.best:
        setting = candidate.setting
        rows.append(
            (
                str(setting.mesh),
                *([str(setting.ep)] if folds else []),
                str(setting.zero),
                setting.recompute,
                setting.schedule if setting.size("pp") > 1 else "-",
                f"{setting.step_microbatches} x {setting.microbatch_size}",
                f"{candidate.step_s:.3f} s",
                f"{candidate.low_s:.3f} to {candidate.high_s:.3f} s",
                f"{candidate.mfu:.1%}",
                f"{candidate.device_bytes / 1e9:.1f} GB",
            )
        )
    title = (
        f"{model} on {options.gpus} x {options.hardware}, "
        f"{options.global_batch} sequences of {options.sequence} tokens per step"
    )
    modes = " and ".join(name.removesuffix("_parallel") for name in fitted.modes)
    over_tp = f"with {modes} parallelism over tp" if modes else "the plan serves neither sequence nor loss parallelism"
    limits = (
        f"{fitted.tried} settings tried; memory is that of the device, of {fitted.memory_bytes / 1e9:.0f} GB, with its "
        f"context; {options.kernels} kernels; {over_tp}"
    )
    reasons = [f"  {rejected.count:>4}  {rejected.reason} (such as {rejected.example})" for rejected in fitted.rejected]
    machine = load_machine(options.hardware)
    note = "`parallelize explain` shows the parts of each, and `--why-not` what another mesh costs."
    if machine.not_scored:
        note = f"times on this hardware were not scored: {machine.not_scored}. {note}"
    return [title, limits, "", *table(head, rows), "", note, "", "not shown:", *reasons]


# -- profile ------------------------------------------------------------------------------------------------------


def _profile(options: argparse.Namespace) -> int:
    from parallelize.tools.analysis.profiling import profile

    found = profile(options.file, options.device, options.base)
    if options.json:
        print_json(found)
    else:
        for key, value in found.items():
            print(f"{key}: {value:.3g}")
        say(f"written: {options.file}")
    return FINE
