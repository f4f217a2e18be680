"""The format "dsml": DeepSeek-V4's prompt encoding and the answers to it."""

from collections.abc import Sequence

from lamina.base.errors import ConfigError
from lamina.chat.answers import AnswerParser, ThoughtTags
from lamina.chat.dsml_parser import DsmlCalls
from lamina.chat.dsml_prompt import DSML, END_THINK, THINK, Plan, write_prompt
from lamina.chat.dsml_texts import EFFORT_ABSOLUTE, EFFORT_BEYOND
from lamina.chat.formats import OutputParser
from lamina.chat.records import ChatOptions, Message, Rendered, Tool
from lamina.chat.thinking import EFFORTS

#: preamble by effort. The encoder of April 2026 knows one; the later one ("0731") moved it down and added a stronger one.
APRIL_EFFORTS = {"max": EFFORT_ABSOLUTE}
LATER_EFFORTS = {"high": EFFORT_ABSOLUTE, "xhigh": EFFORT_ABSOLUTE, "max": EFFORT_BEYOND}


class DsmlFormat:
    """A `ChatFormat`.

    efforts         preamble by effort, "" where an effort is missing: APRIL_EFFORTS or LATER_EFFORTS, as the model was trained.
    thinks          whether a request that does not say is answered with thoughts.
    default_effort  of a request that does not say. True and "high" are what vLLM's server does.
    has_think_tokens  the vocabulary has <think> and </think> as tokens, so that their spelling in plain text is text.
    """

    name = "dsml"
    end_of_thinking: str | None = END_THINK
    shows_tools = True
    starts_of_calls: tuple[str, ...] = (DSML,)

    def __init__(
        self,
        efforts: dict[str, str] | None = None,
        thinks: bool = True,
        default_effort: str = "high",
        has_think_tokens: bool = True,
    ) -> None:
        self._efforts = APRIL_EFFORTS if efforts is None else efforts
        self._thinks = thinks
        self._default_effort = default_effort
        self._tags = ThoughtTags(THINK, END_THINK, has_think_tokens)

    def render(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        special_tokens: Sequence[str] = (),
        context: Sequence[Message] = (),
    ) -> Rendered:
        """The prompt up to where the answer begins.

        special_tokens  that must not come to life where a user's text spells them; () leaves such texts as they are.
        context         messages whose prompt was written before; what comes back goes on from there.
        Tools stand in the first system message, or in an empty one put in front. With tools, thoughts are never dropped.
        """
        if not messages:
            raise ConfigError("messages", [], "at least one message")
        return write_prompt(messages, self._plan(options), special_tokens, context)

    def parser(self, options: ChatOptions, is_thinking: bool) -> OutputParser:
        """Reads one answer. Without tools, or with the choice "none", what looks like a call is content."""
        tools = _tools(options)
        reader = DsmlCalls(tools, options.parallel_tool_calls) if tools else None
        return AnswerParser(self._tags, reader, is_thinking)

    def _plan(self, options: ChatOptions) -> Plan:
        effort = self._default_effort if options.effort is None else options.effort
        if effort not in EFFORTS:
            raise ConfigError("reasoning_effort", effort, f"one of {', '.join(EFFORTS)}")
        if not options.begins_answer:
            raise ConfigError("add_generation_prompt", False, "True: in this format a prompt ends where an answer begins")
        is_thinking = (self._thinks if options.thinking is None else options.thinking) and effort != "none"
        return Plan(
            is_thinking=is_thinking,
            drops_thoughts=options.drop_thinking is not False,
            preamble=self._efforts.get(effort, ""),
            tools=_tools(options),
            response_schema=options.response_schema,
        )


def _tools(options: ChatOptions) -> tuple[Tool, ...]:
    return () if options.tool_choice.mode == "none" else options.tools
