"""Small models: inputs by the names of arguments, and what a forward does in training alone."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallelize import derive_plan
from parallelize.plan.models.example_inputs import has_sounds, images_and_sounds_in_text, sounds_in_text
from parallelize.plan.models.image_inputs import has_images, images_in_text
from parallelize.plan.models.model_source import source_of
from parallelize.plan.models.signature_inputs import inputs_by_signature
from parallelize.tools.derivation.small_model import small_model
from tests.support.refused import WIDTH, Block


class Boxes(nn.Module):
    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=16, use_cache=True)

    def forward(self, input_ids, bbox, labels=None, use_cache=None):
        """Reads ids and boxes."""


def test_inputs_by_the_names_of_arguments():
    first, second = list(inputs_by_signature(Boxes()))[:2]
    assert list(inspect.signature(Boxes.forward).parameters)[1:3] == ["input_ids", "bbox"]
    assert first["input_ids"].shape == second["input_ids"].shape == (2, 11) and int(first["input_ids"].max()) < 16
    assert first["bbox"].dtype == torch.int64 and second["bbox"].dtype == torch.float32 and first["use_cache"] is False
    assert "labels" not in first


class Tower(nn.Module):
    """Puts features of images, [texts, images, channels, height, width], in the place of tokens."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=32, image_token_id=31, image_size=8)
        self.project = nn.Linear(64, 6)

    def get_image_features(self, pixel_values, pixel_attention_mask=None):
        texts, images, *_ = pixel_values.shape
        assert pixel_values.ndim == 5
        assert pixel_attention_mask is not None and pixel_attention_mask.shape == (texts, images)
        return self.project(pixel_values.mean(2).flatten(2))

    def forward(self, input_ids, pixel_values=None, pixel_attention_mask=None, use_cache=None):
        """Reads texts with images."""


def test_images_are_passed_in_the_form_that_the_model_takes():
    inputs = images_in_text(Tower())
    assert inputs["pixel_values"].shape == (2, 1, 3, 8, 8) and inputs["pixel_attention_mask"].shape == (2, 1)
    assert (inputs["input_ids"] == 31).sum() == 2


@pytest.mark.sweep
def test_a_small_model_of_texts_and_images_runs_both():
    """The first small config has heads of a width that rotary positions in two dims do not take: its texts alone would
    run."""
    pytest.importorskip("transformers")
    small, model = small_model(source_of("qwen3_vl"), 2)
    inputs = small.extras["inputs"](2, 11)
    assert (
        "image_grid_thw" in inputs
        and model.config.vision_config.out_hidden_size == model.config.text_config.hidden_size
    )


class Flagged(Block):
    """Sets the flag on its input, as models of sound do."""

    def __init__(self):
        super().__init__()
        self._requires_grad = True

    def forward(self, hidden):
        hidden = hidden[:, :]
        if self._requires_grad and self.training:
            hidden.requires_grad = True
        return super().forward(hidden)


def test_a_model_that_makes_its_input_require_a_gradient():
    derived = derive_plan(Flagged(), {"hidden": torch.randn(2, 3, WIDTH)})
    assert derived.share > 0.9 and derived.proof is not None


@pytest.mark.sweep
def test_heads_of_stages_in_the_file():
    """Each stage has a size of its own, every layer of a stage the same rules, and an attribute that shifted layers
    alone read is local in all of them."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(image_size=32, patch_size=2, embed_dim=16, window_size=4)
    derived = derive_plan(transformers.DonutSwinConfig(depths=[2, 3], num_heads=[4, 8], **sizes))
    assert {name: size.source for name, size in derived.plan.sizes.items()} == {
        f"heads_{i}": f"num_heads.{i}" for i in (1, 0)
    }
    local = {(each.pattern, each.attribute, each.size) for each in derived.plan.local}
    attention = "donut.encoder.layers.{}.blocks.*.attention.self"
    names = ("all_head_size", "num_attention_heads")
    assert local == {(attention.format(i), name, f"heads_{i}") for i in range(2) for name in names}


class ReadsSound(nn.Module):
    """The features of a spectrogram take the place of tokens; it is read as [batch, frames, bins]."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(audio_token_id=9, num_mel_bins=5, text_config=SimpleNamespace(vocab_size=16))
        self.tower, self.table = nn.Linear(5, WIDTH), nn.Embedding(16, WIDTH)

    def get_audio_features(self, input_features, input_features_mask):
        features = self.tower(input_features)[:, ::16]
        return SimpleNamespace(pooler_output=features[input_features_mask[:, ::16].bool()])

    def forward(self, input_ids, input_features=None, input_features_mask=None):
        x = self.table(input_ids)
        return x.masked_scatter(
            (input_ids == 9)[..., None], self.get_audio_features(input_features, input_features_mask).pooler_output
        )


