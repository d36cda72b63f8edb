"""`hicache run` in a checkout: `python -m experiments.run OVERRIDES`."""

from hicache.cli.run import main

if __name__ == "__main__":
    main()
