"""The tokenizer inside a GGUF file, written as the tokenizer.json and tokenizer_config.json that the model had. No torch.

A byte-level BPE alone: `tokenizer.ggml.model` is "gpt2". How texts are cut before the merges is said by a name in
`tokenizer.ggml.pre`; the table has the names whose rule is known, others are refused. Source: llama.cpp's src/llama-vocab.cpp
for the names, the models' own tokenizer.json for the rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.weights.gguf_header import GgufFile, shown

Json = dict[str, object]

_NORMAL, _UNKNOWN, _CONTROL, _DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ROLES = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id", "pad_token": "padding_token_id",
    "eot": "eot_token_id", "eom": "eom_token_id",
}  # fmt: skip
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a text is cut.

    pattern        of the pieces; none: that of GPT-2.   splits_digits  each digit is a piece of its own.
    is_composed    Unicode is normalised to NFC first.   whole_first  a piece that is a token is not cut, whatever the merges say.
    adds_bos       prompts begin with the BOS token where the file does not say.
    """

    pattern: str = ""
    splits_digits: bool = False
    is_composed: bool = False
    whole_first: bool = False
    adds_bos: bool = False


_GPT2, _DIGITS = _Rule(), _Rule(splits_digits=True)
_LLAMA3 = _Rule(_WORDS % "{1,3}", whole_first=True, adds_bos=True)
_QWEN2 = _Rule(_WORDS % "", is_composed=True)  # NFC as in the models' own files; llama.cpp leaves it out
_RULES = {
    "gpt-2": _GPT2, "phi-2": _GPT2, "olmo": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
}  # fmt: skip


def tokenizer_json(file: GgufFile) -> Json | None:
    """The file's tokenizer as tokenizer.json has it; None if it has none.

    Raises ConfigError, in one line, for another kind of tokenizer, an unknown rule, or lists that do not belong together.
    """
    if "tokenizer.ggml.model" not in file.metadata:
        return None
    kind = file.metadata["tokenizer.ggml.model"]
    if kind == "none":
        return None
    if kind != "gpt2":
        raise ConfigError(f"{file.path.name}: tokenizer.ggml.model", shown(kind), "gpt2: a byte-level BPE")
    rule, tokens = _rule(file), _tokens(file)
    types = _integers(file, "token_type", len(tokens), default=_NORMAL)
    vocabulary = {token: number for number, token in enumerate(tokens) if types[number] != _UNUSED}
    if len(vocabulary) != sum(kind != _UNUSED for kind in types):
        raise ConfigError(f"{file.path.name}: tokenizer.ggml.tokens", f"{len(tokens)} texts", "texts that are all different")
    added = [
        {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": types[number] != _DEFINED}
        for number, token in enumerate(tokens) if types[number] in (_UNKNOWN, _CONTROL, _DEFINED) and token
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "NFC"} if rule.is_composed else None,
        "pre_tokenizer": _pre_tokenizer(rule),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": rule.whole_first, "vocab": vocabulary,
            "merges": _merges(file, vocabulary),
        },
    }  # fmt: skip


def tokenizer_config(file: GgufFile) -> Json:
    """Special tokens, whether prompts begin with BOS, and the chat templates, as tokenizer_config.json has them."""
    config: Json = {}
    if file.metadata.get("tokenizer.ggml.model") == "gpt2":
        tokens = _tokens(file)
        config |= {role: tokens[number] for role, number in special_ids(file).items() if role.endswith("_token")}
        adds = file.metadata.get("tokenizer.ggml.add_bos_token", _rule(file).adds_bos)
        if not isinstance(adds, bool):
            raise ConfigError(f"{file.path.name}: tokenizer.ggml.add_bos_token", shown(adds), "true or false")
        config["add_bos_token"] = adds
        if file.metadata.get("tokenizer.ggml.add_eos_token"):
            raise ConfigError(f"{file.path.name}: tokenizer.ggml.add_eos_token", True, "false, the only one supported")
    templates = _templates(file)
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def special_ids(file: GgufFile) -> dict[str, int]:
    """Ids by role: bos_token, eos_token, unk_token, pad_token, eot and eom, as far as the file names them."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    most = len(tokens) if isinstance(tokens, tuple) and tokens else 1 << 31
    found: dict[str, int] = {}
    for role, key in _ROLES.items():
        value = file.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < most:
            raise ConfigError(f"{file.path.name}: tokenizer.ggml.{key}", shown(value), f"a token id below {most}")
        found[role] = value
    return found


def _templates(file: GgufFile) -> dict[str, str]:
    templates: dict[str, str] = {}
    for key, value in file.metadata.items():
        name = key.removeprefix("tokenizer.chat_template")
        if name == key or (name and not name.startswith(".")):
            continue
        if not isinstance(value, str):
            raise ConfigError(f"{file.path.name}: {key!r:.80}", shown(value), "a text")
        templates[name.removeprefix(".") or "default"] = value
    return templates


def _rule(file: GgufFile) -> _Rule:
    name = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _RULES:
        raise ConfigError(f"{file.path.name}: tokenizer.ggml.pre", shown(name), f"one of {', '.join(_RULES)}")
    return _RULES[name]


def _tokens(file: GgufFile) -> tuple[str, ...]:
    found = _texts(file, "tokens")
    if not found:
        raise ConfigError(f"{file.path.name}: tokenizer.ggml.tokens", None, "the texts of all tokens")
    return found


def _merges(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens whose join is a token, each; what is none would stop the library."""
    merges: list[tuple[str, str]] = []
    for number, merge in enumerate(_texts(file, "merges")):
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or any(part not in vocabulary for part in (left, right, left + right)):
            raise ConfigError(
                f"{file.path.name}: tokenizer.ggml.merges[{number}]", merge[:80], "two tokens whose join is a token"
            )
        merges.append((left, right))
    return merges


def _texts(file: GgufFile, key: str) -> tuple[str, ...]:
    value = file.metadata.get(f"tokenizer.ggml.{key}", ())
    texts = tuple(item for item in value if isinstance(item, str)) if isinstance(value, tuple) else ()
    if not isinstance(value, tuple) or len(texts) != len(value):
        raise ConfigError(f"{file.path.name}: tokenizer.ggml.{key}", f"a {type(value).__name__}", "an array of texts")
    return texts


def _integers(file: GgufFile, key: str, count: int, default: int) -> tuple[int, ...]:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return (default,) * count
    numbers = tuple(item for item in value if type(item) is int) if isinstance(value, tuple) else ()
    if len(numbers) != count:
        raise ConfigError(f"{file.path.name}: tokenizer.ggml.{key}", f"{len(numbers)} integers", f"{count} of them, one a token")
    return numbers


def _pre_tokenizer(rule: _Rule) -> Json:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not rule.pattern}
    if rule.pattern:
        first: Json = {"type": "Split", "pattern": {"Regex": rule.pattern}, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [first, byte_level]}
    if rule.splits_digits:
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    return byte_level
