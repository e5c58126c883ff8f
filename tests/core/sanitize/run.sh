#!/usr/bin/env bash
# Builds the core with AddressSanitizer and UndefinedBehaviorSanitizer and runs random traces on it.
# usage: tests/core/sanitize/run.sh [operations per trace]     (objects go to $TMPDIR, nothing is left behind)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
flags=(-std=c++20 -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
       -D_GLIBCXX_ASSERTIONS -Wall -Wextra -Wpedantic -Werror)
compiler="${CXX:-g++}"
printf '%s\n' "$root"/csrc/core/*.cpp "$root"/tests/core/sanitize/random_trace.cpp |
    xargs -P "$(nproc)" -I{} sh -c '"$@" -c "{}" -o "'"$out"'/$(basename "{}").o"' sh "$compiler" "${flags[@]}"
"$compiler" "${flags[@]}" "$out"/*.o -o "$out/random_trace"
# the reports of both sanitizers end the program; leaks count as errors
ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 "$out/random_trace" "${1:-10000}"
