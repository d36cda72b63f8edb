"""A side whose process ends, as one that is killed for memory."""

import os
import sys

sys.stderr.write("farewell\n")
sys.stderr.flush()
os._exit(1)
