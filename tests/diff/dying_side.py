"""A side whose process ends at its import, as if it had been killed for its memory."""

import os
import sys

print("farewell", file=sys.stderr, flush=True)
os._exit(1)
