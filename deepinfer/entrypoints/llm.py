"""LLM: offline batches. One call in, one `RequestOutput` per prompt out, in order, owned by the caller."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from numbers import Number
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.engine.engine_type import EngineType
from deepinfer.engine.intake import InvalidRequestError, Prompt
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.entrypoints.progress import Progress
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings

if TYPE_CHECKING:
    from deepinfer.checkpoint.tokenizer import Tokenizer
    from deepinfer.engine.summary import StatsSummary

PromptInput = str | Sequence[int] | dict[str, Any]


class LLM:
    """A model and the engine that runs it, for batches of prompts.

    Args:
        model: local checkpoint directory, or a Hub id.
        tokenizer: directory of the tokenizer; the model's when None.
        settings: environment settings; read from the environment when None.
        **kwargs: fields of `EngineArgs`, such as `max_model_len`, `max_num_seqs` or `arithmetic`.

    Raises:
        ValueError, TypeError: for arguments or environment variables that do not fit.
        CheckpointError: when the checkpoint is not what its config says.

    Use it as a context manager, or call `close()`. Several may live in one process.
    """

    def __init__(
        self, model: str, tokenizer: str | None = None, *, settings: Settings | None = None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("disable_log_stats", True)
        args = EngineArgs.from_kwargs(model=model, tokenizer=tokenizer, **kwargs)
        if args.engine_type is not EngineType.NORMAL:
            raise ValueError(f"engine_type={args.engine_type!r}: LLM runs whole requests; use LLMEngine")
        self.llm_engine = LLMEngine.from_engine_args(args, settings)
        self._request_ids = itertools.count()
        self._awaited: set[str] = set()  # requests of the calls that are under way
        self._arrived: dict[str, RequestOutput] = {}  # their results, until their call takes them

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        *,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Generate a completion (or `n`) for every prompt.

        Args:
            prompts: one prompt or a list: text, a list of token ids, or a dict with `prompt` or
                `prompt_token_ids`. Text is tokenized with the begin token that the tokenizer's policy adds.
            sampling_params: one object for all prompts, or one per prompt; `SamplingParams()` when None.
                Prompts without an explicit seed get a fresh one each.
            prompt_token_ids: one list of token ids or a list of them; used instead of `prompts`' text when
                both are given, with equal lengths.
            use_tqdm: show a progress bar.
            on_error: "raise": a prompt that cannot run raises before any work is done and names its row.
                "return": it gets a result with `finish_reason="error"`, and the others run.

        Returns:
            One `RequestOutput` per prompt, in input order.

        Raises:
            InvalidRequestError: (a ValueError) for the first prompt that cannot run, with `on_error="raise"`.
            ValueError: when the arguments contradict each other.

        An interrupt (Ctrl-C) ends this call's requests and leaves the engine usable.
        """
        rows, params = self._rows(prompts, sampling_params, prompt_token_ids)
        results: list[RequestOutput | None] = [None] * len(rows)
        for row, output in self._run(rows, params, use_tqdm, on_error):
            results[row] = output
        assert all(result is not None for result in results), f"{results=}"
        return results  # type: ignore[return-value]

    def generate_iter(
        self,
        prompts: PromptInput | Sequence[PromptInput] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = False,
        *,
        on_error: str = "raise",
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `generate`, but yields (row, `RequestOutput`) as requests finish.

        All prompts are checked before the first result. Closing the iterator early ends the rest. Other calls
        may run between two results; they run this one's requests along with their own.
        """
        rows, params = self._rows(prompts, sampling_params, prompt_token_ids)
        return self._run(rows, params, use_tqdm, on_error)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        on_error: str = "raise",
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generate the assistant's next message of one conversation or of each of several.

        Args:
            messages: a list of `{"role": ..., "content": ...}`, or a list of such lists.
            template_options: passed to the checkpoint's prompt encoding, such as `thinking=True`.

        The prompt format is the checkpoint's: the release's needs the extra `deepinfer[chat]`; a tokenizer
        with a chat template uses that. Other arguments and the result are those of `generate`.
        """
        self.llm_engine.check_open()
        if not messages:
            raise ValueError("messages is empty: pass one conversation or a list of conversations")
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            given = type(messages).__name__
            raise ValueError(f"messages must be one conversation or a list of conversations, got {given}")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        prompts = [self._chat_prompt(conversation, template_options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, on_error=on_error)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

    def get_stats(self) -> StatsSummary:
        """Everything the engine counted since it started; `print` shows it as a report."""
        return self.llm_engine.get_stats()

    def reset_prefix_cache(self) -> bool:
        """Forget what the prefix cache knows; False, and nothing changes, while a request is unfinished."""
        return self.llm_engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the engine's memory and threads; a second call does nothing."""
        self.llm_engine.close()

    def __enter__(self) -> LLM:
        self.llm_engine.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chat_prompt(self, conversation: Any, template_options: dict[str, Any]) -> Prompt:
        """A conversation's prompt; one that is not well-formed is for intake to refuse, by its row."""
        try:
            return Prompt(None, self.get_tokenizer().apply_chat_template(conversation, **template_options))
        except ValueError as error:
            return Prompt(None, None, error=str(error))

    def _rows(
        self, prompts: Any, sampling_params: Any, prompt_token_ids: Any
    ) -> tuple[list[Prompt], list[SamplingParams]]:
        """The call's prompts and parameters, one per row."""
        self.llm_engine.check_open()
        rows = _as_prompts(prompts, prompt_token_ids)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            return rows, [sampling_params] * len(rows)
        if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, (str, bytes)):
            given = type(sampling_params).__name__
            raise ValueError(f"sampling_params must be a SamplingParams or a list of them, got {given}")
        params = list(sampling_params)
        if len(params) != len(rows):
            raise ValueError(
                f"{len(params)} sampling_params for {len(rows)} prompts: pass one, or one per prompt"
            )
        return rows, params

    def _run(
        self, rows: list[Prompt], params: list[SamplingParams], use_tqdm: bool, on_error: str
    ) -> Iterator[tuple[int, RequestOutput]]:
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error={on_error!r}: choose 'raise' or 'return'")
        engine = self.llm_engine
        checked = []
        for row, (prompt, param) in enumerate(zip(rows, params, strict=True)):
            request_id = str(next(self._request_ids))
            try:
                checked.append((row, engine.check_request(request_id, prompt, param)))
            except InvalidRequestError as error:
                if on_error == "raise":
                    raise error.at_row(row) from None
                checked.append((row, error.as_output(request_id, prompt)))
        return self._drive(checked, use_tqdm)

    def _drive(self, checked: list[tuple[int, Any]], use_tqdm: bool) -> Iterator[tuple[int, RequestOutput]]:
        """Submit the checked requests, step until all have ended."""
        engine = self.llm_engine
        progress = Progress(len(checked), use_tqdm)
        row_of: dict[str, int] = {}
        try:
            for row, item in checked:
                if isinstance(item, RequestOutput):
                    progress.add([item])
                    yield row, item
                else:
                    row_of[item.request_id] = row
                    self._awaited.add(item.request_id)
                    engine.submit(item)
            while row_of:
                ended = [name for name in self._arrived if name in row_of]
                if not ended:
                    self._step()
                    continue
                outputs = [self._arrived.pop(name) for name in ended]
                progress.add(outputs)
                for output in outputs:
                    yield row_of.pop(output.request_id), output
        finally:  # an interrupt, or a caller who stops iterating, must not leave requests behind
            engine.drop_request(row_of)
            self._awaited.difference_update(request_id for request_id in row_of)
            for request_id in row_of:
                self._arrived.pop(request_id, None)
            progress.close()
            engine.settle()

    def _step(self) -> None:
        """One step of the engine; results go to the calls that await them."""
        for output in self.llm_engine.step():
            if output.finished and output.request_id in self._awaited:
                self._awaited.discard(output.request_id)
                self._arrived[output.request_id] = output


def _as_prompts(prompts: Any, prompt_token_ids: Any) -> list[Prompt]:
    """The rows of a call, whatever the spelling."""
    if prompts is None and prompt_token_ids is None:
        raise ValueError("pass prompts or prompt_token_ids")
    for name, value in (("prompts", prompts), ("prompt_token_ids", prompt_token_ids)):
        if not (value is None or isinstance(value, dict) or _is_sequence(value)):
            raise ValueError(f"{name} must be one prompt or a list of prompts, got {type(value).__name__}")
    if _is_single(prompts):
        prompts = [prompts]
    if prompt_token_ids is not None and len(prompt_token_ids) and _is_single(prompt_token_ids):
        prompt_token_ids = [prompt_token_ids]
    if prompts is None:
        return [Prompt(None, ids) for ids in prompt_token_ids]
    rows = [Prompt.of(prompt) for prompt in prompts]
    if prompt_token_ids is None:
        return rows
    if len(rows) != len(prompt_token_ids):
        raise ValueError(
            f"{len(rows)} prompts but {len(prompt_token_ids)} prompt_token_ids: lengths must match"
        )
    return [Prompt(row.text, ids) for row, ids in zip(rows, prompt_token_ids, strict=True)]


def _is_sequence(value: Any) -> bool:
    """Whether a value has a length and can be indexed: a list, a string, an array."""
    if getattr(value, "ndim", 1) == 0:
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _is_single(value: Any) -> bool:
    """Whether a value is one prompt, not a list of prompts: text, a dict, or a flat list of numbers."""
    if isinstance(value, (str, dict)):
        return True
    if value is None:
        return False
    if getattr(value, "ndim", None) == 1:  # a numpy array or tensor of ids
        return True
    return len(value) > 0 and isinstance(value[0], Number)
