"""Rules for page keys with speculation: the hits they cost, and prompts that share none."""

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA
from hicache.cache.tree.digests import Digests
from hicache.cache.tree.lookup import look, usable_len
from hicache.cache.tree.node import DEVICE, HOST, make_root
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.experiment import run
from hicache.request import TOKEN_BYTES, Request, TokenSpans
from hicache.results.metrics import Result
from hicache.rules import DRAFT_KEYS, Rules
from hicache.runs.schema import config_of
from hicache.workload.workload import Workload
from tests.cache.small import named_kinds, tokens_of

OVERLAPS = {"token": 0, "bigram": 1, "drop_block": 0}
# of a next turn that repeats all n tokens; SGLang 0.5.23's own `RadixKey` on a CPU
REPEATED = [
    *((1, n, n, n - 1) for n in (2, 64, 4096)),
    (64, 4096, 4096, 4032),
    (64, 4097, 4096, 4096),
    (64, 4160, 4160, 4096),
    (16, 4096, 4096, 4080),
]
# of a prompt that shares so many tokens, and then differs
SHARED = [(64, 128, 128, 64), (64, 129, 128, 128), (64, 192, 192, 128), (64, 193, 192, 192)]


def spans(*runs: tuple[int, int]) -> TokenSpans:
    starts, counts = zip(*runs, strict=True)
    return TokenSpans(np.array(starts, np.int32), np.array(counts, np.int32))


def request(number: int, *runs: tuple[int, int], answer: int = 1) -> Request:
    own = spans((10**6 * (number + 1), answer))
    return Request(
        id=number, session_id=number, arrival_ns=number * 10**11, prompt=spans(*runs), output=own
    )


def served(*requests: Request, size: int, key: str, more: tuple[str, ...] = ()) -> Result:
    config = config_of(
        *("workload=chat", "model=llama3_8b", "storage=none", f"cache.page_size={size}"),
        *("cache.unlimited=true", "tracker.wandb_mode=disabled", "workload.arrivals=open"),
        *("speculation.drafts=3", f"speculation.key={key}", *more),
    )
    workload = Workload(name="pair", requests=requests)
    return run(config, workload=workload)


def hits(result: Result) -> list[int]:
    return [record.prompt_len - record.computed_len for record in result.records]


def many_hits(sets: list[list[list[tuple[int, int]]]], *, size: int, key: str) -> list[list[int]]:
    """The hits of sets of prompts in one run; sets share no tokens."""
    shifted = [
        [[(first + 10**7 * (at + 1), count) for first, count in runs] for runs in prompts]
        for at, prompts in enumerate(sets)
    ]
    flat = [runs for prompts in shifted for runs in prompts]
    found = iter(
        hits(served(*(request(n, *runs) for n, runs in enumerate(flat)), size=size, key=key))
    )
    return [[next(found) for _ in prompts] for prompts in sets]


@pytest.mark.parametrize("size", [1, 16, 64])
def test_with_bigram_keys_a_prompt_hits_one_token_less_rounded_down_to_pages(size: int) -> None:
    repeated, shared = ([each for each in cases if each[0] == size] for cases in (REPEATED, SHARED))
    sets = [[[(0, length)], [(0, length), (5 * 10**5, 70)]] for _, length, *_ in repeated]
    sets += [[[(0, length), (own * 10**5, 300)] for own in (1, 2)] for _, length, *_ in shared]
    for key, place in (("token", 2), ("bigram", 3)):
        wanted = [[0, each[place]] for each in [*repeated, *shared]]
        assert many_hits(sets, size=size, key=key) == wanted


@pytest.mark.parametrize("key", DRAFT_KEYS)
def test_the_hits_of_every_short_prompt_follow_its_key_rule(key: str) -> None:
    size, lengths = 16, [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65]
    sets, wanted = [], []
    for length in lengths:
        sets.append([[(0, length)], [(0, length)], [(0, length), (5 * 10**5, 40)]])
        pages = (length - OVERLAPS[key]) // size, (length - 1 - OVERLAPS[key]) // size
        turned, repeated = (max(each - (key == "drop_block"), 0) * size for each in pages)
        wanted.append([0, repeated, turned])
    assert many_hits(sets, size=size, key=key) == wanted


# blocks of 448 and 832 tokens: what vLLM 0.28 with Qwen3.8-27B and drafts had cached of a prompt
# that is sent again with a short addition (syv-ai/qwen38-27b-rtx3090 issue 102)
CACHED = {512: (0, 0), 1024: (448, 0), 2048: (1344, 832), 4096: (3584, 2496), 8192: (7616, 6656)}


