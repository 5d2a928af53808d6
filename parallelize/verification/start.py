"""A verification from its request to its outcome, on threads of this process or as one rank of a group that is there."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelize.errors import HandshakeError, ModelError, Problem
from parallelize.groups import build_mesh
from parallelize.verification.blame import blame
from parallelize.verification.case import Case, Mode, Request, build_cases
from parallelize.verification.compare import Errors
from parallelize.verification.reference import check_repeats, is_a_sum, reference, watch_reference
from parallelize.verification.report import Difference
from parallelize.verification.run import Found, UnappliedError, is_auto, parallel
from parallelize.verification.tolerance import bound_of
from parallelize.verification.trials import Trial, trials
from parallelize.verification.watch import Trace

Told = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What all ranks together found in one trial."""

    mode: Mode
    errors: Errors
    difference: Difference | None


@dataclass(frozen=True)
class Outcomes:
    plan: str
    sizes: dict[str, int]
    bound: float
    each: list[Outcome]
    unseen: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return all(one.errors.equal(self.bound) for one in self.each)


class Run:
    """The trials with their references, on whoever has built them."""

    def __init__(self, request: Request, device: str):
        self.request = request
        variants = [(cases, [reference(case) for case in cases]) for cases in build_cases(request, device)]
        self.case: Case = variants[0][0][0]
        tokens = max(case.rows * case.length for cases, _ in variants for case in cases)
        self.bound = bound_of(self.case.model, self.case.dtype, tokens, request.mesh.world_size)
        if not request.full_size:
            check_repeats(self.case, variants[0][1][0], self.bound)
        self.cuts = request.full_size or is_a_sum(self.case, variants[0][1][0], self.bound)
        if not self.cuts and request.data_ranks * request.fewest_microbatches > 1:
            what = f"the loss of the whole batch is not the sum over its parts, and {request.mesh} computes it in parts"
            fix = "have `loss` return the sum over tokens or rows, and `count` what it is divided by"
            raise ModelError(Problem("loss-no-sum", what, fix=fix))
        self.trials = trials(variants, self.cuts)

    def outcome(self, trial: Trial, found: list[list[Found]]) -> Outcome:
        """Of what every rank found; the first batch on which they differ is looked into."""
        errors, bad = Errors(), None
        for at in range(max(map(len, found))):
            one = _merged([mine[at].errors for mine in found if len(mine) > at])
            errors.merge(one)
            if bad is None and not one.equal(self.bound):
                bad = at, one
        if bad is None:
            return Outcome(trial.mode, errors, None)
        at, wrong = bad
        case = trial.cases[at]
        seen = watch_reference(case, trial.mode)
        traces = [mine[at].trace if len(mine) > at else Trace() for mine in found]
        return Outcome(trial.mode, errors, blame(case, trial.mode, wrong, seen, traces, self.bound))

    def outcomes(self, each: list[Outcome]) -> Outcomes:
        return Outcomes(_plan_name(self.case), sizes_of(self.case), self.bound, each, self._unseen())

    def _unseen(self) -> tuple[str, ...]:
        """What only a look at the model shows that it was not looked at."""
        found = [] if self.cuts and self.case.can_cut else ["several microbatches: the loss or the batch has no parts"]
        pairs = [
            (trial.mode, case, want)
            for trial in self.trials
            for case, want in zip(trial.cases, trial.wants, strict=True)
        ]
        if any(not case.comparable(one, mode) for mode, case, want in pairs for one in want.outputs):
            found.append("outputs without a row for each of the batch's")
        if is_auto(self.case):
            found.append("when `overlap=auto` overlaps: it was run as `chunked`, because at these sizes it never would")
        names = inspect.signature(self.case.model.forward).parameters
        found += ["token types"] if "token_type_ids" in names and "token_type_ids" not in self.case.inputs else []
        found += ["buffers"] if any(True for _ in self.case.model.buffers()) else []
        return tuple(found)


def _merged(each: list[Errors]) -> Errors:
    found = Errors()
    for one in each:
        found.merge(one)
    return found


def _plan_name(case: Case) -> str:
    given = case.request.plan
    return case.plan.name if case.plan is not None else "none" if given is None else type(given).__name__


def sizes_of(case: Case) -> dict[str, int]:
    parameters = sum(parameter.numel() for parameter in case.model.parameters())
    config, found = getattr(case.model, "config", None), {"parameters": parameters}
    for label, name in (
        ("layers", "num_hidden_layers"),
        ("hidden", "hidden_size"),
        ("heads", "num_attention_heads"),
        ("kv heads", "num_key_value_heads"),
        ("inner", "intermediate_size"),
        ("vocabulary", "vocab_size"),
    ):
        if isinstance(value := getattr(config, name, None), int):
            found[label] = value
    return {**found, "batch": case.rows, "sequence": case.length}


def on_threads(request: Request, tell: Told) -> Outcomes:
    from parallelize.threads import run_ranks

    kept = torch.get_num_threads()
    torch.set_num_threads(1)  # the ranks are threads already
    try:
        run = Run(request, "cpu")
        each = []
        for trial in run.trials:
            tell(f"{trial.mode} on {request.mesh}")

            def body(_: int, trial: Trial = trial) -> list[Found]:
                return parallel(trial, build_mesh("cpu", **dict(request.mesh.axes)), run.bound)

            try:
                found = run_ranks(request.mesh.world_size, body, request.timeout_s)
            except UnappliedError as error:
                each.append(_unapplied(trial, error))
                break
            each.append(run.outcome(trial, found))
        return run.outcomes(each)
    finally:
        torch.set_num_threads(kept)


def _unapplied(trial: Trial, error: UnappliedError) -> Outcome:
    problem = error.problems[0]
    difference = Difference(str(trial.mode), "parallelize_model", "raised", problem.what, where=problem.where)
    return Outcome(trial.mode, Errors(failed=problem.what), difference)


def on_this_rank(request: Request, device: str, store: Any, tell: Told) -> Outcomes:
    """The part of one process of a group that has been initialised; the same outcome on every rank.

    store: of this run alone, for what must not depend on collectives that match.
    """
    run = Run(request, device)
    kind = torch.device(device).type
    each: list[Outcome] = []
    for number, trial in enumerate(run.trials):
        tell(f"{trial.mode} on {request.mesh}")
        mine = parallel(trial, build_mesh(kind, **dict(request.mesh.axes)), run.bound)
        told = _exchange(store, f"errors/{number}", [one.errors for one in mine], request.timeout_s)
        found = [[Found(one, Trace()) for one in errors] for errors in told]
        if not all(one.equal(run.bound) for errors in told for one in errors):
            traces = _exchange(store, f"traces/{number}", [one.trace.on_cpu() for one in mine], request.timeout_s)
            found = [[Found(*one) for one in zip(*both, strict=True)] for both in zip(told, traces, strict=True)]
        each.append(run.outcome(trial, found))
        if each[-1].errors.failed:
            break  # a network on which a rank was lost carries nothing more
    return run.outcomes(each)


def _exchange(store: Any, key: str, value: Any, timeout_s: float) -> list[Any]:
    """Every rank's value, through the store: it works where a collective has failed."""
    store.set(f"{key}/{dist.get_rank()}", pickle.dumps(value))
    keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistError):
        missing = [rank for rank, one in enumerate(keys) if not store.check([one])]
        what = f"ranks {missing} did not answer in {timeout_s:g} s"
        raise HandshakeError(Problem("ranks-missing", what, fix="look at those ranks' own errors")) from None
    return [pickle.loads(store.get(one)) for one in keys]
