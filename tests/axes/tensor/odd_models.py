"""A small model whose blocks run one odd operation, inside the sequence-parallel region or between column and row
linears."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from parallelize import ParallelizeError, build_mesh, parallelize_module
from parallelize.plan.plan_file import parse_plan
from tests.support.threads import run_ranks

WIDTH, VOCABULARY, HEADS = 8, 30, 4
Operation = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Inner(nn.Module):
    """A column linear, an operation on its features, a row linear."""

    def __init__(self, between: Operation | None, inner: int, summed: int):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(summed, WIDTH)
        self.between, self.heads = between, HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h if self.between is None else self.between(self, h))


class Layer(nn.Module):
    """A norm and the inner block, with an operation on the hidden states before them."""

    def __init__(self, tokens: Operation | None, between: Operation | None, inner: int, summed: int):
        super().__init__()
        self.norm, self.inner, self.tokens = nn.LayerNorm(WIDTH), Inner(between, inner, summed), tokens
        self.rows, self.wide, self.narrow = (
            nn.BatchNorm1d(WIDTH),
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
            nn.Conv1d(WIDTH, WIDTH, 1),
        )
        generator = torch.Generator().manual_seed(0)  # a buffer is the same on every rank
        self.table = nn.Buffer(torch.randn(64, WIDTH, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tokens is None else self.tokens(self, x)
        return x + self.inner(self.norm(x))


class OddModel(nn.Module):
    def __init__(
        self, tokens: Operation | None = None, between: Operation | None = None, inner: int = 16, summed: int = 16
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(tokens, between, inner, summed) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plan_text(up: str = "colwise", down: str = "rowwise") -> str:
    by_heads = "(heads)" in up + down
    sizes = f"sizes: {{heads: {HEADS}}}" if by_heads else ""
    local = "local: {layers.*.inner: {heads: heads}}" if by_heads else ""
    return f"""
schema_version: 1
{sizes}
sequence_parallel: {{layers: layers, leave: norm}}
tensor_parallel:
  embed: embedding
  layers.*:
    norm: sequence
    "{{rows,wide,narrow}}": sequence
    inner: gather
    inner.up: {up}
    inner.down: {down}
  norm: sequence
  head: colwise(output=full)
{local}
"""


def outcome(make: Callable[[], nn.Module], plan, sequence_parallel: bool, training: bool = True, bound: float = 1e-10):
    """ "right", "silent", the slugs of the error that both ranks raise, or "crashed: ..." with another error."""
    torch.manual_seed(0)
    reference = make().double().train(training)
    ids = torch.randint(0, VOCABULARY, (2, 8))
    state = {key: value.clone() for key, value in reference.state_dict().items()}
    expected = reference(ids).detach()

    def body(rank: int):
        model = make().double().train(training)
        model.load_state_dict(state)
        options = {"sequence_parallel": True} if sequence_parallel else {}
        try:
            resolved = parse_plan(plan) if isinstance(plan, str) else plan
            parallelize_module(model, build_mesh("cpu", tp=2), resolved, **options)
            out = model(ids).detach()
        except ParallelizeError as error:
            return error.slugs
        except (RuntimeError, ValueError, IndexError) as error:
            return f"crashed: {type(error).__name__} {str(error)[:90]}"
        return "right" if out.shape == expected.shape and (out - expected).abs().max() < bound else "silent"

    first, second = run_ranks(2, body)
    assert first == second or {type(first), type(second)} == {str}, (first, second)
    return first
