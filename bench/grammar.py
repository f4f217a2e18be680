"""What a grammar costs: compiling it, and for each token its mask and the step of its state, on one core.

`python bench/grammar.py CHECKPOINT_OR_TOKENIZER_DIR [--vocab-size 129280] [--tokens 400]` prints a line for each grammar. Texts
are walked at random by the masks themselves, so every state that a grammar has is met in proportion.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import numpy as np

from lamina.chat.records import Json, Tool, ToolChoice
from lamina.chat.tool_grammar import tool_grammar
from lamina.engine.grammar import GrammarCompiler
from lamina.engine.text import TextCodec
from lamina.engine.wire import Grammar

PERSON: dict[str, Json] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "gold"]}, "maxItems": 5},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {
        "friend": {"type": "object", "properties": {"name": {"type": "string"}, "since": {"type": "string", "format": "date"}}}
    },
}
TOOLS = [
    Tool(
        "search",
        {"name": "search", "parameters": {"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}},
        True,
    ),
    Tool("add_person", {"name": "add_person", "parameters": PERSON}, True),
]


def grammars() -> dict[str, Grammar]:
    """By name."""
    calls = {mode: tool_grammar("dsml", TOOLS, ToolChoice(mode), True, None) for mode in ("required", "auto")}
    wide = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(60)}, "additionalProperties": False}
    return {
        "json_object": Grammar("json_object", ""),
        "json_schema, a record": Grammar("json_schema", json.dumps(PERSON)),
        "json_schema, 60 optional": Grammar("json_schema", json.dumps(wide)),
        "regex, an address": Grammar("regex", r"[a-z0-9.]{1,20}@[a-z]{1,10}\.(com|org|net)"),
        "choice of 100": Grammar("choice", json.dumps([f"class number {i}" for i in range(100)])),
        "ebnf, sums": Grammar("ebnf", 'root ::= term (" + " term)*\nterm ::= [0-9]+ | "(" root ")"'),
        **{f"tools, {mode}": Grammar(call.kind, call.value) for mode, call in calls.items() if call is not None},
    }


def likely_ids(codec: TextCodec, text: str) -> set[int]:
    """Tokens of an ordinary text, which a walk prefers, so that it looks like an answer."""
    return set(codec.encode(text))


def walk(compiler: GrammarCompiler, grammar: Grammar, num_tokens: int, eos: int, common: list[int]) -> tuple[float, list[float]]:
    """(ms to compile, us of each token's mask and step)."""
    begin = time.perf_counter()
    compiled = compiler.compile(grammar)
    compile_ms = 1e3 * (time.perf_counter() - begin)
    chance = random.Random(7)
    times: list[float] = []
    state = compiled.start((eos,))
    while len(times) < num_tokens:
        start = time.perf_counter()
        mask = state.mask()
        middle = time.perf_counter()
        assert mask is not None
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        wanted = [token for token in common if allowed[token]] if chance.random() < 0.9 else []
        ids = wanted or [int(token) for token in allowed.nonzero()[0] if token != eos] or [eos]
        token = chance.choice(ids)
        if token == eos:
            state = compiled.start((eos,))
            continue
        after = time.perf_counter()
        assert state.accept(token)
        times.append(1e6 * (middle - start + time.perf_counter() - after))
        if len(times) % 100 == 0:
            state = compiled.start((eos,))
    return compile_ms, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--vocab-size", type=int, default=129_280)
    parser.add_argument("--eos", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=400)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    compiler = GrammarCompiler(arguments.directory, arguments.vocab_size, (arguments.eos,))
    print(f"library imported in {time.perf_counter() - begin:.2f} s")
    begin = time.perf_counter()
    compiler.compile(Grammar("choice", '["x"]'))
    print(f"vocabulary of {arguments.vocab_size} read in {time.perf_counter() - begin:.2f} s")
    codec = TextCodec(arguments.directory / "tokenizer.json")
    text = '{"name": "the quick brown fox", "age": 12, "query": [ ], "since": "2026-01-02"}'
    text += "</｜DSML｜invoke> + field_1 me@x.org class number"
    common = sorted(likely_ids(codec, text))
    print(f"{'grammar':28s} {'compile ms':>10s} {'KiB':>8s} {'median us':>10s} {'p99 us':>8s} {'max us':>8s}")
    for name, grammar in grammars().items():
        compile_ms, times = walk(compiler, grammar, arguments.tokens, arguments.eos, common)
        kib = compiler.compile(grammar).nbytes / 1024
        p99 = sorted(times)[int(0.99 * len(times))]
        print(f"{name:28s} {compile_ms:10.1f} {kib:8.0f} {statistics.median(times):10.1f} {p99:8.1f} {max(times):8.1f}")


if __name__ == "__main__":
    main()
