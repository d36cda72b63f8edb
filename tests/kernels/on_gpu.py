"""Whether tests take sizes of production, which need a real GPU, or small ones."""

import sys

import torch

ON_GPU = torch.cuda.is_available() and "tests.imitated_gpu" not in sys.modules
