"""The offline interface: give prompts, get answers."""

import numbers
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeGuard, cast

import numpy as np

from lamina.base.config import EMBEDDED, EngineConfig
from lamina.base.errors import ConfigError
from lamina.base.keywords import CALL_ELSEWHERE, LLM_ELSEWHERE, known_only
from lamina.chat.turns import ChatMessage, read_options
from lamina.engine.chats import Chats, conversations
from lamina.engine.default_sampling import check_source, find_defaults
from lamina.engine.engine import Engine, Group
from lamina.engine.outputs import Delta, RequestOutput
from lamina.models.files import model_text
from lamina.schedule.sampling_params import SamplingParams

#: a text, token ids, or a record with one of them under "prompt" or "prompt_token_ids"
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, str | Sequence[int]]


class LLM:
    """A model that generates, lamina-tiny in the package if none is named. Settings are those of `EngineConfig`, by keyword.

    llm = LLM()  # LLM("path/to/checkpoint", cache_bytes="2GiB")
    llm.generate(["Once upon a time"], SamplingParams(max_tokens=32, temperature=0))
    llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=32))
    """

    @known_only("LLM", LLM_ELSEWHERE)
    def __init__(
        self,
        model: str = EMBEDDED,
        *,
        dtype: str = "auto",
        cache_format: str = "auto",
        index_format: str = "auto",
        device: str = "cpu",
        cache_bytes: int | str | None = None,
        max_step_tokens: int | None = None,
        max_requests: int = 256,
        max_model_len: int | None = None,
        block_tokens: int | None = None,
        checkpoint_interval: int | None = None,
        deterministic: bool | str | None = None,
        seed: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kernels: str = "auto",
        activation_format: str = "auto",
        warmup: bool = True,
        generation_config: str = "auto",
        draft: str = "none",
        draft_tokens: int | None = None,
        on_tensor: Callable[[int, int], None] | None = None,
    ) -> None:
        config = EngineConfig(
            model=model_text(model),
            dtype=dtype,
            cache_format=cache_format,
            index_format=index_format,
            device=device,
            cache_bytes=cache_bytes,
            max_step_tokens=max_step_tokens,
            max_requests=max_requests,
            max_model_len=max_model_len,
            block_tokens=block_tokens,
            checkpoint_interval=checkpoint_interval,
            deterministic=deterministic,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            kernels=kernels,
            activation_format=activation_format,
            warmup=warmup,
            draft=draft,
            draft_tokens=draft_tokens,
        )
        check_source(generation_config)
        self.engine = Engine(config, on_tensor)
        self._chats: Chats | None = None  # once somebody chats
        self._defaults = find_defaults(self.engine.directory, generation_config)

    def get_default_sampling_params(self) -> SamplingParams:
        """What applies where a call gives none: what the checkpoint's generation_config.json recommends.

        That is for `generation_config="auto"`; "vllm" leaves the file alone, and the path of a directory takes the one there.
        """
        return self._defaults.params()

    @known_only("LLM.generate", CALL_ELSEWHERE)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache_salt: str = "",
        on_step: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in order.

        prompts     a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these.
        params      one for all, or one a prompt (sampling_params is another name for it).
        cache_salt  requests with different salts never share memory.   on_step  called with (finished, all) outputs.
        Raises      ConfigError or CapacityError before anything is queued if any prompt cannot be served.
        """
        return self._run(self._add(_as_list(prompts), _either(params, sampling_params), cache_salt), on_step)

    @known_only("LLM.chat", CALL_ELSEWHERE)
    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        cache_salt: str = "",
        on_step: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Answers to chats, written as the model's chat format writes them: one RequestOutput a chat, in order.

        messages    a chat, a list of {"role": ..., "content": ...} with OpenAI's fields, or a list of chats.
        sampling_params  one for all, or one a chat.
        add_generation_prompt  False: the prompt ends after the last turn (templates only).
        continue_final_message  the answer goes on with the last turn, an assistant's; then no other turn is begun.
        tools       functions that the model is told of, with OpenAI's fields; calls come as text, as the model writes them.
        chat_template_kwargs  handed to the template, as {"enable_thinking": False}.
        cache_salt, on_step  as for `generate`.
        Raises      ConfigError or CapacityError before anything is queued; ConfigError names the turn (messages[2].content).
        """
        if not isinstance(add_generation_prompt, bool):
            raise ConfigError("add_generation_prompt", add_generation_prompt, "True or False")
        options = read_options(chat_template_kwargs, tools, add_generation_prompt or continue_final_message)
        chats = conversations(messages)
        if self._chats is None:
            self._chats = Chats(self.engine.directory, self.engine.codec)
        prompts = [self._chats.prompt(chat, options, place, continue_final_message) for chat, place in chats]
        groups = self._add(
            [prompt.ids for prompt in prompts], sampling_params, cache_salt, [prompt.keep_at for prompt in prompts], "messages"
        )
        for group, prompt in zip(groups, prompts, strict=True):
            group.output.prompt = prompt.text
        return self._run(groups, on_step)

    def _run(self, groups: list[Group], on_step: Callable[[int, int], None] | None) -> list[RequestOutput]:
        """Steps until all are finished; cancels them where something breaks off."""
        try:
            total = sum(len(group.requests) for group in groups)
            for group in groups:
                while not group.is_finished:
                    self.engine.advance(group)
                    if on_step is not None:
                        on_step(sum(r.finish_reason is not None for g in groups for r in g.requests), total)
        except BaseException:
            self._cancel(groups)
            raise
        return [group.output for group in groups]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache_salt: str = "",
    ) -> "Stream":
        """Deltas of all prompts as they come; each output ends with one whose finish_reason is set.

        Closing the stream early, even unread, cancels what has not finished. Raises as `generate`, at the call.
        """
        return Stream(self.engine, self._add(_as_list(prompts), _either(params, sampling_params), cache_salt))

    def _add(
        self, listed: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None, cache_salt: str,
        keep_at: Sequence[int | None] | None = None, field: str = "prompts",
    ) -> list[Group]:  # fmt: skip
        """Queues prompts once all of them have been checked. field  how errors name them.   keep_at  of each, see Engine.add."""
        if not isinstance(cache_salt, str):
            raise ConfigError("cache_salt", cache_salt, "a text")
        if params is None or isinstance(params, SamplingParams):
            each = [params or self.get_default_sampling_params()] * len(listed)
        else:
            each = list(params)
            if len(each) != len(listed):
                raise ConfigError("params", f"{len(each)} of them", f"one, or one for each of the {len(listed)} prompts")
        for index, (prompt, own) in enumerate(zip(listed, each, strict=True)):
            if not isinstance(own, SamplingParams):
                raise ConfigError(f"params[{index}]", own, "a SamplingParams")
            self.engine.check(prompt, own, f"{field}[{index}]")
        ends = keep_at or [None] * len(listed)
        return [
            self.engine.add(prompt, own, index, cache_salt, keep_at=end)
            for index, (prompt, own, end) in enumerate(zip(listed, each, ends, strict=True))
        ]

    def _cancel(self, groups: list[Group]) -> None:
        for group in groups:
            self.engine.cancel(group)