def test_sound_in_texts():
    model = ReadsSound()
    inputs = sounds_in_text(model)
    assert has_sounds(model) and not has_sounds(Block())
    assert inputs["input_features"].shape[2] == 5 and (inputs["input_ids"] == 9).sum() == 2 * 4  # of 64 frames
    model(**inputs)
    model.config.num_mel_bins = 6
    with pytest.raises(TypeError, match="input_features_mask"):  # of the first form, without a mask
        sounds_in_text(model)


class TwoTowers(Tower):
    """Another tower reads the same images in a size of its own."""

    def __init__(self):
        super().__init__()
        self.config.high_res_vision_config = SimpleNamespace(image_size=12)

    def get_image_features(self, pixel_values, high_res_pixel_values):
        return self.project(pixel_values.mean(1).flatten(1))[:, None]


def test_images_of_a_second_tower():
    assert images_in_text(TwoTowers())["high_res_pixel_values"].shape == (2, 3, 12, 12)


class ToldPlaces(nn.Module):
    """An argument says which tokens the queries of an image replace; images are patches, of which each has its row and
    column."""

    def __init__(self):
        super().__init__()
        text, vision = SimpleNamespace(vocab_size=16), SimpleNamespace(patch_embed_hidden_size=5)
        self.config = SimpleNamespace(text_config=text, vision_config=vision, latent_query_num=3)

    def forward(self, input_ids, flattened_patches=None, image_embeds_position_mask=None, use_cache=None):
        """Reads texts with images."""


def test_images_at_places_of_a_text():
    inputs = images_in_text(ToldPlaces())
    places, patches = inputs["image_embeds_position_mask"], inputs["flattened_patches"]
    assert places.shape == inputs["input_ids"].shape and places.sum(1).tolist() == [3, 3]
    assert patches.shape[2] == 7 and int(patches[..., :2].min()) == 1 and has_images(ToldPlaces())


@pytest.mark.sweep
def test_a_small_model_that_is_told_places_runs_its_tower():
    pytest.importorskip("transformers")
    small, _ = small_model(source_of("kosmos-2.5"), 2)
    assert "flattened_patches" in small.extras["inputs"](2, 11)


class ReadsBoth(nn.Module):
    """A head on a model whose functions return the features of images and of sound."""

    def __init__(self):
        super().__init__()
        tokens = {"image_token_id": 31, "audio_token_id": 9}  # 9 is one that texts would have too
        self.config = SimpleNamespace(vocab_size=32, image_size=8, num_mel_bins=5, **tokens)
        self.base_model = nn.Module()
        self.base_model.get_image_features = lambda pixel_values: pixel_values.flatten(2)
        self.base_model.get_audio_features = self.sounds

    @staticmethod
    def sounds(input_features, feature_attention_mask=None):
        """[batch, bins, frames], whose frames the mask counts."""
        assert feature_attention_mask.shape[1] == input_features.shape[2] == 64
        return input_features[:, :, ::16].mT

    def forward(self, input_ids, pixel_values=None, input_features=None, mm_token_type_ids=None):
        """Reads texts with images and sound."""


def test_images_and_sound_in_one_text():
    """By functions of the model below the head, which take a mask of frames."""
    inputs = images_and_sounds_in_text(ReadsBoth())
    ids, kinds = inputs["input_ids"], inputs["mm_token_type_ids"]
    assert (ids == 31).sum() == 2 * 3 and (ids == 9).sum() == 2 * 4
    assert torch.equal(kinds, ids.eq(31).long()) and inputs["feature_attention_mask"].shape == (2, 64)
    assert {"pixel_values", "input_features"} < inputs.keys()


@pytest.mark.sweep
def test_a_small_model_of_texts_images_and_sound_runs_all():
    """The first small config takes sound alone; another takes both."""
    pytest.importorskip("transformers")
    small, model = small_model(source_of("qwen3_omni_moe_thinker"), 2)
    inputs = small.extras["inputs"](2, 11)
    assert {"pixel_values", "input_features"} < inputs.keys()
    assert model.config.audio_config.output_dim == model.config.text_config.hidden_size
