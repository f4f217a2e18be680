"""Which format a checkpoint gets."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.base.errors import ConfigError
from lamina.chat import dsml_texts
from lamina.chat.formats import ChatFormat
from lamina.chat.records import ChatOptions, Message
from lamina.models.chats import added_tokens, chat_format

HI = [Message("user", "Hi")]


def text_of(chat: ChatFormat | None, options: ChatOptions | None = None) -> str:
    assert chat is not None
    return chat.render(HI, options or ChatOptions()).text


def test_the_tiny_model(tiny_of: Callable[[str, str], Path]) -> None:
    directory = tiny_of("flash", "official")
    chat = chat_format("deepseek_v4", directory)
    assert chat is not None and (chat.name, chat.end_of_thinking) == ("dsml", "</think>")
    assert text_of(chat) == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>"
    assert {"<｜User｜>", "｜DSML｜", "<think>", "<｜end▁of▁sentence｜>"} <= set(added_tokens(directory))


def test_the_release_is_read_from_the_config(tmp_path: Path) -> None:
    hardest = ChatOptions(effort="max")
    for config, preamble in (({}, dsml_texts.EFFORT_ABSOLUTE), ({"dspark_block_size": 5}, dsml_texts.EFFORT_BEYOND)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", **config}))
        assert preamble in text_of(chat_format("deepseek_v4", tmp_path), hardest)


def test_templates_and_where_they_are_found(tmp_path: Path) -> None:
    assert chat_format("llama", tmp_path) is None
    named = [{"name": "default", "template": "named {{ bos_token }}"}, {"name": "tool_use", "template": "t"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert text_of(chat_format("llama", tmp_path)) == "named <s>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "text", "bos_token": "<s>"}))
    assert text_of(chat_format("llama", tmp_path)) == "text"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "record"}))
    assert text_of(chat_format("llama", tmp_path)) == "record"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert text_of(chat_format("llama", tmp_path)) == "file"
    (tmp_path / "own").write_text("own")
    assert text_of(chat_format("deepseek_v4", tmp_path, tmp_path / "own")) == "own"
    found = chat_format("deepseek_v4", tmp_path)
    assert found is not None and found.name == "dsml"  # the family was trained on it, whatever lies beside it
    assert text_of(chat_format("deepseek_v4", tmp_path, name="jinja")) == "file"
    assert text_of(chat_format("llama", tmp_path, name="dsml")).endswith("<think>")


def test_bad_files_are_refused(tmp_path: Path) -> None:
    for arguments, match in (
        (("llama", tmp_path, tmp_path / "none"), "chat_template"),
        (("llama", tmp_path, None, "xml"), "chat_format"),
        (("llama", tmp_path, None, "jinja"), "no template"),
    ):
        with pytest.raises(ConfigError, match=match):
            chat_format(*arguments)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(ConfigError, match="tokenizer_config"):
        chat_format("llama", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% for %}"}')
    with pytest.raises(ConfigError, match="chat_template"):
        chat_format("llama", tmp_path)


def test_no_torch_is_needed() -> None:
    code = "import sys, lamina.models.chats, lamina.chat.guard; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