class Stream:
    """Deltas of some prompts, an iterator. Closing it, or letting go of it, cancels what has not finished."""

    def __init__(self, engine: Engine, groups: list[Group]) -> None:
        self._engine = engine
        self._groups = groups
        self._waiting = list(groups)
        self._ready: deque[Delta] = deque()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Delta:
        try:
            while self._waiting and not self._ready:
                self._ready.extend(delta for group in self._waiting for delta in self._engine.take(group))
                self._waiting = [group for group in self._waiting if not group.is_finished or group.deltas]
                if self._waiting and not self._ready:
                    self._engine.step_for(self._waiting)
        except BaseException:
            self.close()
            raise
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def close(self) -> None:
        """Cancels what has not finished; nothing more comes."""
        self._waiting.clear()
        self._ready.clear()
        for group in self._groups:
            self._engine.cancel(group)

    def __del__(self) -> None:
        self.close()


def _either(
    params: SamplingParams | Sequence[SamplingParams] | None, other: SamplingParams | Sequence[SamplingParams] | None
) -> SamplingParams | Sequence[SamplingParams] | None:
    """The one of two names for the same argument that was used."""
    if params is not None and other is not None:
        raise ConfigError("sampling_params", other, "absent where params is given: they are the same argument")
    return other if params is None else params


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[str | Sequence[int]]:
    """A list of prompts from one prompt or several; a flat list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [_plain(prompts, "prompts")]
    if not _is_list(prompts):
        raise ConfigError("prompts", type(prompts).__name__, "a text, a list of token ids, or a list of either")
    items: list[object] = list(prompts)
    if items and isinstance(items[0], numbers.Integral):
        return [cast("list[int]", items)]  # the engine looks at each
    return [_plain(item, f"prompts[{index}]") for index, item in enumerate(items)]


def _plain(prompt: object, name: str) -> str | Sequence[int]:
    """The text or the token ids of one prompt."""
    if isinstance(prompt, Mapping):
        found = [prompt[key] for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
        if not found:
            raise ConfigError(name, dict(prompt), 'a record with "prompt" or "prompt_token_ids"')
        prompt = found[0]
    if isinstance(prompt, str):
        return prompt
    if not _is_list(prompt):
        raise ConfigError(name, prompt, "a text or a list of token ids")
    return cast("list[int]", list(prompt))


def _is_list(value: object) -> TypeGuard[Iterable[object]]:
    """A sequence or a one-dimensional array of anything; bytes are not."""
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, bytes | bytearray | str)
