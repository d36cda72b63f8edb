"""Corrects three faults of vLLM 0.33.0, so that its other decisions can be compared.

- After a load, `OffloadingConnectorScheduler.update_state_after_alloc` (`offloading/scheduler.py`,
  line 1472) skips all blocks before the end of the load. Blocks that were hit on the device then
  keep their age in the CPU tier. Corrected: it offers every block, and the tier refreshes those
  that it holds.
- `BlockPool` keeps a computed block although an equal block is cached (`block_pool.py`, line 49).
  Corrected: the request takes the cached block, and its own is freed.
- With windows or states, the blocks that the device holds after the last whole window or state are
  loaded once more (`kv_cache_coordinator.py`, `find_longest_cache_hit` truncates them). Corrected:
  the request takes the blocks of the device, and loads the others.
"""

from typing import Any


def correct(scheduler: Any) -> None:
    """Correct known faults in this vLLM scheduler; the installed package stays unchanged."""
    _keep_one_of_equal_blocks(scheduler.kv_cache_manager.block_pool)
    _load_what_the_device_lacks(scheduler.kv_cache_manager)
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


def _load_what_the_device_lacks(cache: Any) -> None:
    hashes: list[Any] = []  # of the request that gets blocks
    allocate = cache.allocate_slots

    def note_request(request: Any, *args: Any, **more: Any) -> Any:
        hashes[:] = request.block_hashes
        return allocate(request, *args, **more)

    cache.allocate_slots = note_request
    for group, manager in enumerate(cache.coordinator.single_type_managers):
        _take_held(manager, group, cache.block_pool, hashes)


def _take_held(manager: Any, group: int, pool: Any, hashes: list[Any]) -> None:
    add, null = manager.add_local_computed_blocks, pool.null_block
    manager.num_loaded = {}

    def add_and_take(name: str, found: Any, num_local: int, num_more: int) -> None:
        add(name, found, num_local, num_more)
        blocks = manager.req_to_blocks[name]
        for block_hash in hashes[len(blocks) : (num_local + num_more) // manager.block_size]:
            held = pool.get_cached_block(block_hash, [group]) or [null]
            pool.touch(held)
            blocks += held

    def fill(name: str, num_local: int, num_more: int, **_: Any) -> None:
        blocks, first = manager.req_to_blocks[name], num_local // manager.block_size
        first = max(
            first, manager.get_num_skipped_tokens(num_local + num_more) // manager.block_size
        )
        lacking = [place for place in range(first, len(blocks)) if blocks[place] is null]
        for place, block in zip(lacking, pool.get_new_blocks(len(lacking)), strict=True):
            blocks[place] = block
        manager.num_loaded[name] = len(lacking)  # the job lists all from the first of them on

    manager.add_local_computed_blocks, manager.allocate_external_computed_blocks = (
        add_and_take,
        fill,
    )


def _offer_every_block(connector: Any) -> None:
    update = connector.update_state_after_alloc

    def update_and_rewind(request: Any, blocks: Any, num_loaded: int) -> None:
        update(request, blocks, num_loaded)
        if num_loaded:
            for group in connector._req_status[request.request_id].group_states:
                group.next_stored_chunk_idx = 0

    connector.update_state_after_alloc = update_and_rewind
