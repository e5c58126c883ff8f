"""Fits the temperatures of a drafter's confidences on prompts, shows the effect and writes them to a file.

    python -m deepinfer.calibrate MODEL [--prompts FILE] [--groups NAME ...] [--output FILE] ...

Every prompt is answered at each temperature, several times, with all drafts of a block verified. The file is
what `EngineArgs.calibration_file` takes. Prompts are a JSON list of texts, or an object of such lists; those
under "questions" are asked in the model's chat format, the others are continued.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from deepinfer.checkpoint.loader import Checkpoint, open_checkpoint
from deepinfer.checkpoint.tokenizer import Tokenizer
from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.engine.draft_outcomes import record_blocks
from deepinfer.engine.intake import Intake, InvalidRequestError, Prompt, Request
from deepinfer.engine.parts import EngineParts, build_parts
from deepinfer.entrypoints.arguments import positive_number
from deepinfer.entrypoints.calibration_text import Estimates, describe, notes_of
from deepinfer.entrypoints.prompts_file import BUNDLED_PROMPTS, TextPrompt, read_prompts
from deepinfer.sampling.calibration import Blocks, Calibration, fit, held_out_survivals
from deepinfer.sampling.confidence import resolve_confidence_scale, write_calibration
from deepinfer.sampling.seeds import sample_seed
from deepinfer.sampling_params import VERIFICATIONS, SamplingParams
from deepinfer.settings import Settings

ENOUGH_BLOCKS = 20_000  # with far fewer, temperatures are mostly noise
FOLDS = 5
ENVIRONMENT = "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        calibrate(options, Settings.from_env())
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def calibrate(options: argparse.Namespace, settings: Settings) -> Calibration:
    """Record blocks, fit, report and write.

    Raises:
        ValueError: for a model without a drafter, prompts that cannot run, too little data to fit, or an
            output that cannot be written. All but the data is checked before any work.
    """
    prompts = read_prompts(options.prompts, options.groups)
    _check_output(options.output)
    checkpoint = open_checkpoint(options.model, None)
    if not checkpoint.config.num_nextn_predict_layers:
        raise ValueError(f"{options.model} has no drafter: there are no confidences to calibrate")
    num_drafts = checkpoint.config.dspark_block_size
    args = EngineArgs(
        model=options.model,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        disable_log_stats=True,
    )
    whole_blocks = dataclasses.replace(
        settings,
        num_draft_tokens=num_drafts,
        use_async_scheduling=False,
        use_draft_budget=False,
        confidence_temperatures=None,  # raw logits are what is recorded
    )
    parts = build_parts(args, whole_blocks)
    work = list(requests_of(parts, prompts, options))
    start = time.perf_counter()
    recorded = record_blocks(
        parts, [request for _, request in work], _show_progress if sys.stderr.isatty() else None
    )
    if sys.stderr.isatty():
        print(file=sys.stderr)
    blocks = recorded.blocks
    print(
        f"{len(work)} answers to {len(prompts)} prompts, {len(blocks.logits)} blocks of {num_drafts} drafts "
        f"in {time.perf_counter() - start:.0f} s"
    )
    if len(blocks.logits) < ENOUGH_BLOCKS:
        print(
            f"fewer than {ENOUGH_BLOCKS} blocks: temperatures are partly noise; raise --samples or "
            "--max-tokens, or give more prompts"
        )
    sources = np.array([place for place, _ in work])[recorded.sources]
    found, estimates = _fit(blocks, sources, checkpoint, options.offsets)
    groups = {prompt.group: None for prompt in prompts}  # in their order
    group_of = np.array([list(groups).index(prompt.group) for prompt in prompts])[sources]
    print(describe(blocks, estimates, found, list(groups), group_of, by_position=options.by_position))
    notes = {
        "model": str(options.model),
        "groups": list(groups),
        "num_prompts": len(prompts),
        "num_blocks": len(blocks.logits),
        "verification": options.verification,
        "sampling_temperatures": options.temperature,
        "top_p": options.top_p,
        "reports": notes_of(blocks, estimates),
    }
    write_calibration(options.output, found.temperatures, found.offsets, notes)
    print(f"written to {options.output}: pass it to the engine as calibration_file")
    if found.offsets.any():
        print("the offsets exist in the file only: no environment variable and no config.json holds them")
    else:
        values = [f"{value:.4g}" for value in found.temperatures]
        print(f'or, in config.json, "dspark_sts_temperatures": [{", ".join(values)}]')
    if settings.confidence_temperatures is not None:
        print(f"{ENVIRONMENT} is set: while it is, an engine uses that and neither of these")
    return found


def _fit(
    blocks: Blocks, sources: np.ndarray, checkpoint: Checkpoint, always_offset: bool
) -> tuple[Calibration, list[Estimates]]:
    """The fit of all blocks, and what to compare: estimates before it, and after it on prompts held out."""
    try:
        found = fit(blocks, always_offset=always_offset)
        folds = min(FOLDS, len(np.unique(sources)))
        survivals = None
        if folds > 1:
            survivals = held_out_survivals(blocks, sources, folds, always_offset=always_offset)
    except ValueError as error:
        raise ValueError(
            f"too little to fit: {error}; raise --max-tokens or --samples, or give more prompts"
        ) from error
    num_drafts = blocks.num_positions
    estimates = [Estimates.of("head alone", blocks, Calibration.identity(num_drafts))]
    temperatures = checkpoint.config.dspark_sts_temperatures
    if temperatures is not None:
        scale = resolve_confidence_scale(num_drafts, checkpoint=temperatures)
        given = dataclasses.replace(
            Calibration.identity(num_drafts), temperatures=scale.temperatures.double().numpy()
        )
        estimates.append(Estimates.of("checkpoint", blocks, given))
    if survivals is None:
        print("one prompt only: nothing can be held out, so the fit is judged by what it was made of")
        return found, [*estimates, Estimates.of("fitted, same data", blocks, found)]
    return found, [*estimates, Estimates("fitted, held out", survivals)]


def requests_of(
    parts: EngineParts, prompts: Sequence[TextPrompt], options: argparse.Namespace
) -> Iterator[tuple[int, Request]]:
    """Every prompt at every temperature, as often as asked; a greedy one once, for it would only repeat.

    Yields:
        The place of the prompt, and a checked request.
    """
    max_model_len = parts.scheduler_config.max_model_len
    intake = Intake(parts.tokenizer, parts.spec.vocab_size, max_model_len, options.verification)
    number = 0
    for place, text in enumerate(prompts):
        prompt = Prompt.of(_token_ids(parts.tokenizer, text))
        for temperature in options.temperature:
            params = SamplingParams(
                temperature=temperature, max_tokens=options.max_tokens, top_p=options.top_p, detokenize=False
            )
            for _ in range(1 if params.is_greedy else options.samples):
                number += 1
                seeded = params.clone(seed=sample_seed(options.seed, number))
                try:
                    yield place, intake.check(str(number), prompt, seeded)
                except InvalidRequestError as error:
                    raise ValueError(f"{text.text[:40]!r}: {error}") from error


def _token_ids(tokenizer: Tokenizer, prompt: TextPrompt) -> list[int]:
    if prompt.is_chat:
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
    return tokenizer.encode(prompt.text)


def _check_output(path: str) -> None:
    """Minutes of work should not end at a name that cannot be written."""
    output = Path(path)
    if output.is_dir() or not output.resolve().parent.is_dir():
        raise ValueError(f"--output {path}: there is no such folder, or this is one; name a file")


def _show_progress(num_blocks: int) -> None:
    print(f"\r{num_blocks} blocks", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer.calibrate",
        description="Fit the temperatures of a drafter's confidences on prompts, show the effect on prompts "
        "that were held out, and write a file that the engine takes as calibration_file.",
        epilog="The data should look like the traffic: give its sampling temperatures and its way of "
        "verification, and prompts of its kind.",
    )
    add = parser.add_argument
    add("model", help="checkpoint directory or Hub id")
    add(
        "--prompts",
        default=str(BUNDLED_PROMPTS),
        metavar="FILE",
        help='JSON list of texts, or object of such lists; those under "questions" are asked as chat '
        "messages; default: the bundled prompts",
    )
    add("--groups", nargs="+", metavar="NAME", help="use only these lists of the file")
    add("--output", default="calibration.json", metavar="FILE", help="default %(default)s")
    add(
        "--max-tokens", type=positive_number, default=128, metavar="N", help="per answer, default %(default)s"
    )
    add(
        "--temperature",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="T",
        help="sampling temperatures that are served, default 1",
    )
    add("--top-p", type=float, default=1.0, metavar="P", help="default %(default)s")
    add(
        "--samples",
        type=positive_number,
        default=10,
        metavar="N",
        help="answers per prompt, default %(default)s",
    )
    add("--seed", type=int, default=0, metavar="N", help="of all answers, default %(default)s")
    add("--verification", choices=VERIFICATIONS, default=VERIFICATIONS[0], help="default %(default)s")
    add(
        "--max-num-seqs",
        type=positive_number,
        default=64,
        metavar="N",
        help="answers at once, default %(default)s",
    )
    add("--max-model-len", type=positive_number, default=None, metavar="N", help="prompt + answer, in tokens")
    add(
        "--offsets",
        action="store_true",
        help="fit an offset beside every temperature, not just where one fails",
    )
    add("--by-position", action="store_true", help="print a reliability table for each draft position")
    return parser
