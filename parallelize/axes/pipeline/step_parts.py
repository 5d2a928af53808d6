"""What a step calls: the forward of a stage, and the reduction of gradients over the data axes."""

from __future__ import annotations

from typing import Any, Protocol

from parallelize.axes.pipeline.payload import StageHeader
from parallelize.axes.pipeline.stage_forward import Outcome


class Runner(Protocol):
    """Runs a stage's forward."""

    def run(
        self,
        stage: int,
        args: tuple,
        kwargs: dict,
        content: dict[str, Any],
        header: StageHeader | None,
        make_header: bool,
    ) -> Outcome: ...


class Data(Protocol):
    """What a step calls to reduce gradients over the data axes: an `engine` of `zero`."""

    def hold(self) -> None: ...

    def release(self, stage: int) -> None: ...

    def flush(self, stage: int) -> None: ...

    def finish(self) -> None: ...

    def reset(self) -> None: ...
