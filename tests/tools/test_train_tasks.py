"""Training rows and questions of the small model: what is written into them is where it should be and weighs what it should."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train_tiny.drafts import Weights, Writer, draw_facts
from tools.train_tiny.exam import KINDS as EXAM_KINDS
from tools.train_tiny.exam import is_right, questions
from tools.train_tiny.names import SPLITS, WORDS, Pieces
from tools.train_tiny.relations import RELATIONS, draw_related
from tools.train_tiny.tasks import KINDS, Mix, Rows, sample_texts
from tools.train_tiny.templates import (
    ASSISTANT_MARKER,
    BARE_QUESTIONS,
    COMPLETIONS,
    FRAMES,
    QUESTIONS,
    STATEMENTS,
    UPDATES,
    USER_MARKER,
    fact_text,
)
from tools.train_tiny.train import positions

SUBJECTS, VERBS = ("The miller", "An old sailor", "Nobody", "The queen"), ("saw", "liked", "sold")
OBJECTS = ("corn", "ropes", "the moon", "it all")


def prose(seed: int, sentences: int) -> str:
    rng = random.Random(seed)
    lines = (f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}." for _ in range(sentences))
    return "".join(line + ("\n\n" if rng.random() < 0.2 else " ") for line in lines).rstrip() + "\n"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with two kinds of text, in which no held-out word is."""
    where = tmp_path_factory.mktemp("data")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=["<bos>", "<eos>", "<pad>"], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))  # fmt: skip
    tokenizer.train_from_iterator([prose(0, 300), *sample_texts(1, 1500)], trainer)
    markers = (USER_MARKER, ASSISTANT_MARKER, "</think>")
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in markers])
    tokenizer.save(str(where / "tokenizer.json"))
    documents: dict[str, list[dict[str, object]]] = {"train": [], "val": []}
    for part, count in (("train", 12), ("val", 4)):
        tokens: list[int] = []
        for index in range(count):
            ids = [*tokenizer.encode(prose(index + (part == "val") * 50, 150)).ids, 1]
            source = ("tales", "letters")[index % 2]
            documents[part].append({"source": source, "title": "T", "kind": source, "offset": len(tokens), "length": len(ids)})
            tokens += ids
        np.array(tokens, np.uint16).tofile(where / f"{part}.u16")
    (where / "documents.json").write_text(json.dumps(documents))
    return where


def only(kind: str, **fields: float) -> Mix:
    return Mix(**({one: float(one == kind) for one in KINDS} | fields))


def test_pieces_joined_are_what_the_tokenizer_makes_of_the_text(data_dir: Path) -> None:
    """Every template of both splits, after a sentence and at a line's start: the same ids as of the text in letters."""
    pieces = Pieces(Tokenizer.from_file(str(data_dir / "tokenizer.json")))
    rng = random.Random(0)
    for split in SPLITS:
        writer = Writer(pieces, split, Weights())
        asked = (*QUESTIONS[split], *BARE_QUESTIONS[split])
        framed = [frame.replace("{q}", question) for frame in FRAMES[split] for question in asked]
        for template in (*STATEMENTS[split], *UPDATES[split], *COMPLETIONS[split], *framed):
            facts = [fact for fact in draw_facts(rng, writer.draws, 4, False) if fact.name.words]
            for fact in facts:
                text = fact_text(template, fact)
                for is_spaced in (False, True):
                    draft = writer.sentence(template, fact, is_spaced, True)
                    assert draft.ids == pieces.tokenizer.encode(" " * is_spaced + text).ids, text
                    answer = [token for token, is_answer in zip(draft.ids, draft.answer) if is_answer]
                    assert fact.value.text in pieces.tokenizer.decode(answer)
                    assert fact.value.text in text


@pytest.mark.parametrize("varied", [0.0, 0.8], ids=["listed", "varied"])
def test_rows_have_answers_that_were_told(data_dir: Path, varied: float) -> None:
    """Recall rows: a value that is asked for stands in the row before, weighs nothing there and `answer` where it is asked."""
    rows = Rows(data_dir, 3, 256, only("recall", packed=0.0, chat=0.0, updated=0.0, varied=varied, related=varied / 3))
    decode = rows.writer.pieces.tokenizer.decode
    seen = 0
    for row in (rows.row(index) for index in range(30)):
        assert row.ids.shape == row.weights.shape == row.answer.shape == (257,)
        starts = np.flatnonzero(row.answer & ~np.roll(row.answer, 1))
        for start in starts:
            end = start + int(np.argmin(np.append(row.answer[start:], False)))
            if end == 257:
                continue  # cut by the row's end
            value = decode(row.ids[start : end - 1].tolist()).strip()
            assert value in decode(row.ids[:start].tolist())
            assert set(row.weights[start : end - 1].tolist()) == {8.0}
            assert row.weights[end - 1] == Weights().end
            seen += 1
        assert row.weights[~row.answer].max() <= 1.0
    assert seen > 60


