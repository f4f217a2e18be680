"""What the server takes at the door: the most of every list, text and number in a request, in one place.

Each is a type, so that the check, the error that names the field and the OpenAPI file come from the same line.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta

from lamina.chat.thinking import EFFORTS

MAX_N = 128
MAX_LOGPROBS = 20
MAX_PROMPTS = 256
MAX_OUTPUTS = 1_024
MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
MAX_TOOLS = 512
MAX_CALLS = 512
MAX_STOPS = 64
MAX_STOP_CHARS = 1_024
MAX_STOP_IDS = 1_024
MAX_BIASES = 4_096
MAX_CHOICES = 4_096
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_NAME_CHARS = 128
MAX_DEADLINE_S = 86_400.0
#: of a whole body, before it is decoded: what a million token ids, or ten thousand messages with their calls, need
MAX_VALUES = 1_250_000
MAX_TEXTS = 500_000
MAX_CONTAINERS = 100_000
MAX_NAMES = 50_000
#: prompts as token ids; the model's own limit is checked after it
MAX_TOKEN_IDS = 1_250_000
_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1

Number: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_N)]
MaxTokens: TypeAlias = Annotated[int, Meta(ge=0, le=_INT64)]
MinTokens: TypeAlias = Annotated[int, Meta(ge=0, le=_INT64)]
ThinkingBudget: TypeAlias = Annotated[int, Meta(ge=-1, le=_INT64)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e6)]
TopP: TypeAlias = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=_INT64)]
MinP: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]
Repetition: TypeAlias = Annotated[float, Meta(ge=1e-6, le=1e6)]
Logprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=_INT32)]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]
StopIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts: TypeAlias = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
Biases: TypeAlias = dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100.0, le=100.0)]]
Priority: TypeAlias = Annotated[int, Meta(ge=-_INT32 - 1, le=_INT32)]
Deadline: TypeAlias = Annotated[float, Meta(gt=0.0, le=MAX_DEADLINE_S)]
Salt: TypeAlias = Annotated[str, Meta(max_length=256)]
Owner: TypeAlias = Annotated[str, Meta(max_length=256)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
CallId: TypeAlias = Annotated[str, Meta(max_length=256)]
Choices: TypeAlias = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]
GrammarText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
#: checked where it is read, with the other places that it may stand in
Effort: TypeAlias = Annotated[str, Meta(max_length=32, extra_json_schema={"enum": list(EFFORTS)})]
