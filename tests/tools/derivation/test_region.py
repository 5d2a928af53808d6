"""Where activations may be sequence shards: the layers, the module after which they are full again, and the blocks that
gather."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize.plan.dims.trace import record_forward
from parallelize.tools.derivation.region_search import find_regions
from tests.tools.derivation.own_models import Mlp

WIDTH = 12
SHARDED = {"layers.0.mlp.up": "colwise", "layers.0.mlp.down": "rowwise"}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp(WIDTH, 20)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Layers(nn.Module):
    """`count` layers and a norm; `between` stands before each layer but the first."""

    def __init__(self, count=2, layer=Layer, between=lambda x: x):
        super().__init__()
        self.enter, self.norm, self.between = nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH), between
        self.layers = nn.ModuleList([layer() for _ in range(count)])

    def forward(self, x):
        x = self.enter(x)
        for index, layer in enumerate(self.layers):
            x = layer(self.between(x) if index else x)
        return self.norm(x)


def region_of(model, styles=SHARDED):
    regions = find_regions(record_forward(model, (torch.randn(2, 7, 6),)), model, styles)
    return regions[0] if regions else None


def test_layers_and_the_norm_after_them():
    region = region_of(Layers())
    assert region.section == {"layers": "layers", "leave": "norm"}
    assert region.styles == {
        "layers.0.mlp": "gather",
        "layers.0.norm": "sequence",
        "layers.1.norm": "sequence",
        "layers.1.mlp.up": "sequence",  # not in SHARDED: it works on each token
        "layers.1.mlp.down": "sequence",
        "norm": "sequence",
    }


def test_without_a_norm_after_them_the_region_ends_with_the_layers():
    model = Layers()
    model.norm = nn.Linear(WIDTH, WIDTH)  # which is no norm, and works on full activations
    assert region_of(model).section == {"layers": "layers"}


@pytest.mark.parametrize(
    "model",
    [
        lambda: Layers(count=1),
        lambda: Layers(between=lambda x: x[:, :-1]),  # fewer tokens
        lambda: Layers(layer=lambda: nn.Linear(WIDTH, WIDTH), between=lambda x: x.flatten(0, 1)),
    ],
    ids=["one layer", "other lengths", "two dims"],
)
def test_models_without_a_region(model):
    assert region_of(model()) is None


def test_a_list_of_sharded_linears_is_no_region():
    model = Layers(layer=lambda: nn.Linear(WIDTH, WIDTH))
    assert region_of(model, {"layers.0": "colwise", "layers.1": "rowwise"}) is None


class Parts(nn.Module):
    """A layer that is a list of its parts, as of T5."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def test_of_lists_inside_of_one_another_the_outermost_is_taken():
    model = Layers(layer=Parts)
    styles = {"layers.0.parts.0.mlp.up": "colwise", "layers.0.parts.0.mlp.down": "rowwise"}
    regions = find_regions(record_forward(model, (torch.randn(2, 7, 6),)), model, styles)
    assert [region.section for region in regions] == [{"layers": "layers", "leave": "norm"}]
    assert regions[0].styles["layers.0.parts.0.mlp"] == "gather"


class CrossLayer(Layer):
    """A layer whose `mlp.other` works on what the encoder returned."""

    def __init__(self):
        super().__init__()
        self.mlp.other = nn.Linear(WIDTH, 20)

    def forward(self, x, encoded=None):
        return super().forward(x) if encoded is None else x + self.mlp(self.norm(x)) + self.mlp.other(encoded).mean()


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Layers(), Layers(layer=CrossLayer)

    def forward(self, x):
        encoded, y = self.encoder(x), self.decoder.enter(x[:, 1:])
        for layer in self.decoder.layers:
            y = layer(y, encoded)
        return self.decoder.norm(y)


def test_an_encoder_and_a_decoder_have_one_each():
    """In the order of the forward. What the encoder returned is full, which its length tells."""
    model = EncoderDecoder()
    styles = {f"decoder.layers.{index}.mlp.{name}": "colwise" for index in (0, 1) for name in ("up", "other")}
    encoder, decoder = find_regions(record_forward(model, (torch.randn(2, 7, 6),)), model, styles)
    assert encoder.section == {"layers": "encoder.layers", "leave": "encoder.norm"}
    assert decoder.section == {"layers": "decoder.layers", "leave": "decoder.norm"}
    assert decoder.styles["decoder.layers.0.mlp"] == "gather"
    assert decoder.styles["decoder.layers.0.mlp.other"] == "colwise(input=full)"
    assert "decoder.layers.0.mlp.up" not in decoder.styles


def test_an_input_by_keyword_is_named():
    class Keyword(Layer):
        def forward(self, x):
            return x + self.mlp(scale=1, x=self.norm(x))

    class Scaled(Mlp):
        def forward(self, scale, x):
            return super().forward(x)

    model = Layers(layer=Keyword)
    for layer in model.layers:
        layer.mlp = Scaled(WIDTH, 20)
    assert region_of(model).styles["layers.0.mlp"] == "gather(x)"


def test_linears_of_flattened_tokens():
    """A linear that is called on [tokens, width] takes and returns tokens of all sequences."""

    class Flat(Mlp):
        def forward(self, x):
            return super().forward(x.flatten(0, 1)).view(x.shape)

    model = Layers()
    for layer in model.layers:
        layer.mlp = Flat(WIDTH, 20)
    styles = region_of(model, {"layers.0.mlp.up": "colwise(heads)", "layers.0.mlp.down": "rowwise"}).styles
    assert styles["layers.0.mlp.up"] == "colwise(heads, input=tokens)"
    assert styles["layers.0.mlp.down"] == "rowwise(output=tokens)" and "layers.0.mlp" not in styles
