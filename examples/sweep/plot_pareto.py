"""Draws the Pareto charts of benchmark results: throughput of a device against the speed that a user sees.

    python examples/sweep/plot_pareto.py results.jsonl --output DIR [--assumed] [--csv-only]

    decode.png, .csv     tokens/s of a device over tokens/s of a user, one line for each number of drafts
    prefill.png, .csv    prompt tokens/s of a device over the time to the first token

Points are measured; the steps of a model with random weights accept nothing, so `--assumed` draws what an
assumed acceptance would give instead, and says so. Filled points are on the Pareto front: no other is better
in both. Charts need matplotlib (`pip install -e .[bench]`); tables do not.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Chart:
    """What a phase's chart shows.

    Attributes:
        x, y: keys of results.
        x_label, y_label: in words.
        is_less_better: a smaller x is better.
        size: key that tells the points of a line apart.
    """

    phase: str
    x: str
    y: str
    x_label: str
    y_label: str
    is_less_better: bool
    size: str


DECODE = Chart(
    "decode",
    "tokens_per_s_per_user",
    "tokens_per_s_per_device",
    "tokens/s of a user",
    "tokens/s of a device",
    False,
    "num_requests",
)
ASSUMED = Chart(
    "decode",
    "assumed_tokens_per_s_per_user",
    "assumed_tokens_per_s_per_device",
    "tokens/s of a user, with an assumed acceptance",
    "tokens/s of a device, with an assumed acceptance",
    False,
    "num_requests",
)
PREFILL = Chart(
    "prefill",
    "ttft_ms_p50",
    "prefill_tokens_per_s_per_device",
    "time to the first token of a lone request, ms",
    "prompt tokens/s of a device",
    True,
    "prefill_batch_size",
)
_SERIES = ("model", "dummy", "emulated_ep", "context_length", "num_drafts", "varlen", "device")


def read_results(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The JSON lines of several files.

    Raises:
        ValueError: a line is no result.
    """
    results = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                result = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}: {error}") from error
            if not isinstance(result, dict) or "phase" not in result:
                raise ValueError(f"{file}, line {number}: no result of benchmark.py")
            results.append(result)
    return results


def pareto_front(points: Sequence[tuple[float, float]], is_less_better: bool) -> list[bool]:
    """Whether each point (x, y) is one that no other beats in one coordinate and reaches in the other."""
    sign = -1.0 if is_less_better else 1.0
    turned = [(sign * x, y) for x, y in points]
    return [
        not any(other[0] >= x and other[1] >= y and other != (x, y) for other in turned) for x, y in turned
    ]


def points_of(chart: Chart, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that a chart can show, with `on_front`."""
    of_phase = [each for each in results if each["phase"] == chart.phase]
    shown = [each for each in of_phase if each.get(chart.x) and each.get(chart.y)]
    front = pareto_front([(each[chart.x], each[chart.y]) for each in shown], chart.is_less_better)
    return [{**each, "on_front": is_front} for each, is_front in zip(shown, front)]


def series_of(points: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Lines of a chart: points that differ in their size alone, named by what tells the lines apart."""
    varying = [key for key in _SERIES if len({str(each.get(key)) for each in points}) > 1]
    lines: dict[str, list[dict[str, Any]]] = {}
    for each in points:
        name = ", ".join(f"{key.removeprefix('num_')} {each.get(key)}" for key in varying) or "measured"
        lines.setdefault(name, []).append(each)
    return lines


def write_csv(file: Path, points: Sequence[dict[str, Any]]) -> None:
    """All fields of the points."""
    fields = list(dict.fromkeys(key for each in points for key in each))
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, fields)
        writer.writeheader()
        writer.writerows(points)


def draw(file: Path, chart: Chart, points: Sequence[dict[str, Any]]) -> None:
    """One chart as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for name, line in series_of(points).items():
        line = sorted(line, key=lambda each: each[chart.x])
        (drawn,) = axes.plot([p[chart.x] for p in line], [p[chart.y] for p in line], label=name, linewidth=1)
        for p in line:
            fill = drawn.get_color() if p["on_front"] else "none"
            place = p[chart.x], p[chart.y]
            axes.scatter(*place, facecolors=fill, edgecolors=drawn.get_color(), zorder=3)
            axes.annotate(str(p[chart.size]), place, (4, 4), textcoords="offset points", size=8)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.margins(0.08)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, title=f"points: {chart.size}")
    axes.set_title(f"{chart.phase}, {', '.join(sorted({str(each['device']) for each in points}))}", size=10)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines of benchmark.py --output")
    parser.add_argument("--output", type=Path, default=Path("."), help="directory of the charts")
    parser.add_argument("--assumed", action="store_true", help="decode with the acceptance that was assumed")
    parser.add_argument("--csv-only", action="store_true", help="tables without charts")
    args = parser.parse_args(argv)
    try:
        results = read_results(args.files)
    except (OSError, ValueError) as error:
        print(f"plot_pareto.py: {error}", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    num_drawn = 0
    for chart in (ASSUMED if args.assumed else DECODE, PREFILL):
        points = points_of(chart, results)
        if not points:
            continue
        num_drawn += 1
        write_csv(args.output / f"{chart.phase}.csv", points)
        print(f"{chart.phase}: {len(points)} points, {sum(p['on_front'] for p in points)} on the front")
        try:
            if not args.csv_only:
                draw(args.output / f"{chart.phase}.png", chart, points)
        except ImportError:
            print(
                "plot_pareto.py: charts need matplotlib: pip install -e .[bench], or ask for --csv-only; "
                f"{args.output / chart.phase}.csv is there",
                file=sys.stderr,
            )
            return 2
    if num_drawn == 0:
        print("plot_pareto.py: no result has what a chart shows", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
