"""Options that commands share, and what they mean for the engine."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lamina import SamplingParams
from lamina.base.config import ACTIVATION_FORMATS, AUTO, CACHE_FORMATS, DRAFTS, DTYPES, INDEX_FORMATS, KERNELS, EngineConfig
from lamina.base.errors import ConfigError
from lamina.models.files import about_embedded, is_embedded, model_path

Prompt: TypeAlias = str | list[int]
_MAX_TOKENS = 128
_DETERMINISTIC: dict[str, bool | str] = {"strict": "strict", "true": True, "false": False}


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt option as it was typed: `kind` is prompt, prompt-file or prompt-ids."""

    kind: str
    value: str


class _AppendPrompt(argparse.Action):
    """Collects the three kinds of prompts in one list, in the order of the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        given = GivenPrompt((option_string or self.dest).lstrip("-"), str(values))
        namespace.prompts = [*(namespace.prompts or []), given]


def add_common(parser: argparse.ArgumentParser) -> None:
    """--help, --verbose and --quiet."""
    group = parser.add_argument_group("output of the program itself (stderr)")
    group.add_argument("-h", "--help", action="help", help="show this and exit")
    group.add_argument("-v", "--verbose", action="count", default=0, help="log lines (key=value); twice: also one per request")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress bars and no closing line")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """The options that name prompts; at least one must be given."""
    group = parser.add_argument_group("prompts (repeat and mix them; they are served together)")
    group.add_argument(
        "--prompt", action=_AppendPrompt, dest="prompts", metavar="TEXT", help="a text, as it is: no chat template"
    )
    group.add_argument(
        "--prompt-file",
        action=_AppendPrompt,
        dest="prompts",
        metavar="FILE",
        help="a UTF-8 file with one prompt, its newlines kept; - reads stdin",
    )
    group.add_argument(
        "--prompt-ids",
        action=_AppendPrompt,
        dest="prompts",
        metavar="IDS",
        help='token ids, such as "17,4,256"; all there is without a tokenizer.json',
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The options of SamplingParams."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=_MAX_TOKENS, metavar="N", help=f"most tokens of an output (default {_MAX_TOKENS})"
    )
    group.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 takes the most likely token (default 1.0)")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="fewest tokens that reach this probability (default 1.0: all)"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K most likely tokens (default 0: all)")
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="no tokens below this share of the most likely one's probability (default 0.0)",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="makes the answer repeatable, whatever it is batched with (default: a new one)"
    )
    group.add_argument("--n", type=int, default=1, metavar="N", help="outputs of each prompt (default 1)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends an output before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    group.add_argument(
        "--logprobs", type=int, metavar="K", help="report each token's log-probability and the K most likely ones (default: none)"
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The options of EngineConfig."""
    group = parser.add_argument_group("memory and computing")
    group.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="cpu, cuda, cuda:1, ..., or auto: a GPU if there is one that can be used (default %(default)s)",
    )
    group.add_argument(
        "--cache-bytes",
        metavar="SIZE",
        help="memory for what requests remember: 8GiB, 512MiB, 1048576 (default 1GiB); on a GPU by default all that is left",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of the GPU's memory for weights, cache and computing (default 0.9)",
    )
    group.add_argument(
        "--cache-format",
        choices=(AUTO, *CACHE_FORMATS),
        default=AUTO,
        metavar="FORMAT",
        help=f"attention entries: {', '.join(CACHE_FORMATS)} (default auto: fp8 for models trained with it, else as --dtype)",
    )
    group.add_argument(
        "--index-format",
        choices=(AUTO, *INDEX_FORMATS),
        default=AUTO,
        metavar="FORMAT",
        help=f"index keys: {', '.join(INDEX_FORMATS)} (default auto: fp4 for models trained with it, else as --dtype)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        metavar="TYPE",
        help="activations are rounded to: fp32, bf16, auto (default auto: fp32 on a CPU, bf16 on a GPU)",
    )
    group.add_argument(
        "--max-step-tokens",
        type=int,
        metavar="N",
        help="most tokens computed in one step; longer prompts are cut (default 1024 on a CPU, 4096 on a GPU)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of a request, output included (default: the model's limit, or what the memory holds)",
    )
    group.add_argument(
        "--checkpoint-interval",
        type=int,
        metavar="N",
        help="keep a point to resume from every N tokens (default: only at ends, and where requests part)",
    )
    group.add_argument(
        "--deterministic",
        choices=tuple(_DETERMINISTIC),
        metavar="MODE",
        help="strict: the same bits whatever else runs and however a prompt is cut; true: the same on a CPU, on a GPU decodes do "
        "not depend on what else runs and prefills not on cuts at multiples of 128; false: bits may depend on the batch "
        "(default strict on a CPU, true on a GPU)",
    )
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default="auto",
        metavar="WHICH",
        help="auto: the fastest that this GPU runs; portable: those that run on every GPU (default auto)",
    )
    group.add_argument(
        "--activation-format",
        choices=ACTIVATION_FORMATS,
        default="auto",
        metavar="FORMAT",
        help="what products with fp8 and fp4 weights read: fp8, bf16, auto (default auto: fp8 where the GPU multiplies it)",
    )
    group.add_argument(
        "--draft",
        choices=DRAFTS,
        default="none",
        metavar="KIND",
        help="draft tokens ahead and check them together, which changes no answer: lookup (what came before in the request), mtp "
        "or dspark (the checkpoint's draft blocks), auto (these blocks, else lookup), none (default %(default)s)",
    )
    group.add_argument("--draft-tokens", type=int, metavar="N", help="most of them in a step, 1 to 7 (default 4; dspark: 5)")
    group.add_argument(
        "--no-warmup",
        action="store_true",
        help="on a GPU, compile kernels and capture decode graphs when they are first needed, not before",
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling that the options ask for. Raises ConfigError."""
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        n=args.n,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The settings that the options ask for. Raises ConfigError."""
    return EngineConfig(
        model=args.model,
        dtype=args.dtype,
        cache_format=args.cache_format,
        index_format=args.index_format,
        cache_bytes=args.cache_bytes,
        max_step_tokens=args.max_step_tokens,
        max_model_len=args.max_model_len,
        checkpoint_interval=args.checkpoint_interval,
        deterministic=_DETERMINISTIC[args.deterministic] if args.deterministic else None,
        device=args.device,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kernels=args.kernels,
        activation_format=args.activation_format,
        warmup=not args.no_warmup,
        draft=args.draft,
        draft_tokens=args.draft_tokens,
    )


def say_embedded(model: str, quiet: bool) -> None:
    """One line on stderr about the model in the package, if it is the one."""
    if is_embedded(model_path(model)) and not quiet:
        print(about_embedded(), file=sys.stderr, flush=True)


def read_prompts(given: Sequence[GivenPrompt]) -> list[Prompt]:
    """Texts and token ids, in the order of the command line. Raises ConfigError, and OSError for a file that cannot be read."""
    return [_read(one) for one in given]


def _read(given: GivenPrompt) -> Prompt:
    if given.kind == "prompt":
        return given.value
    if given.kind == "prompt-ids":
        try:
            return [int(part) for part in given.value.split("," if "," in given.value else None)]
        except ValueError:
            raise ConfigError(given.kind, given.value, 'whole numbers such as "17,4,256"') from None
    data = sys.stdin.buffer.read() if given.value == "-" else Path(given.value).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(given.kind, given.value, f"a UTF-8 text ({error.reason} at byte {error.start})") from None
