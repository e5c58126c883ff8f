"""Throughput and latency of prefill and decode, on the bundled model or another, a CPU or a GPU.

    python examples/benchmark.py                                        # the bundled model, a minute or two
    python examples/benchmark.py --phases decode --decode_num_requests 1 16 --speculation 0 5 --output r.jsonl
    python examples/benchmark.py --trace poisson:4 --num_arrivals 40
    python examples/benchmark.py --preset published-decode-64           # a rank's share of a published figure

Every number is measured: request-steps per second, the tokens that a request gets in a step (on the given
prompts), and their product stand in columns of their own. `--assume-acceptance` adds columns that say so.
doc/benchmark.md has the rules.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by its path

from deepinfer import Settings
from examples.bench import decode, emulated, prefill, replay, report, roofline
from examples.bench.presets import PRESETS, RELEASE
from examples.bench.scale import Scale
from examples.bench.setting import KEEP_TOKENS, Setting

BUNDLED = Path(__file__).resolve().parent / "v41-tiny"
PREFILL_STEPS = 5  # that warm up
_COMMON = (  # options that are fields of every setting
    *(
        "dummy",
        "emulated_ep",
        "redundant_experts",
        "emulated_engram",
        "cp",
        "context_length",
        "yoco_clip",
        "keep_tokens",
    ),
    *("prompts", "temperature", "seed", "arithmetic", "batch_invariant", "async_scheduling", "threads"),
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = out.add_argument
    add("--preset", choices=sorted(PRESETS), help="options of a published figure; others given here win")
    add("--phases", nargs="+", choices=("prefill", "decode"), default=["prefill", "decode"])
    add("--model", help="checkpoint directory or Hub id (default: DEEPINFER_HF_MODEL_DIR, else bundled)")
    add("--dummy", action="store_true", help=f"random weights; --model may then be {RELEASE!r} (the default)")
    add("--emulated_ep", type=int, default=1, help="with --dummy: one rank's share of so many (default 1)")
    add("--redundant_experts", type=int, default=0, help="with --dummy: copies of experts in that group")
    add(
        "--emulated_engram",
        type=int,
        default=0,
        help="with --dummy: parts of the Engram tables (default: of ep)",
    )
    add("--cp", type=int, default=1, help="devices that share a context; divides all devices")
    add("--prefill_batch_size", type=int, nargs="+", default=[256, 1024], help="tokens of a prefill step")
    add("--decode_num_requests", type=int, nargs="+", default=[1, 8, 32], help="requests that decode at once")
    add("--context_length", type=int, help="prompt tokens of a request (default: the prompts as they stand)")
    add("--uncached", type=int, help="of these, computed in a prefill; the rest is in the prefix cache")
    add("--yoco_clip", action="store_true", help="bounded replay of the decoder in prefills")
    add("--keep_tokens", type=int, default=KEEP_TOKENS, help="that it keeps (default %(default)s)")
    add(
        "--speculation",
        type=int,
        nargs="+",
        default=[0, 3],
        metavar="DRAFTS",
        help="draft tokens of a step, 0 for off; measured beside each other (default 0 3)",
    )
    add("--varlen", action="store_true", help="choose how many drafts are verified, instead of all")
    add("--warmup", type=int, default=50, help="decode steps before the measurement (default %(default)s)")
    add("--steps", type=int, default=60, help="decode steps that are measured (default %(default)s)")
    add("--prefill_steps", type=int, default=8, help="prefill steps that are measured (default %(default)s)")
    add("--prompts", default="mixed", help="a set of examples/prompts.json, or a JSON file with texts")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--assume-acceptance", type=float, help="add columns for an acceptance of each draft that is assumed")
    add("--trace", metavar="poisson:RATE|FILE", help="replay arrivals instead; FILE holds JSON lines")
    add("--num_arrivals", type=int, default=32, help="requests of a Poisson trace (default %(default)s)")
    add("--output_tokens", type=int, default=32, help="of each of them (default %(default)s)")
    add("--arithmetic", help="of the engine (default: the device's)")
    add("--batch_invariant", action=argparse.BooleanOptionalAction, help="default: the engine's")
    add("--async_scheduling", action=argparse.BooleanOptionalAction, help="default: the engine's")
    add("--threads", type=int, default=torch.get_num_threads(), help="of a CPU")
    add("--roofline", action="store_true", help="profile eager steps: each component beside its floor")
    add("--output", type=Path, help="append one JSON line for each setting to this file")
    return out


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Options; those of a preset take the place of defaults."""
    out = parser()
    preset = out.parse_known_args(argv)[0].preset
    if preset is not None:
        out.set_defaults(**PRESETS[preset].options)
    args = out.parse_args(argv)
    if args.assume_acceptance is not None and not 0 <= args.assume_acceptance <= 1:
        out.error(f"--assume-acceptance {args.assume_acceptance}: expected a share from 0 to 1")
    if min(args.warmup, args.steps, args.prefill_steps) < 1:
        out.error("--warmup, --steps and --prefill_steps are 1 at least")
    if (args.emulated_ep, args.redundant_experts) != (1, 0) and not args.dummy:
        out.error("--emulated_ep and --redundant_experts need --dummy")
    return args


