"""The packages: every folder of `parallelize/`, and the plans, which stand beside it. All else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["parallelize", "parallelize.*"]), "parallelize.tp_plans"])
