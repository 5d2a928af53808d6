"""The position in the data of a run, as checkpoints have it: compared with the file of a run that goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from parallelize.base.errors import CheckpointError, LaunchError
from parallelize.launch.config.resumed_keys import may_differ
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.loop.resumed_run import ChangedKey, refuse_or_tell
from parallelize.training.data.global_batches import GlobalBatches

_SOURCES = ("text", "jsonl", "field", "function", "args", "tokenizer", "sequence")
_STATES = "states"


class DataPosition:
    """What a checkpoint saves of the data.

    Args:
        batches: `GlobalBatches` or `IterableBatches`, of this data rank.
        config: the run.
        tell: prints a line on rank 0.
    """

    def __init__(self, batches: Any, config: RunConfig, tell: Callable[[str], None]):
        self.batches, self.config, self.tell = batches, config, tell

    def state_dict(self) -> dict[str, Any]:
        return self.batches.state_dict()

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The states of all data ranks of the saved run, as `load_state_dict` takes them."""
        return {_STATES: list(states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved position. Where the file accepts that the data are others, they begin anew.

        Raises: LaunchError `changed-key`; CheckpointError `data-position`, which names the keys of the file. Nothing is changed then.
        """
        states = state[_STATES]
        if refuse_or_tell(self.config, list(self._differences(states[0])), "the checkpoint", self.tell):
            self.tell("the data begin anew")
            return
        try:
            if hasattr(self.batches, "merge_states"):
                self.batches.load_state_dict(self.batches.merge_states(states))
            else:
                self.batches.load_state_dict(states[0])
        except CheckpointError as error:
            self._refuse(error, states[0])

    def _differences(self, saved: Any) -> Iterator[ChangedKey]:
        """Of the order, and of the number of rows."""
        batches = self.batches
        if not isinstance(batches, GlobalBatches) or not isinstance(saved, dict):
            return
        for name in ("seed", "shuffle"):
            value = getattr(batches, name)
            if name in saved and saved[name] != value:
                yield ChangedKey(f"data.{name}", value, saved[name])
        rows = saved.get("num_samples", batches.num_samples)
        if rows != batches.num_samples:
            yield ChangedKey(self._key_of_sources(), f"of {batches.num_samples} rows", f"of {rows} rows")

    def _key_of_sources(self) -> str:
        """The key to name for other rows: any of the sources may be the reason, so it is the one that the file accepts, or the section."""
        accepted = self.config.checkpoints.may_differ
        return next((f"data.{name}" for name in _SOURCES if f"data.{name}" in accepted), "data")

    def _refuse(self, error: CheckpointError, saved: Any) -> None:
        """Raises: LaunchError with the problems of `error`, unless the file accepts them."""
        of_batch = isinstance(self.batches, GlobalBatches) and isinstance(saved, dict) and "num_samples" in saved
        key = "data.global_batch" if of_batch else self._key_of_sources()
        if may_differ(self.config.checkpoints.may_differ, key):
            self.tell(f"{key}: {error.problems[0].what}: accepted by checkpoints.may_differ; the data begin anew")
            return
        choice = f"checkpoints: {{may_differ: [{key}]}}, with which the data begin anew"
        place = self.config.place(key)
        problems = [replace(each, where=place, fix=f"{each.fix}; or {choice}") for each in error.problems]
        raise LaunchError(*problems) from error
