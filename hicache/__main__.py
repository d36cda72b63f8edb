"""`python -m hicache` is the `hicache` command."""

from hicache.cli.main import main

main()
