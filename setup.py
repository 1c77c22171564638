"""All metadata is in pyproject.toml; this file exists for tools that still call it."""

from setuptools import setup

setup()
