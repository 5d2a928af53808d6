"""State dicts speak the original order and load whole tensors."""

from __future__ import annotations

import pytest

from tests.axes.tensor import jobs

pytestmark = pytest.mark.processes


def test_state_dict_and_reload(two_processes):
    two_processes.run(jobs.tied_state_and_reload)
