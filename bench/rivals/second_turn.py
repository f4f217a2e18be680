"""The first token of a conversation's first turn and of its second, alone on a server: `second_turn.py URL`.

The second turn's prompt is the first's, its answer and another question, as text to /v1/completions, which every server of
OpenAI's protocol has: what it computes again is what its prefix cache does not hold. Medians of the rounds, in ms.
"""

import argparse
import asyncio
import statistics

from lamina.cli.bench_client import LoadClient, Result
from lamina.cli.bench_data import Wanted, make_jobs
from lamina.cli.http_client import Client, parse_address

_QUESTION_TOKENS = 64


async def conversations(args: argparse.Namespace, model: str) -> list[tuple[Result, Result]]:
    """Both turns of each round; the first round warms up and is left out."""
    client = LoadClient(parse_address(args.url), keeps_text=True)
    rounds = []
    for seed in range(args.rounds + 1):
        texts = [
            make_jobs(Wanted("random", 1, length, None, 2 * seed + place, tokens_per_word=args.tokens_per_word))[0].turns[0].text
            for place, length in enumerate((args.prompt_len, _QUESTION_TOKENS))
        ]
        first = await client.post("/v1/completions", request_of(args, model, texts[0]))
        second = await client.post("/v1/completions", request_of(args, model, f"{texts[0]}{first.text}\n{texts[1]}"))
        for one in (first, second):
            if not one.is_good:
                raise SystemExit(f"error: {one.error}: {one.message}")
        rounds.append((first, second))
    client.close()
    return rounds[1:]


def request_of(args: argparse.Namespace, model: str, prompt: str) -> dict[str, object]:
    """A streamed request whose answer has a fixed length."""
    return {
        "model": model, "prompt": prompt, "max_tokens": args.output_len, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens-per-word", type=float, default=1.3)
    args = parser.parse_args()
    client = Client(parse_address(args.url))
    model = client.models()[0].id
    client.close()
    rounds = asyncio.run(conversations(args, model))
    turns = list(zip(*rounds, strict=True))
    tokens = [statistics.median(0 if one.usage is None else one.usage.prompt_tokens for one in turn) for turn in turns]
    ms = [statistics.median((one.first_s or 0.0) * 1e3 for one in turn) for turn in turns]
    print(
        f"first turn, {tokens[0]:.0f} tokens: {ms[0]:.1f} ms to the first token; second, {tokens[1]:.0f} tokens: {ms[1]:.1f} ms"
    )


if __name__ == "__main__":
    main()
