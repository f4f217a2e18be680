"""Reading answers in tests: what the events of one answer join to."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lamina.chat.formats import OutputParser
from lamina.chat.records import CallArguments, CallEnd, CallStart, Content, Event, Reasoning


@dataclass
class Answer:
    """An answer put together. calls  [name, arguments, whether it ended]; ids apart, as they are random."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[object]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list, compare=False)


def join(events: Iterable[Event]) -> Answer:
    """The whole answer. Checks that calls start in order and that nothing comes after a call's end."""
    answer = Answer()
    for event in events:
        match event:
            case Reasoning(text):
                assert text and not answer.calls
                answer.reasoning += text
            case Content(text):
                assert text
                answer.content += text
            case CallStart(index, id, name):
                assert index == len(answer.calls)
                answer.calls.append([name, "", False])
                answer.ids.append(id)
            case CallArguments(index, text):
                assert text and index == len(answer.calls) - 1 and not answer.calls[index][2]
                answer.calls[index][1] += text  # type: ignore[operator]
            case CallEnd(index):
                assert index == len(answer.calls) - 1 and not answer.calls[index][2]
                answer.calls[index][2] = True
    return answer


def read(parser: OutputParser, parts: Iterable[str | tuple[str, bool]], reason: str = "stop") -> Answer:
    """What a parser makes of texts, or of (text, is_control) pairs."""
    events: list[Event] = []
    for part in parts:
        text, is_control = (part, False) if isinstance(part, str) else part
        events += parser.push(text, is_control)
    return join([*events, *parser.finish(reason)])
