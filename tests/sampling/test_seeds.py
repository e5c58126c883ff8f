"""Seeds of requests and of their samples."""

from __future__ import annotations

import subprocess
import sys

from deepinfer.sampling.seeds import fresh_seed, mix64, sample_seed


def test_mix64_is_splitmix64():
    """First outputs of the published SplitMix64 generator with state 0 and 1234567."""
    gamma = 0x9E3779B97F4A7C15
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(gamma) == 0x6E789E6AA1B965F4
    assert [mix64(1234567 + i * gamma & 2**64 - 1) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_sample_zero_uses_the_seed_itself():
    for seed in (0, 7, 2**64 - 1):
        assert sample_seed(seed, 0) == seed


def test_samples_of_related_seeds_never_meet():
    gamma = 0x9E3779B97F4A7C15
    seeds = [s & 2**64 - 1 for base in (0, 2**64 - 1, 12345) for s in (*range(base, base + 40), base + gamma)]
    seen = {sample_seed(seed, j) for seed in set(seeds) for j in range(64)}
    assert len(seen) == len(set(seeds)) * 64
    assert all(0 <= s < 2**64 for s in seen)


def test_sample_seeds_are_fixed():
    """Values that earlier results were drawn with must not change."""
    assert sample_seed(0, 1) == mix64((mix64(0) + 0x9E3779B97F4A7C15) % 2**64) == 12935080325729570654
    assert [sample_seed(42, j) for j in (0, 1, 2)] == [42, 17630415256238047317, 8971565426155258802]


def test_fresh_seeds_differ():
    seeds = {fresh_seed() for _ in range(1000)}
    assert len(seeds) == 1000
    assert max(seeds).bit_length() > 56 and max(seeds) < 2**64


def test_seeds_need_no_torch():
    code = (
        "import sys, deepinfer.sampling.seeds, deepinfer.sampling_params, deepinfer.outputs;"
        "print('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
