"""Forwards that read parameters of their children: full ones are right, shards are refused, code that no forward
reaches is not."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ParallelizeError, PlanError, build_mesh, full_gradients, parallelize_module
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.analysis.linting import lint
from tests.support.parity import worst
from tests.support.threads import run_ranks

WIDTH = 8


class Block(nn.Module):
    """Two sharded linears, and a module whose parameters other code reads."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.scale = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.down(self.up(self.scale(x)).relu())


class Initializes(Block):
    def init_weights(self):
        nn.init.zeros_(self.scale.weight)
        self.fuse()

    def fuse(self):
        return torch.cat([self.up.weight, self.down.weight.T])


class Asks(Block):
    """Without the values."""

    def forward(self, x):
        assert isinstance(self.up.weight, torch.Tensor) and self.scale.weight is not None
        return super().forward(x.to(self.scale.weight.dtype).view(-1, self.up.weight.shape[1]))


class Reads(Block):
    def forward(self, x):
        return super().forward(x * self.scale.weight)


class ByMethod(Block):
    def forward(self, x):
        return self._scaled(super().forward(x))

    def _scaled(self, x):
        return x * self.scale.weight


class ByProperty(Block):
    @property
    def factor(self):
        return self.scale.weight.exp()

    def forward(self, x):
        return super().forward(x) * self.factor


class OfBase(ByMethod):
    def forward(self, x):
        return super().forward(x) + 1


def decorated(method):
    @functools.wraps(method)
    def call(self, *args):
        return method(self, *args)

    return call


class Decorated(Block):
    @decorated
    def forward(self, x):
        return super().forward(x) * self.scale.weight


class Untaken(Block):
    """In a branch that never runs."""

    def forward(self, x):
        if x.ndim == 7:
            x = x * self.scale.weight
        return super().forward(x)


class Hidden(Block):
    """By code that the source text does not show."""

    def forward(self, x):
        name = "weight"
        return super().forward(F.gelu(x) * getattr(self.scale, name))


class OfInner(Block):
    """Of a module that is not a child."""

    def __init__(self):
        super().__init__()
        self.outer = nn.Module()
        self.outer.scale = self.scale

    def forward(self, x):
        return super().forward(x * self.outer.scale.weight)


class ByName(OfInner):
    """By local names of modules, as of a head that is tied by hand."""

    def forward(self, x):
        outer = self.outer
        other = self.scale
        scale = outer.scale
        return super().forward(x * scale.weight) * other.weight


class ByReboundName(Block):
    """By a name that was another module's before."""

    def forward(self, x):
        child = self.up
        assert child.weight is not None
        child = self.scale
        return super().forward(x * child.weight)


class Twice(Block):
    """The child runs, and is read before and after."""

    def forward(self, x):
        x = self.scale(x * self.scale.weight) + self.scale.weight
        return self.down(self.up(x).relu())


class Norm(nn.LayerNorm):
    def normed(self, x):
        return super().forward(x)


class ByChild(Block):
    """By a method of the child that runs PyTorch's forward, as the positions of ProphetNet."""

    def __init__(self):
        super().__init__()
        self.scale = Norm(WIDTH)

    def forward(self, x):
        return self.down(self.up(self.scale(x) + self.scale.normed(x + 1)).relu())


class Router(nn.Module):
    """Whose parameters its own method reads."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def mixed(self, x):
        return self._scaled(x)

    def _scaled(self, x):
        return x * self.scale.weight.clamp(-1, 1)


class ByMethodOfChild(Block):
    """By a method of a child that reads the parameters of a module in it, as the predictions of Gemma 3n."""

    def __init__(self):
        super().__init__()
        self.router = Router(self.scale)

    def forward(self, x):
        return super().forward(self.router.mixed(x))


FULL = "scale: replicate(gradient=full)"
SHARDED = "scale.weight: shard(0)\n  scale.bias: replicate(gradient=full)"


def plan(allow: str = "", scale: str = SHARDED):
    rules = f"{scale}\n  up: colwise\n  down: rowwise"
    return parse_plan(f"schema_version: 1\n{allow}tensor_parallel:\n  {rules}\n")


def outcome(cls: type[nn.Module], allow: str = "", scale: str = SHARDED) -> tuple[str, str]:
    """(slug, message) of the refusal of the plan, or of the forward after it; empty where output and gradients are
    right."""
    torch.manual_seed(0)
    initial = cls().double()
    with torch.no_grad():
        initial.scale.weight.normal_()

    def body(rank: int) -> tuple[str, str]:
        import copy

        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        try:
            model = parallelize_module(copy.deepcopy(initial), build_mesh("cpu", tp=2), plan(allow, scale))
            unsharded = copy.deepcopy(initial)
            out, expected = model(x), unsharded(x)
            assert (out - expected).abs().max() < 1e-12
            out.square().sum().backward()
            expected.square().sum().backward()
            gradients = {name: p.grad for name, p in unsharded.named_parameters()}
            assert worst(full_gradients(model), gradients)[0] < 1e-12
            assert all(not isinstance(vars(child).get("weight"), torch.Tensor) for child in model.children())
        except ParallelizeError as error:
            return error.slugs[0], str(error)
        return "", ""

    return run_ranks(2, body)[0]


@pytest.mark.parametrize("cls", [Block, Initializes, Asks])
def test_code_that_no_forward_reaches_and_descriptions_are_accepted(cls):
    assert outcome(cls, scale=FULL) == ("", "")


@pytest.mark.parametrize(
    "cls", [Reads, ByMethod, ByProperty, OfBase, Decorated, Untaken, Twice, ByChild, ByMethodOfChild, OfInner, ByName]
)
def test_full_parameters_of_children_are_read_as_local_tensors(cls):
    assert outcome(cls, scale=FULL) == ("", "")


class BySomeName(Block):
    """By a name of a child."""

    def forward(self, x):
        scale = self.scale
        return super().forward(x * scale.weight)


def test_a_shard_read_by_a_name_of_its_module_is_refused_in_the_first_forward():
    """Also by a name that is not followed, because it is bound twice."""
    assert outcome(BySomeName, scale=FULL) == ("", "")
    for cls, scale in ((BySomeName, SHARDED), (ByReboundName, FULL)):
        slug, message = outcome(cls, scale=scale)
        assert slug == "reads-child-parameters" and "reads scale.weight" in message


class Contained(Block):
    """Parameters in containers, of which a plan may shard some."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(WIDTH), torch.randn(16)])
        self.shifts = nn.ModuleDict({"of": nn.ParameterDict({"inner": torch.randn(16), "outer": torch.randn(WIDTH)})})

    def forward(self, x):
        shifts = self.shifts["of"]
        x = self.scale(x) * self.scales[0] + shifts["outer"]
        return self.down((self.up(x) * list(self.scales)[1] + shifts["inner"]).relu())


