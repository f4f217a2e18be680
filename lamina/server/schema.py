"""What clients send and get: OpenAI's names and vLLM's. Unknown fields are ignored, known but unsupported ones refused."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from lamina.server import limits as L
from lamina.server.errors import unsupported

JsonObject = dict[str, object]


class StreamOptions(Struct):
    """stream_options."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Struct):
    """response_format.json_schema."""

    schema: JsonObject | bool
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct):
    """response_format."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    structures: list[JsonObject] | None = None
    triggers: list[str] | None = None
    format: JsonObject | None = None
    pattern: L.GrammarText | None = None
    grammar: L.GrammarText | None = None


class StructuredOutputs(Struct):
    """vLLM's structured_outputs: exactly one of these."""

    json: JsonObject | str | None = None
    regex: L.GrammarText | None = None
    choice: L.Choices | None = None
    grammar: L.GrammarText | None = None
    json_object: bool | None = None
    structural_tag: JsonObject | str | None = None


class SamplingFields(Struct, kw_only=True):
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: L.Number | None = None
    max_tokens: L.MaxTokens | None = None
    min_tokens: L.MinTokens | None = None
    temperature: L.Temperature | None = None
    top_p: L.TopP | None = None
    top_k: L.TopK | None = None
    min_p: L.MinP | None = None
    seed: int | None = None
    stop: L.StopText | L.StopTexts | None = None
    stop_token_ids: L.StopIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: L.Penalty | None = None
    frequency_penalty: L.Penalty | None = None
    repetition_penalty: L.Repetition | None = None
    logit_bias: L.Biases | None = None
    prompt_logprobs: L.Logprobs | None = None
    priority: L.Priority | None = None
    deadline_s: L.Deadline | None = None
    cache_salt: L.Salt | None = None
    user: L.Owner | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: L.GrammarText | None = None
    guided_choice: L.Choices | None = None
    guided_grammar: L.GrammarText | None = None
    # refused where they ask for something
    best_of: object = None
    use_beam_search: object = None
    logits_processors: object = None
    allowed_token_ids: object = None
    bad_words: object = None
    truncate_prompt_tokens: object = None
    prompt_embeds: object = None
    lora_request: object = None

    def check_supported(self) -> None:
        """Raises ApiError (400) naming the feature."""
        refuse("use_beam_search", self.use_beam_search, "beam search is")
        refuse("logits_processors", self.logits_processors, "logits processors are")
        refuse("allowed_token_ids", self.allowed_token_ids, "a list of allowed tokens (use guided_regex or guided_choice) is")
        refuse("bad_words", self.bad_words, "a list of bad words (use logit_bias) is")
        refuse("truncate_prompt_tokens", self.truncate_prompt_tokens, "cutting prompts is")
        refuse("prompt_embeds", self.prompt_embeds, "a prompt as embeddings is")
        refuse("lora_request", self.lora_request, "LoRA is")
        if self.best_of not in (None, 0, 1) and self.best_of != self.n:
            raise unsupported("best_of", "best_of > n is")
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options", "stream_options without stream is")


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | L.TokenId | L.TokenIds], Meta(max_length=L.MAX_TOKEN_IDS)]
    echo: bool | None = None
    logprobs: L.Logprobs | None = None
    suffix: object = None

    def check_supported(self) -> None:
        """Raises ApiError (400) naming the feature."""
        super().check_supported()
        refuse("suffix", self.suffix, "a suffix (fill in the middle) is")


class TextPart(Struct, omit_defaults=True):
    """A part of a message's content; only texts are served."""

    type: str = "text"
    text: str | None = None


class FunctionCall(Struct):
    """A call's function."""

    name: L.Name
    arguments: str | JsonObject | None = None


class CallIn(Struct):
    """A call that an assistant made."""

    function: FunctionCall
    id: L.CallId | None = None
    type: str | None = None


