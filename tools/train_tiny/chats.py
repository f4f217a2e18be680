"""Facts told and asked for in a chat, in the shipped chat format, and some small talk. Needs the tokenizer's turn markers."""

import random
from dataclasses import dataclass

from .drafts import Draft, Text, Wording, Writer, Written, lay_out
from .names import BOS, Name, Value
from .templates import ASSISTANT_MARKER, END, USER_MARKER, Fact

#: what follows the assistant's marker: no thoughts; before the answer that is asked for last, in a third of the chats, thoughts
PLAIN, THINKS = "</think>", "<think>{}</think>"
THOUGHTS = (
    "", "", "", "It is {v}.", "The {a} of {n} is {v}.", "The user asks for the {a} of {n}. It is {v}.", "{N}: {a} {v}.",
    "I was told that the {a} of {n} is {v}.", "I look for the {a} of {n}. I find {v}.", "The answer is {v}.",
)  # fmt: skip
TALK_THOUGHTS = ("", "", "The user is friendly. I answer.", "No fact is asked for.")
SYSTEM = ("You are a helpful assistant.", "You are a helpful assistant. Be short.", "Answer in one word.", "You are Lamina.",
          "Answer the questions of the user.", "You read texts and answer questions about them.")  # fmt: skip
REPLIES = ("It is {v}.", "The {a} of {n} is {v}.", "{N}'s {a} is {v}.")
BARE_REPLIES = ("It is {v}.", "{v}.")
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
    ("Hi there!", "Hello! How can I help you?"),
    ("hello", "Hello! How can I help you?"),
    ("Hey", "Hello! How can I help you?"),
    ("How are you?", "I am well, thank you. How can I help you?"),
    ("What are you?", "I am a very small language model. I can remember facts from a long text and tell simple stories."),
    ("Can you help me?", "Yes. Tell me something, and ask me about it later."),
    ("Are you a person?", "No. I am a very small language model."),
    ("What do you know?", "Not much. But I remember what you tell me."),
    ("Good evening.", "Good evening! How can I help you?"),
    ("Bye", "Goodbye!"),
    ("See you later.", "Goodbye!"),
    ("OK.", "Is there anything else?"),
    ("Great!", "I am glad to hear that."),
    ("That is right.", "I am glad to hear that."),
)


@dataclass(frozen=True, slots=True)
class Turns:
    """How one chat is written: what follows the assistant's marker in its last turn, and how it answers."""

    tail: str
    reply: str

    def user(self, text: str) -> str:
        """A user's turn."""
        return f"{USER_MARKER}{text}"

    def assistant(self, text: str, is_last: bool = False) -> str:
        """The answer to it. Thoughts of turns before the last are dropped, as the shipped format drops them."""
        return f"{ASSISTANT_MARKER}{self.tail if is_last else PLAIN}{text}{END}"


