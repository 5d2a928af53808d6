"""Many ranks in one process, for tests. It stands in the package, because `verify` runs on it too."""

from __future__ import annotations

from parallelize.threads import run_ranks

__all__ = ["run_ranks"]
