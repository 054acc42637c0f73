"""What every test process has in common.

tkernels is imported before any test module imports Triton: without CUDA, it makes the process interpret. One thread per
worker, here and in the processes that tests start: two workers with two threads each on two cores spend their time
waiting for each other (training a small model took 164 s instead of 18).
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

import tkernels  # noqa: F401

torch.set_num_threads(1)
