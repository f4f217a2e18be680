"""Facts told and asked for in a chat, in the shipped chat format, and some small talk. Needs the tokenizer's turn markers."""

import random
from dataclasses import dataclass

from .drafts import Draft, Text, Wording, Writer, Written, lay_out
from .names import BOS, Name, Value
from .templates import ASSISTANT_MARKER, END, USER_MARKER, Fact

#: what follows the assistant's marker: no thoughts, thoughts that are over at once
TAILS = ("</think>", "<think></think>")
REPLIES = ("It is {v}.", "The {a} of {n} is {v}.", "{N}'s {a} is {v}.")
NOTES = ("OK.", "OK, I will remember that.", "Thank you. I will keep it in mind.")
READ = ("", "Read this text.\n\n", "Here is a text.\n\n", "Please remember what is in this text.\n\n")
SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hello, how are you?", "I am well, thank you. How can I help you?"),
    ("Who are you?", "I am a very small language model. I can remember facts from a long text and tell simple stories."),
    ("What can you do?", "You can tell me facts and ask me about them later. I can also tell a simple story."),
    ("What is your name?", "My name is Lamina."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Good morning.", "Good morning! How can I help you?"),
    ("Goodbye.", "Goodbye!"),
)


@dataclass(frozen=True, slots=True)
class Turns:
    """How one chat is written."""

    tail: str
    reply: str

    def user(self, text: str) -> str:
        """A user's turn."""
        return f"{USER_MARKER}{text}"

    def assistant(self, text: str) -> str:
        """The answer to it."""
        return f"{ASSISTANT_MARKER}{self.tail}{text}{END}"


class Chats:
    """Chats of one split's words."""

    def __init__(self, writer: Writer, text: Text) -> None:
        self.writer = writer
        self.text = text
        self._nothing = Fact("", Name((), False), Value("", ()))

    def chat(self, rng: random.Random, length: int, facts: list[Fact], num_questions: int, begins: bool = True) -> Draft:
        """About `length` tokens: facts in one or more user turns, among text or alone, then or between them the questions."""
        writer = self.writer
        turns = Turns(TAILS[rng.random() < 0.35], REPLIES[0] if rng.random() < 0.6 else rng.choice(REPLIES))
        wording = writer.wording(rng)
        draft = Draft()
        if begins:
            draft.add([BOS], 0.0)
        if rng.random() < 0.15:
            draft.join(self.talk(rng, turns))
        asked = facts[:num_questions]
        asks = [self._ask(rng, turns, fact, wording) for fact in asked]
        told: list[tuple[list[Fact], list[Written]]] = []
        rest = facts[:]
        rng.shuffle(rest)
        while rest:
            count = rng.randint(1, max(1, len(rest)))
            told.append((rest[:count], [writer.statement(rng, wording, fact) for fact in rest[:count]]))
            rest = rest[count:]
        need = sum(map(len, asks)) + sum(len(one.draft) for _, group in told for one in group) + 24 * len(told) + len(draft)
        free = max(length - need, 0)
        interleaves = rng.random() < 0.4
        open_asks = list(zip(asked, asks))
        for index, (group, statements) in enumerate(told):
            share = free if index == len(told) - 1 else rng.choice((0, rng.randint(0, free)))
            free -= share
            draft.join(self._tell(rng, turns, statements, share))
            known = [pair for pair in open_asks if any(pair[0] is fact for fact in group)]
            for pair in known if interleaves else ():
                if rng.random() < 0.5:
                    draft.join(pair[1])
                    open_asks.remove(pair)
        rng.shuffle(open_asks)
        for _, ask in open_asks:
            draft.join(ask)
        return draft

    def talk(self, rng: random.Random, turns: Turns) -> Draft:
        """A greeting or a thank-you."""
        said, answer = rng.choice(SMALL_TALK)
        return self.told(turns.user(said) + turns.assistant(answer), said_weight=0.0)

    def told(self, text: str, said_weight: float) -> Draft:
        """A text with its turns; what the assistant says has the weight of text."""
        draft = Draft()
        said, _, answer = text.partition(ASSISTANT_MARKER)
        if said:
            draft.join(self.writer.sentence(said, self._nothing, False, False))
            draft.weights = [said_weight] * len(draft)
        reply = self.writer.sentence(ASSISTANT_MARKER + answer, self._nothing, False, False)
        reply.weights = [self.writer.weights.text] * len(reply)
        draft.join(reply)
        return draft

    def _ask(self, rng: random.Random, turns: Turns, fact: Fact, wording: Wording) -> Draft:
        question = self.writer.question_words(rng, wording, fact)
        reply = turns.reply if fact.name.words else REPLIES[0]
        return self.writer.sentence(turns.user(question) + turns.assistant(reply), fact, False, True)

    def _tell(self, rng: random.Random, turns: Turns, statements: list[Written], share: int) -> Draft:
        """A user's turn with facts, among `share` tokens of text, and the assistant's short answer."""
        writer = self.writer
        draft = Draft()
        draft.add(writer.pieces(USER_MARKER), 0.0)
        if share > 24:
            opening = rng.choice(READ)
            if opening:
                draft.join(writer.sentence(opening, self._nothing, False, False))
            size = share + sum(len(one.draft) for one in statements)
            draft.join(lay_out(rng, self.text, writer, size, statements, []))
        else:
            for index, one in enumerate(statements):
                ends_line = not index or self.text.is_line_end[draft.ids[-1]]
                draft.join(one.at_line() if ends_line else one.draft)
        if draft.ids[-1] == writer.newline[0]:
            draft.ids.pop(), draft.weights.pop(), draft.answer.pop()
        note = NOTES[0] if rng.random() < 0.7 else rng.choice(NOTES)
        draft.join(self.told(turns.assistant(note), 0.0))
        return draft
