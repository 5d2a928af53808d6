"""Many ranks in one process, for tests. It is defined in the package, because `verify` uses it too."""

from __future__ import annotations

from parallelize.tools.verification.threads import run_ranks

__all__ = ["run_ranks"]
