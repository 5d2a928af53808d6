"""Models whose modules have any names, and models that are one block: the derived file is read, and what it says is
applied."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan, parallelize_module
from tests.support.refused import small_mesh
from tests.tools.derivation.test_derived_plans import file_of


class Attention(nn.Module):
    """Attention by itself, so that the model itself has the attribute that becomes local."""

    def __init__(self, width: int = 24, heads: int = 4):
        super().__init__()
        self.h = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(*x.shape[:2], self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OddNames(nn.Module):
    """An MLP for each key of a ModuleDict, and attention whose name is no text for YAML."""

    def __init__(self) -> None:
        super().__init__()
        self.no = Attention()
        keys = ("yes", "1", "a-b", "q,k", "x: y", "# z")
        self.on = nn.ModuleDict(
            {key: nn.ModuleDict({"null": nn.Linear(24, 30), "down": nn.Linear(30, 24)}) for key in keys}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x + self.no(x), (24,))
        for mlp in self.on.values():
            x = x + mlp["down"](F.gelu(mlp["null"](F.layer_norm(x, (24,)))))
        return x


def _inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 7, 24)}


BLOCK = """\
schema_version: 1
classes: Attention
sizes:
  heads: 4
tensor_parallel:
  q: colwise(heads)
  k: colwise(heads)
  v: colwise(heads)
  o: rowwise(heads)
local:
  "": {h: heads}
"""


def test_a_model_that_is_one_block():
    derived = derive_plan(Attention(), _inputs())
    assert derived.proof.ok and file_of(derived) == BLOCK
    with small_mesh(tp=2) as mesh:
        model = parallelize_module(Attention(), mesh, derived.plan)
        assert model.h == 2 and model.q.weight.to_local().shape == (12, 24)


def test_attention_of_torch_by_itself():
    model = nn.MultiheadAttention(24, 4, batch_first=True)
    derived = derive_plan(model, dict.fromkeys(("query", "key", "value"), torch.randn(2, 7, 24)))
    assert derived.share == 1.0 and derived.proof.ok
    assert '  "": multihead(heads)\n  out_proj: rowwise(heads)\n' in derived.text


@pytest.mark.sweep
def test_names_that_are_no_text_for_yaml():
    derived = derive_plan(OddNames(), _inputs())
    assert derived.proof.ok and derived.share > 0.9
    assert '\nlocal:\n  "no": {h: heads}\n' in derived.text and '"null": colwise' in derived.text
