"""A side whose process ends, as one that is killed for memory."""

import os
import sys

print("farewell", file=sys.stderr, flush=True)
os._exit(1)