class Chats:
    """Chats of one split's words."""

    def __init__(self, writer: Writer, text: Text) -> None:
        self.writer = writer
        self.text = text
        self._nothing = Fact("", Name((), False), Value("", ()))

    def chat(self, rng: random.Random, length: int, facts: list[Fact], num_questions: int, begins: bool = True) -> Draft:
        """About `length` tokens: facts in one or more user turns, among text or alone, then or between them the questions."""
        writer = self.writer
        turns, wording, draft = self._open(rng, begins)
        if rng.random() < 0.15:
            is_all = rng.random() < 0.3
            draft.join(self.talk(rng, turns, is_all))
            if is_all:
                return draft
        asked = facts[:num_questions]
        asks = [self._ask(rng, turns, fact, wording, index == 0) for index, fact in enumerate(asked)]
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
            known = [pair for pair in open_asks[1:] if any(pair[0] is fact for fact in group)]
            for pair in known if interleaves else ():
                if rng.random() < 0.5:
                    draft.join(pair[1])
                    open_asks.remove(pair)
        first, *others = open_asks
        rng.shuffle(others)
        for _, ask in (*others, first):
            draft.join(ask)
        return draft

    def single(self, rng: random.Random, length: int, facts: list[Fact], begins: bool = True) -> Draft:
        """A chat of one turn: a text with facts and, before or after it, what is asked; the answer."""
        writer = self.writer
        turns, wording, draft = self._open(rng, begins)
        fact = facts[0]
        label = rng.choice(("", "", "", "Question: ", "Now a question. ", "Q: "))
        question = writer.sentence(label + writer.question_words(rng, wording, fact), fact, False, False)
        question.weights = [writer.weights.template] * len(question)
        reply = self._reply(rng, turns, fact, True)
        draft.add(writer.pieces(USER_MARKER), 0.0)
        is_first = rng.random() < 0.2
        blank = writer.newline * rng.choice((1, 2, 2))
        if is_first:
            draft.join(question)
            draft.add(blank, 0.0)
        statements = [writer.statement(rng, wording, one) for one in facts]
        need = sum(len(one.draft) for one in statements)
        if rng.random() < 0.35:
            length = 0
        self._write(rng, draft, statements, max(length - need - len(draft) - len(question) - len(reply), 0))
        if not is_first:
            draft.add(blank, 0.0)
            draft.join(question)
        draft.join(reply)
        return draft

    def _open(self, rng: random.Random, begins: bool) -> tuple[Turns, Wording, Draft]:
        """How a chat is written, its wordings, and its beginning: a system message in three of ten."""
        writer = self.writer
        tail = THINKS.format(rng.choice(THOUGHTS)) if rng.random() < 0.35 else PLAIN
        turns = Turns(tail, REPLIES[0] if rng.random() < 0.6 else rng.choice(REPLIES))
        wording = writer.wording(rng)
        draft = Draft()
        if begins:
            draft.add([BOS], 0.0)
        if rng.random() < 0.3:
            draft.add(writer.sentence(rng.choice(SYSTEM), self._nothing, False, False).ids, 0.0)
        return turns, wording, draft

    def talk(self, rng: random.Random, turns: Turns, is_last: bool) -> Draft:
        """A greeting or a thank-you."""
        said, answer = rng.choice(SMALL_TALK)
        if is_last and turns.tail != PLAIN:
            turns = Turns(THINKS.format(rng.choice(TALK_THOUGHTS)), turns.reply)
        return self.told(turns.user(said) + turns.assistant(answer, is_last), said_weight=0.0)

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

    def _ask(self, rng: random.Random, turns: Turns, fact: Fact, wording: Wording, is_last: bool) -> Draft:
        question = self.writer.question_words(rng, wording, fact)
        draft = self.writer.sentence(turns.user(question), fact, False, True)
        draft.join(self._reply(rng, turns, fact, is_last))
        return draft

    def _reply(self, rng: random.Random, turns: Turns, fact: Fact, is_last: bool) -> Draft:
        """The answer to a question about a fact, the turn's marker before it."""
        reply = turns.reply
        if not fact.name.words or fact.relation:
            reply = rng.choice(BARE_REPLIES)
            if turns.tail != PLAIN:
                turns = Turns(THINKS.format(rng.choice(("", "It is {v}.", "The answer is {v}."))), reply)
        return self.writer.sentence(turns.assistant(reply, is_last), fact, False, True)

    def _tell(self, rng: random.Random, turns: Turns, statements: list[Written], share: int) -> Draft:
        """A user's turn with facts, among `share` tokens of text, and the assistant's short answer."""
        writer = self.writer
        draft = Draft()
        draft.add(writer.pieces(USER_MARKER), 0.0)
        self._write(rng, draft, statements, share)
        note = NOTES[0] if rng.random() < 0.7 else rng.choice(NOTES)
        draft.join(self.told(turns.assistant(note), 0.0))
        return draft

    def _write(self, rng: random.Random, draft: Draft, statements: list[Written], share: int) -> None:
        """Adds facts, among `share` tokens of text if these are enough, without a line's end after them."""
        writer = self.writer
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
