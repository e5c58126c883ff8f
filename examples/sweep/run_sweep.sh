#!/usr/bin/env bash
# Measures many settings, each in a process of its own, and draws the Pareto charts.
#
#   examples/sweep/run_sweep.sh OUT [OPTION ...]
#
# OUT gets results.jsonl, one JSON line for each setting, and the charts. Options go to examples/benchmark.py
# as they are: --model, --dummy, --emulated_ep, --context_length, --steps and so on. The sweep itself:
#
#   REQUESTS="1 4 16 64"     requests that decode at once         (default "1 4 16 32")
#   DRAFTS="0 3"             draft tokens                         (default "0 3")
#   BATCHES="256 1024"       prompt tokens of a prefill step      (default "128 512 2048"); empty for none
#   PYTHON=python3           the interpreter                      (default python)
#
#   examples/sweep/run_sweep.sh out                                       # the bundled model on a CPU
#   REQUESTS="8 64 256" DRAFTS=3 BATCHES= examples/sweep/run_sweep.sh out \
#       --dummy --emulated_ep 64 --redundant_experts 64 --context_length 131072 --assume-acceptance 0.75
#
# A setting that fails is named at the end, and the others are drawn; the status is then 1.
set -u

if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    sed -n '2,20p' "$0" | sed 's/^# \{0,1\}//' >&2
    exit 2
fi
out=$1
shift
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
requests=${REQUESTS-1 4 16 32}
drafts=${DRAFTS-0 3}
batches=${BATCHES-128 512 2048}
mkdir -p "$out" || exit 2
results=$out/results.jsonl
: > "$results" || exit 2
failed=()

measure() { # measure NAME OPTION ...: one setting; its table goes to the log
    local name=$1
    shift
    echo "$name" >&2
    if ! "$python" "$here/benchmark.py" --output "$results" "$@" >> "$out/log.txt" 2>&1; then
        failed+=("$name")
        tail -n 1 "$out/log.txt" >&2
    fi
}

: > "$out/log.txt"
for batch in $batches; do
    measure "prefill, $batch tokens" "$@" --phases prefill --prefill_batch_size "$batch"
done
for count in $requests; do
    for k in $drafts; do
        measure "decode, $count requests, $k drafts" "$@" --phases decode --decode_num_requests "$count" \
            --speculation "$k"
    done
done
"$python" "$here/sweep/plot_pareto.py" "$results" --output "$out" || failed+=("charts")
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
