"""How evenly the compute of a step is spread over ranks, for recorded lengths and routes: before and after balancing.

Balance is the mean over ranks of the operations that they compute, over the largest: 1 is even, and a rank waits for
the rest of a step. Rows, stages and experts are balanced by the same functions that deal them in training. Arithmetic,
torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from parallelize.base.errors import ModelError, ParallelizeError, Problem
from parallelize.base.files.strict_json import read_json
from parallelize.base.partition import balance_of, balanced_parts, best_balance
from parallelize.plan.expert_order import on_ranks
from parallelize.plan.stages import split_evenly
from parallelize.training.data.balanced_deal import Deal, RowCosts, balanced_deal, consecutive_deal

ENOUGH = 0.95


@dataclass(frozen=True)
class LoadRecord:
    """What a run has recorded of its data and its routers: what `explain(..., record=)` balances.

    Attributes:
        lengths: tokens of each sample, in the order of the samples.
        routes: of a mixture: choices [tokens, layers, k], as `RecordedRoutes.gather()` gives them, or numbers of tokens
            [layers, experts].
        samples: of a global batch. Default: `batch` of the setting for each data rank.
        joined: samples are documents that are joined to one row for each microbatch (`JoinedRows`).
        lockstep: as `GlobalBatches` takes it.
    """

    lengths: Sequence[int] = ()
    routes: Any = None
    samples: int | None = None
    joined: bool = False
    lockstep: bool = False


def read_record(path: Path) -> LoadRecord:
    """A record from a JSON file: the fields of `LoadRecord`, or a list of lengths alone. Raises: ModelError
    `bad-record`."""
    try:
        values = read_json(path.read_bytes(), str(path))
        return LoadRecord(**values) if isinstance(values, dict) else LoadRecord(lengths=list(values))
    except (OSError, TypeError, ParallelizeError) as error:
        what = f"{path} is no record: {str(error).splitlines()[0]}"
        fix = '{"lengths": [...], "routes": [[...], ...], "samples": 512, "joined": true}, or a list of lengths'
        raise _bad(what, fix) from None


@dataclass(frozen=True)
class UnitLoad:
    """Operations of one rank in a pipeline unit, forward and backward.

    Attributes:
        token: for a token of the data rank's rows; in `expert` those of its experts, which `token` includes.
        pair: for a squared token of a document.
        layers: indices of its modules of experts among all of the model.
    """

    unit: str
    token: float
    pair: float
    expert: float = 0.0
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class LoadMesh:
    """Ranks and order of a setting. shared: ranks of cp and tp, which share the rows of a data rank."""

    data_ranks: int
    shared: int
    ep: int
    microbatches: int
    stage_ranks: tuple[int, ...]
    starts: tuple[int, ...]
    num_first: int
    num_layers: int


@dataclass(frozen=True)
class BalanceLine:
    """The balance of one thing.

    Attributes:
        name: "rows", "microbatches", "stages", "experts" or "all together".
        before: as the package does without being asked: samples in order, stages by parameters, experts in order.
        after: balanced. best: that no choice exceeds; 0: it is not known.
        bound: what bounds it, as text, where `after` is below 0.95.
    """

    name: str
    before: float
    after: float
    best: float = 0.0
    bound: str = ""


@dataclass(frozen=True)
class LoadBalance:
    """What balances recorded lengths and routes, and how much.

    Attributes:
        lines: the balance of each thing, and of all together.
        row_costs: for `GlobalBatches(costs=row_costs.of(lengths))`.
        stage_costs: for `parallelize_model(costs=)`: by pipeline unit, at the mean of the recorded lengths. Empty
            without `pp`.
        expert_placement: for the option of that name. Empty without `ep` and routes.
    """

    lines: tuple[BalanceLine, ...]
    row_costs: RowCosts
    stage_costs: Mapping[str, float] = field(default_factory=dict)
    expert_placement: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> BalanceLine:
        return next(line for line in self.lines if line.name == name)


def balance_load(
    record: LoadRecord, units: Sequence[UnitLoad], experts: Mapping[str, int], mesh: LoadMesh, samples: int
) -> LoadBalance:
    """Balance rows, stages and experts, and say what each brings.

    Args:
        units: in calling order. experts: name of each module of experts -> their number.
        samples: of a global batch.

    Raises: ModelError `bad-record`; ShapeError `indivisible-batch`.
    """
    costs = row_costs(units, mesh)
    steps = _steps(record, samples)
    counts = token_counts(record.routes, experts) if record.routes is not None else None
    orders = placed(counts, mesh.ep) if counts is not None and mesh.ep > 1 else None
    starts = _balanced_starts(units, mesh, _mean_length(steps)) if len(mesh.starts) > 1 else mesh.starts
    deals = [_deals(step, costs, mesh, record) for step in steps]
    lines = [_rows(steps, deals, costs, record.joined)]
    if mesh.microbatches > 1:
        lines.append(_microbatches(steps, deals, costs, record.lockstep))
    if len(mesh.starts) > 1:
        lines.append(_stages(units, mesh, starts, _mean_length(steps)))
    usual = [tuple(range(len(layer))) for layer in counts] if counts is not None else []
    if counts is not None and orders is not None:
        lines.append(_experts(counts, usual, orders, mesh.ep))
    even = [[1 / mesh.ep] * mesh.ep for _ in experts]
    before = _Together(units, mesh, mesh.starts, _shares(counts, usual, mesh.ep) if counts is not None else even)
    after = _Together(units, mesh, starts, _shares(counts, orders or usual, mesh.ep) if counts is not None else even)
    together = (
        _over_steps(before.ranks(_tokens_of(step, deal[0])) for step, deal in zip(steps, deals, strict=True)),
        _over_steps(after.ranks(_tokens_of(step, deal[1])) for step, deal in zip(steps, deals, strict=True)),
    )
    lines.append(BalanceLine("all together", *together))
    mean = _mean_length(steps)
    return LoadBalance(
        tuple(lines),
        costs,
        {unit.unit: unit.token * mean[0] + unit.pair * mean[1] for unit in units} if len(mesh.starts) > 1 else {},
        dict(zip(experts, orders, strict=True)) if orders is not None else {},
    )


def row_costs(units: Sequence[UnitLoad], mesh: LoadMesh) -> RowCosts:
    """What a row costs the ranks of its data rank.

    Where `ep` goes over several data ranks, experts compute the tokens of all of them: these are no cost of a row.
    """
    pooled = mesh.ep > mesh.shared
    token = sum(unit.token - (unit.expert if pooled else 0.0) for unit in units)
    return RowCosts(token, sum(unit.pair for unit in units))


# -- rows ----------------------------------------------------------------------------------------------------------


def _steps(record: LoadRecord, samples: int) -> list[list[int]]:
    """The lengths of each full global batch."""
    lengths = [int(length) for length in record.lengths]
    if len(lengths) < samples or min(lengths, default=0) < 1:
        what = (
            f"{len(lengths)} lengths, the shortest {min(lengths, default=0)}, for global batches of {samples} samples"
        )
        raise _bad(what, "record=LoadRecord(lengths=[...]) of one global batch or more, each 1 or more")
    return [lengths[start : start + samples] for start in range(0, len(lengths) - samples + 1, samples)]


def _deals(lengths: Sequence[int], costs: RowCosts, mesh: LoadMesh, record: LoadRecord) -> tuple[Deal, Deal]:
    """The samples of a step in their order, and balanced."""
    before = consecutive_deal(len(lengths), mesh.data_ranks, mesh.microbatches)
    ways = {"joined": record.joined, "lockstep": record.lockstep}
    return before, balanced_deal(costs.of(lengths), mesh.data_ranks, mesh.microbatches, **ways)


def _rows(steps: Sequence[list[int]], deals: Sequence[tuple[Deal, Deal]], costs: RowCosts, joined: bool) -> BalanceLine:
    def sums(step: list[int], deal: Deal) -> list[float]:
        of = costs.of(step)
        return [sum(of[n] for part in rank for n in part) for rank in deal]

    before, after = (_over_steps(sums(step, deal[i]) for step, deal in zip(steps, deals, strict=True)) for i in (0, 1))
    ranks = len(deals[0][0])
    best = _mean_of_best([(costs.of(step), ranks) for step in steps], best_balance)
    longest, mean = max(map(max, steps)), sum(sum(costs.of(step)) for step in steps) / len(steps) / ranks
    share = costs.of([longest])[0] / mean
    bound = (
        f"the longest sample, {longest} tokens, costs {share:.2f} of a rank's mean: more samples, or cp"
        if share > 1
        else ""
    )
    if not bound and not joined:
        bound = "each rank gets as many samples: joined=True leaves their number free"
    return _line("rows", before, after, best, bound)


def _microbatches(
    steps: Sequence[list[int]], deals: Sequence[tuple[Deal, Deal]], costs: RowCosts, lockstep: bool
) -> BalanceLine:
    """Where data ranks wait for each other in each microbatch, as those of ZeRO 2 and 3 do."""

    def parts(index: int) -> Iterator[list[float]]:
        for step, deal in zip(steps, deals, strict=True):
            of = costs.of(step)
            for microbatch in zip(*deal[index], strict=True):
                yield [sum(of[n] for n in part) for part in microbatch]

    bound = "" if lockstep else "lockstep=True makes each microbatch even over ranks, with longer rows"
    return _line("microbatches", _over_steps(parts(0)), _over_steps(parts(1)), 0.0, bound)


def _tokens_of(lengths: Sequence[int], deal: Deal) -> list[tuple[float, float]]:
    """(tokens, squared tokens of documents) of each data rank."""
    rows = [[lengths[n] for part in rank for n in part] for rank in deal]
    return [(float(sum(row)), float(sum(n * n for n in row))) for row in rows]


def _mean_length(steps: Sequence[list[int]]) -> tuple[float, float]:
    """(tokens, squared tokens) of a sample, on average."""
    count = sum(map(len, steps))
    return sum(map(sum, steps)) / count, sum(n * n for step in steps for n in step) / count


# -- stages --------------------------------------------------------------------------------------------------------


def _unit_costs(units: Sequence[UnitLoad], mean: tuple[float, float]) -> list[float]:
    return [unit.token * mean[0] + unit.pair * mean[1] for unit in units]


def _balanced_starts(units: Sequence[UnitLoad], mesh: LoadMesh, mean: tuple[float, float]) -> tuple[int, ...]:
    """Where stages begin, as `cut_stages` decides with these costs."""
    costs, first, last = _unit_costs(units, mean), mesh.num_first, mesh.num_first + mesh.num_layers
    layers = costs[first:last]
    layers[0] += sum(costs[:first])
    layers[-1] += sum(costs[last:])
    return tuple(first + layer if layer else 0 for layer in split_evenly(layers, len(mesh.starts)))


def _of_ranks(values: Sequence[float], mesh: LoadMesh, starts: tuple[int, ...]) -> list[float]:
    """Sums of what units have over those of each pp rank."""
    sums = [0.0] * (max(mesh.stage_ranks) + 1)
    for rank, (start, stop) in zip(mesh.stage_ranks, pairwise((*starts, len(values))), strict=True):
        sums[rank] += sum(values[start:stop])
    return sums


def _stages(
    units: Sequence[UnitLoad], mesh: LoadMesh, starts: tuple[int, ...], mean: tuple[float, float]
) -> BalanceLine:
    costs = _unit_costs(units, mean)
    before, after = (balance_of(_of_ranks(costs, mesh, each)) for each in (mesh.starts, starts))
    share = len({*mesh.stage_ranks}) / sum(costs)
    largest = max(range(len(units)), key=lambda n: costs[n])
    bound = (
        f"{mesh.num_layers} layers are not divided, and {units[largest].unit} alone has "
        f"{costs[largest] * share:.2f} of a rank's mean"
    )
    return _line("stages", before, after, after, bound)


# -- experts -------------------------------------------------------------------------------------------------------


def token_counts(routes: Any, experts: Mapping[str, int]) -> list[list[float]]:
    """Tokens of each expert in each layer. Raises: ModelError `bad-record`."""
    values = routes.tolist() if hasattr(routes, "tolist") else [list(row) for row in routes]
    if values and values[0] and isinstance(values[0][0], list | tuple):
        counts = [[0.0] * count for count in experts.values()]
        for token in values:
            for layer, chosen in enumerate(token[: len(counts)]):
                for expert in chosen:
                    if 0 <= expert < len(counts[layer]):
                        counts[layer][expert] += 1
        widths = [len(values[0])]
        fits = widths[0] == len(counts)
    else:
        counts = [[float(n) for n in row] for row in values]
        widths = [len(row) for row in counts]
        fits = widths == list(experts.values())
    if not fits or not experts or not all(sum(row) > 0 for row in counts):
        what = f"routes of {len(widths)} layers with {widths[:1]} entries, for {len(experts)} layers with experts"
        raise _bad(what, "choices [tokens, layers, k], or numbers of tokens [layers, experts], of all its layers")
    return counts


def placed(counts: Sequence[Sequence[float]], ep: int) -> list[tuple[int, ...]]:
    """An order of experts for each layer, with as many on each rank of `ep`, that balances their tokens.

    In each layer the rank with the fewest tokens so far gets the most. Where `ep` does not divide the experts, they
    stay in their order.
    """
    orders, totals = [], [0.0] * ep
    for layer in counts:
        if len(layer) % ep:
            orders.append(tuple(range(len(layer))))
            continue
        shifted = [count + 1e-9 * (1 + sum(layer)) for count in layer]  # costs are positive
        parts = balanced_parts(shifted, ep, equal=True)
        ranks = sorted(range(ep), key=lambda rank: (totals[rank], rank))
        by_rank = dict(zip(ranks, parts, strict=True))
        for rank, part in by_rank.items():
            totals[rank] += sum(layer[n] for n in part) / sum(layer)
        orders.append(tuple(n for rank in range(ep) for n in by_rank[rank]))
    return orders


def _shares(counts: list[list[float]], orders: Sequence[tuple[int, ...]], ep: int) -> list[list[float]]:
    """Of each layer, the fraction of choices that each rank of `ep` computes."""
    return [
        [sum(layer[n] for n in experts) / sum(layer) for experts in on_ranks(order, ep)]
        for layer, order in zip(counts, orders, strict=True)
    ]


def _experts(
    counts: list[list[float]], usual: Sequence[tuple[int, ...]], orders: Sequence[tuple[int, ...]], ep: int
) -> BalanceLine:
    """Ranks of `ep` wait for each other in each layer."""
    before, after = (_over_steps(_shares(counts, each, ep)) for each in (usual, orders))
    best = _mean_of_best([(layer, ep) for layer in counts], _best_of_experts)
    hottest = [max(layer) / sum(layer) for layer in counts]
    layer = max(range(len(hottest)), key=lambda n: hottest[n])
    bound = (
        f"one expert of layer {layer} with experts gets {hottest[layer]:.3f} of the choices, and 1/ep is {1 / ep:.3f}"
    )
    if any(len(layer) % ep for layer in counts):
        bound = f"ep {ep} does not divide the experts, which stay in their order"
    return _line("experts", before, after, best, bound)


def _best_of_experts(layer: Sequence[float], ep: int) -> float:
    """The rank of the hottest expert has the coldest ones beside it, at best."""
    ordered, mean = sorted(layer, reverse=True), sum(layer) / ep
    beside = max(len(layer) // ep - 1, 0)
    return min(1.0, mean / (ordered[0] + sum(ordered[len(ordered) - beside :]))) if mean else 1.0


# -- all together --------------------------------------------------------------------------------------------------


class _Together:
    """Operations of every rank in a step. shares: of the choices of each layer, by rank of `ep`."""

    def __init__(
        self, units: Sequence[UnitLoad], mesh: LoadMesh, starts: tuple[int, ...], shares: Sequence[Sequence[float]]
    ):
        self.mesh = mesh
        self.token = _of_ranks([unit.token - unit.expert for unit in units], mesh, starts)
        self.pair = _of_ranks([unit.pair for unit in units], mesh, starts)

        def of_experts(unit: UnitLoad, e: int) -> float:
            return sum(unit.expert / len(unit.layers) * shares[n][e] * mesh.ep for n in unit.layers)

        self.expert = [_of_ranks([of_experts(unit, e) for unit in units], mesh, starts) for e in range(mesh.ep)]

    def ranks(self, tokens: Sequence[tuple[float, float]]) -> list[float]:
        """tokens: (tokens, squared tokens) of each data rank."""
        flat = [(count, squares) for count, squares in tokens for _ in range(self.mesh.shared)]
        sums, ep = [], self.mesh.ep
        for start in range(0, len(flat), ep):
            group = flat[start : start + ep]  # that has all experts together
            mean = sum(count for count, _ in group) / len(group)
            for e, (count, squares) in enumerate(group):
                parts = zip(self.token, self.pair, self.expert[e], strict=True)
                sums += [token * count + pair * squares + expert * mean for token, pair, expert in parts]
        return sums


# -- lines ---------------------------------------------------------------------------------------------------------


def _over_steps(sums: Any) -> float:
    """The balance of several steps, or layers, that wait one after another."""
    listed = [list(each) for each in sums]
    largest = sum(map(max, listed))
    return sum(sum(each) / len(each) for each in listed) / largest if largest else 1.0


def _mean_of_best(parts: Sequence[tuple[Sequence[float], int]], best: Callable[[Sequence[float], int], float]) -> float:
    """The best balance of several steps or layers together."""
    means = [sum(costs) / count for costs, count in parts]
    largest = sum(mean / best(costs, count) for mean, (costs, count) in zip(means, parts, strict=True))
    return sum(means) / largest if largest else 1.0


def _line(name: str, before: float, after: float, best: float, bound: str) -> BalanceLine:
    return BalanceLine(name, before, after, best, bound if after < ENOUGH else "")


def _bad(what: str, fix: str) -> ModelError:
    return ModelError(Problem("bad-record", what, fix=fix))