@pytest.mark.parametrize("length", CACHED)
@pytest.mark.parametrize(("place", "size"), [(0, 448), (1, 832)])
def test_a_model_with_states_hits_what_vllm_had_cached(length: int, place: int, size: int) -> None:
    pair = request(0, (0, length)), request(1, (0, length), (5 * 10**5, 9))
    more = ("model=qwen3_next_80b", "compat.rules.lowers_ends=true")
    result = served(*pair, size=size, key="drop_block", more=more)
    assert hits(result) == [0, CACHED[length][place]]


@pytest.mark.parametrize(("lowers_ends", "repeats"), [(True, [1600, 1600]), (False, [0, 1600])])
def test_the_first_repeat_hits_if_the_state_is_kept_a_block_lower(
    lowers_ends: bool,  # noqa: FBT001
    repeats: list[int],
) -> None:
    # vllm issue 53504: 0 of 4,481 tokens with the state at the last block alone
    same = [request(number, (0, 4481)) for number in range(3)]
    more = (
        *("model=qwen3_next_80b", "cache.checkpoints=end_branch"),
        f"compat.rules.lowers_ends={lowers_ends}",
    )
    assert hits(served(*same, size=1600, key="drop_block", more=more))[1:] == repeats


def test_no_page_has_the_same_digest_under_two_key_rules() -> None:
    tokens, size = tokens_of(66), 4
    names = []
    for overlap in (0, 1):
        digests = Digests(size, overlap=overlap)
        sequence = Sequence(digests.of_tokens(tokens))
        names.append({*digests.of_span(make_root(""), sequence, 16)})
    assert len(names[0]) == len(names[1]) == 16
    assert names[0].isdisjoint(names[1])


def test_two_prompts_share_a_bigram_page_if_the_next_token_is_equal_too() -> None:
    digests, size = Digests(4, overlap=1), 4 * TOKEN_BYTES
    same = tokens_of(9)
    other = same[: 2 * size] + tokens_of(1, first=99)
    one, two = (digests.of_tokens(tokens) for tokens in (same, other))
    length = digests.page_bytes
    assert one[:length] == two[:length]
    assert one[length:] != two[length:]


def test_a_lookup_agrees_with_a_match_if_the_last_block_is_dropped() -> None:
    names = Digests(4)
    tree = RadixTree(kinds=named_kinds(4), names=names, drops_block=True, rules=Rules())
    tokens = tokens_of(33)
    node = tree.root("")
    assert usable_len(tree, tokens, 32) == 0
    node = tree.grow(node, tokens[: 6 * names.page_bytes])
    tree.residency.put(node, 0, 0, list(range(6)))
    for length in range(33):
        seen = look(tree, tokens, length)
        assert seen.usable_len == max(min(length // 4, 6) - 1, 0) * 4
        found = tree.match(tokens, length)
        assert (found.usable_len, found.full_len, found.dropped_len) == (
            seen.usable_len,
            seen.full_len,
            seen.dropped_len,
        )


def test_the_branch_point_is_the_end_of_the_device_hit_less_the_dropped_block() -> None:
    rules = Rules(keeps_for_repeats=True)
    tree = RadixTree(kinds=named_kinds(4, has_states=True), drops_block=True, rules=rules)
    tokens, node = tokens_of(33), tree.root("")
    for end, tiers in ((2, (DEVICE, HOST)), (3, (DEVICE, HOST)), (6, (HOST,))):
        node = tree.grow(node, tokens[node.end * tree.page_bytes : end * tree.page_bytes])
        for tier in tiers:
            tree.residency.put(node, tier, FULL, list(range(node.start, end)))
        if end == 2:
            tree.residency.put(node, DEVICE, MAMBA, [0])
    for found in (look(tree, tokens, 32), tree.match(tokens, 32)):
        assert (found.usable_len, found.full_len, found.branch_end) == (8, 20, 8)
        assert found.branch_len is None  # the device resumes at all of it


def test_a_model_with_states_has_plain_keys_in_sglang() -> None:
    sglang = ("compat=sglang_0_5_23", "speculation.drafts=3")
    assert config_of(*sglang, "model=llama3_8b").draft_key == "bigram"
    assert config_of(*sglang, "model=qwen3_next_80b").draft_key == "token"