def test_memory_is_dropped_in_its_shares(data_dir: Path) -> None:
    for kind, c4, c128 in (("gist", 0.5, 0.0), ("recall", 0.0, 0.25), ("text", 0.0, 0.0)):
        batch = Rows(data_dir, 1, 512, only(kind)).batch(80)
        assert set(batch.kind.tolist()) == {KINDS.index(kind)}
        assert abs(batch.drop_c4.mean() - c4) < 0.2 * (c4 > 0) + 1e-9
        assert abs(batch.drop_c128.mean() - c128) < 0.2 * (c128 > 0) + 1e-9
        assert batch.answer.any() == (kind != "text")
    assert (Rows(data_dir, 1, 512, only("text")).batch(4).weights[:, 2:] == 1.0).all()


def test_gist_is_out_of_the_window(data_dir: Path) -> None:
    """The counted words end at least a window before the first question, and the answers are right."""
    rows = Rows(data_dir, 5, 512, only("gist"))
    rng = random.Random(0)
    decode = rows.writer.pieces.tokenizer.decode
    for _ in range(10):
        document, asked = rows.gist.document(rng, 512, "majority")
        ids = document.ids
        for one in asked:
            if "more often" in one.question:
                x, y = one.question.removeprefix("Which came more often, ").removesuffix("?").split(" or ")
                counts = {kind: decode(ids).count(f" {kind}") for kind in (x, y)}
                assert max(counts, key=counts.__getitem__) == one.answer
        kinds = WORDS["train"].kinds
        assert not any(f" {kind}" in decode(ids[-131:]) for kind in kinds)


def test_varied_wordings_keep_what_is_told(data_dir: Path) -> None:
    """Words change, slots stay; the ids are those of the text; a fact woven into a sentence keeps its words."""
    rows = Rows(data_dir, 4, 256, only("recall", varied=1.0))
    writer, rng = rows.writer, random.Random(0)
    variation, tokenizer = writer.variation, writer.pieces.tokenizer
    assert variation is not None
    changed = 0
    for template in STATEMENTS["train"] + QUESTIONS["train"] + FRAMES["train"]:
        varied = variation.template(rng, template, True)
        slots = [sorted(re.findall(r"\{[anNvq]\}", text)) for text in (template, varied)]
        assert slots[0] == slots[1]
        changed += varied != template
        (fact,) = draw_facts(rng, writer.draws, 1, True)
        text = fact_text(varied.replace("{q}", "Who?"), fact)
        assert writer.sentence(varied.replace("{q}", "Who?"), fact, False, True).ids == tokenizer.encode(text).ids, text
    assert changed > 60
    woven = 0
    for _ in range(40):
        (fact,) = draw_facts(rng, writer.draws, 1, True)
        found = variation.woven(rng, fact)
        if found is not None:
            for draft in found:
                text = tokenizer.decode(draft.ids)
                assert tokenizer.encode(text).ids == draft.ids
                assert fact.name.text() in text and fact.attribute in text and fact.value.text in text
            woven += 1
    assert woven > 20


def test_related_facts_can_be_told_apart(data_dir: Path) -> None:
    """No two facts of a document answer the same question; every relation can be asked for."""
    draws = Writer(Pieces(Tokenizer.from_file(str(data_dir / "tokenizer.json"))), "train", Weights()).draws
    rng, seen = random.Random(1), set()
    for _ in range(60):
        facts = draw_related(rng, draws, 12)
        asked = [fact_text(RELATIONS[fact.relation].questions[0], fact) for fact in facts]
        assert len(set(asked)) == len(asked) > 0
        for fact in facts:
            assert all("{v}" in text for text in RELATIONS[fact.relation].statements)
            assert fact.value.text == "".join(fact.value.pieces)
            seen.add(fact.relation)
    assert seen == set(RELATIONS)


