"""`ON_GPU` is true with a real GPU: tests then use production sizes, and small ones otherwise."""

import sys

import torch

ON_GPU = torch.cuda.is_available() and "tests.imitated_gpu" not in sys.modules
