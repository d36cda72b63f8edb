"""Kernels that move pages, token rows, windows and Mamba slots between device and host memory.

They take tensors and tables and do not depend on the cache, so any engine can call them. They need
torch, triton and einops only. README.md explains their use and the cost of each operation.
"""

from hicache.kernels.copy import checksums as checksums
from hicache.kernels.copy import copy_items as copy_items
from hicache.kernels.copy import copy_items_with_checksum as copy_items_with_checksum
from hicache.kernels.copy import naive_copy_items as naive_copy_items
from hicache.kernels.index import page_table as page_table
from hicache.kernels.layout import layer_first_buffers as layer_first_buffers
from hicache.kernels.layout import page_first_buffers as page_first_buffers
from hicache.kernels.ops import send as send
from hicache.kernels.ops import send_ids as send_ids
from hicache.kernels.ops import warm_up as warm_up
from hicache.kernels.table import CopyTable as CopyTable
from hicache.kernels.table import copy_table as copy_table
