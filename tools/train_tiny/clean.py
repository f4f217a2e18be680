"""From marked-up files to paragraphs of plain prose."""

import html
import re
import unicodedata
from html.parser import HTMLParser

#: Elements whose text is no prose; everything up to their end is dropped.
SKIPPED = {
    "script", "style", "pre", "table", "nav", "header", "footer", "form", "svg", "math", "button", "dt", "aside", "select",
    "noscript", "caption", "figure", "summary", "colgroup", "sup",
}  # fmt: skip
#: A class that holds one of these makes any element one of them.
SKIPPED_CLASSES = re.compile(
    r"(?<!with)sidebar|related|navheader|navfooter|\btoc|footer|toctree|highlight|headerlink|breadcrumb|langs-menu|"
    r"version-note|navigation|menu|search|programlisting|screen|synopsis|sig\b|field-list|index-|copyright|docinfo|classref|"
    r"admonition-title|out-of-band|src-link|rightside|hint|toggle|badge|caption|footnote|legalnotice|clipboard|buttons|"
    r"versionmodified|linenos|option-list|deprecated"
)
BLOCKS = {
    "p", "li", "dd", "div", "section", "article", "blockquote", "ul", "ol", "dl", "td", "tr", "body", "main", "hr",
    "h1", "h2", "h3", "h4", "h5", "h6", "title",
}  # fmt: skip
VOID = {"br", "hr", "img", "meta", "link", "input", "col", "wbr", "area", "base", "embed", "source", "track", "param"}


class _Prose(HTMLParser):
    """Collects the title and the paragraphs; headings below the first are dropped."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self.paragraphs: list[str] = []
        self._text: list[str] = []
        self._skipped = ""  # the element that is being skipped
        self._depth = 0  # of elements of its name
        self._heading = ""
        self._has_h1 = False

    def flush(self) -> None:
        text = " ".join("".join(self._text).split())
        self._text.clear()
        if not text:
            return
        if self._heading:
            if not self.title or (self._heading == "h1" and not self._has_h1):
                self.title = text
            self._has_h1 = self._has_h1 or self._heading == "h1"
            return
        self.paragraphs.append(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if self._skipped:
            self._depth += tag == self._skipped
            return
        if tag in VOID:
            self._text.append(" ")
            return
        classes = next((value for name, value in attributes if name == "class" and value), "")
        if tag in SKIPPED or (tag not in ("body", "html") and SKIPPED_CLASSES.search(classes)):
            self._skipped, self._depth = tag, 1
            return
        if tag in BLOCKS:
            self.flush()
            self._heading = tag if tag == "title" or re.fullmatch(r"h\d", tag) else ""

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            self._depth -= tag == self._skipped
            if self._depth == 0:
                self._skipped = ""
            return
        if tag in BLOCKS:
            self.flush()
            self._heading = ""

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._text.append(data)


def html_paragraphs(page: str) -> tuple[str, list[str]]:
    """Title and paragraphs of a page: no code, tables, navigation, signatures, headings."""
    parser = _Prose()
    parser.feed(page)
    parser.close()
    parser.flush()
    return parser.title, parser.paragraphs


def osis_paragraphs(text: str) -> list[str]:
    """Paragraphs of a text in OSIS mark-up: no notes, titles, tables."""
    text = re.sub(r"<(note|title|table|figure)\b[^>]*>.*?</\1>", " ", text, flags=re.DOTALL)
    text = re.sub(r"<(?:div|p|lg|chapter|list|item)\b[^>]*>|</(?:div|p|lg|list|item)>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text.replace("<lb", " <lb").replace("<l ", " <l ")))
    paragraphs = (re.sub(r" ([,.;:!?])", r"\1", " ".join(line.split())) for line in text.split("\n"))
    return [paragraph for paragraph in paragraphs if paragraph]


def wrapped_paragraphs(lines: list[str]) -> list[str]:
    """Paragraphs of lines that were wrapped: an empty line ends one."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line.strip())
        elif paragraphs[-1]:
            paragraphs.append([])
    return [" ".join(" ".join(paragraph).split()) for paragraph in paragraphs if paragraph]


_MARKS = str.maketrans({
    "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "‘": "'", "’": "'", "‚": "'", "′": "'", "`": "'", "´": "'",
    "–": "-", "‐": "-", "‑": "-", "−": "-", "—": " - ", "―": " - ", "…": "...", "•": " ", "\u00a0": " ",
    "\u200b": "", "\u00ad": "", "\ufeff": "", "¶": "",
})  # fmt: skip


def plain(text: str) -> str:
    """The text with straight quotes, simple dashes, single spaces, no accents on letters and no italics marks."""
    text = text.translate(_MARKS)
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    text = re.sub(r"\b_([^_]{1,80})_(?!\w)", r"\1", text)
    text = re.sub(r"\s*--+\s*", " - ", text).replace("''", '"')
    text = re.sub(r"\[[^\]]{0,20}\]", "", text)
    text = re.sub(r"\(\s*\)", "", text)
    return re.sub(r"\s+([,.;:!?)])(?=\s|$)", r"\1", " ".join(text.split()))


#: Words that prose is full of.
_COMMON_WORDS = """
the of and to a in is that it for as was with be on not by he his i are this have at or from had which but you they
were all an there we one their if has will would so who when them him been more no can her she my what than its then
into may your do any our up some only me out about these must other such should could also after before where how
because over use used each us same most between through while very under own said now time way make made like two
first new well even did never much many those shall upon against great every
"""
COMMON = frozenset(_COMMON_WORDS.split())

#: Words of old texts that a model should not learn to say.
_SLURS = re.compile(r"\b(n[i]gg[a-z]*|squaws?|coons?|faggots?|chinam[ae]n|darkies)\b", re.IGNORECASE)


def is_prose(text: str, manual: bool) -> bool:
    """Whether a paragraph is plain English prose. Of manuals only whole sentences without symbols are."""
    length = len(text)
    if length < (60 if manual else 2):
        return False
    letters = sum(c.isalpha() or c == " " for c in text) / length
    marks = sum(c in ",.;:!?'\"-()" for c in text) / length
    if not text.isascii() or letters < (0.90 if manual else 0.4) or letters + marks < 0.93:
        return False
    words = re.findall(r"[A-Za-z']+", text)
    if not words or max(map(len, words)) > 24 or _SLURS.search(text):
        return False
    if length >= 60 and sum(word.lower() in COMMON for word in words) < (0.30 if manual else 0.25) * len(words):
        return False
    if not manual:
        return not re.search(r"[{}<>|\\=^~#@]|://", text)
    if text[0].islower() or text[-1] not in ".!?" or re.match(r"(Stability|Type|Default|New in|Changed in|Added in|See) ?", text):
        return False
    odd = re.findall(r"[A-Za-z]+[A-Z_0-9][a-z]|\w\.\w|\w_\w|::|\(\)|[{}<>|\\=^~#@&*$%+/]", text)
    return len(odd) <= max(1, len(words) // 40) and "://" not in text
