"""State-space mixers on shards: fused kernels with the output projection are left out, and other norms are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize import ModelError, build_mesh, parallelize_module
from parallelize.plan.plan_file import parse_plan
from tests.support.refused import refused, small_mesh
from tests.support.threads import run_ranks


class Mixer(nn.Module):
    """Channels by themselves; in training a fused function of all weights, whose result lacks the sum over ranks."""

    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.conv = nn.Conv1d(8, 8, 3, groups=8, padding=2)
        self.decay, self.drop = nn.Parameter(torch.rand(8)), nn.Dropout(0.5)

    def forward(self, x):
        h = self.up(x).transpose(1, 2)
        if self.training:
            return (h.transpose(1, 2) * self.decay) @ self.out.weight.T
        h = torch.conv1d(h, self.conv.weight, self.conv.bias, padding=2, groups=h.shape[1])[..., : x.shape[1]]
        assert self.drop.training
        return self.out(h.transpose(1, 2) * self.decay)


class Norm(nn.Module):
    """Normalizes before the gate, as the norm of Mamba 2 does not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x, gate):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight * torch.sigmoid(gate)


PLAN = parse_plan("""
schema_version: 1
tensor_parallel:
  mixer: scan(x)
  mixer.up: colwise
  mixer.{conv,decay}: shard
  mixer.out: rowwise
""")


@pytest.mark.filterwarnings("ignore")
def test_the_fused_path_of_training_does_not_run():
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"mixer": Mixer()}).double(), torch.randn(2, 5, 6, dtype=torch.float64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model["mixer"].eval()
    model["mixer"].drop.train()
    expected = model["mixer"](x)

    def body(rank):
        copied = nn.ModuleDict({"mixer": Mixer()}).double().train()
        copied.load_state_dict(state)
        copied.mixer = copied["mixer"]
        parallelize_module(copied, build_mesh("cpu", tp=2), PLAN)
        copied["mixer"].drop.p = 0.0
        out = copied["mixer"](x)
        assert copied["mixer"].training and copied["mixer"].conv.groups == 4
        return out.detach()

    for out in run_ranks(2, body):
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)


def test_another_norm_is_refused():
    model = nn.ModuleDict({"up": nn.Linear(6, 8), "norm": Norm(), "down": nn.Linear(8, 6)})
    rules = {"up": "colwise", "norm": "gated_norm", "down": "rowwise"}
    with small_mesh(tp=2) as mesh, refused(ModelError, "not-gated-norm", "norm", "Norm"):
        parallelize_module(model, mesh, rules)
