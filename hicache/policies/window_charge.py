"""Window charges: how much room in a sliding-window pool a request needs to be admitted."""

from hicache.scheduler.admission import ceil_page


def swa_budget_for_req(
    form: str,
    *,
    extend: int,
    chunk: int | None,
    window: int,
    page: int,
    swa_host_hit_length: int = 0,
    max_new: int = 0,
) -> int:
    """Return how many tokens of sliding-window KV are reserved when a request is admitted.

    Let a be the smaller of `extend` and `chunk`. Let host be `swa_host_hit_length`, rounded up to
    whole pages. `form` names the formula:

    - `no_host_term`: max(a, window) + page;
    - `reports`: max(a, window) + page + host, as in SGLang since its pull request 27391;
    - `double`: max(a, window) + page + 2 * host, to measure the effect of counting host twice;
    - `sglang_0_5_23`: max(a - window, 0) + min(extend + max_new, window) + page + host, as in
      SGLang since its pull request 32379.

    Args:
        form: the name of the formula.
        extend: tokens of the request that must be computed.
        chunk: tokens that the current step can still compute; None means no limit. Admission always
            passes a number.
        window: length of the sliding window in tokens.
        page: tokens per page.
        swa_host_hit_length: window tokens to load from host to device; 0 once device pages are
            allocated for them.
        max_new: answer tokens for which memory is reserved.
    """
    allocated = extend if chunk is None else min(extend, chunk)
    host = ceil_page(swa_host_hit_length, page)
    if form == "sglang_0_5_23":
        return max(allocated - window, 0) + min(extend + max_new, window) + page + host
    base = max(allocated, window) + page
    if form == "no_host_term":
        return base
    return base + (2 * host if form == "double" else host)