def settings_of(args: argparse.Namespace, scale: Scale, model: str) -> Iterator[Setting]:
    """Every setting that the options ask for."""
    common: dict[str, Any] = {name: getattr(args, name) for name in _COMMON}
    common |= {"model": model, "num_devices": scale.ep}
    if args.trace is not None:
        for drafts in args.speculation:
            yield Setting(
                phase="trace",
                num_requests=max(args.decode_num_requests),
                prefill_batch_size=max(args.prefill_batch_size),
                num_drafts=drafts,
                varlen=args.varlen,
                arrivals=args.trace,
                num_arrivals=args.num_arrivals,
                output_tokens=args.output_tokens,
                **common,
            )
        return
    if "prefill" in args.phases:
        for size in args.prefill_batch_size:
            yield Setting(
                phase="prefill",
                prefill_batch_size=size,
                uncached=args.uncached,
                num_drafts=max(args.speculation),
                warmup=PREFILL_STEPS,
                steps=args.prefill_steps,
                **common,
            )
    if "decode" in args.phases:
        for num_requests in args.decode_num_requests:
            for drafts in args.speculation:
                yield Setting(
                    phase="decode",
                    num_requests=num_requests,
                    prefill_batch_size=max(args.prefill_batch_size),
                    num_drafts=drafts,
                    varlen=args.varlen,
                    warmup=args.warmup,
                    steps=args.steps,
                    **common,
                )


def measure(setting: Setting, settings: Settings, args: argparse.Namespace) -> dict[str, Any]:
    """One JSON object: the setting, the machine, the figures."""
    if setting.phase == "prefill":
        figures = prefill.measure_prefill(setting, settings)
    elif setting.phase == "decode":
        figures = decode.measure_decode(setting, settings, args.assume_acceptance)
    else:
        figures = replay.measure_trace(setting, settings)
    result = setting.parameters() | {"preset": args.preset} | report.machine() | figures
    preset = PRESETS.get(args.preset)
    if preset is not None and preset.drafts in (None, setting.num_drafts):
        result["published_step_ms"] = preset.published_ms
        result["step_of_published"] = figures["step_ms_p50"] / preset.published_ms
    return result


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    logging.getLogger("deepinfer").setLevel(logging.WARNING)
    results: dict[str, list[dict[str, Any]]] = {}
    rooflines: list[str] = []
    try:
        settings = Settings.from_env()
        scale = Scale.from_env(args.cp)
        scale.check_supported()
        model = args.model or (RELEASE if args.dummy else settings.hf_model_dir or str(BUNDLED))
        for setting in settings_of(args, scale, model):
            print(f"{setting.phase}: {report.name(setting.parameters())}", file=sys.stderr, flush=True)
            result = measure(setting, settings, args)
            report.write_line(args.output, result)
            results.setdefault(setting.phase, []).append(result)
            if args.roofline and setting.phase != "trace":
                found = roofline.measure_roofline(setting, settings)
                phase = {"phase": f"{setting.phase} roofline"}
                report.write_line(args.output, setting.parameters() | phase | found)
                rooflines.append(f"{setting.phase}, {report.name(result)}\n\n{roofline.text(found)}")
    except ValueError as error:  # what was asked for does not fit: the message says why
        print(f"benchmark.py: {error}", file=sys.stderr)
        return 2
    kind = report.machine()
    print(f"{kind['device']}, torch {kind['torch']}, {args.threads} threads, {scale.ep} device(s), {model}")
    for phase, rows in results.items():
        print(f"\n{phase}\n\n{report.table(rows)}")
        for row in rows:
            if row.get("emulated"):
                print(f"\n{phase}, {report.name(row)}\n\n{emulated.text(row)}")
    for text in rooflines:
        print(f"\nroofline of eager steps, {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
