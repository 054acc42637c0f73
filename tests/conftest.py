"""Decides the mode before any test module imports Triton: without CUDA, tkernels makes this process interpret."""

import tkernels  # noqa: F401
