"""The exit status says whose problem it is: the input's or the environment's."""

from __future__ import annotations

from parallelize.base.errors import Problem
from parallelize.base.terminal.console import status_of


def test_only_problems_of_the_environment_alone_end_with_3():
    environment, mistake = Problem("no-gpu", ""), Problem("bad-mesh", "")
    statuses = [status_of(problems) for problems in ([environment] * 2, [environment, mistake], [mistake])]
    assert statuses == [3, 2, 2]
