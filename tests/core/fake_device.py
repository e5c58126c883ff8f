"""A device without a model: it keeps tokens where a model keeps KV, and draws from what it finds there.

The next token is a hash of the seed and of the prefix *read back through block tables and state slots*, so a
wrong position, block, slot, window or stale entry changes the outputs. `reference_outputs` computes the same
chain directly.

As in a model a prefill writes only those ring records that are read once its sequence has `total_lens`
tokens, and drafting scribbles over the places behind the newest token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.core.harness import EOS, VOCAB, batch_inputs, core, sampling_inputs

WINDOW = 5
NOTHING = -1


def draw(seed: int, prefix: np.ndarray) -> int:
    """The token after `prefix`."""
    return zlib.crc32(np.ascontiguousarray(prefix, np.int32).tobytes(), seed & 0xFFFFFFFF) % VOCAB


def draft_of(seed: int, prefix: np.ndarray, accuracy: int) -> int:
    """A guess of `draw`, right in about `accuracy` of 8 cases."""
    token = draw(seed, prefix)
    return token if zlib.crc32(prefix.astype(np.int32).tobytes(), 99) % 8 < accuracy else (token + 1) % VOCAB


def confidence_of(prefix: np.ndarray) -> float:
    """An estimate in (0, 1) of the draft behind `prefix`; it knows nothing."""
    return (zlib.crc32(prefix.astype(np.int32).tobytes(), 7) % 97 + 1) / 98


def reference_outputs(seed: int, prompt: np.ndarray, params: Any, max_model_len: int) -> list[int]:
    """What a sequence must produce, whatever the schedule."""
    tokens = list(prompt)
    limit = max_model_len if params.max_tokens < 0 else min(len(prompt) + params.max_tokens, max_model_len)
    while True:
        token = draw(seed, np.array(tokens, np.int32))
        index = len(tokens) - len(prompt)
        if index < len(params.golden_token_ids) and params.golden_token_ids[index] >= 0:
            token = params.golden_token_ids[index]
        tokens.append(token)
        is_eos = token == params.eos_token_id and not params.ignore_eos
        if index >= params.min_tokens and (is_eos or token in params.stop_token_ids):
            break
        if len(tokens) >= limit:
            break
    return [int(token) for token in tokens[len(prompt) :]]


@dataclass
class Done:
    """What the last step left on the device."""

    num_emitted: np.ndarray  # [S]
    emitted: np.ndarray  # [S, 1 + k]
    drafts: np.ndarray | None  # [S, k]
    confidences: np.ndarray  # [S, k]


@dataclass
class Running:
    """A step whose forward has run and whose results are not committed."""

    plan: Any
    true_starts: np.ndarray  # [S]
    rows: list[tuple[int, int]]  # (sequence, position) of every output row
    slots: np.ndarray
    tables: np.ndarray
    cu_rows: np.ndarray  # [S + 1] output rows
    num_sampled: np.ndarray
    dealt: np.ndarray | None  # [S] rows of each sequence, where the device has dealt them anew


class FakeDevice:
    """Runs plans of one engine: `forward` after schedule, `sample` once the plan before is committed."""

    def __init__(
        self, engine: Any, config: Any, accuracy: int = 6, vocab: np.ndarray | None = None, pad: int = 0
    ):
        self.engine, self.config, self.accuracy = engine, config, accuracy
        self.kv = np.full((config.num_blocks, config.block_size), NOTHING, np.int32)
        self.ring_size = WINDOW + config.num_draft_tokens + 1
        self.ring = np.full((config.num_state_slots, self.ring_size, 2), NOTHING, np.int32)  # position, token
        self.vocab, self.pad = vocab, pad
        self.seeds: dict[int, int] = {}
        self.done: Done | None = None
        self.host: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # swapped sequences: KV rows, ring
        self.num_matched = self.num_rejected = self.num_accepted = self.num_dealt = 0

    def forward(self, plan: Any) -> Running:
        """Stores the rows of a plan, correcting a plan that was made one step ahead."""
        b = batch_inputs(self.engine, plan)
        if plan.has_copies:
            self._copy(self.ring, self.copies(plan, "slot_copies"))
            for name in ("slot_copies", "state_copies", "block_copies"):
                assert np.array_equal(b[name], getattr(plan, name))
        num_seqs = plan.num_seqs
        dealt = self._deal(b) if plan.can_redistribute else None
        cu = b["cu_seqlens_q"]
        assert np.array_equal(np.diff(cu), b["seqlens_q"]) and cu[-1] == plan.num_rows
        true_starts = (b["seqlens_k"] - b["seqlens_q"]).copy()
        input_ids, positions, ngram = (b[name].copy() for name in ("input_ids", "positions", "ngram_ids"))
        if self.config.async_scheduling and not plan.is_prefill:
            self._correct(b, true_starts, input_ids, positions, ngram)
        for s in range(num_seqs):
            rows = slice(cu[s], cu[s + 1])
            assert (b["row_seq"][rows] == s).all()
            assert np.array_equal(positions[rows], np.arange(cu[s + 1] - cu[s]) + true_starts[s])
            total = int(b["total_lens"][s]) if plan.is_prefill else int(positions[rows][0]) + 1
            first = 0 if b["keep_all"][s] else total - WINDOW
            self._store(b, s, first, input_ids[rows], positions[rows], ngram[rows])
        rows = [(int(b["row_seq"][row]), int(positions[row])) for row in b["output_rows"]]
        assert (np.diff(b["output_rows"]) > 0).all()
        counts = np.bincount([s for s, _ in rows], minlength=num_seqs)
        return Running(
            plan,
            true_starts,
            rows,
            b["state_slots"],
            b["block_tables"],
            np.concatenate([[0], np.cumsum(counts)]),
            plan.num_sampled_rows if dealt is None else dealt,
            dealt,
        )

    def copy_out(self) -> None:
        """What was preempted goes to the host, before anybody writes to its blocks."""
        outs, drops = self.engine.take_swaps()
        for seq_id, blocks, slot, _ in outs:
            self.host[seq_id] = self.kv[blocks].copy(), self.ring[slot].copy()
        for seq_id in drops:
            del self.host[seq_id]

    def copy_in(self) -> None:
        """And comes back."""
        for seq_id, blocks, slot in self.engine.admit_swapped():
            self.kv[blocks], self.ring[slot] = self.host.pop(seq_id)

    def copies(self, plan: Any, name: str) -> np.ndarray:
        """What a plan wants copied."""
        return getattr(plan, name)

    @staticmethod
    def _copy(pool: np.ndarray, copies: np.ndarray) -> None:
        pool[copies[:, 1]] = pool[copies[:, 0]]

    def _deal(self, b: dict[str, np.ndarray]) -> np.ndarray:
        """Gives the rows of a plan to the drafts that survive most likely, as the host could not see yet."""
        assert self.done is not None
        k = self.config.num_draft_tokens
        planned, limits, starts = b["seqlens_q"], b["max_seqlens_q"], b["seqlens_k"] - b["seqlens_q"]
        assert b["confidence_odds"].shape == (k,) and (limits >= planned).all()
        lengths = np.where(b["remap"] >= 0, 1, planned).astype(np.int32)
        survivals = np.cumprod(self.done.confidences, axis=1)
        while lengths.sum() < planned.sum():
            candidates = [
                (-survivals[row, lengths[s] - 1], s)
                for s, row in enumerate(b["remap"])
                if row >= 0 and lengths[s] < limits[s]
            ]
            lengths[min(candidates)[1]] += 1
        self.num_dealt += int((lengths != planned).any())
        first, rows = b["cu_seqlens_q"][:-1], np.repeat(np.arange(len(lengths)), lengths)
        place = np.concatenate([np.arange(n) for n in lengths])
        source = first[rows] + np.minimum(place, planned[rows] - 1)
        for name in ("input_ids", "ngram_ids"):
            b[name] = b[name][source]
        b["row_seq"], b["positions"] = rows.astype(np.int32), (starts[rows] + place).astype(np.int32)
        b["seqlens_q"], b["seqlens_k"] = lengths, starts + lengths
        b["cu_seqlens_q"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return lengths

    def _correct(
        self,
        b: dict[str, np.ndarray],
        starts: np.ndarray,
        ids: np.ndarray,
        positions: np.ndarray,
        ngram: np.ndarray,
    ) -> None:
        """For sequences of the step before: ids, lengths and n-gram windows from the device's own results."""
        cu = b["cu_seqlens_q"]
        for s, previous in enumerate(b["remap"]):
            if previous < 0:
                continue
            assert self.done is not None
            self.num_matched += 1
            count = int(self.done.num_emitted[previous])
            emitted = self.done.emitted[previous, :count]
            start = int(b["committed_lens"][s]) + count - 1
            assert start <= starts[s], "the plan's lengths are the most possible"
            starts[s] = start
            rows = slice(cu[s], cu[s + 1])
            drafts = [] if self.done.drafts is None else self.done.drafts[previous]
            fresh = np.concatenate([emitted[-1:], drafts])[: cu[s + 1] - cu[s]].astype(np.int32)
            assert len(fresh) == cu[s + 1] - cu[s]
            ids[rows] = np.maximum(fresh, 0)
            positions[rows] = start + np.arange(len(fresh))
            # windows: known history, then emitted tokens, then drafts
            history = b["ngram_history"][s][::-1]
            line = np.concatenate([history, self._compress(np.concatenate([emitted[:-1], ids[rows]]))])
            width = self.config.max_ngram
            for j in range(len(fresh)):
                end = len(line) - len(fresh) + j + 1
                ngram[cu[s] + j] = line[end - width : end][::-1]

    def _compress(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.vocab is None else self.vocab[ids]

    def _read(self, table: np.ndarray, length: int) -> np.ndarray:
        """The first `length` tokens as the caches hold them."""
        where = np.arange(length)
        return self.kv[table[where // self.config.block_size], where % self.config.block_size]

    def _store(
        self,
        b: dict[str, np.ndarray],
        s: int,
        first: int,
        ids: np.ndarray,
        positions: np.ndarray,
        ngram: np.ndarray,
    ) -> None:
        """Keep the rows of a sequence; ring records from position `first` on are read some time."""
        table, slot, start = b["block_tables"][s], int(b["state_slots"][s]), int(positions[0])
        assert slot > 0
        size = self.config.block_size
        prefix = self._read(table, start)
        for p in range(max(0, first, start - WINDOW + 1), start):
            position, token = self.ring[slot, p % self.ring_size]
            assert (position, token) == (p, prefix[p]), f"slot {slot} lost position {p}: {position=}"
        self.kv[table[positions // size], positions % size] = ids
        for p, token in zip(positions, ids):
            if p < first:
                continue
            self.ring[slot, p % self.ring_size] = (p, token)
        line = self._compress(np.concatenate([prefix, ids]))
        padded = np.concatenate([np.full(self.config.max_ngram, self.pad, np.int32), line])
        for j, p in enumerate(positions):
            expected = padded[p + 1 : p + 1 + self.config.max_ngram][::-1]
            assert np.array_equal(ngram[j], expected), f"{p=} {ngram[j]=} {expected=}"

    def sample(self, running: Running) -> Done:
        """Draws a token for every output row, verifies drafts, proposes new ones."""
        plan = running.plan
        if running.dealt is not None:
            self.engine.set_seqlens_q(plan, running.dealt)
        inputs = sampling_inputs(self.engine, plan)
        k = self.config.num_draft_tokens
        tokens = np.zeros(plan.num_samples, np.int32)
        logprobs = np.zeros(plan.num_samples, np.float32)
        assert np.array_equal(inputs["row_offsets"], running.cu_rows)
        done = Done(
            np.ones(plan.num_seqs, np.int32),
            np.full((plan.num_seqs, 1 + k), NOTHING, np.int32),
            np.full((plan.num_seqs, k), NOTHING, np.int32) if plan.num_drafting else None,
            np.zeros((plan.num_seqs, k), np.float32),
        )
        for s, seq_id in enumerate(plan.seq_ids):
            seed = self.seeds[int(seq_id)]
            first, last = running.cu_rows[s], running.cu_rows[s + 1]
            for row in range(first, last):
                _, position = running.rows[row]
                is_live = self.engine.status(int(seq_id)) != core.SequenceStatus.FINISHED
                assert not is_live or inputs["token_index"][row] == position + 1
                prefix = self._read(running.tables[s], position + 1)
                forced = int(inputs["forced"][row])
                tokens[row] = forced if forced >= 0 else draw(seed, prefix)
                logprobs[row] = -float(zlib.crc32(prefix.tobytes()) % 1000)
            num_sampled = int(running.num_sampled[s])
            if num_sampled == 0:
                continue
            first = last - num_sampled
            count = 1
            while count < num_sampled and tokens[first + count - 1] == inputs["draft_ids"][first + count - 1]:
                count += 1
            if (inputs["draft_ids"][first:last] >= 0).any():
                self.num_accepted += count - 1
                self.num_rejected += count < num_sampled
            done.num_emitted[s] = count
            done.emitted[s, :count] = tokens[first : first + count]
        if plan.has_copies:
            self._copy(self.ring, self.copies(plan, "state_copies"))
            self._copy(self.kv, self.copies(plan, "block_copies"))
        for s, seq_id in enumerate(plan.seq_ids if done.drafts is not None else ()):
            if running.num_sampled[s] == 0 or s < plan.num_seqs - plan.num_drafting:
                continue
            seed, last = self.seeds[int(seq_id)], running.cu_rows[s + 1]
            first, count = last - int(running.num_sampled[s]), int(done.num_emitted[s])
            prefix = np.concatenate(
                [self._read(running.tables[s], running.rows[first][1] + 1), done.emitted[s, :count]]
            )
            for j in range(k):
                guess = draft_of(seed, prefix.astype(np.int32), self.accuracy)
                self.ring[running.slots[s], len(prefix) % self.ring_size] = (len(prefix), NOTHING)
                done.drafts[s, j], done.confidences[s, j] = guess, confidence_of(prefix)
                prefix = np.append(prefix, guess)
        self.done = done
        self.tokens, self.logprobs = tokens, logprobs
        return done

    def commit(self, running: Running, done: Done, tell_emitted: bool = True) -> Any:
        k = self.config.num_draft_tokens
        wanted = running.plan.max_num_logprobs
        rows = running.plan.num_samples
        return self.engine.commit(
            running.plan,
            self.tokens,
            num_emitted=done.num_emitted if tell_emitted else None,
            logprobs=self.logprobs if wanted >= 0 else None,
            top_ids=np.tile(self.tokens[:, None], (1, wanted)) if wanted > 0 else None,
            top_logprobs=np.tile(self.logprobs[:, None], (1, wanted)) if wanted > 0 else None,
            faults=np.zeros(rows, np.uint8),
            drafts=done.drafts if k else None,
            confidences=done.confidences if k and done.drafts is not None else None,
        )


class Loop:
    """The engine's step loop around a fake device, with or without a step in flight."""

    def __init__(self, config: Any, accuracy: int = 6, vocab: np.ndarray | None = None, pad: int = 0):
        self.config = config
        self.engine = core.EngineCore(config)
        if vocab is not None:
            self.engine.set_compressed_vocab(vocab, pad)
        self.device = FakeDevice(self.engine, config, accuracy, vocab, pad)
        self.in_flight: Running | None = None
        self.in_flight_done: Done | None = None
        self.num_overlapped = 0
        self.finished: dict[int, int] = {}
        self.on_scheduled: Callable[[], None] | None = (
            None  # runs between schedule and forward, as a thread might
        )

    def add(self, seed: int, prompt: np.ndarray, **fields: Any) -> int:
        params = core.SequenceParams(**{"eos_token_id": EOS, **fields})
        seq_id = self.engine.add(params, prompt)
        self.device.seeds[seq_id] = seed
        return seq_id

    def step(self, tell_emitted: bool = True) -> bool:
        """One turn of the loop; False when there was nothing to schedule and nothing to commit."""
        self.device.copy_out()
        self.device.copy_in()
        plan = self.engine.schedule()
        self.device.copy_out()
        ids, reasons = self.engine.take_ended()
        self.finished.update(zip(ids.tolist(), reasons.tolist()))
        if self.on_scheduled is not None:
            self.on_scheduled()
        running = self.device.forward(plan) if plan is not None else None
        if self.in_flight is not None:
            self.num_overlapped += running is not None
            self._commit(self.in_flight, self.in_flight_done, tell_emitted)
        elif running is None:
            return False
        self.in_flight = None
        if running is None:
            return True
        done = self.device.sample(running)
        self._results = (self.device.tokens, self.device.logprobs)
        if self.config.async_scheduling:
            self.in_flight, self.in_flight_done = running, done
        else:
            self._commit(running, done, tell_emitted)
        return True

    def _commit(self, running: Running, done: Done | None, tell_emitted: bool) -> None:
        assert done is not None
        self.device.tokens, self.device.logprobs = self._results
        result = self.device.commit(running, done, tell_emitted)
        self.device.copy_out()
        self.finished.update(zip(result.finished_ids.tolist(), result.finished_reasons.tolist()))

    def run(self, max_steps: int = 100_000) -> None:
        """Steps until everything is finished and committed."""
        for _ in range(max_steps):
            if not self.step():
                assert not self.engine.has_unfinished, (
                    f"{self.engine.num_running=} {self.engine.num_waiting=}"
                )
                return
        raise AssertionError(f"not finished after {max_steps} steps")
