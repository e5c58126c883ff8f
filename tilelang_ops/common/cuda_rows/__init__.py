"""Rows of scores, one block of threads each: walks over the row, reductions, draws, cuts of truncations.

    row      a block's row: its memory, keys, walks, reductions
    draw     the draw of a token
    places   histograms of the scores, and what they say about the cut
    masses   what top-p sums
    lists    the few tokens among which the cut is
    cut      the cut

A row is read in groups of four tokens; a walk hands every group to a macro, and has the next ones on their
way meanwhile. Sums that decide something are integers, or floats of known error that decide what is clear;
maxima are of whole keys. So no order of threads shows.

Keys. `pack` makes one integer of a score and its token id: a larger score is a larger key, and of equal
scores the lower id. A truncation keeps the tokens whose key is at least its cut. What decides are the masses
of `truncate_scores`' reference, integers; every step that makes them is rounded once, so programs are built
with `OPTIONS`.

    look       a walk sums exponentials in float32 and lists the tokens above a bound that a sample of the row
               gives. Mostly the cut is in the list.
    survey     otherwise a walk with a guess: masses of all and of those above the guessed places are summed,
               the tokens in these places are listed. The guess comes from a quarter of the row, counted by
               place; where that failed, and for a top-k beyond the list, from counts of all tokens.
    list       is sorted, and its prefix sums of masses give the cut, or that the guess was wrong
    bisect     finds a cut that the list has no room for, a walk per bit of a key

Places. `place` makes one of 4096 integers of a score, 64 to a unit of score or fewer, around the best of a
sample.

Masses in float32 are of known error: a draw is among all that may stay, and only where the winner is not sure
to stay, a matter of chances of 2^-13, the row is walked again for the integers.
"""

from tilelang_ops.common.cuda_noise import keep
from tilelang_ops.common.cuda_rows.cut import (
    bisect_cut,
    bound_list,
    draw_from_list,
    find_cut,
    keep_above,
    list_above,
    look,
    narrow,
    survey_group,
)
from tilelang_ops.common.cuda_rows.draw import (
    draw_group,
    finish_draw,
    keep_for_draw,
    set_stream,
    start_draw,
    start_plain_draw,
    winner_bound,
)
from tilelang_ops.common.cuda_rows.lists import collect, list_picked, pack_list, sort_list
from tilelang_ops.common.cuda_rows.masses import mass_of
from tilelang_ops.common.cuda_rows.places import MAGIC, CutRow, count_places, find_rank, place
from tilelang_ops.common.cuda_rows.rivals import LEAST_TOP_P, choose_rival, draw_rivals
from tilelang_ops.common.cuda_rows.row import (
    K_PLACE,
    LIST_SIZE,
    LOWEST,
    OPTIONS,
    QUEUE_SIZE,
    Row,
    added,
    finish_watch,
    is_nan,
    is_whole,
    larger,
    largest,
    load_group,
    load_sample,
    near_mass,
    ordered,
    pack,
    packed_score,
    packed_token,
    reduce_block,
    start_watch,
    walk,
    watch,
    whole_branch,
)

__all__ = [
    "K_PLACE",
    "LEAST_TOP_P",
    "LIST_SIZE",
    "LOWEST",
    "MAGIC",
    "OPTIONS",
    "QUEUE_SIZE",
    "CutRow",
    "Row",
    "added",
    "bisect_cut",
    "bound_list",
    "choose_rival",
    "collect",
    "count_places",
    "draw_from_list",
    "draw_group",
    "draw_rivals",
    "find_cut",
    "find_rank",
    "finish_draw",
    "finish_watch",
    "is_nan",
    "is_whole",
    "keep",
    "keep_above",
    "keep_for_draw",
    "larger",
    "largest",
    "list_above",
    "list_picked",
    "load_group",
    "load_sample",
    "look",
    "mass_of",
    "narrow",
    "near_mass",
    "ordered",
    "pack",
    "pack_list",
    "packed_score",
    "packed_token",
    "place",
    "reduce_block",
    "set_stream",
    "sort_list",
    "start_draw",
    "start_plain_draw",
    "start_watch",
    "survey_group",
    "walk",
    "watch",
    "whole_branch",
    "winner_bound",
]
