"""The cut of a row: where min-p, top-k and top-p end."""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import noise_near
from tilelang_ops.common.cuda_rows.draw import start_draw, winner_bound, word_of
from tilelang_ops.common.cuda_rows.lists import list_picked, pack_list, sort_list
from tilelang_ops.common.cuda_rows.masses import (
    add_masses,
    add_near_masses,
    finish_masses,
    mass_of,
    take_near,
)
from tilelang_ops.common.cuda_rows.places import (
    MAGIC,
    clear_counts,
    count_group,
    count_places,
    find_rank,
    guess_from_counts,
    guess_from_sample,
    place,
    set_bound,
    start_places,
)
from tilelang_ops.common.cuda_rows.row import (
    BINS,
    HIGH_PLACE,
    K_PLACE,
    LIST_SIZE,
    LOW_PLACE,
    LOWEST,
    QUEUE_SIZE,
    added,
    is_nan,
    larger,
    largest,
    ordered,
    pack,
    packed_score,
    packed_token,
    reduce_block,
    scan_block,
    smaller,
    walk,
    walk_again,
    whole_branch,
)

RETRY_PLACES = 4
LOG2_E = 1.4426950408889634
# Where `find_cut` takes its list from, in the order of attempts.
LOOK, GUESS, COUNTED, WIDER, GIVEN, NOWHERE = range(6)


