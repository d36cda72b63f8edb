"""Loops whose machine code the static model is shown."""

import triton
import triton.language as tl


@triton.jit
def _ends(pieces_ptr):
    # the source and the target of a program
    piece = pieces_ptr + tl.program_id(0) * 6
    src = tl.load(piece).to(tl.pointer_type(tl.int64))
    dst = tl.load(piece + 1).to(tl.pointer_type(tl.int64))
    return tl.multiple_of(src, 16), tl.multiple_of(dst, 16)


@triton.jit
def two_deep_kernel(pieces_ptr, num_tiles, WORDS: tl.constexpr):
    """Its text has two tiles on their way.

    `words = next_words` becomes moves from register to register, and these wait for the loads of
    the next tile, which they should overlap; so in every turn but the first there is one.
    """
    src, dst = _ends(pieces_ptr)
    word = tl.arange(0, WORDS)
    words = tl.load(src + word)
    tile = 0
    while tile < num_tiles:
        num_next = tl.where(tile + 1 < num_tiles, WORDS, 0)
        next_words = tl.load(src + (tile + 1) * WORDS + word, mask=word < num_next, other=0)
        tl.store(dst + tile * WORDS + word, words)
        words = next_words
        tile += 1


@triton.jit
def staged_kernel(pieces_ptr, num_tiles, WORDS: tl.constexpr):
    """The compiler's own pipeline: copies into shared memory, three turns ahead."""
    src, dst = _ends(pieces_ptr)
    word = tl.arange(0, WORDS)
    for tile in tl.range(0, num_tiles, num_stages=4):
        tl.store(dst + tile * WORDS + word, tl.load(src + tile * WORDS + word))
