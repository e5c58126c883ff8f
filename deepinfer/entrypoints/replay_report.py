"""Measures how far bounded replay moves a model's answers from the exact ones.

    python -m deepinfer.replay_report MODEL [--keep K] [--prompts FILE] [--join N] ...

Every prompt is answered exactly and greedily; then bounded replay runs along the same tokens. At each
position the two distributions are compared: Kullback-Leibler divergence, and whether both have the same best
token.
Prompts are files as `python -m deepinfer.calibrate` takes them.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import ReplayMode
from deepinfer.entrypoints.arguments import positive_number
from deepinfer.entrypoints.llm import LLM
from deepinfer.entrypoints.prompts_file import BUNDLED_PROMPTS, TextPrompt, read_prompts
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings


@dataclass(frozen=True)
class Deviation:
    """What bounded replay does to the first tokens behind one prompt.

    Attributes:
        num_prompt: tokens of the prompt; with at most K of them nothing is cut.
        divergences: nats by position, of the exact distribution from the cut one.
        agrees: by position, whether both have the same best token.
    """

    num_prompt: int
    divergences: tuple[float, ...]
    agrees: tuple[bool, ...]

    @property
    def num_same(self) -> int:
        """Tokens of the greedy text before the first that differs."""
        return next((place for place, same in enumerate(self.agrees) if not same), len(self.agrees))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        found = measure(options, Settings.from_env())
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(describe(found, options.keep, options.by_prompt))
    return 0


def measure(options: argparse.Namespace, settings: Settings) -> list[Deviation]:
    """Run both ways, one after the other, so that one copy of the weights is held at a time.

    Raises:
        ValueError: for prompts that cannot be read or run, or a K below the bound.
    """
    texts = read_prompts(options.prompts, options.groups)
    with _engine(options, settings, ReplayMode.OFF) as llm:
        prompts = list(prompts_of(llm, texts, options.join))[: options.max_prompts]
        exact, tokens = _answers(llm, prompts, options.tokens, [()] * len(prompts))
    with _engine(options, settings, options.mode) as llm:
        cut, _ = _answers(llm, prompts, options.tokens, tokens)
    return [compare(len(prompt), *rows) for prompt, *rows in zip(prompts, exact, cut, strict=True)]


def compare(num_prompt: int, exact: Tensor, cut: Tensor) -> Deviation:
    """The deviation between log-probabilities [tokens, vocab] of the two ways."""
    divergences = (exact.double().exp() * (exact.double() - cut.double())).sum(1)
    agrees = exact.argmax(1) == cut.argmax(1)
    return Deviation(num_prompt, tuple(divergences.tolist()), tuple(agrees.tolist()))


def describe(found: Sequence[Deviation], keep: int, by_prompt: bool = False) -> str:
    """The report: one line of all prompts that were cut, and one of each if asked for."""
    cut = [deviation for deviation in found if deviation.num_prompt > keep]
    lines = []
    if len(cut) < len(found):
        lines.append(f"{len(found) - len(cut)} prompts have at most {keep} tokens: nothing is cut there")
    if not cut:
        return "\n".join([*lines, "no prompt is longer: give longer ones, or --join texts"])
    lines.append(
        f"{'prompt tokens':>13} {'tokens':>7} {'mean KL':>9} {'max KL':>9} {'top-1':>7} {'same text':>10}"
    )
    if by_prompt:
        lines += [_line(str(deviation.num_prompt), [deviation]) for deviation in cut]
    lines.append(_line(f"{len(cut)} prompts", cut))
    return "\n".join(lines)


def _line(name: str, found: Sequence[Deviation]) -> str:
    divergences = [value for deviation in found for value in deviation.divergences]
    agrees = [same for deviation in found for same in deviation.agrees]
    same = sum(deviation.num_same for deviation in found) / len(found)
    return (
        f"{name:>13} {len(agrees):>7} {sum(divergences) / len(divergences):>8.1e} {max(divergences):>8.1e} "
        f"{sum(agrees) / len(agrees):>7.1%} {same:>10.1f}"
    )


def prompts_of(llm: LLM, texts: Sequence[TextPrompt], join: int | None) -> Iterator[list[int]]:
    """Token ids of the prompts; with `join`, each text and those after it, round about, cut to so many."""
    tokenizer = llm.get_tokenizer()
    for place, text in enumerate(texts):
        if join is None:
            if text.is_chat:
                yield tokenizer.apply_chat_template([{"role": "user", "content": text.text}])
            else:
                yield tokenizer.encode(text.text)
            continue
        joined, number = text.text, place
        while len(tokens := tokenizer.encode(joined)) < join:
            number = (number + 1) % len(texts)
            joined += " " + texts[number].text
        yield tokens[:join]


def _engine(options: argparse.Namespace, settings: Settings, mode: str) -> LLM:
    plain = dataclasses.replace(
        settings,
        replay_mode=str(mode),
        replay_keep_tokens=options.keep,
        num_draft_tokens=0,
        use_async_scheduling=False,
        use_draft_budget=False,
    )
    return LLM(
        options.model,
        settings=plain,
        max_num_seqs=1,
        max_model_len=options.max_model_len,
        arithmetic=options.arithmetic,
    )


def _answers(
    llm: LLM, prompts: Sequence[list[int]], num_tokens: int, forced: Sequence[Sequence[int]]
) -> tuple[list[Tensor], list[list[int]]]:
    """Log-probabilities [tokens, vocab] and tokens behind each prompt, along forced tokens or greedily."""
    rows: list[Tensor] = []  # of one request after the other: only one runs at a time
    llm.llm_engine.model_runner.watch_logits(lambda logits: rows.append(logits.log_softmax(1)))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate(
        prompts, [params.clone(golden_token_ids=tokens) for tokens in forced], use_tqdm=False
    )
    found = [output.outputs[0].token_ids for output in outputs]
    for prompt, tokens in zip(prompts, found, strict=True):
        if len(tokens) != num_tokens:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves room for {len(tokens)}: raise --max-model-len"
            )
    return list(torch.cat(rows).split(num_tokens)), found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer.replay_report",
        description="Compare bounded replay with the exact model on the first tokens behind prompts.",
    )
    add = parser.add_argument
    add("model", help="checkpoint directory or Hub id")
    add("--keep", type=positive_number, default=140, metavar="K", help="tokens kept, default %(default)s")
    add(
        "--mode",
        choices=[str(ReplayMode.COMPACT), str(ReplayMode.MASK)],
        default=str(ReplayMode.COMPACT),
        help="default %(default)s; both give the same",
    )
    add("--prompts", default=str(BUNDLED_PROMPTS), metavar="FILE", help="default: the bundled prompts")
    add("--groups", nargs="+", metavar="NAME", help="use only these lists of the file")
    add("--join", type=positive_number, metavar="N", help="join texts to prompts of N tokens each")
    add("--max-prompts", type=positive_number, metavar="N", help="use only the first so many")
    add(
        "--tokens",
        type=positive_number,
        default=64,
        metavar="N",
        help="behind each prompt, default %(default)s",
    )
    add("--max-model-len", type=positive_number, default=None, metavar="N", help="prompt + answer, in tokens")
    add("--arithmetic", default=None, help="rounding preset, default that of the engine")
    add("--by-prompt", action="store_true", help="print a line for each prompt")
    return parser


if __name__ == "__main__":
    sys.exit(main())
