"""Forwards that divide the width of their input by a number of heads, as `C // self.n_head`.

The input of a column linear has all features, and its output those of this rank's heads: no value of `n_head` is right for both.
"""

from __future__ import annotations

import ast
import inspect
from functools import lru_cache
from typing import Any

from parallelize.axes.tensor.syntax import own_attribute, parsed, receiver


@lru_cache(maxsize=4096)
def divided_width(cls: Any) -> str:
    """Where the forward of a class divides a variable by one of its attributes: "`C // self.n_head`, line 12 of a.py"; or ""."""
    function = inspect.unwrap(cls.forward)
    tree = parsed(function)
    if tree is None:
        return ""
    own = receiver(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.FloorDiv, ast.Div)):
            continue
        if isinstance(node.left, ast.Name) and own_attribute(node.right, own):
            code = function.__code__
            return f"`{ast.unparse(node)}`, line {code.co_firstlineno + node.lineno - 1} of {code.co_filename}"
    return ""


def advice_on_widths(cls: Any) -> str:
    """What to write instead of such a division in the forward of a class; empty where there is none."""
    where = divided_width(cls)
    if not where:
        return ""
    return (
        f"the forward takes the width of a head from its input ({where}), which has all features, and this rank has "
        "some of the heads: make the width an attribute (head_dim = hidden size // heads, in __init__), and let the "
        "shards say how many heads there are: view(batch, length, -1, self.head_dim), and flatten(2) after attention"
    )
