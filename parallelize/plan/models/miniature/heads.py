"""Fewer and narrower heads in one part of a config, and the hidden size that they make up."""

from __future__ import annotations

from parallelize.plan.models.miniature.roles import ConfigPart, Role
from parallelize.plan.models.miniature.rules import Rules, Widths

NARROW, _ROTATED = 6, 16  # channels of a head, and of one of which a part is rotated
_MORE = 4  # channels of a hidden size beside those of two heads, where heads do not fill it
_RANK_RATIO = 4  # of the ranks of queries to those of keys and values, at most
_PACKED = {"codegen": 4}
"""Parts of a packed weight by model type, each with its heads: a number that the code of the model has, and no
field."""

_BOXES = {"max_2d_position_embeddings", "dim_bbox"}
_EXPANDS = {"expand", "mamba_expand"}  # fields of scans, which are a multiple of the hidden size wide
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
MERGED = "spatial_merge_size"  # of patches along each side, whose positions along two sides are rotated


def main_hidden(part: ConfigPart) -> str:
    """The field of the width of a part's layers: where `embed_dim` stands beside `hidden_size`, the latter is that of
    the output."""
    return min((name for name, _ in part.numbers(Role.HIDDEN)), key=_HIDDEN.index, default="")


class Heads:
    """The heads of a part, which this makes small.

    Attributes:
        count, width: how many there are now, and their channels. hidden: the hidden size. All 1: the part has no heads.
    """

    def __init__(self, part: ConfigPart, widths: Widths, rules: Rules):
        self.part, self.widths, self.rules = part, widths, rules
        self.count = self.width = self.hidden = 1
        name = main_hidden(part)
        if (heads := part.first(Role.HEADS)) and part.number(name):
            self._scale(heads, name, part.number(name))
        if part.number("qk_rope_head_dim"):
            self._scale_latent(part.number("qk_rope_head_dim"))

    def _scale(self, heads: int, name: str, hidden: int) -> None:
        part, kv_heads = self.part, self.part.first(Role.KV_HEADS)
        said = part.number("head_dim") or part.first(Role.HEAD_WIDTH)
        real_width = said or hidden // heads
        self.count, few_kv = few, _ = self._few_heads(heads, kv_heads)
        for field, value in part.numbers(Role.HEADS):
            part[field] = max(1, value * few // heads)
        for field, value in part.numbers(Role.KV_HEADS):
            part[field] = max(1, value * few_kv // kv_heads)
        times, rest = divmod(said * heads, hidden) if said else (1, 0)
        if rest or (times > 1 and not _EXPANDS & part.real.keys()):
            times = 0
        self._choose_width(hidden, real_width, times)
        part[name] = self.hidden
        self.widths.begin(hidden, self.hidden)
        for field, value in part.numbers(Role.HEAD_WIDTH):
            part[field] = self.hidden // few if value * heads == hidden else self.width * max(1, value // real_width)
        if rotated := part.number("rotary_dim"):
            part["rotary_dim"] = max(2, int(self.width * min(1.0, rotated / real_width)) // 2 * 2)

    def _few_heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        fields, rules = self.part.real, self.rules
        if _BOXES & fields.keys():  # boxes make up the hidden size
            return heads, kv_heads
        if "kv_lora_rank" in fields and kv_heads:  # whose keys and values each head has
            few, _ = self.widths.heads(heads, 0)
            return few, max(1, kv_heads * few // heads)
        few, few_kv = self.widths.heads(heads, kv_heads)
        packed = rules.tp * _PACKED.get(getattr(self.part.small, "model_type", ""), 1)
        if not kv_heads and heads % packed == 0:
            few = -(-few // packed) * packed
        return few, few_kv

    def _choose_width(self, hidden: int, real_width: int, times: int) -> None:
        """The width of a head and the hidden size: that of another part whose real one is the same, or a new one.

        times: how many times as wide as the hidden size heads are together; 0: no whole number of times.
        """
        rules, widths, count = self.rules, self.widths, self.count
        width = real_width if rules.head_width == 0 else rules.head_width or self._narrow(real_width)
        known = widths.new.get(hidden, 0)
        if known and times and times * known % count == 0:
            self.hidden, self.width = known, times * known // count
            return
        step = width if width % 4 == 0 else 2
        self.hidden = (count * width + (2 * width + _MORE if rules.distinct and not times else 0)) // max(1, times)
        while widths.is_taken(self.hidden) and rules.distinct and times:
            width += step
            self.hidden = count * width // times
        self.width = max(1, times) * self.hidden // count if times or not rules.distinct else width

    def _narrow(self, real_width: int) -> int:
        """Few channels: more where a part of them is rotated."""
        fields, rope = self.part.real, self.part.real.get("rope_parameters") or {}
        partial = next((fields[name] for name in ("rotary_pct", "partial_rotary_factor") if fields.get(name)), 1)
        partial = min(partial, rope.get("partial_rotary_factor") or 1) if isinstance(rope, dict) else partial
        is_partial = partial < 1 or 0 < self.part.number("rotary_dim") < real_width or MERGED in fields
        return _ROTATED if is_partial and "qk_rope_head_dim" not in fields else NARROW

    def _scale_latent(self, rotated: int) -> None:
        """Heads of attention with latent keys, which have a rotated part and one that is not, and their ranks."""
        part, width = self.part, self.width if self.width > 1 else NARROW
        for name in ("qk_nope_head_dim", "v_head_dim", "head_dim"):
            if value := part.number(name):
                part[name] = max(1, round(value * width / rotated))
        part["qk_rope_head_dim"] = width
        if "qk_head_dim" in part.real:
            part["qk_head_dim"] = width + part["qk_nope_head_dim"]
        if kv_rank := part.number("kv_lora_rank"):
            part["kv_lora_rank"] = width + 4
            if q_rank := part.number("q_lora_rank"):
                part["q_lora_rank"] = (width + 4) * min(_RANK_RATIO, max(1, q_rank // kv_rank)) + 2
