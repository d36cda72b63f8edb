"""Tools that check, read and measure kernels: this project's, other engines' and the user's own.

contract                interface of a copy kernel, in any file
own                     interface of any other kernel: a class with its oracle
check, check_*          correctness: `python -m hicache.workbench.check module:name`
codegen, codegen_cases  machine code without a GPU: `python -m hicache.workbench.codegen`
scoreboard, scalars     bytes in flight, by a static model of that code
stand_in                a driver that stands in for a GPU
bench                   `python -m hicache.workbench.bench [--dry-run] [--kernel module:name]`
"""
