"""The serving loop against closed forms: one server, Poisson arrivals, no cache hits."""

import time
import numpy as np
from tests.validity import runs

ALONE = (
    "storage=none",
    "cache.host_gib=0",
    "cache.device_gib=4",
    "model=llama3_8b",
    "parallel.tp=4",
    "scheduler.max_running=1",
    "workload.arrivals=open",
)
