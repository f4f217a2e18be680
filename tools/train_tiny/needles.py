"""Needles as strangers write them: `python -m tools.train_tiny.needles`, through the public interface alone.

bench/needles.jsonl has short texts of our own, each with a fact, a question and a sentence that the fact completes, in many
styles; nothing of it is ever trained on. Each is asked in every form: as a prompt that ends with "Answer:", as a bare question,
as a sentence to complete, in a chat of one turn, in one whose first turn tells and whose second asks, in a chat with thoughts.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from lamina import LLM, RequestOutput, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
NEEDLES = ROOT / "bench" / "needles.jsonl"
FORMS = ("question", "bare", "completion", "chat", "turns", "thinking")
ANSWER_TOKENS = 24
_HEAD = 100  # characters of a reply in which its answer must be


@dataclass(frozen=True, slots=True)
class Needle:
    """A text with a fact. kind  of the answer.   style  how it is told.   accept  other answers that are right."""

    id: str
    kind: str
    style: str
    text: str
    question: str
    completion: str
    answer: str
    accept: list[str]


def read_needles(path: Path) -> list[Needle]:
    """One a line. Raises ValueError for a line that is none."""
    names = {field.name for field in fields(Needle)}
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        values = json.loads(line)
        if set(values) != names:
            raise ValueError(f"{path}, line {number}: {', '.join(sorted(names ^ set(values)))} missing or unknown")
        found.append(Needle(**values))
    return found


def is_answered(needle: Needle, reply: str) -> bool:
    """Whether a reply's first line has the answer, and no other number if the answer is one."""
    line = next((line.strip() for line in reply.split("\n") if line.strip()), "")[:_HEAD]
    for answer in (needle.answer, *needle.accept):
        if re.search(rf"(?<![\w.:,-]){re.escape(answer)}(?![\w]|[.:,-]\d)", line, re.IGNORECASE):
            rest = re.sub(re.escape(answer), "", line, flags=re.IGNORECASE)
            return not (answer.isdigit() and re.search(r"\d", rest))
    return False


def haystack(needle: Needle, others: Sequence[Needle], number: int, filler: str) -> str:
    """The needle's text among `number` other texts, or in the middle of a filler text."""
    chance = random.Random(needle.id)
    if filler:
        parts = re.split(r"\n\s*\n", filler)
        place = chance.randint(0, len(parts))
        return "\n\n".join([*parts[:place], needle.text, *parts[place:]])
    around = chance.sample([one for one in others if one.id != needle.id], number)
    texts = [one.text for one in around]
    texts.insert(chance.randint(0, number), needle.text)
    return "\n\n".join(texts)


def replies(llm: LLM, form: str, asked: Sequence[tuple[Needle, str]]) -> list[RequestOutput]:
    """What the model writes about each needle in its haystack."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0)
    match form:
        case "question":
            return llm.generate([f"{text}\n\nQuestion: {one.question}\nAnswer:" for one, text in asked], params)
        case "bare":
            return llm.generate([f"{text}\n\n{one.question}" for one, text in asked], params)
        case "completion":
            return llm.generate([f"{text}\n\n{one.completion}" for one, text in asked], params)
        case "turns":
            chats = [
                [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": "OK."},
                    {"role": "user", "content": one.question},
                ]
                for one, text in asked
            ]
            return llm.chat(chats, params)
    chats = [[{"role": "user", "content": f"{text}\n\n{one.question}"}] for one, text in asked]
    if form == "chat":
        return llm.chat(chats, params, chat_template_kwargs={"thinking": False})
    longer = SamplingParams(max_tokens=2 * ANSWER_TOKENS, temperature=0)
    return llm.chat(chats, longer, chat_template_kwargs={"thinking": True})


def main() -> int:
    """Prints a JSON line for each form: right answers of all, by kind and by style of the wrong ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="lamina-tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--forms", default=",".join(FORMS), help=f"of {', '.join(FORMS)}, with commas between")
    parser.add_argument("--around", type=int, default=0, help="other texts of the file around each (default 0)")
    parser.add_argument("--filler", type=Path, help="a text file in whose middle each text is put instead")
    parser.add_argument("--needles", type=Path, default=NEEDLES)
    parser.add_argument("--show", type=int, default=0, help="wrong replies to show for each form")
    parser.add_argument("--out", type=Path, help="file that the lines are appended to")
    arguments = parser.parse_args()
    forms = arguments.forms.split(",")
    if unknown := [form for form in forms if form not in FORMS]:
        parser.error(f"--forms {unknown[0]}: of {', '.join(FORMS)}")
    needles = read_needles(arguments.needles)
    if not 0 <= arguments.around < len(needles):
        parser.error(f"--around {arguments.around}: 0 to {len(needles) - 1}")
    filler = arguments.filler.read_text(encoding="utf-8") if arguments.filler is not None else ""
    asked = [(needle, haystack(needle, needles, arguments.around, filler)) for needle in needles]
    options: dict[str, object] = {} if arguments.device == "cpu" else {"warmup": False, "cache_bytes": "2GiB"}
    llm = LLM(arguments.model, device=arguments.device, max_requests=16, **options)  # type: ignore[arg-type]
    for form in forms:
        kinds: dict[str, list[int]] = {}
        wrong = []
        for (needle, _), output in zip(asked, replies(llm, form, asked), strict=True):
            reply = output.outputs[0].text
            good = is_answered(needle, reply.split("</think>")[-1] if form == "thinking" else reply)
            count = kinds.setdefault(needle.kind, [0, 0])
            count[0], count[1] = count[0] + good, count[1] + 1
            if not good:
                wrong.append((needle, reply))
        right = sum(count[0] for count in kinds.values())
        line = {
            "form": form, "around": arguments.around, "filler": len(filler), "device": arguments.device, "right": right,
            "asked": len(asked), "share": round(right / len(asked), 4), "kinds": kinds, "wrong": [one.id for one, _ in wrong],
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        for needle, reply in wrong[: arguments.show]:
            question = needle.completion if form == "completion" else needle.question
            print(f"    {needle.id} ({needle.style}): {question!r} {needle.answer!r} wrote {reply!r}", file=sys.stderr)
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
