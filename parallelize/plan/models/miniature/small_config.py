"""A small version of a config, whatever its family: each field becomes small by what it says, in all parts alike."""

from __future__ import annotations

import copy
from typing import Any

from parallelize.plan.models.miniature.heads import MERGED, NARROW, Heads, main_hidden
from parallelize.plan.models.miniature.images import shrink_images
from parallelize.plan.models.miniature.layers import choose_layers
from parallelize.plan.models.miniature.rates import without_dropout
from parallelize.plan.models.miniature.roles import ConfigPart, Role, parts_of
from parallelize.plan.models.miniature.rules import MAX_CHOICES, Rules, Widths, few_groups
from parallelize.plan.models.miniature.states import scale_states

_STAGE = 4  # channels of a head in a model of stages
_POSITIONS = 64
_AT_MOST = {
    "sliding_window": 5,
    "attention_window": 5,
    "max_source_positions": 9,  # frames of sound, after the encoder's convolutions
    "num_queries": 7,
    "latent_query_num": 7,
    "index_n_heads": 4,
    "index_head_dim": 16,
}
"""Fields whose size no other one follows from."""

_OPEN = (
    {"vocab_size": 67, "pad_token_id": 0},
    {"n_routed_experts": 6, "n_shared_experts": 1},
    {"num_experts_per_tok": 2},
)
"""Numbers of a family where a config leaves the first of them open."""

_HEADLESS = 64  # channels of a part without heads


_OUTPUTS = ("out_hidden_size", "output_dim", "projection_dim")
_TOKENS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
_SECTIONS = "mrope_section"
_PATCH = 4  # pixels along each side, where patches are passed as rows


def small_config(config: Any, rules: Rules) -> Any:
    """The config with small sizes, without dropout.

    Raises: whatever the class of the config raises for sizes that it does not take.
    """
    small = copy.deepcopy(config)
    parts = [ConfigPart(new, real) for new, real in zip(parts_of(small), parts_of(config), strict=True)]
    for part in parts if not rules.ratios_kept else ():
        _fill_open(part)
    widths = Widths(rules)
    for part in parts:
        without_dropout(part.small)
        choose_layers(part, rules)
    if rules.only_layers:
        return small
    first = sorted(parts, key=lambda part: not part.first(Role.KV_HEADS))  # others have other counts than their heads
    for scaling in [_Scaling(part, widths, rules) for part in first]:
        scaling.run(parts)
    _match_outputs(small, parts)
    shrink_images(parts)
    _shrink_vocabulary(parts, rules)
    return small


