"""Checks, reads and measures kernels: this project's, those of other engines, and yours.

contract                what a copy kernel is to the three programs, in any file
own                     what any other kernel is to them: a class with its oracle
check, check_*          is it right? `python -m hicache.workbench.check module:name`
codegen, codegen_cases  machine code without a GPU: `python -m hicache.workbench.codegen`
scoreboard, scalars     bytes in flight, by a walk over that code
stand_in                a driver that is no GPU
bench                   `python -m hicache.workbench.bench [--dry-run] [--kernel module:name]`
"""
