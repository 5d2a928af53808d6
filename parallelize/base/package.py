"""The package's name and folder: frames and modules in it are not the user's."""

from __future__ import annotations

import os

NAME = __name__.partition(".")[0]
FOLDER = os.path.dirname(os.path.dirname(__file__))