def _fill_open(part: ConfigPart) -> None:
    """Give a family a number where a config leaves one open, which its class may read."""
    heads, hidden = part.first(Role.HEADS), part.number("hidden_size")
    own = ({"num_key_value_heads": heads}, {"head_dim": hidden // heads}) if heads and hidden else ()
    for row in (*_OPEN, *own):
        if part.real.get(next(iter(row)), 0) is None:
            for name, value in row.items():
                if part.real.get(name, 0) is None:
                    part.real[name] = value
                    part[name] = value


class _Scaling:
    """Makes one part of a config small, whose heads are small already."""

    def __init__(self, part: ConfigPart, widths: Widths, rules: Rules):
        self.part, self.widths, self.rules = part, widths, rules
        self.heads = Heads(part, widths, rules)
        self.staged: set[str] = set()
        self._scale_stages()

    def run(self, parts: list[ConfigPart]) -> None:
        """Make small all that follows from the hidden sizes of the parts."""
        name = main_hidden(self.part)
        hidden, few = self.part.number(name), scale_states(self.part, parts, self.rules)
        if not few and self.heads.hidden == 1 and hidden > 2 * _HEADLESS and not any(self.part.lists(Role.HEADS)):
            few = self.widths.new.get(hidden, _HEADLESS)
        if few:
            self.part[name] = self.heads.hidden = few
        if self.heads.hidden > 1:
            self.widths.begin(hidden, self.heads.hidden)
        self._scale_experts()
        self._scale_widths()
        self._scale_positions()
        self._scale_boxes()

    def _scale_stages(self) -> None:
        """Heads that a list gives for each stage, and widths that they divide; or one width, from which those of all
        stages follow."""
        part = self.part
        for name, heads in part.lists(Role.HEADS):
            more = 1 if self.rules.ratios_kept else 4  # of 1, 2 and 5 heads two ranks split some, and four none
            few = [more * count for count in heads]
            part[name] = type(heads)(few)
            if first := part.number("embed_dim"):
                part["embed_dim"] = few[0] * (_STAGE if more > 1 else min(NARROW, first // heads[0]))
                if last := part.number("hidden_size"):
                    part["hidden_size"] = last * part["embed_dim"] // first
                self.widths.begin(first, part["embed_dim"])
            for field, widths in part.lists(Role.HIDDEN, Role.WIDTH):
                if len(widths) == len(heads) and all(w % h == 0 for w, h in zip(widths, heads, strict=True)):
                    small = type(widths)(_STAGE * count for count in few)
                    part[field] = small
                    self.staged.add(field)
                    self.widths.new |= dict(zip(widths, small, strict=True))

    def _scale_experts(self) -> None:
        part = self.part
        groups = part.first(Role.EXPERT_GROUPS) or 1
        for name, count in part.numbers(Role.EXPERTS):
            part[name] = few = self.rules.experts(count, groups)
            if few < count:
                for field, value in part.numbers(Role.CHOICES):
                    part[field] = min(value, MAX_CHOICES)
                for field, value in part.numbers(Role.EXPERT_GROUPS, Role.GROUP_CHOICES):
                    part[field] = max(1, value * few_groups(groups) // groups)

    def _scale_widths(self) -> None:
        part, beside = self.part, max(self.heads.hidden, self.heads.count * self.heads.width)
        main = main_hidden(part)
        if part.real.get("n_inner", 0) is None:  # GPT-2: four times the hidden size
            part["n_inner"] = self.widths.mlp(4 * part.number(main), beside)
        for name, value in part.numbers(Role.INNER):
            part[name] = self.widths.mlp(value, beside)
        for name, values in part.lists(Role.INNER, Role.EXPERT_INNER):
            part[name] = type(values)(self.widths.mlp(value, beside) for value in values)
        for name, value in part.numbers(Role.EXPERT_INNER):
            sizes = {size for size in vars(part.small).values() if type(size) is int}
            part[name] = self.widths.expert(value, sizes)
        for name, value in part.numbers(Role.WIDTH, Role.HIDDEN):
            if part[name] == value:
                part[name] = self.widths(value)
        for name, _ in part.lists(Role.WIDTH, Role.HIDDEN):
            if name not in self.staged:
                part[name] = type(part[name])(map(self.widths, part[name]))
        if groups := part.number("groups_width"):  # so that each width has as many groups as before
            part["groups_width"] = max(2, round(groups * self.widths.ratio))
        for name, most in _AT_MOST.items():
            if value := part.number(name):
                part[name] = min(value, most)

    def _scale_positions(self) -> None:
        """Learned position tables, windows, sound, and lists of rotary factors, which have one for each pair of
        channels."""
        part = self.part
        rope = part.real.get("rope_parameters") or part.real.get("rope_scaling")
        for name, value in part.numbers(Role.POSITIONS):
            if not rope:
                part[name] = min(value, max(_POSITIONS, 2 * self.rules.tp))
        if MERGED in part.real and part.number("patch_size"):
            part["patch_size"] = min(part.number("patch_size"), _PATCH)
            if part.number("window_size"):  # of one merged patch, so that a small image has several
                part["window_size"] = part["patch_size"] * part.number(MERGED)
        self._scale_rotary()

    def _scale_rotary(self) -> None:
        part = self.part
        rope = part["rope_parameters"] or part["rope_scaling"]
        for entry in (rope, *rope.values()) if isinstance(rope, dict) else ():
            if not isinstance(entry, dict) or any(isinstance(value, dict) for value in entry.values()):
                continue
            partial = entry.get("partial_rotary_factor") or part["partial_rotary_factor"] or part["rotary_pct"] or 1
            pairs = int((part["head_dim"] or self.heads.width) * partial) // 2
            for key, value in entry.items():
                if isinstance(value, (list, tuple)) and len(value) > pairs:
                    entry[key] = list(value)[:pairs]
            # pairs for time, height and width, for which a class may have a default
            entry[_SECTIONS] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]

    def _scale_boxes(self) -> None:
        """Embeddings of the corners and sides of boxes, which together have the hidden size."""
        part, hidden = self.part, self.heads.hidden
        if "coordinate_size" in part.real:
            part["coordinate_size"] = part["shape_size"] = hidden // 6
        if "dim_bbox_projection" in part.real:
            part["dim_bbox_sinusoid_emb_2d"] = hidden // 4
            part["dim_bbox_sinusoid_emb_1d"] = hidden // 4 // part["dim_bbox"]
            part["dim_bbox_projection"] = hidden // self.heads.count


def _match_outputs(config: Any, parts: list[ConfigPart]) -> None:
    """A tower's output takes the place of tokens, so that it has the width of the text, which default configs may not
    say."""
    text = getattr(config, "text_config", None)
    width = getattr(text, "hidden_size", None)
    if type(width) is not int:
        return
    takes_places = any(type(vars(config).get(token)) is int for token in _TOKENS)
    for part in parts:
        if part.small is text:
            continue
        for name in _OUTPUTS if takes_places else _OUTPUTS[:1]:
            if part.number(name):
                part[name] = width
        names_both = part.number("embed_dim") and part.number("hidden_size")
        if names_both and not any(part.lists(Role.HEADS)):  # its layers have the first one, its output the second
            part["hidden_size"] = width


def _shrink_vocabulary(parts: list[ConfigPart], rules: Rules) -> None:
    """Small vocabularies, whose last ids stand for images and the like."""
    size = rules.vocabulary
    ids: dict[int, int] = {}
    for part in parts:
        for name, value in part.numbers(Role.VOCABULARY):
            if value >= size:
                inside = "per_layer" in name and value < part.number("vocab_size")  # others have no input of a layer
                part[name] = size - 6 if inside else size
        for name, value in part.numbers(Role.TOKEN):
            if value >= size:
                part[name] = ids.setdefault(value, max(size // 2, size - 1 - len(ids)))
        for name, values in part.lists(Role.TOKEN):
            if max(values) >= size:
                part[name] = type(values)([2])