def test_positions_jump_by_whole_groups() -> None:
    """At a multiple of 128, by a multiple of 128, in the share of rows that was asked for, never past a million or so."""
    at = positions(np.random.default_rng(0), 400, 512, 0.4)
    steps = np.diff(at, axis=1)
    jumps = np.argwhere(steps != 1)
    assert abs(len(jumps) / 400 - 0.4) < 0.08
    assert len({row for row, _ in jumps.tolist()}) == len(jumps)
    for row, before in jumps.tolist():
        assert (before + 1) % 128 == 0
        assert (steps[row, before] - 1) % 128 == 0 and 2048 <= steps[row, before] - 1 <= 1 << 20


def test_held_out_words_are_in_no_row(data_dir: Path) -> None:
    rows = Rows(data_dir, 2, 512, Mix(varied=0.4, related=0.2))
    text = " ".join(rows.writer.pieces.tokenizer.decode(ids.tolist()) for ids in rows.batch(150).ids)
    lists = [tuple(getattr(WORDS[split], field) for field in WORDS[split].__slots__) for split in SPLITS]
    known = {word for words in lists[0] for name in words for word in name.split()}
    held_out = {word for words in lists[1] for name in words for word in name.split()} - known
    made_up = set(Writer(rows.writer.pieces, "held-out", Weights()).draws.made_up)
    assert len(held_out) > 60
    found = set(text.replace(",", " ").replace(".", " ").replace("?", " ").split())
    assert found & held_out == set()
    assert made_up & set(rows.writer.draws.made_up) == set()
    for name in ("Problem:", "Pupil:", "Among other things"):
        assert name not in text
    assert "Question:" in text


def test_rows_depend_on_seed_worker_and_index_alone(data_dir: Path) -> None:
    first, again = (Rows(data_dir, 7, 300, Mix()) for _ in range(2))
    whole, parts = first.batch(12), [again.batch(5), again.batch(7)]
    assert (whole.ids == np.concatenate([one.ids for one in parts])).all()
    assert (whole.weights == np.concatenate([one.weights for one in parts])).all()
    assert not (Rows(data_dir, 7, 300, Mix(), worker=1).batch(12).ids == whole.ids).all()
    assert not (Rows(data_dir, 8, 300, Mix()).batch(12).ids == whole.ids).all()


@pytest.mark.parametrize("split", SPLITS)
def test_questions_fit_and_can_be_answered(data_dir: Path, split: str) -> None:
    tokenizer = Tokenizer.from_file(str(data_dir / "tokenizer.json"))
    for kind in EXAM_KINDS:
        asked = questions(data_dir, 1, 2048, 12, kind, split)
        assert len(asked) == 12
        for one in asked:
            assert 1700 < len(one.prompt) + len(one.answer_ids) <= 2048
            assert is_right(tokenizer.decode(list(one.answer_ids)), one.answer)
            if kind in ("recall", "hard", "words", "templates", "wording", "updated"):
                place = round(one.depth * len(one.prefix))
                assert one.answer in tokenizer.decode(one.prefix[place : place + 60].tolist())
    assert len({round(one.depth, 1) for one in questions(data_dir, 1, 2048, 12, "hard", split)}) > 6
    with pytest.raises(ValueError, match="no room"):
        questions(data_dir, 1, 512, 200, "recall", split)


def test_an_answer_is_read_as_a_whole() -> None:
    assert is_right(" 4821\nQuestion", "4821") and is_right("red.", "red")
    assert not is_right("48217", "4821") and not is_right("48", "4821") and not is_right("reddish", "red")
    assert not is_right("3.75", "3")


def test_a_factor_alone_is_of_the_split(data_dir: Path) -> None:
    """The rest is the main wording with words of training, so that an answer that fails says why."""
    tokenizer = Tokenizer.from_file(str(data_dir / "tokenizer.json"))
    main = FRAMES["train"][0].split("{q}")[0]

    def asked(kind: str) -> list[tuple[str, str]]:
        found = questions(data_dir, 1, 2048, 12, kind, "held-out")
        ends = [one.prefix[round(one.depth * len(one.prefix)) :][:48].tolist() for one in found]
        return [(tokenizer.decode(told), tokenizer.decode(list(one.ids))) for told, one in zip(ends, found)]

    for told, end in asked("statement"):
        assert end.startswith(f"{main}What is the ") and not re.match(r"\s*The [\w ]+ of [\w ]+ is ", told)
    for told, end in asked("question+frame"):
        assert re.match(r"\s*The [\w ]+ of [\w ]+ is ", told)
        assert not end.startswith(main) and "What is the" not in end
    for _, end in asked("attribute"):
        assert any(f"What is the {attribute} of" in end for attribute in WORDS["held-out"].attributes)
    with pytest.raises(ValueError, match="allowed are"):
        questions(data_dir, 1, 2048, 12, "question+frames", "held-out")
