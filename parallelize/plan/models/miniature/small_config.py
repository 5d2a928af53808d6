"""A small version of a config, whatever its family: each field becomes small by what it says, in all parts alike."""

from __future__ import annotations

import copy
from typing import Any

from parallelize.plan.models.miniature.images import shrink_images
from parallelize.plan.models.miniature.layers import choose_layers
from parallelize.plan.models.miniature.rates import without_dropout
from parallelize.plan.models.miniature.roles import Part, Role, parts_of
from parallelize.plan.models.miniature.rules import MAX_CHOICES, Rules, Widths, few_groups
from parallelize.plan.models.miniature.states import scale_states

_NARROW, _ROTATED = 6, 16  # channels of a head, and of one of which a part is rotated
_MORE = 4  # channels of a hidden size beside those of two heads, where heads do not fill it
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

_HIDDEN = (
    "embed_dim",
    "hidden_size",
    "d_model",
    "n_embd",
    "emb_dim",
    "dim",
    "encoder_hidden_size",
    "hidden_dim",
    "width",
)
_HEADLESS = 64  # channels of a part without heads

_RANK_RATIO = 4  # of the ranks of queries to those of keys and values, at most
_PACKED = {"codegen": 4}
"""Parts of a packed weight by model type, each with its heads: a number that the code of the model has, and no
field."""

_BOXES = {"max_2d_position_embeddings", "dim_bbox"}
_EXPANDS = {"expand", "mamba_expand"}  # fields of scans, which are a multiple of the hidden size wide
_OUTPUTS = ("out_hidden_size", "output_dim", "projection_dim")
_TOKENS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
_SECTIONS = "mrope_section"
_MERGED = "spatial_merge_size"
_PATCH = 4  # pixels along each side, where patches are passed as rows


def small_config(config: Any, rules: Rules) -> Any:
    """The config with small sizes, without dropout.

    Raises: whatever the class of the config raises for sizes that it does not take.
    """
    small = copy.deepcopy(config)
    parts = [Part(new, real) for new, real in zip(parts_of(small), parts_of(config), strict=True)]
    for part in parts if not rules.ratios_kept else ():
        _fill_open(part)
    widths = Widths(rules)
    for part in parts:
        without_dropout(part.small)
        choose_layers(part, rules)
    if rules.only_layers:
        return small
    scalings = [_Scaling(part, parts, widths, rules) for part in parts]
    for scaling in scalings:
        scaling.scale_heads()
    for scaling in scalings:
        scaling.scale_widths()
    text = getattr(small, "text_config", None)
    _match_outputs(small, text, parts)
    shrink_images(parts)
    _shrink_vocabulary(parts, rules)
    return small


