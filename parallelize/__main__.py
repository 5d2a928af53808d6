"""`python -m parallelize`."""

import sys

from parallelize.cli import main

sys.exit(main())
