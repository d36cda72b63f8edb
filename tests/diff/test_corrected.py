"""The corrections of vLLM, on stand-ins of its block pool, block tables and connector."""

from types import SimpleNamespace
from typing import Any

from experiments.diff.vllm.corrected import correct


class FakePool:
    def __init__(self, cached: dict[str, str]) -> None:
        self.cached, self.touched, self.freed = cached, list[str](), list[str]()
        self.null_block = "null"

    def get_cached_block(self, block_hash: str, groups: list[int]) -> list[str] | None:
        return [self.cached[block_hash]] if block_hash in self.cached else None

    def cache_full_blocks(
        self, *, request: Any, blocks: list[str], num_cached_blocks: int, block_mask: Any, **_: Any
    ) -> None:
        for place, is_new in enumerate(block_mask, start=num_cached_blocks):
            if is_new:
                self.cached[request.block_hashes[place]] = blocks[place]

    def touch(self, blocks: list[str]) -> None:
        self.touched += blocks

    def free_blocks(self, blocks: list[str]) -> None:
        self.freed += blocks

    def get_new_blocks(self, count: int) -> list[str]:
        return [f"new {number}" for number in range(count)]


class FakeManager:
    """The block table of one group of layers, with blocks of ten tokens."""

    block_size = 10

    def __init__(self, num_skipped: int) -> None:
        self.num_skipped, self.req_to_blocks = num_skipped, dict[str, list[str]]()

    def get_num_skipped_tokens(self, num_tokens: int) -> int:
        return self.num_skipped

    def add_local_computed_blocks(
        self, name: str, found: list[str], num_local: int, num_more: int
    ) -> None:
        skipped = ["null"] * (self.num_skipped // 10)
        self.req_to_blocks[name] = skipped + found[len(skipped) :]


def scheduler_of(
    pool: FakePool, connector: Any = None, managers: tuple[FakeManager, ...] = ()
) -> SimpleNamespace:
    wrapped = SimpleNamespace(connector_scheduler=connector) if connector else None
    cache = SimpleNamespace(
        block_pool=pool,
        coordinator=SimpleNamespace(single_type_managers=managers),
        allocate_slots=lambda request: None,
    )
    return SimpleNamespace(kv_cache_manager=cache, connector=wrapped)


def test_a_load_reuses_blocks_on_the_device_and_loads_the_rest() -> None:
    pool = FakePool({"a": "old a", "b": "old b", "d": "old d"})
    full, window = FakeManager(0), FakeManager(20)
    scheduler = scheduler_of(pool, managers=(full, window))
    correct(scheduler)
    scheduler.kv_cache_manager.allocate_slots(SimpleNamespace(block_hashes=["a", "b", "c", "d"]))
    for manager, found in ((full, ["old a"]), (window, [])):
        manager.add_local_computed_blocks("1", found, 10, 30)
        manager.allocate_external_computed_blocks("1", 10, 30)  # type: ignore[attr-defined]
    assert full.req_to_blocks["1"] == ["old a", "old b", "new 0", "old d"]
    assert window.req_to_blocks["1"] == ["null", "null", "new 0", "old d"]


def test_a_request_takes_the_cached_block_that_equals_its_own() -> None:
    pool = FakePool({"a": "old a", "b": "old b"})
    correct(scheduler_of(pool))
    blocks = ["old a", "new b", "new c"]
    pool.cache_full_blocks(
        request=SimpleNamespace(block_hashes=["a", "b", "c"]),
        blocks=blocks,
        num_cached_blocks=1,
        num_full_blocks=3,
        kv_cache_group_id=0,
        block_mask=None,
    )
    assert blocks == ["old a", "old b", "new c"]
    assert (pool.touched, pool.freed) == (["old b"], ["new b"])
    assert pool.cached == {"a": "old a", "b": "old b", "c": "new c"}


def test_every_block_is_offered_for_storing_after_a_load() -> None:
    group = SimpleNamespace(next_stored_chunk_idx=0)

    def update(request: Any, blocks: Any, num_loaded: int) -> None:
        group.next_stored_chunk_idx = num_loaded

    connector = SimpleNamespace(
        _req_status={"1": SimpleNamespace(group_states=[group])}, update_state_after_alloc=update
    )
    correct(scheduler_of(FakePool({}), connector))
    connector.update_state_after_alloc(SimpleNamespace(request_id="1"), None, 7)
    assert group.next_stored_chunk_idx == 0