def _fill_open(part: Part) -> None:
    """Give a family a number where a config leaves one open, which its class may read."""
    heads = next((value for _, value in part.numbers(Role.HEADS)), 0)
    hidden = part.number("hidden_size")
    own = ({"num_key_value_heads": heads}, {"head_dim": hidden // heads}) if heads and hidden else ()
    for row in (*_OPEN, *own):
        if part.real.get(next(iter(row)), 0) is None:
            for name, value in row.items():
                if part.real.get(name, 0) is None:
                    part.real[name] = value
                    part[name] = value


class _Scaling:
    """Makes one part of a config small.

    Attributes:
        heads, head: how many heads the part has now, and their width. hidden: its hidden size.
    """

    def __init__(self, part: Part, parts: list[Part], widths: Widths, rules: Rules):
        self.part, self.parts, self.widths, self.rules = part, parts, widths, rules
        self.heads = self.head = self.hidden = 1
        self.staged: set[str] = set()

    def scale_heads(self) -> None:
        """Fewer and narrower heads, and the hidden size that they make up."""
        self._scale_heads()
        self._scale_latent()
        self._scale_stages()

    def scale_widths(self) -> None:
        """All that follows from the hidden sizes of the parts."""
        name, hidden = "hidden_size", self.part.number("hidden_size")
        if few := scale_states(self.part, self.parts, self.rules):
            self.part[name] = self.hidden = few
            self.widths.begin(hidden, few)
        else:
            name = self._main_hidden()
            hidden = self.part.number(name)
            if self.hidden == 1 and hidden > 2 * _HEADLESS and not any(self.part.lists(Role.HEADS)):
                self.part[name] = self.hidden = self.widths.new.get(hidden, _HEADLESS)
            if self.hidden > 1:
                self.widths.begin(hidden, self.hidden)
        self._scale_experts()
        self._scale_widths()
        self._scale_positions()
        self._scale_boxes()

    # -- heads and the hidden size --

    def _main_hidden(self) -> str:
        """The field of the width of the layers: where `embed_dim` stands beside `hidden_size`, the latter is that of
        the output."""
        names = [name for name, _ in self.part.numbers(Role.HIDDEN)]
        return min(names, key=_HIDDEN.index, default="")

    def _scale_heads(self) -> None:
        part, name = self.part, self._main_hidden()
        heads = next((value for _, value in part.numbers(Role.HEADS)), 0)
        hidden = part.number(name)
        if not heads or not hidden:
            return
        kv_heads = next((value for _, value in part.numbers(Role.KV_HEADS)), 0)
        said = part.number("head_dim") or next((value for _, value in part.numbers(Role.HEAD_WIDTH)), 0)
        real_head = said or hidden // heads
        few, few_kv = self._few_heads(heads, kv_heads)
        for field, value in part.numbers(Role.HEADS):
            part[field] = max(1, value * few // heads)
        for field, value in part.numbers(Role.KV_HEADS):
            part[field] = few_kv if value == kv_heads else max(1, value * few_kv // kv_heads)
        times, rest = divmod(said * heads, hidden) if said else (1, 0)
        if rest or (times > 1 and not _EXPANDS & part.real.keys()):
            times = 0
        self.heads = few
        self.hidden = self._hidden_size(hidden, real_head, times)
        self.head = max(1, times) * self.hidden // few if times or not self.rules.distinct else self.head
        part[name] = self.hidden
        self.widths.begin(hidden, self.hidden)
        for field, value in part.numbers(Role.HEAD_WIDTH):
            part[field] = self.hidden // few if value * heads == hidden else self.head * max(1, value // real_head)
        if rotated := part.number("rotary_dim"):
            part["rotary_dim"] = max(2, int(self.head * min(1.0, rotated / real_head)) // 2 * 2)

    def _few_heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        fields, rules = self.part.real, self.rules
        if _BOXES & fields.keys():  # boxes make up the hidden size
            return heads, kv_heads
        if "kv_lora_rank" in fields and kv_heads:  # whose keys and values each head has
            few, _ = rules.heads(heads, 0)
            return few, max(1, kv_heads * few // heads)
        few, few_kv = rules.heads(heads, kv_heads)
        packed = rules.tp * _PACKED.get(getattr(self.part.small, "model_type", ""), 1)
        if not kv_heads and heads % packed == 0:
            few = -(-few // packed) * packed
        return few, few_kv

    def _hidden_size(self, hidden: int, real_head: int, times: int) -> int:
        """The hidden size: that of another part whose real one is the same, or a new one.

        times: how many times as wide heads are together; 0: they are as wide as they are.
        """
        rules, widths = self.rules, self.widths
        known = widths.new.get(hidden, 0)
        width = real_head if rules.head_width == 0 else rules.head_width or self._head_width(hidden, real_head)
        if known and times and times * known % self.heads == 0:
            return known
        step = width if width % 4 == 0 else 2
        more = 2 * width + _MORE if rules.distinct and not times else 0
        few = (self.heads * width + more) // max(1, times)
        while widths.is_taken(few) and rules.distinct and times:
            width += step
            few = self.heads * width // times
        self.head = width
        return few

    def _head_width(self, hidden: int, real_head: int) -> int:
        fields, rope = self.part.real, self.part.real.get("rope_parameters") or {}
        partial = next((fields[name] for name in ("rotary_pct", "partial_rotary_factor") if fields.get(name)), 1)
        partial = min(partial, rope.get("partial_rotary_factor") or 1) if isinstance(rope, dict) else partial
        rotated = self.part.number("rotary_dim")
        is_partial = partial < 1 or 0 < rotated < real_head or _MERGED in fields
        return _ROTATED if is_partial and "qk_rope_head_dim" not in fields else _NARROW

    def _scale_latent(self) -> None:
        """Heads of attention with latent keys, which have a rotated part and one that is not, and their ranks."""
        part, width = self.part, self.head
        rotated = part.number("qk_rope_head_dim")
        if not rotated:
            return
        if self.rules.head_width is None and width == 1:
            width = _NARROW
        for name in ("qk_nope_head_dim", "v_head_dim"):
            if value := part.number(name):
                part[name] = max(1, value * width // rotated)
        part["qk_rope_head_dim"] = width
        if "qk_head_dim" in part.real:
            part["qk_head_dim"] = width + part["qk_nope_head_dim"]
        if head := part.number("head_dim"):
            part["head_dim"] = round(width * head / rotated)
        kv_rank, q_rank = part.number("kv_lora_rank"), part.number("q_lora_rank")
        if kv_rank:
            part["kv_lora_rank"] = width + 4
        if kv_rank and q_rank:
            part["q_lora_rank"] = (width + 4) * min(_RANK_RATIO, max(1, q_rank // kv_rank)) + 2

    # -- other sizes --

    def _scale_stages(self) -> None:
        """Heads that a list gives for each stage, and widths that they divide; or one width, from which those of all
        stages follow."""
        part = self.part
        for name, heads in part.lists(Role.HEADS):
            more = 1 if self.rules.ratios_kept else 4  # of 1, 2 and 5 heads two ranks split some, and four none
            few = [more * count for count in heads]
            part[name] = type(heads)(few)
            if first := part.number("embed_dim"):
                part["embed_dim"] = few[0] * (_STAGE if more > 1 else min(_NARROW, first // heads[0]))
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
        groups = next((value for _, value in part.numbers(Role.EXPERT_GROUPS)), 1)
        for name, count in part.numbers(Role.EXPERTS):
            part[name] = few = self.rules.experts(count, groups)
            if few < count:
                for field, value in part.numbers(Role.CHOICES):
                    part[field] = min(value, MAX_CHOICES)
                for field, value in part.numbers(Role.EXPERT_GROUPS, Role.GROUP_CHOICES):
                    part[field] = max(1, value * few_groups(groups) // groups)

    def _scale_widths(self) -> None:
        part, beside = self.part, max(self.hidden, self.heads * self.head)
        main = self._main_hidden()
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
        if _MERGED in part.real and part.number("patch_size"):
            part["patch_size"] = min(part.number("patch_size"), _PATCH)
            if part.number("window_size"):  # of one merged patch, so that a small image has several
                part["window_size"] = part["patch_size"] * part.number(_MERGED)
        self._scale_rotary()

    def _scale_rotary(self) -> None:
        part = self.part
        rope = part["rope_parameters"] or part["rope_scaling"]
        for entry in (rope, *rope.values()) if isinstance(rope, dict) else ():
            if not isinstance(entry, dict) or any(isinstance(value, dict) for value in entry.values()):
                continue
            partial = entry.get("partial_rotary_factor") or part["partial_rotary_factor"] or part["rotary_pct"] or 1
            pairs = int((part["head_dim"] or self.head) * partial) // 2
            for key, value in entry.items():
                if isinstance(value, (list, tuple)) and len(value) > pairs:
                    entry[key] = list(value)[:pairs]
            # pairs for time, height and width, for which a class may have a default
            entry[_SECTIONS] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]

    def _scale_boxes(self) -> None:
        """Embeddings of the corners and sides of boxes, which together have the hidden size."""
        part, hidden = self.part, self.hidden
        if "coordinate_size" in part.real:
            part["coordinate_size"] = part["shape_size"] = hidden // 6
        if "dim_bbox_projection" in part.real:
            part["dim_bbox_sinusoid_emb_2d"] = hidden // 4
            part["dim_bbox_sinusoid_emb_1d"] = hidden // 4 // part["dim_bbox"]
            part["dim_bbox_projection"] = hidden // self.heads


def _match_outputs(config: Any, text: Any, parts: list[Part]) -> None:
    """A tower's output takes the place of tokens, so that it has the width of the text, which default configs may not
    say."""
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


def _shrink_vocabulary(parts: list[Part], rules: Rules) -> None:
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
