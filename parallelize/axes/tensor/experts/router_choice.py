"""Routers of `transformers` whose choices are replaced: the call of `torch.topk` by which they choose, and its weights.

    torch.topk(scores [tokens, experts], k)  ->  (scores at the replacing choices, the choices)    each [tokens, k]

So the stock router computes the weights of other choices from its own scores, with its own code and gradient. Tokens
without a replacing choice are routed as before. A router that first leaves groups of experts out, by `masked_fill`,
leaves none out for tokens whose choices are replaced: had it made these choices, it would not have left them out.

A recomputed unit replays the choices of its forward, all of them, also after `replay_routes` has ended.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize.axes.tensor.local_inputs import own_attribute, parsed, receiver
from parallelize.base.errors import ModelError, Problem, ShapeError, short_list
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops.replay_cache import in_recompute, is_remembered, remembered
from parallelize.state.forward_rows import ForwardRows
from parallelize.state.forward_steps import ROUTES, add_step, run_inner
from parallelize.state.records import applied

T = torch.Tensor
_TOPK = (torch.topk, torch.Tensor.topk)
_MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill, torch.Tensor.masked_fill_)
TOPK = "topk"
_ROUTES, _CHOICES = "replacing choices", "choices"


class ForwardRoutes:
    """The choices that replace those of one forward.

    Args:
        rows: the tokens of the forward on this rank.
        routes: [tokens of the inputs, layers, k]; -1 for tokens that are routed as before.
    """

    def __init__(self, rows: ForwardRows, routes: T):
        self.rows, self.routes = rows, routes

    def of_layer(self, layer: int, count: int, device: torch.device) -> T:
        """[count, k], int64: those of the rows of a router. Raises: ShapeError `unknown-rows`."""
        indices = self.rows.indices(count, device)
        return self.routes[:, layer].to(device)[indices.clamp(min=0)].long()  # of rows that only pad a shard, any


class RouteReplay:
    """What all routers of one model read.

    Attributes:
        active: whether a block of `replay_routes` runs.
        forward: the choices of the running forward; None: the routers choose.
    """

    def __init__(self) -> None:
        self.active = False
        self.forward: ForwardRoutes | None = None

    def __deepcopy__(self, memo: dict) -> RouteReplay:
        return memo.setdefault(id(self), RouteReplay())


class ReplayedRouter:
    """The state of one router; stored on its module.

    Args:
        fqn: its name.
        layer: its index among the layers with experts.
        count: the number of its experts.
        replay: that of its model.
    """

    def __init__(self, fqn: str, layer: int, count: int, replay: RouteReplay):
        self.fqn, self.layer, self.count, self.replay = fqn, layer, count, replay


def install_router(fqn: str, module: nn.Module, layer: int, count: int, replay: RouteReplay) -> None:
    """Let a router take its choices from `replay`. Nothing is changed where it does so already.

    It stays so: a backward after `replay_routes` recomputes with the choices of its forward.
    """
    if applied(module).router is None:
        add_step(module, ROUTES, _forward, router=ReplayedRouter(fqn, layer, count, replay))


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    router: ReplayedRouter = self._applied.router
    routes = router.replay.forward
    if in_recompute():
        routes, replaces = None, is_remembered(_ROUTES)
    elif router.replay.active and private.backward_id() != -1:
        raise recomputed_elsewhere(router.fqn)
    else:
        replaces = routes is not None
    if not replaces:
        return run_inner(self, ROUTES, args, kwargs)
    cls: Any = type(self)
    if _calls(cls, FUNCTION):
        return _mixed(router, routes, self.training, partial(run_inner, self, ROUTES, args, kwargs))
    with _ReplacedChoices(router, routes) as mode:
        out = run_inner(self, ROUTES, args, kwargs)
    if mode.calls != 1:
        what = (
            f"{router.fqn} calls torch.topk {mode.calls} times with scores [tokens, {router.count}], and chooses once"
        )
        raise ModelError(
            Problem("unknown-router", what, fix="a router of `transformers`, whose one such call is its choice")
        )
    return out


def _mixed(router: ReplayedRouter, routes: ForwardRoutes | None, training: bool, run: Callable[[], Any]) -> Any:
    """The output of a router that chooses by maxima. Raises: ModelError `unknown-router`."""
    choices = _ReplacedChoices(router, routes)

    @torch.no_grad()
    def decide(replacing: T, own: T) -> T:
        return remembered(_CHOICES, lambda: torch.where(replacing < 0, own, replacing))

    with ReplacedMaxima(router.count, training, choices.replacing, decide) as mode:
        out = run()
    if choices.k is not None and not mode.has_chosen(choices.k):
        what = f"{router.fqn} took {mode.maxima} maxima and {mode.masks} masks of its scores for {choices.k} choices"
        fix = f"the router of Phi 3.5, of which {FUNCTION} takes one mask for each choice"
        raise ModelError(Problem("unknown-router", what, fix=fix))
    return out


def recomputed_elsewhere(name: str) -> ModelError:
    what = f"{name} is recomputed by code that does not say which forward it belongs to, so its choices are not known"
    return ModelError(
        Problem("foreign-recompute", what, fix="parallelize.recompute, and model.gradient_checkpointing_disable()")
    )


class _ReplacedChoices(TorchFunctionMode):
    """Replaces the choice within one call of a router. routes: None in a replay, which has those of the forward.

    Attributes:
        calls: how often the router has chosen.
    """

    def __init__(self, router: ReplayedRouter, routes: ForwardRoutes | None):
        super().__init__()
        self.router, self.routes, self.calls = router, routes, 0
        self._replacing: T | None = None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK:
            scores, k = _topk_arguments(*args, **kwargs)
            if self._are_scores(scores):
                return self._choose(scores, k, lambda: func(*args, **kwargs).indices)
        elif func in _MASKED_FILL and args and self._are_scores(args[0]):
            return func(*self._without_mask(*args, **kwargs))
        return func(*args, **kwargs)

    def _are_scores(self, x: T) -> bool:
        return x.ndim == 2 and x.shape[1] == self.router.count

    def _without_mask(self, scores: T, mask: T, value: Any) -> tuple[T, T, Any]:
        """The arguments of `masked_fill` with a mask that leaves nothing out for tokens whose choices are replaced."""
        return scores, mask & (self.replacing(scores)[:, :1] < 0), value

    def _choose(self, scores: T, k: int, choose: Callable[[], T]) -> Any:
        self.calls += 1
        replacing = self.replacing(scores)
        if replacing.shape[1] != k:
            raise wrong_k(self.router.fqn, k, replacing.shape[1])

        @torch.no_grad()  # nothing is saved for backward that a replay, which does not choose, would not save
        def chosen() -> T:
            return torch.where(replacing < 0, choose(), replacing)

        choices = remembered(_CHOICES, chosen)
        return torch.return_types.topk((scores.gather(1, choices), choices))

    @property
    def k(self) -> int | None:
        """The number of choices of a token; None before the router has chosen."""
        return None if self._replacing is None else self._replacing.shape[1]

    def replacing(self, scores: T) -> T:
        """[tokens, k], in a replay those of the forward."""
        if self._replacing is None:
            routes, layer = self.routes, self.router.layer

            def of_forward() -> T:
                assert routes is not None
                return routes.of_layer(layer, len(scores), scores.device)

            self._replacing = remembered(_ROUTES, of_forward)
        return self._replacing


def _topk_arguments(input: T, k: int, *_: Any, **__: Any) -> tuple[T, int]:  # by the names of torch
    return input, k


def wrong_k(name: str, k: int, of_routes: int) -> ShapeError:
    what = f"{name} chooses {k} experts for a token, and the routes have {of_routes}"
    return ShapeError(Problem("wrong-routes", what, fix=f"routes [tokens, layers, {k}] of the same model"))


# -- which module chooses ---------------------------------------------------------------------------------------------


def router_of(model: nn.Module, experts: str) -> tuple[str, nn.Module]:
    """(name, module) of the router of experts: the module beside them whose forward calls `topk`; else the one that
    contains both.

    Args:
        experts: the name of the module of experts.

    Raises: ModelError `unknown-router`.
    """
    block = experts.rpartition(".")[0]
    beside = {f"{block}.{name}".strip("."): inner for name, inner in model.get_submodule(block).named_modules() if name}
    classes: dict[str, Any] = {
        fqn: type(inner) for fqn, inner in beside.items() if not f"{fqn}.".startswith(f"{experts}.")
    }
    choosing = {fqn: beside[fqn] for fqn, cls in classes.items() if _calls(cls, TOPK) or _calls(cls, FUNCTION)}
    around: Any = type(model.get_submodule(block))
    if not choosing and block and _calls(around, TOPK):  # by the logits of the module beside
        choosing = {block: model.get_submodule(block)}
    if len(choosing) != 1:
        names = short_list(list(choosing)) or "none"
        what = f"the router of {experts} is not known: modules beside it whose forward calls torch.topk: {names}"
        fix = (
            "routers that choose by torch.topk; those that choose by token ids, or by other functions, are not replayed"
        )
        raise ModelError(Problem("unknown-router", what, fix=fix))
    ((fqn, router),) = choosing.items()
    if applied(router).recompute_unit is not None:
        what = f"{fqn} is a recomputed unit itself"
        raise ModelError(Problem("unknown-router", what, fix="recompute units that contain routers, such as layers"))
    return fqn, router


@lru_cache(maxsize=1024)
def _calls(cls: Any, name_of_function: str) -> bool:
    """Whether the forward of a class, or a method that it calls, calls a function of this name."""
    pending, seen = ["forward"], {""}
    while pending:
        name = pending.pop()
        method = getattr(cls, name, None)
        if name in seen or not inspect.isfunction(method):
            continue
        seen.add(name)
        tree = parsed(inspect.unwrap(method))
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Call):
                if name_of_function in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")):
                    return True
                pending.append(own_attribute(node.func, receiver(tree)))  # type: ignore[arg-type]
    return False


# -- sparse mixer ----------------------------------------------------------------------------------------------------
# Routers that choose one expert after another by a maximum (`sparsemixer` of Phi 3.5), whose choices are replaced.
# For each choice such a router computes the largest score in evaluation its index is the choice scores far below it,
# left out masked_fill; weights are a softmax of the others the largest score with noise in training; its index is the
# choice the largest weight in training; it decides which gradient estimate is taken and the next one among the
# experts that are left. The indices are replaced, and an expert that is chosen is not left out: had the router made
# this choice, it would not have been. So the stock router computes weights and its own gradient from its own scores.
# Source: Liu et al., GRIN: GRadient-INformed MoE, arXiv:2409.12136.


FUNCTION = "sparsemixer"
_MAX = (torch.max, torch.Tensor.max)
_MIXER_FILL = (torch.masked_fill, torch.Tensor.masked_fill)
MAXIMA_IN_TRAINING = 3  # for each choice; the second one is it


class ReplacedMaxima(TorchFunctionMode):
    """Replaces the choices within one call of such a router.

    Args:
        count: the number of experts. training: of the router.
        replacing: scores -> [tokens, k], the replacing choices; -1 for tokens that are routed as before.
        decide: (replacing choices [tokens], those of the router) -> the choices.

    Attributes:
        maxima, masks: how often the router took a maximum of scores, and left out scores.
    """

    def __init__(self, count: int, training: bool, replacing: Callable[[T], T], decide: Callable[[T, T], T]):
        super().__init__()
        self.count, self.training = count, training
        self.replacing, self.decide = replacing, decide
        self.maxima = self.masks = 0

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        scores = args[0] if args else None
        if not isinstance(scores, torch.Tensor) or scores.ndim != 2 or scores.shape[1] != self.count:
            return func(*args, **kwargs)
        if func in _MAX and len(args) + len(kwargs) > 1:
            return self._maximum(scores, func(*args, **kwargs))
        if func in _MIXER_FILL:
            return func(scores, self._unmasked(scores, args[1]), *args[2:], **kwargs)
        return func(*args, **kwargs)

    def _maximum(self, scores: T, largest: Any) -> Any:
        n, kind = divmod(self.maxima, MAXIMA_IN_TRAINING if self.training else 1)
        self.maxima += 1
        if kind != (1 if self.training else 0):
            return largest
        replacing = self._nth_choice(scores, n).view_as(largest.indices)
        return torch.return_types.max((largest.values, self.decide(replacing, largest.indices)))

    def _unmasked(self, scores: T, mask: T) -> T:
        """The mask, which leaves no expert out that is chosen."""
        replacing = self._nth_choice(scores, self.masks)[:, None]
        self.masks += 1
        return torch.where(replacing < 0, mask, mask.scatter(1, replacing.clamp(min=0), False))

    def _nth_choice(self, scores: T, n: int) -> T:
        """[tokens]: the n-th replacing choices; -1 after the last, where the router is another one than the head of the
        file says."""
        replacing = self.replacing(scores)
        return replacing[:, n] if n < replacing.shape[1] else replacing.new_full((len(scores),), -1)

    def has_chosen(self, k: int) -> bool:
        """Whether the router computed what the head of the file says, for k choices."""
        return (self.maxima, self.masks) == (k * (MAXIMA_IN_TRAINING if self.training else 1), k)
