"""Models whose layers look alike and differ in what they do."""

from __future__ import annotations

from torch import nn

PLAN = {"embed": "embedding", "layers.*": "colwise(output=full)", "head": "colwise(output=full)"}


class Numbered(nn.Module):
    """A forward in which a layer's number decides what it does."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.head = nn.Linear(16, 37)

    def forward(self, ids):
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(layer(x)) if number % 2 else layer(x)
        return self.head(x)


class Reused(Numbered):
    """One module in several places."""

    def __init__(self):
        super().__init__()
        self.layers[4] = self.layers[5] = self.layers[3]
