#!/usr/bin/env bash
# Builds the CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer, then with ThreadSanitizer, and runs
# them on random inputs with 1, 2 and 4 threads.
# usage: tests/ops/sanitize/run.sh                 (objects go to $TMPDIR, nothing is left behind)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
compiler="${CXX:-g++}"
# A program with target_clones does not start under ThreadSanitizer; those kernels have no threads.
mapfile -t sources < <(grep -L target_clones "$root"/csrc/cpu/*.cpp)
for sanitizers in address,undefined thread; do
    flags=(-std=c++20 -O1 -g1 -ffp-contract=off -fno-omit-frame-pointer -pthread "-I$root/csrc"
           "-fsanitize=$sanitizers" -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS -Wall -Wextra -Wpedantic -Werror)
    printf '%s\n' "${sources[@]}" "$root"/tests/ops/sanitize/run_kernels.cpp |
        xargs -P "$(nproc)" -I{} sh -c '"$@" -c "{}" -o "'"$out"'/$(basename "{}").o"' sh "$compiler" "${flags[@]}"
    "$compiler" "${flags[@]}" "$out"/*.o -o "$out/run_kernels"
    for instruction_set in auto generic; do
        ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 "$out/run_kernels" "$instruction_set"
    done
done
