"""Rows of scores, one block of threads each: walks over the row, reductions, and the cut of a truncation.

    row      a block's row: its memory, keys, walks, reductions
    places   a histogram of the scores, and what it says about the cut
    draw     the draw of a token
    cut      the cut, from places, masses and a sorted list

A row is read in groups of four tokens; a walk hands every group to a macro. Sums that decide something are
integers and maxima are of whole keys, so no order of threads shows.

Keys. `pack` makes one integer of a score and its token id: a larger score is a larger key, and of equal
scores the lower id. A truncation keeps the tokens whose key is at least its cut. Nothing is sorted but a
short list:

    walk 1   the largest score, and how many tokens fall into each of 4096 places (`place`), 64 to a unit
             of score or fewer, around a sampled reference
    counts   say in which place the k-th token is, exactly, and, with exp(place) for a mass, about where the
             nucleus ends
    walk 2   the masses of all tokens and of those above the places in question; tokens in those places are
             collected
    list     is sorted, and its prefix sums of masses give the cut, or that the guess was wrong: then wider
             places are tried once
    bisect   finds a cut that the list has no room for, a walk per bit of a key

In walk 2 a draw is content with masses in float32, of known error: it draws among all that may stay, and only
where the winner is not sure to stay, a matter of chances of 2^-13, the row is walked again for the integers.
The masses are those of `truncate_scores`' reference: every step is rounded once, so programs are built with
`OPTIONS`.
"""

from tilelang_ops.common.cuda_noise import keep
from tilelang_ops.common.cuda_rows.cut import bisect_cut, collect, find_cut, sort_list, survey_group
from tilelang_ops.common.cuda_rows.draw import (
    draw_from_list,
    draw_group,
    finish_draw,
    keep_for_draw,
    set_stream,
    start_plain_draw,
)
from tilelang_ops.common.cuda_rows.places import MAGIC, count_places, guess_places, place
from tilelang_ops.common.cuda_rows.row import (
    K_PLACE,
    LIST_SIZE,
    LOWEST,
    OPTIONS,
    Row,
    added,
    finish_watch,
    is_whole,
    larger,
    largest,
    pack,
    packed_score,
    packed_token,
    reduce_block,
    start_watch,
    walk,
    watch,
)

__all__ = [
    "K_PLACE",
    "LIST_SIZE",
    "LOWEST",
    "MAGIC",
    "OPTIONS",
    "Row",
    "added",
    "bisect_cut",
    "collect",
    "count_places",
    "draw_from_list",
    "draw_group",
    "find_cut",
    "finish_draw",
    "finish_watch",
    "guess_places",
    "is_whole",
    "keep",
    "keep_for_draw",
    "larger",
    "largest",
    "pack",
    "packed_score",
    "packed_token",
    "place",
    "reduce_block",
    "set_stream",
    "sort_list",
    "start_plain_draw",
    "start_watch",
    "survey_group",
    "walk",
    "watch",
]