CONTAINED = "scales.0: replicate\n  scales.1: shard(0)\n  shifts.of.inner: shard(0)\n  shifts.of.outer: replicate"


def test_parameters_in_lists_and_dicts_are_read_as_those_of_the_module():
    assert outcome(Contained, scale=f"{FULL}\n  {CONTAINED}") == ("", "")


class Elsewhere(Block):
    """A list of parameters that another module reads."""

    def __init__(self):
        super().__init__()
        self.owner = nn.Module()
        self.owner.scales = nn.ParameterList([torch.randn(WIDTH)])

    def forward(self, x):
        return super().forward(x * self.owner.scales[0])


def test_a_list_of_parameters_that_another_module_reads_is_refused_in_the_first_forward():
    slug, message = outcome(Elsewhere, scale=f"{FULL}\n  owner.scales: replicate")
    assert slug == "reads-child-parameters" and "reads owner.scales.*" in message


@pytest.mark.parametrize(
    ("cls", "method", "owner"),
    [
        (Reads, "forward", Reads.forward),
        (ByMethod, "_scaled", ByMethod._scaled),
        (ByProperty, "factor", ByProperty.factor.fget),
        (OfBase, "_scaled", ByMethod._scaled),
        (Decorated, "forward", inspect.unwrap(Decorated.forward)),
        (Untaken, "forward", Untaken.forward),
    ],
)
def test_the_message_names_method_file_and_line(cls, method, owner):
    slug, message = outcome(cls)
    lines, first = inspect.getsourcelines(owner)
    line = first + next(index for index, text in enumerate(lines) if "self.scale.weight" in text)
    assert slug == "reads-child-parameters" and "before" not in message
    assert f"{cls.__name__}.{method} (test_child_reads.py:{line}) reads self.scale.weight" in message


def test_a_shard_is_refused_that_a_method_of_the_child_reads():
    slug, message = outcome(ByChild)
    assert slug == "reads-child-parameters" and "reads self.scale.weight" in message


def test_a_plan_allows_a_line_that_never_runs():
    assert "reads-child-parameters" in outcome(Untaken)
    parallelize = plan("allow: reads-child-parameters\n")
    run_ranks(2, lambda rank: parallelize_module(Untaken(), build_mesh("cpu", tp=2), parallelize))


def test_a_read_that_the_source_hides_is_refused_in_the_first_forward():
    cls = Hidden
    slug, message = outcome(cls, scale=FULL)
    lines, first = inspect.getsourcelines(cls.forward)
    line = first + next(index for index, text in enumerate(lines) if "super().forward" in text)
    assert slug == "reads-child-parameters"
    assert f"{cls.__name__} (test_child_reads.py:{line}) reads scale.weight" in message


def test_other_checks_cannot_be_turned_off():
    with pytest.raises(PlanError, match=r"bad-value.*mixed-features"):
        plan("allow: mixed-features\n")


# -- a width that is divided by a number of heads ---------------------------------------------------------------------


class Divides(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head, self.q, self.o = 2, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, C = x.shape
        q = self.q(x).view(batch, length, self.n_head, C // self.n_head).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q)
        return self.o(out.transpose(1, 2).flatten(2))


DIVIDES = {"q": "colwise", "o": "rowwise"}
LINE = inspect.getsourcelines(Divides.forward)[1] + 2


def test_a_width_taken_from_the_input_gets_a_message_that_says_how_to_write_it():
    def body(rank: int) -> str:
        model = parallelize_module(Divides(), build_mesh("cpu", tp=2), DIVIDES)
        with pytest.raises(ParallelizeError) as error:
            model(torch.ones(1, 3, WIDTH))
        assert error.value.slugs == ("shard-misread",)
        return str(error.value)

    for message in run_ranks(2, body):
        assert f"`C // self.n_head`, line {LINE} of {__file__}" in message and "view(batch, length, -1" in message
        assert "local_inputs: {MODULE: {ARGUMENT: width(heads)}}" in message


def test_lint_says_so_too():
    def source():
        return {"model": Divides(), "inputs": lambda batch, sequence: {"x": torch.zeros(batch, sequence, WIDTH)}}

    (finding,) = lint(source, DIVIDES, "tp=2")
    assert finding.problem.slug == "layouts-do-not-meet" and "`C // self.n_head`" in finding.problem.fix