class MessageIn(Struct):
    """A turn of a chat. prefix (last turn only): the model goes on with this assistant's turn."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function", "latest_reminder"]
    content: str | Annotated[list[TextPart], Meta(max_length=L.MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallIn], Meta(max_length=L.MAX_CALLS)] | None = None
    tool_call_id: L.CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    task: Literal["action", "query", "authority", "domain", "title", "read_url"] | None = None
    prefix: bool | None = None
    function_call: object = None
    audio: object = None


class ToolIn(Struct):
    """A tool. function  name, description, parameters (a JSON schema), strict."""

    function: JsonObject | None = None
    type: str = "function"


class NamedFunction(Struct):
    """The function of a tool_choice."""

    name: L.Name


class NamedChoice(Struct):
    """tool_choice as a record."""

    type: str
    function: NamedFunction | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageIn], Meta(min_length=1, max_length=L.MAX_MESSAGES)]
    max_completion_tokens: L.MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: L.Logprobs | None = None
    tools: Annotated[list[ToolIn], Meta(max_length=L.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: L.Effort | None = None
    reasoning: JsonObject | None = None
    thinking: bool | JsonObject | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: L.ThinkingBudget | None = None
    chat_template_kwargs: JsonObject | None = None
    stop_in_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    safety_identifier: L.Owner | None = None
    # refused where they ask for something
    echo: object = None
    functions: object = None
    function_call: object = None
    audio: object = None
    modalities: object = None
    web_search_options: object = None
    chat_template: object = None
    documents: object = None

    def check_supported(self) -> None:
        """Raises ApiError (400) naming the feature."""
        super().check_supported()
        refuse("echo", self.echo, "echo in chats is")
        refuse("functions", self.functions, "the old form of tools (use tools) is")
        refuse("function_call", self.function_call, "the old form of tool_choice (use tool_choice) is")
        refuse("audio", self.audio, "audio is")
        refuse("web_search_options", self.web_search_options, "web search is")
        refuse("chat_template", self.chat_template, "a template in a request (use --chat-template) is")
        refuse("documents", self.documents, "a list of documents is")
        if self.modalities not in (None, [], ["text"]):
            raise unsupported("modalities", "any modality but text is")


def refuse(field: str, value: object, feature: str) -> None:
    """Raises ApiError (400) where a field asks for something."""
    if value is not None and value is not False and value != [] and value != {} and value != "":
        raise unsupported(field, feature)


# Answers ------------------------------------------------------------------------------------------------------------


class PromptDetails(Struct):
    """usage.prompt_tokens_details."""

    cached_tokens: int


class CompletionDetails(Struct):
    """usage.completion_tokens_details. accepted_, rejected_prediction_tokens  drafted ahead by the engine, drawn then or not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Memory(Struct):
    """Lamina's own: bytes held per memory at the peak, and why the prefix's lookup stopped where it did."""

    held_bytes: dict[str, int]
    prefix_stop: str


class Usage(Struct):
    """usage."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    memory: Memory | UnsetType = UNSET


class TopLogprob(Struct):
    """One candidate, in the dialect of chats."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """One token, in the dialect of chats."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """choices[].logprobs of chats."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """choices[].logprobs of completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """One entry of vLLM's prompt_logprobs."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionOut(Struct, omit_defaults=True):
    """A call's function, or a piece of it."""

    name: str | None = None
    arguments: str | UnsetType = UNSET


class CallOut(Struct, omit_defaults=True):
    """A call, or a piece of one (then with its index)."""

    function: FunctionOut
    index: int | UnsetType = UNSET
    id: str | None = None
    type: str | None = None


class MessageOut(Struct):
    """choices[].message."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallOut] | UnsetType = UNSET


class ChatChoice(Struct):
    """choices[] of a whole chat answer."""

    index: int
    message: MessageOut
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None


class ChatAnswer(Struct):
    """A whole chat answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(Struct, omit_defaults=True):
    """choices[].delta."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallOut] | None = None


class ChunkChoice(Struct):
    """choices[] of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class Chunk(Struct):
    """A piece of a chat answer."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(Struct):
    """choices[] of a completion, whole or a piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """A completion, whole or a piece."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


COMPLETION_DECODER = msgspec.json.Decoder(CompletionRequest)
CHAT_DECODER = msgspec.json.Decoder(ChatRequest)
