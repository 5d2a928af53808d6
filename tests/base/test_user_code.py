"""Whose code runs: in a stack, and in a traceback."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

from parallelize.base.user_code import (
    frame_of_caller,
    innermost_module,
    is_ours,
    is_user_code,
    location_of,
    place_of,
)


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3)  # the line of the error


def failure(model: nn.Module) -> BaseException:
    try:
        model(torch.ones(2, 2))
    except RuntimeError as error:
        return error
    raise AssertionError("it did not fail")


def test_an_error_is_at_the_line_of_the_user_and_in_the_innermost_module():
    model = nn.Sequential(nn.Identity(), nn.Sequential(Fails()))
    error = failure(model)
    file, _, line = location_of(error).rpartition(":")
    assert file == __file__ and Path(file).read_text().splitlines()[int(line) - 1].endswith("# the line of the error")
    assert innermost_module(error, {id(module): name for name, module in model.named_modules()}) == "1.0"
    assert innermost_module(error, {}) == ""


def test_an_error_that_was_not_raised_is_nowhere():
    assert location_of(ValueError("never raised")) == "" and innermost_module(ValueError(), {}) == ""


def test_the_frame_of_the_caller_is_outside_of_torch():
    seen = []

    class Seen(nn.Module):
        def forward(self, x):
            return x

    module = Seen()
    module.register_forward_hook(lambda *_: seen.append(frame_of_caller(sys._getframe(1))))
    module(torch.ones(1))  # the hook is called by torch
    assert seen[0].f_code.co_filename == __file__ and place_of(seen[0]).startswith(os.path.basename(__file__) + ":")
    assert place_of(None) == "" and frame_of_caller(None) is None


def test_files_of_others():
    import parallelize

    assert is_ours(torch.__file__) and is_ours(parallelize.__file__) and not is_ours(__file__)
    assert is_user_code(__file__)
    assert not any(map(is_user_code, (torch.__file__, parallelize.__file__, os.__file__, "<string>")))
