"""The command line: `main` reads arguments, runs one verb, and turns whatever goes wrong into an exit status.

Every verb comes from an `add_commands` of its own (`parser.py`); what a verb needs is imported when it runs, so that
`--help` and everything that only reads plans answers without torch. Exit statuses: `parallelize.console`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from parallelize.cli.parser import build_parser
from parallelize.cli.plans import with_verb
from parallelize.console import ENVIRONMENT, FINE, INTERRUPTED, report, status_of
from parallelize.errors import ParallelizeError, Problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    if arguments is not None:
        return _status(list(arguments))
    status = _status(sys.argv[1:])
    threads = sys.modules.get("parallelize.threads")
    if threads is not None and threads.still_running():  # Python cannot end beside them without an abort
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _status(given: list[str]) -> int:
    as_json = "--json" in given
    try:
        options = build_parser().parse_args(with_verb(given))
        status = options.run(options)
        sys.stdout.flush()
        return status
    except ParallelizeError as error:
        report(error.problems, as_json)
        return status_of(error.problems)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except ImportError as error:
        report([_missing(error)], as_json)
        return ENVIRONMENT
    except OSError as error:
        report([_of_the_system(error)], as_json)
        return ENVIRONMENT
    except KeyboardInterrupt:
        return INTERRUPTED


def _missing(error: ImportError) -> Problem:
    """A package that is not there, or not as needed. One of our own modules is a mistake of ours: that is raised."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "parallelize"):
        raise error
    if isinstance(error, ModuleNotFoundError):
        return Problem("missing-package", f"this needs {package}", fix=f"pip install {package}")
    return Problem("missing-package", f"this needs another {package}: {error}", fix=f"pip install -U {package}")


def _of_the_system(error: OSError) -> Problem:
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return Problem("file-error", error.strerror or str(error) or type(error).__name__, " -> ".join(names))
