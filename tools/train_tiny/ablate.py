"""Which memory answers what, on the same weights: `python -m tools.train_tiny.ablate --data DIR --model DIR`.

Each line takes one memory away, or spoils the index, and asks the same questions. An answer is right if each of its tokens is the
likeliest one after the right ones before it, which is what greedy decoding would write. Text: nats per token, held out.
`--mtp` asks instead how often the MTP block's likeliest token is the main model's own next choice, on held-out text.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tools.train_tiny.exam import Question, questions
from tools.train_tiny.export import load_weights
from tools.train_tiny.model import SHAPE, Mode, Model
from tools.train_tiny.train import plain_inputs, text_nats

TASKS = ("recall", "hard", "majority", "language", "window")


def modes() -> dict[str, Mode]:
    """Every ablation by its name; "all memories" is the model as it is served."""
    c4, c128 = (frozenset(layer for layer, of in enumerate(SHAPE.ratios[:-1]) if of == ratio) for ratio in (4, 128))
    top = SHAPE.index_topk
    found = {
        "all memories": Mode(True, top),
        "no c4 entries": Mode(True, top, without=c4),
        "no c128 entries": Mode(True, top, without=c128),
        "window of 1": Mode(True, top, window=1),
        "window of 16": Mode(True, top, window=16),
        "index: all entries": Mode(True, 0),
        "index: half as many": Mode(True, top // 2),
        "index: 4 entries": Mode(True, 4),
        "index: random": Mode(True, top, index="random"),
        "index: most recent": Mode(True, top, index="recent"),
    }
    return found | {
        f"no entries in layer {layer} (c{SHAPE.ratios[layer]})": Mode(True, top, without=frozenset({layer}))
        for layer in sorted(c4 | c128)
    }


def rows(found: list[Question], length: int) -> list[tuple[NDArray[np.int64], list[tuple[int, int]]]]:
    """Rows [length + 1] of tokens, and where answers begin and end: questions about one text follow each other in one row."""
    made: list[tuple[NDArray[np.int64], list[tuple[int, int]]]] = []
    row: list[int] = []
    spans: list[tuple[int, int]] = []
    text: NDArray[np.uint16] | None = None
    for question in found:
        more = [*question.ids, *question.answer_ids]
        if question.prefix is not text or len(row) + len(more) > length + 1:
            if spans:
                made.append((np.array(row + [0] * (length + 1 - len(row)), np.int64), spans))
            row, spans, text = question.prefix.tolist(), [], question.prefix
        spans.append((len(row) + len(question.ids), len(row) + len(more)))
        row += more
    if spans:
        made.append((np.array(row + [0] * (length + 1 - len(row)), np.int64), spans))
    return made


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def share_right(model: Model, made: list[tuple[NDArray[np.int64], list[tuple[int, int]]]], mode: Mode) -> tuple[int, int]:
    """(right, asked) over rows of `rows`."""
    right = asked = 0
    for row, spans in made:
        tokens = torch.from_numpy(row)[None].to(next(model.parameters()).device)
        predicted = model(plain_inputs(tokens), mode)["predicted"][0].cpu().numpy()
        for begin, end in spans:
            right += bool((predicted[begin - 1 : end - 1] == row[begin:end]).all())
            asked += 1
    return right, asked


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def drafts(model: Model, data: Path, length: int, most: int) -> dict[str, object]:
    """How often the MTP block's likeliest token is the main model's own next choice, everything rounded as stored.

    After each token of `most` rows of `length` tokens spread over the held-out text; of the least and the most lucky row too.
    """
    ids = np.fromfile(data / "val.u16", np.uint16).astype(np.int64)
    if len(ids) <= length:
        raise ValueError(f"val.u16 has {len(ids)} tokens, rows have {length}")
    shares = []
    for start in np.linspace(0, len(ids) - 1 - length, most).astype(np.int64):
        row = torch.from_numpy(ids[start : start + length + 1])[None].to(next(model.parameters()).device)
        shares.append(float(model(plain_inputs(row), Mode(True, SHAPE.index_topk))["draft"]))
    mean, least, top = (round(share, 4) for share in (sum(shares) / most, min(shares), max(shares)))
    return {"mtp": mean, "least": least, "most": top, "length": length, "rows": most, "tokens": most * (length - 1)}


def main() -> int:
    """Prints one JSON line for each ablation, and appends it to --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint that export.py wrote")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row, a multiple of 128")
    parser.add_argument("--texts", type=int, default=3, help="texts of recall and window, 12 questions each (default 3)")
    parser.add_argument("--gists", type=int, default=24, help="questions of each gist task, a text each (default 24)")
    parser.add_argument("--text-rows", type=int, default=4, help="rows of held-out text (default 4)")
    parser.add_argument("--mtp", action="store_true", help="drafts of the MTP block on --text-rows rows, no ablations")
    parser.add_argument("--only", help="ablations whose name holds this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = Model(dtype=torch.bfloat16 if arguments.device.startswith("cuda") else torch.float32)
    load_weights(model, arguments.model)
    model.to(arguments.device)
    if arguments.mtp:
        _say(arguments.out, drafts(model, arguments.data, arguments.length, arguments.text_rows))
        return 0
    exam = {}
    for task in TASKS:
        found: list[Question] = []
        if task in ("majority", "language"):
            found = questions(arguments.data, 31, arguments.length, arguments.gists, task)
        else:
            for text in range(arguments.texts):
                found += questions(arguments.data, 31 + text, arguments.length - 320, 12, task)
        exam[task] = rows(found, arguments.length)
    for name, mode in modes().items():
        if arguments.only and arguments.only not in name:
            continue
        line: dict[str, object] = {"ablation": name, "length": arguments.length}
        for task, made in exam.items():
            right, asked = share_right(model, made, mode)
            line[task] = f"{right}/{asked}"
        line["text"] = round(text_nats(model, arguments.data, mode, arguments.length, arguments.text_rows), 3)
        _say(arguments.out, line)
    return 0


def _say(out: Path | None, line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
