"""Answers a few prompts with a checkpoint: the bundled trained model, a directory or a Hub id.

python examples/offline_inference.py
python examples/offline_inference.py --prompt "What is the opposite of hot?" --temperature 0.7 --seed 1
python examples/offline_inference.py --model DIR_OR_HUB_ID --no-chat --prompt "In the beginning"
python examples/offline_inference.py --set stories
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from deepinfer import LLM, RequestOutput, SamplingParams, Settings

HERE = Path(__file__).resolve().parent
BUNDLED_MODEL = HERE / "v41-tiny"
PROMPT_SETS = HERE / "prompts.json"  # questions to be asked, beginnings of texts to be continued
DEFAULT_PROMPTS = (
    "What is the capital of France?",
    "Tell me a story about a fox.",
    "What is 12 + 7?",
    "Answer in JSON. Anna is 7 years old. She lives in Paris.",
)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    sets = json.loads(PROMPT_SETS.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        metavar="DIR|HUB_ID",
        help="checkpoint (default: DEEPINFER_HF_MODEL_DIR, else the bundled model)",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", help="may be repeated; all run as one batch")
    prompts.add_argument("--set", choices=sorted(sets), help="run a whole set of examples/prompts.json")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="ask in the model's chat format, or continue the text as it stands (default: ask, but continue "
        "the sets of beginnings)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    arguments = parser.parse_args(argv)
    if arguments.chat is None:
        arguments.chat = arguments.set in (None, "questions")
    arguments.prompts = sets[arguments.set] if arguments.set else arguments.prompt or list(DEFAULT_PROMPTS)
    return arguments


def run(llm: LLM, prompts: list[str], is_chat: bool, sampling_params: SamplingParams) -> list[RequestOutput]:
    """One batch; outputs come in the order of the prompts."""
    if not is_chat:
        return llm.generate(prompts, sampling_params)
    return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], sampling_params)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        settings = Settings.from_env()
        sampling_params = SamplingParams(
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            max_tokens=arguments.max_tokens,
            seed=arguments.seed,
        )
        llm = LLM(arguments.model or settings.hf_model_dir or str(BUNDLED_MODEL), settings=settings)
    except ValueError as error:  # what was asked for, or the checkpoint, does not fit: the message says why
        print(f"offline_inference.py: {error}", file=sys.stderr)
        return 2
    with llm:
        start = time.perf_counter()
        outputs = run(llm, arguments.prompts, arguments.chat, sampling_params)
        seconds = time.perf_counter() - start
    for prompt, output in zip(arguments.prompts, outputs, strict=True):
        answer = output.outputs[0]
        print(f"\n> {prompt}\n{answer.text.strip()}")
        print(f"[{answer.finish_reason}, {len(answer.token_ids)} tokens]")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    speed = f"{num_tokens / seconds:.1f} tokens/s"
    print(f"\n{len(outputs)} prompts, {num_tokens} tokens in {seconds:.1f} s: {speed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
