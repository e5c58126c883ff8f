"""Speed of the KV store: a prefix put and loaded again, beside one plain file with the same bytes.

    python examples/benchmark_kv_store.py [--directory D] [--tokens N] [--runs R]

A prefix of N tokens has the blocks and the state of the bundled model. It is loaded layer by layer into rows
of a pool, every checksum compared. Plain files hold the same bytes, without names and checksums. Flushed
writes end with fsync; cold reads come after the system was told to forget the files. Medians of R runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deepinfer.checkpoint.loader import open_checkpoint
from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.entry import EntryLayout
from deepinfer.kv_transfer.keys import Identity
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.kv_transfer.prefix import PrefixStore
from deepinfer.kv_transfer.store import KVStore
from deepinfer.models.deepseek_v41.spec import model_spec
from deepinfer.runtime.cache_layout import CacheLayout

BLOCK_SIZE = 128
MODEL = Path(__file__).parent / "v41-tiny"


class Prefix:
    """A prefix of random bytes, and rows to load it into."""

    def __init__(self, num_tokens: int) -> None:
        pools = CacheLayout.build(
            model_spec(open_checkpoint(str(MODEL)).config),
            release=True,
            block_size=BLOCK_SIZE,
            max_backtracking=6,
        )
        self.layout = EntryLayout.of(pools)
        self.identity = Identity("benchmark", "float32", self.layout.fingerprint(), BLOCK_SIZE)
        self.num_blocks = num_tokens // BLOCK_SIZE
        rng = np.random.default_rng(0)
        self.token_ids = rng.integers(0, 1 << 17, num_tokens, np.int32)
        self.blocks = rng.integers(0, 256, (self.num_blocks, self.layout.block_bytes), np.uint8)
        self.slot = rng.integers(0, 256, self.layout.slot_bytes, np.uint8)
        self.out_blocks, self.out_slot = np.zeros_like(self.blocks), np.zeros_like(self.slot)
        sections = [self.layout.block] * self.num_blocks + [self.layout.state]
        self.sizes = [sum(part.num_bytes for part in each) for each in sections]
        self.num_bytes = sum(self.sizes)

    def put(self, prefixes: PrefixStore) -> None:
        chain = prefixes.chain(self.token_ids)
        for index, block in enumerate(self.blocks):
            assert prefixes.put_block(chain, index, block)
        assert prefixes.put_state(chain, self.num_blocks, self.slot)

    def load(self, prefixes: PrefixStore) -> float:
        """Load it; seconds until the first layer is there."""
        start = time.perf_counter()
        chain = prefixes.chain(self.token_ids)
        assert prefixes.find(chain, self.num_blocks) == self.num_blocks
        load = prefixes.load(chain, self.num_blocks, list(self.out_blocks), self.out_slot)
        assert load is not None
        load.wait(load.layers[0])
        first = time.perf_counter() - start
        load.wait()
        return first


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forget(directory: Path) -> None:
    """Ask the system to drop a directory's files from its cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure_plain(directory: Path, sizes: list[int]) -> dict[str, float]:
    """Plain files of these sizes."""
    data = memoryview(bytearray(os.urandom(max(sizes))))

    def write(sync: bool) -> None:
        for number, size in enumerate(sizes):
            with open(directory / str(number), "wb", buffering=0) as file:
                file.write(data[:size])
                if sync:
                    os.fsync(file.fileno())

    def read() -> None:
        for number, size in enumerate(sizes):
            with open(directory / str(number), "rb", buffering=0) as file:
                file.readinto(data[:size])

    times = {"put": seconds(lambda: write(False)), "get": seconds(read)}
    for path in directory.iterdir():
        path.unlink()
    times["put, flushed"] = seconds(lambda: write(True))
    forget(directory)
    return times | {"get, cold": seconds(read)}


def measure_store(prefix: Prefix, store: KVStore) -> dict[str, float]:
    prefixes = PrefixStore(store, prefix.identity, prefix.layout)
    times = {"put": seconds(lambda: prefix.put(prefixes))}
    start = time.perf_counter()
    times["first layer"] = prefix.load(prefixes)
    times["get"] = time.perf_counter() - start
    prefixes.close()
    return times


def measure_directory(prefix: Prefix, directory: Path) -> dict[str, float]:
    for name in (f"{store}/v1/{number:02x}" for store in "ab" for number in range(256)):
        (directory / name).mkdir(parents=True)  # as they are in a store that has been in use
    times = measure_store(prefix, DirectoryStore(directory / "a"))
    flushing = PrefixStore(DirectoryStore(directory / "b", sync=True), prefix.identity, prefix.layout)
    times["put, flushed"] = seconds(lambda: prefix.put(flushing))
    forget(directory)
    times["get, cold"] = seconds(lambda: prefix.load(flushing))
    flushing.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the KV store beside plain files.")
    parser.add_argument("--directory", default=None, help="where to write, not the temporary folder")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    prefix = Prefix(args.tokens)
    ways: dict[str, Callable[[Path], dict[str, float]]] = {
        "one plain file": lambda directory: measure_plain(directory, [prefix.num_bytes]),
        "a plain file per entry": lambda directory: measure_plain(directory, prefix.sizes),
        "DirectoryStore": lambda directory: measure_directory(prefix, directory),
        "MemoryStore": lambda _: measure_store(prefix, MemoryStore(2 * prefix.num_bytes)),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(args.runs):
        for name, times in runs.items():
            directory = Path(tempfile.mkdtemp(dir=args.directory))
            try:
                times.append(ways[name](directory))
            finally:
                shutil.rmtree(directory)
    columns = ("put", "put, flushed", "get", "get, cold")
    print(
        f"{args.tokens} tokens, {prefix.num_blocks} blocks and a state, {prefix.num_bytes / 1e6:.1f} MB; MB/s"
    )
    print("| |", " | ".join(columns), "| first layer, ms |")
    print("|---" * (len(columns) + 2) + "|")
    for name, times in runs.items():
        medians = {key: statistics.median(each[key] for each in times) for key in times[0]}
        cells = [f"{prefix.num_bytes / medians[key] / 1e6:,.0f}" if key in medians else "" for key in columns]
        first = f"{1e3 * medians['first layer']:.1f}" if "first layer" in medians else ""
        print("|", " | ".join([name, *cells, first]), "|")


if __name__ == "__main__":
    main()
