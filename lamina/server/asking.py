"""What completions and chats share on the way in: sampling, structured output, salt and owner."""

from functools import lru_cache

import msgspec
from starlette.requests import Request

from lamina import SamplingParams
from lamina.engine.wire import Grammar
from lamina.server import limits
from lamina.server.body import state_of
from lamina.server.chat_request import Extras, salt_of
from lamina.server.errors import ApiError, invalid
from lamina.server.schema import JsonObject, ResponseFormat, SamplingFields, StructuredOutputs
from lamina.server.state import ServerState


class _OlderStructure(msgspec.Struct):
    """A text that begins a tag, what stands in it, and the text that ends it."""

    begin: str
    schema: JsonObject | bool
    end: str


class _OlderTag(msgspec.Struct):
    """A structural tag as vLLM wrote it before `format`: a trigger opens one of the structures."""

    structures: list[_OlderStructure]
    triggers: list[str]


#: settings that many requests share are checked once
_checked = lru_cache(maxsize=256)(SamplingParams)


def sampling_params(
    state: ServerState, request: SamplingFields, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Checked parameters. Raises ConfigError naming the field."""
    given, defaults = request, state.defaults

    def or_else(value: float | None, default: float) -> float:
        return default if value is None else value

    if given.logit_bias is not None and len(given.logit_bias) > limits.MAX_BIASES:
        raise invalid("logit_bias", f"{len(given.logit_bias)} entries", f"at most {limits.MAX_BIASES}")
    params = _checked(
        n=given.n or 1, max_tokens=defaults.most_tokens(max_tokens), min_tokens=given.min_tokens or 0,
        temperature=or_else(given.temperature, defaults.temperature), top_p=or_else(given.top_p, defaults.top_p),
        top_k=defaults.top_k if given.top_k is None else given.top_k, min_p=or_else(given.min_p, defaults.min_p), seed=given.seed,
        stop_token_ids=tuple(given.stop_token_ids or ()), ignore_eos=bool(given.ignore_eos),
        logprobs=logprobs, prompt_logprobs=prompt_logprobs,
        presence_penalty=or_else(given.presence_penalty, 0.0), frequency_penalty=or_else(given.frequency_penalty, 0.0),
        repetition_penalty=or_else(given.repetition_penalty, defaults.repetition_penalty),
        logit_bias=tuple((given.logit_bias or {}).items()),
    )  # fmt: skip
    params.validate_for_vocab(state.ready.vocab_size)
    return params


def extras_of(http: Request, request: SamplingFields, owner: str | None) -> Extras:
    """What is neither the prompt's nor the sampling's."""
    stop = request.stop
    skip = request.skip_special_tokens
    wanted = grammar_of(request)
    return Extras(
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop)),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=True if skip is None else skip,
        grammar=None if wanted is None else wanted[1],
        grammar_field="" if wanted is None else wanted[0],
        priority=request.priority or 0,
        deadline_s=request.deadline_s,
        cache_salt=salt_of(state_of(http), request.cache_salt, http.scope["lamina_key"]),
        owner=owner or "",
    )


def grammar_of(request: SamplingFields) -> tuple[str, Grammar] | None:
    """The one thing that an answer must match, and the field that asks for it. Raises ApiError (400) where several are named."""
    found: list[tuple[str, Grammar]] = []
    if request.response_format is not None:
        grammar = response_grammar(request.response_format)
        if grammar is not None:
            found.append(("response_format", grammar))
    if request.structured_outputs is not None:
        found += _structured(request.structured_outputs, "structured_outputs.")
    old = StructuredOutputs(request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar)
    found += _structured(old, "guided_")
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise ApiError(400, f"{names} exclude each other: one of them at most", found[1][0], "invalid_value")
    return found[0] if found else None


def _structured(given: StructuredOutputs, prefix: str) -> list[tuple[str, Grammar]]:
    found = []
    if given.json is not None:
        found.append((f"{prefix}json", Grammar("json_schema", _json(given.json, f"{prefix}json"))))
    if given.regex is not None:
        found.append((f"{prefix}regex", Grammar("regex", given.regex)))
    if given.choice is not None:
        found.append((f"{prefix}choice", Grammar("choice", _json(given.choice, f"{prefix}choice"))))
    if given.grammar is not None:
        found.append((f"{prefix}grammar", Grammar("ebnf", given.grammar)))
    if given.json_object:
        found.append((f"{prefix}json_object", Grammar("json_object", "")))
    if given.structural_tag is not None:
        found.append((f"{prefix}structural_tag", _structural_tag(given.structural_tag, f"{prefix}structural_tag")))
    return found


def response_grammar(wanted: ResponseFormat) -> Grammar | None:
    """The grammar of a response_format. Raises ApiError (400) where a part is missing."""
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return Grammar("json_object", "")
        case "json_schema":
            if wanted.json_schema is None:
                raise ApiError(400, "response_format.json_schema is required", "response_format.json_schema", "missing_field")
            return Grammar("json_schema", _json(wanted.json_schema.schema, "response_format.json_schema.schema"))
        case "regex":
            if wanted.pattern is None:
                raise ApiError(400, "response_format.pattern is required", "response_format.pattern", "missing_field")
            return Grammar("regex", wanted.pattern)
        case "grammar":
            if wanted.grammar is None:
                raise ApiError(400, "response_format.grammar is required", "response_format.grammar", "missing_field")
            return Grammar("ebnf", wanted.grammar)
        case "structural_tag":
            parts: JsonObject = {"format": wanted.format, "structures": wanted.structures, "triggers": wanted.triggers}
            return _structural_tag({name: value for name, value in parts.items() if value is not None}, "response_format")


def _structural_tag(given: JsonObject | str, field: str) -> Grammar:
    """The grammar of a tag with {"format"}, or with the older {"structures", "triggers"}, which say the same."""
    try:
        tag = msgspec.json.decode(given) if isinstance(given, str) else given
    except (msgspec.DecodeError, RecursionError):
        tag = given  # the engine's checks say what is wrong with it
    if not isinstance(tag, dict):
        return Grammar("structural_tag", _json(given, field))
    if "structures" in tag:
        try:
            older = msgspec.convert(tag, _OlderTag)
        except msgspec.ValidationError as error:
            raise invalid(field, given, str(error).replace("`", "")) from None
        tags = [
            {"type": "tag", "begin": one.begin, "end": one.end, "content": {"type": "json_schema", "json_schema": one.schema}}
            for one in older.structures
        ]
        tag = {"format": {"type": "triggered_tags", "triggers": older.triggers, "tags": tags}}
    tag = {**tag, "type": "structural_tag"}
    return Grammar("structural_tag", _json(tag, field))


def _json(value: object, field: str) -> str:
    """A schema as JSON text. Raises ApiError (400) for one that is too large."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text) > limits.MAX_GRAMMAR_BYTES:
        raise invalid(field, f"{len(text)} bytes", f"at most {limits.MAX_GRAMMAR_BYTES} bytes")
    return text
