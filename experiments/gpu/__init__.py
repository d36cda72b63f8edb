"""Programs for a machine with a GPU: the script `gpu.sh`, and what it calls."""
