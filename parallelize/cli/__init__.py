"""The command line: `main` parses arguments, runs one command, and turns errors into an exit status.

Each command is added by an `add_commands` of its room (`parser.py`). A command imports what it needs when it runs, so
that `--help` and commands that only read plans do not import torch. Exit statuses: `parallelize.base.terminal.console`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from parallelize.base.errors import ParallelizeError, Problem
from parallelize.base.terminal.console import ENVIRONMENT, FINE, INTERRUPTED, report, status_of
from parallelize.cli.parser import parsed
from parallelize.cli.plans import with_verb

_RANK_0_PRINTS_S = 30.0
"""What a failed rank waits for. torchrun ends all ranks as soon as one fails, and rank 0 alone prints why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: the arguments without the program's name. None: those of this process.
    """
    if arguments is not None:
        return _status(list(arguments))
    status = _status(sys.argv[1:])
    if status != FINE and os.environ.get("RANK", "0") != "0":
        time.sleep(_RANK_0_PRINTS_S)
    threads = sys.modules.get("parallelize.tools.verification.threads")
    if threads is not None and threads.still_running():  # Python would abort if it exited while they run
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _status(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    try:
        options = parsed(with_verb(arguments))
        status = options.run(options)
        sys.stdout.flush()
        return status
    except ParallelizeError as error:
        report(error.problems, as_json)
        return status_of(error.problems)
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except ImportError as error:
        report([_import_problem(error)], as_json)
        return ENVIRONMENT
    except OSError as error:
        report([_file_problem(error)], as_json)
        return ENVIRONMENT
    except KeyboardInterrupt:
        return INTERRUPTED


def _import_problem(error: ImportError) -> Problem:
    """A package that is missing, broken or of another version.

    An import of one of this package's modules that fails is a bug of this package, so that error is raised again.
    """
    package = (error.name or "").partition(".")[0]
    if package == "parallelize":
        raise error
    if not package:  # raised by code of a package, not by the import system: the name is unknown
        fix = "reinstall the package that the message names; `parallelize env` lists installed versions"
        return Problem(
            "missing-package", f"a package cannot be imported: {str(error) or type(error).__name__}", fix=fix
        )
    if isinstance(error, ModuleNotFoundError):
        return Problem("missing-package", f"this needs {package}", fix=f"pip install {package}")
    return Problem("missing-package", f"this needs another {package}: {error}", fix=f"pip install -U {package}")


def _file_problem(error: OSError) -> Problem:
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return Problem("file-error", error.strerror or str(error) or type(error).__name__, " -> ".join(names))