@T.macro
def bound_list(r, wanted):
    """The bound of a list that shall hold `wanted` tokens: a rank in a sample. Sets places as well."""
    start_places(r)
    clear_counts(r)
    for j in T.unroll(4):
        r.scores[j] = r.raw[j] * r.scale[0]
    count_group(r, 0)
    T.sync_threads()
    size = T.min(T.max(r.capacity * 3 // 16, wanted), r.capacity * 5 // 8)
    find_rank(r, T.cast(size * (4 * r.num_threads) // r.vocab + 1, "int64"))
    edge = (T.cast(r.ints[K_PLACE], "float32") - T.float32(0.5) - r.origin[0]) * r.width[0]
    set_bound(r, T.min(edge / r.scale[0], r.raw_peak[0]), r.ints[K_PLACE] > 0)


@T.macro
def list_above(r, base, group):
    """Lists the tokens of a group above the bound."""
    if largest(r.raw, base) >= r.bound_of_list[0]:
        for j in T.unroll(4):
            r.picks[j] = T.if_then_else(r.scores[base + j] > r.least_listed[0], 1, 0)
        list_picked(r, base, group)
    else:
        whole_branch(r)


@T.macro
def _guess_group(r, base, group):
    """Lists the tokens of a group between two bounds, and sums the masses above in float32."""
    top = largest(r.raw, base)
    if top >= r.bound_of_list[0]:
        for j in T.unroll(4):
            is_listed = r.scores[base + j] > r.least_listed[0] and r.scores[base + j] <= r.most_listed[0]
            r.picks[j] = T.if_then_else(is_listed, 1, 0)
        list_picked(r, base, group)
        if top * r.scale[0] > r.most_listed[0]:
            for j in T.unroll(4):
                mass = T.exp2(T.ieee_fmaf(r.raw[base + j], r.slope[0], r.offset[0]))
                r.near[j] = T.if_then_else(r.scores[base + j] > r.most_listed[0], mass, T.float32(0.0))
            r.near_above[0] = r.near_above[0] + ((r.near[0] + r.near[1]) + (r.near[2] + r.near[3]))
            if r.above is not None:
                for j in T.unroll(4):
                    if not r.scores[base + j] > r.most_listed[0]:
                        r.scores[base + j] = -T.infinity("float32")
                r.above(r, base, group)
            else:
                whole_branch(r)
        else:
            whole_branch(r)
    else:
        whole_branch(r)


@T.macro
def _list_by_guess(r):
    """A walk for the list of a guess, whose masses add to those of `look`."""
    set_slope(r, r.peak[0])
    r.near_above[0] = 0.0
    start_draw(r)
    T.sync_threads()
    walk_again(r, _guess_group, r.unroll_guess)
    T.sync_threads()
    reduce_block(r, r.near_above, added)
    r.mass_above[0] = T.cast(r.near_above[0] * T.float32(2.0**40), "int64")


@T.macro
def set_slope(r, reference):
    """exp(score - reference) is 2^(logit * slope + offset)."""
    r.slope[0] = r.scale[0] * T.float32(LOG2_E)
    r.offset[0] = T.min(T.max(reference, T.float32(-1e38)), T.float32(1e38)) * T.float32(-LOG2_E)


@T.macro
def _look_group(r, base, group):
    r.raw_peak[0] = T.max(r.raw_peak[0], largest(r.raw, base))
    for j in T.unroll(4):
        r.near[j] = T.exp2(T.ieee_fmaf(r.raw[base + j], r.slope[0], r.offset[0]))
    r.near_all[0] = r.near_all[0] + ((r.near[0] + r.near[1]) + (r.near[2] + r.near[3]))
    list_above(r, base, group)


@T.macro
def look(r, log_min_p):
    """The first walk of a truncated row: its largest score, its list, and r.floor.

    log_min_p: float32, -inf where off.
    """
    bound_list(r, r.top_k[0] * 2)
    set_slope(r, r.reference[0])
    r.most_listed[0] = T.infinity("float32")
    r.raw_peak[0] = -T.infinity("float32")
    r.near_all[0] = 0.0
    walk(r, _look_group)
    reduce_block(r, r.near_all, added)
    reduce_block(r, r.raw_peak, larger)
    r.is_broken[0] = is_nan(r.near_all[0])
    r.peak[0] = r.raw_peak[0] * r.scale[0]
    # From here on masses are relative to the largest score.
    r.near_all[0] = r.near_all[0] * T.__exp(r.reference[0] - r.peak[0])
    # They are of no use where the reference was far below the best.
    r.is_near[0] = T.if_then_else(r.near_all[0] >= T.float32(0.5) and r.near_all[0] <= T.float32(MAGIC), 1, 0)
    r.near_above[0] = 0.0
    # Products with the slope are rounded apart from scores.
    take_near(r, (T.abs(r.peak[0]) + T.abs(r.reference[0]) + T.float32(32.0)) * T.float32(2.0**-20))
    r.floor[0] = T.max(r.peak[0] + log_min_p, T.float32(LOWEST))
    r.stage[0] = LOOK


@T.macro
def draw_from_list(r):
    """Queues the tokens of the list that stay and may win."""
    at = T.alloc_local((1,), "int32")
    at[0] = r.thread
    while r.is_found[0] == 1 and at[0] < r.ints[LIST_SIZE]:
        key = r.list[at[0]]
        if key >= r.cut[0]:
            token = packed_token(r, key)
            r.near[0] = noise_near(word_of(r, token))
            r.near[0] = packed_score(r, key) + r.near[0]
            if r.near[0] >= winner_bound(r):
                T.atomic_max(r.bound[0], ordered(r.near[0]))
                slot = T.atomic_add(r.ints[QUEUE_SIZE], 1, return_prev=True)
                if slot < r.queue_capacity:
                    r.queue[slot] = token
            else:
                whole_branch(r)
        else:
            whole_branch(r)
        at[0] = at[0] + r.num_threads
    if r.is_found[0] == 0:
        # The cut came from `bisect_cut`: what the walks queued may have fallen out, so all is drawn anew.
        T.sync_threads()
        if r.thread == 0:
            r.ints[QUEUE_SIZE] = r.queue_capacity + 1
            r.bound[0] = ordered(-T.infinity("float32"))
        else:
            whole_branch(r)
        T.sync_threads()
    else:
        whole_branch(r)


@T.macro
def _read_list(r):
    """The cut, if it lies in the list and the list is whole: sets r.is_found, r.cut and r.sure_cut.

    With near masses the cut keeps all that may stay.
    """
    own = T.alloc_local((1,), "int64")
    before = T.alloc_local((1,), "int64")
    total = T.alloc_local((1,), "int64")
    inner = T.alloc_local((1,), "int64")
    num_first = T.alloc_local((1,), "int32")  # of the list's tokens in the nucleus' places
    num_listed = T.alloc_local((1,), "int32")  # that pass min-p
    num_above = T.alloc_local((1,), "int32")
    num_between = T.alloc_local((1,), "int32")
    whole = T.alloc_local((1,), "int64")
    last, sure = T.alloc_local((1,), "uint64"), T.alloc_local((1,), "uint64")
    is_blind = T.alloc_local((1,), "int32")
    pack_list(r)
    sort_list(r)
    per_thread = (r.ints[LIST_SIZE] + r.num_threads - 1) // r.num_threads
    first = r.thread * per_thread
    # Masses of the list: all, and those of the nucleus' places.
    own[0] = 0
    inner[0] = 0
    num_first[0] = 0
    num_listed[0] = 0
    for i in T.serial(per_thread):
        if first + i < r.ints[LIST_SIZE]:
            score = packed_score(r, r.list[first + i])
            if score >= r.floor[0]:
                mass = mass_of(score - r.peak[0])
                own[0] = own[0] + mass
                num_listed[0] = num_listed[0] + 1
                if place(r, score) >= r.low[0]:
                    inner[0] = inner[0] + mass
                    num_first[0] = num_first[0] + 1
                else:
                    whole_branch(r)
            else:
                whole_branch(r)
        else:
            whole_branch(r)
    reduce_block(r, inner, added)
    reduce_block(r, num_first, added)
    reduce_block(r, num_listed, added)
    scan_block(r, own, before, total)
    count = num_listed[0]
    is_blind[0] = 0
    if r.stage[0] == LOOK:
        r.mass_top[0] = total[0]
        is_all = r.floor[0] > r.least_listed[0]
        if is_all or (r.top_k[0] > 0 and count >= r.top_k[0]):
            # All that may stay is here.
            r.mass_all[0] = total[0]
            r.doubt[0] = 0
            r.is_open[0] = 0
        elif r.top_k[0] > 0 or r.top_p[0] >= T.float32(1.0) or r.floor[0] > T.float32(LOWEST):
            # A sum of all masses says nothing.
            is_blind[0] = 1
        if count == 0:
            is_blind[0] = 1
    else:
        whole_branch(r)
    # What lies between the nucleus' places and the k-th token's.
    mass_between = r.mass_all[0] - r.mass_above[0] - total[0]
    num_above[0] = 0
    num_between[0] = 0
    if r.top_k[0] > 0 and r.stage[0] > GUESS:
        for i in T.unroll(BINS // r.num_threads, unroll_factor=1):
            at_place = T.cast(i * r.num_threads + r.thread, "float32") + T.float32(MAGIC)
            here = r.counts[i * r.num_threads + r.thread]
            if at_place > r.high[0]:
                num_above[0] = num_above[0] + here
            if at_place < r.low[0] and at_place > r.k_place[0]:
                num_between[0] = num_between[0] + here
        reduce_block(r, num_above, added)
        reduce_block(r, num_between, added)
    else:
        whole_branch(r)
    # The mass that top-p is a share of.
    whole[0] = 0
    for i in T.serial(per_thread):
        if first + i < count:
            is_second = first + i >= num_first[0]
            rank = num_above[0] + first + i + T.if_then_else(is_second, num_between[0], 0)
            if r.top_k[0] <= 0 or rank < r.top_k[0]:
                whole[0] = whole[0] + mass_of(packed_score(r, r.list[first + i]) - r.peak[0])
            else:
                whole_branch(r)
        else:
            whole_branch(r)
    reduce_block(r, whole, added)
    whole[0] = whole[0] + r.mass_above[0] + mass_between
    share = T.cast(r.top_p[0], "float64") * T.cast(whole[0], "float64")
    r.threshold[0] = T.cast(T.floor(share), "int64")
    # The last token that stays.
    last[0] = ~T.uint64(0)
    sure[0] = ~T.uint64(0)
    before[0] = before[0] + r.mass_above[0]
    for i in T.serial(per_thread):
        if first + i < count:
            key = r.list[first + i]
            is_second = first + i >= num_first[0]
            rank = num_above[0] + first + i + T.if_then_else(is_second, num_between[0], 0)
            ahead = before[0] + T.if_then_else(is_second, mass_between, T.int64(0))
            if r.top_k[0] <= 0 or rank < r.top_k[0]:
                if r.top_p[0] >= T.float32(1.0) or ahead <= r.threshold[0] + r.doubt[0]:
                    last[0] = T.min(last[0], key)
                if r.top_p[0] >= T.float32(1.0) or ahead <= r.threshold[0] - r.doubt[0]:
                    sure[0] = T.min(sure[0], key)
            else:
                whole_branch(r)
            before[0] = before[0] + mass_of(packed_score(r, key) - r.peak[0])
        else:
            whole_branch(r)
    reduce_block(r, last, smaller)
    reduce_block(r, sure, smaller)
    if count == 0:
        last[0] = T.uint64(0)
        sure[0] = T.uint64(0)
    else:
        whole_branch(r)
    r.cut[0] = last[0]
    r.sure_cut[0] = sure[0]
    r.is_found[0] = 1 - is_blind[0]
    if r.top_p[0] < T.float32(1.0):
        if r.mass_above[0] > T.int64(0) and r.mass_above[0] > r.threshold[0] - r.doubt[0]:
            r.is_found[0] = 0
        if r.is_open[0] == 1 and r.mass_above[0] + inner[0] <= r.threshold[0] + r.doubt[0]:
            r.is_found[0] = 0
    else:
        whole_branch(r)


@T.macro
def _weigh_above(r, base, group):
    """Counts the tokens above r.limit, or sums their masses if they stay by r.cut."""
    for j in T.unroll(4):
        key = pack(r, r.scores[base + j], group * 4 + j)
        if r.scores[base + j] >= r.floor[0] and group * 4 + j < r.vocab and key > r.limit[0]:
            if r.weighs[0] == 0:
                r.count[0] = r.count[0] + T.int64(1)
            elif key >= r.cut[0]:
                r.count[0] = r.count[0] + mass_of(r.scores[base + j] - r.peak[0])
            else:
                whole_branch(r)
        else:
            whole_branch(r)


@T.macro
def bisect_cut(r):
    """The cut of any row, a walk per bit: first top-k's, then, knowing the mass it keeps, top-p's."""
    low = T.alloc_local((1,), "uint64")
    high = T.alloc_local((1,), "uint64")
    r.cut[0] = T.uint64(0)
    r.threshold[0] = T.cast(r.top_k[0], "int64") - T.int64(1)
    r.weighs[0] = T.if_then_else(r.top_k[0] > 0, 0, 1)  # 0: top-k, 1: the whole mass, 2: top-p, 3: done
    if r.top_k[0] <= 0 and r.top_p[0] >= T.float32(1.0):
        r.weighs[0] = 3
    low[0] = pack(r, r.floor[0], r.vocab - 1)
    high[0] = pack(r, r.peak[0], 0)
    while r.weighs[0] < 3:
        r.limit[0] = low[0] + (high[0] - low[0]) // T.uint64(2)
        if r.weighs[0] == 1:
            r.limit[0] = T.uint64(0)
        r.count[0] = T.int64(0)
        walk_again(r, _weigh_above)
        reduce_block(r, r.count, added)
        if r.weighs[0] == 1:
            share = T.cast(r.top_p[0], "float64") * T.cast(r.count[0], "float64")
            r.threshold[0] = T.cast(T.floor(share), "int64")
            r.weighs[0] = 2
        else:
            if r.count[0] <= r.threshold[0]:
                high[0] = r.limit[0]
            else:
                low[0] = r.limit[0] + T.uint64(1)
            if low[0] >= high[0]:
                # The smallest key above which not too much lies.
                r.cut[0] = T.max(r.cut[0], low[0])
                r.weighs[0] = T.if_then_else(r.weighs[0] == 0 and r.top_p[0] < T.float32(1.0), 1, 3)
                low[0] = pack(r, r.floor[0], r.vocab - 1)
                high[0] = pack(r, r.peak[0], 0)
            else:
                whole_branch(r)


@T.macro
def _set_places(r):
    """From the guess in r.ints to the places of a survey."""
    bottom = T.cast(place(r, r.floor[0]) - T.float32(MAGIC), "int32")
    wider = T.if_then_else(r.stage[0] == WIDER, T.float32(RETRY_PLACES), T.float32(0.0))
    lowest = T.if_then_else(r.top_k[0] > 0, T.max(r.ints[K_PLACE], bottom), bottom)
    r.k_place[0] = T.if_then_else(
        r.top_k[0] > 0, T.cast(r.ints[K_PLACE], "float32") + T.float32(MAGIC), T.float32(-1.0)
    )
    if r.top_p[0] < T.float32(1.0):
        r.high[0] = T.cast(T.max(r.ints[HIGH_PLACE], lowest), "float32") + wider + T.float32(MAGIC)
        r.low[0] = T.cast(T.max(r.ints[LOW_PLACE], r.ints[K_PLACE]), "float32") - wider + T.float32(MAGIC)
        r.low[0] = T.min(T.max(r.low[0], r.k_place[0]), r.high[0])
    else:
        r.high[0] = T.if_then_else(
            r.top_k[0] > 0, T.cast(lowest, "float32") + T.float32(MAGIC), T.float32(0.0)
        )
        r.low[0] = r.high[0]


@T.macro
def _list_by_survey(r, survey):
    """A walk for the list of the places that are set."""
    T.sync_threads()
    bottom = T.max(r.k_place[0], T.max(place(r, r.floor[0]), T.float32(MAGIC)))
    r.is_open[0] = T.if_then_else(r.low[0] > bottom, 1, 0)
    r.lowest[0] = T.if_then_else(r.top_k[0] > 0, T.min(r.low[0], r.k_place[0]), r.low[0])
    r.sum_above[0] = 0
    r.sum_all[0] = 0
    r.near_above[0] = 0.0
    r.near_all[0] = 0.0
    T.sync_threads()
    if r.thread == 0:
        r.ints[LIST_SIZE] = 0
    start_draw(r)
    T.sync_threads()
    walk_again(r, survey)
    T.sync_threads()
    finish_masses(r)


@T.macro
def find_cut(r, survey):
    """The key of the last token that stays, in r.cut, after `look` or `narrow`.

    survey: macro of a walk: fills r.places by `survey_group`, calls `collect`, and draws among the tokens
    above the place r.high.
    """
    r.is_found[0] = 0
    while r.is_found[0] == 0 and r.stage[0] != NOWHERE:
        is_look = r.stage[0] == LOOK or (r.stage[0] == GUESS and r.top_p[0] < T.float32(1.0))
        if is_look:
            r.low[0] = 0.0
            # No place is above.
            r.high[0] = T.float32(MAGIC + BINS)
            r.is_open[0] = 1
            if r.stage[0] == LOOK:
                start_draw(r)
                T.sync_threads()
            else:
                guess_from_sample(r)
                _list_by_guess(r)
        else:
            r.most_listed[0] = T.infinity("float32")
            if r.stage[0] == COUNTED:
                count_places(r)
                guess_from_counts(r)
            else:
                whole_branch(r)
            if r.stage[0] != GIVEN:
                _set_places(r)
            else:
                whole_branch(r)
            _list_by_survey(r, survey)
        is_whole = r.ints[LIST_SIZE] <= r.capacity
        is_near = r.stage[0] != LOOK or r.is_near[0] == 1
        if is_whole and is_near:
            _read_list(r)
        else:
            whole_branch(r)
        T.sync_threads()
        if r.is_found[0] == 0:
            # Sums of `look` are of all tokens: with top-k or min-p they are not what top-p is a share of.
            may_guess = r.top_k[0] <= 0 and (r.top_p[0] >= T.float32(1.0) or r.floor[0] <= T.float32(LOWEST))
            stage = T.alloc_local((1,), "int32")
            stage[0] = COUNTED
            if r.stage[0] == LOOK and is_whole and is_near and may_guess:
                stage[0] = GUESS
            if r.stage[0] == COUNTED or r.stage[0] == WIDER:
                stage[0] = T.if_then_else(r.stage[0] == COUNTED and is_whole, WIDER, NOWHERE)
            T.sync_threads()
            r.stage[0] = stage[0]
        else:
            whole_branch(r)
    if r.is_found[0] == 0:
        bisect_cut(r)
        r.sure_cut[0] = r.cut[0]
    else:
        whole_branch(r)


@T.macro
def narrow(r):
    """After `find_cut` with near masses: the next one sums integers, and lists what was in doubt."""
    T.sync_threads()
    r.is_exact[0] = 1
    r.low[0] = place(r, packed_score(r, r.cut[0]))
    r.high[0] = T.float32(MAGIC + BINS - 1.0)
    if r.sure_cut[0] != ~T.uint64(0):
        r.high[0] = place(r, packed_score(r, r.sure_cut[0]))
    else:
        whole_branch(r)
    if r.stage[0] <= GUESS:
        r.k_place[0] = T.float32(-1.0)
    r.stage[0] = GIVEN


@T.macro
def survey_group(r, base):
    """A survey's group but for collecting and drawing: places, and masses where top-p needs them."""
    for j in T.unroll(4):
        r.places[j] = place(r, r.scores[base + j])
    if r.top_p[0] < T.float32(1.0) and largest(r.scores, base) - r.peak[0] > T.float32(-28.0):
        if r.is_exact[0] == 1:
            add_masses(r, base)
        else:
            add_near_masses(r, base)


@T.macro
def keep_above(r, base):
    """Of a group's scores those of tokens that stay for certain, -inf for others; after `collect`."""
    for j in T.unroll(4):
        if not (r.scores[base + j] >= r.floor[0] and r.places[j] > r.high[0]):
            r.scores[base + j] = -T.infinity("float32")
