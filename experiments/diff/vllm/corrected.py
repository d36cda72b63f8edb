"""Corrects two faults of vLLM 0.33.0, so that its other decisions can be compared.

- After a load, `OffloadingConnectorScheduler.update_state_after_alloc` (`offloading/scheduler.py`,
  line 1472) skips all blocks before the end of the load. Blocks that were hit on the device then
  keep their age in the CPU tier. Corrected: it offers every block, and the tier refreshes those
  that it holds.
- `BlockPool` keeps a computed block although an equal block is cached (`block_pool.py`, line 49).
  Corrected: the request takes the cached block, and its own is freed.
"""

from typing import Any


def correct(scheduler: Any) -> None:
    """Correct two known faults in this vLLM scheduler; the installed package stays unchanged."""
    _keep_one_of_equal_blocks(scheduler.kv_cache_manager.block_pool)
    if scheduler.connector is not None:
        _offer_every_block(scheduler.connector.connector_scheduler)


def _keep_one_of_equal_blocks(pool: Any) -> None:
    cache = pool.cache_full_blocks

    def cache_once(**call: Any) -> None:
        blocks, first = call["blocks"], call["num_cached_blocks"]
        is_new = call["block_mask"] or [True] * (call["num_full_blocks"] - first)
        for place in range(first, first + len(is_new)):
            block_hash = call["request"].block_hashes[place]
            equal = pool.get_cached_block(block_hash, [call["kv_cache_group_id"]])
            if is_new[place - first] and equal:
                pool.touch(equal)
                pool.free_blocks([blocks[place]])
                blocks[place] = equal[0]
                is_new[place - first] = False
        cache(**{**call, "block_mask": is_new})

    pool.cache_full_blocks = cache_once


def _offer_every_block(connector: Any) -> None:
    update = connector.update_state_after_alloc

    def update_and_rewind(request: Any, blocks: Any, num_loaded: int) -> None:
        update(request, blocks, num_loaded)
        if num_loaded:
            for group in connector._req_status[request.request_id].group_states:
                group.next_stored_chunk_idx = 0

    connector.update_state_after_alloc = update_and_rewind
