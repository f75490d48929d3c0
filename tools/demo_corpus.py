"""The training texts of the embedded model as conversations: reading, the held-out split, prompts, rendering.

Owns how each corpus becomes user and assistant turns. Tokens, weights and batches are not here
(demo_packing).

The corpora are the six files described in ../shared/workloads/README.md: two books and a play, whose passages
become the answers of a storyteller, and three sets of dialogues, which are conversations already.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import jinja2

T = TypeVar("T")

HELD_OUT_SHARE = 0.05
BOOKS = ("grimm", "little_women", "tinyshakespeare")
DIALOGUES = ("airline_chat", "retail_chat", "smalltalk")
SOURCES = BOOKS + DIALOGUES

# A smalltalk question that the file repeats about a hundred times teaches nothing after the first few.
MAX_REPEATS = 6
PASSAGE_CHARS = (160, 640)
MAX_PASSAGES = 4
THINKING_SHARE = 0.08
SYSTEM_SHARE = 0.15

CONTINUE = (
    "Go on.",
    "Please go on.",
    "What happened next?",
    "And then?",
    "Tell me more.",
    "Continue.",
    "What happened then?",
)
TALE_WORDS = (
    "king queen princess prince wolf fox bird cat dog horse fish frog bear mouse witch "
    "giant dwarf tailor miller huntsman soldier farmer peasant shepherd fisherman mother father "
    "brother sister daughter son wife child maiden boy girl "
    "forest castle tree mountain garden well ring apple"
).split()
NOVEL_WORDS = ("Jo", "Meg", "Beth", "Amy", "Laurie", "Marmee", "John", "Hannah", "Aunt March", "Mr. Laurence")
SYSTEM_TEXTS = {
    "grimm": ("You tell old fairy tales.", "You are a storyteller."),
    "little_women": ("You tell the story of four sisters.", "You are a storyteller."),
    "tinyshakespeare": ("You are an actor.", "You play scenes from old plays."),
    "airline_chat": ("You are an airline agent.", "You help with flights."),
    "retail_chat": ("You are a shop assistant.", "You help with orders."),
    "smalltalk": ("You are a friendly assistant.", "You answer in one sentence."),
}
THOUGHTS = {
    "grimm": "The user wants a fairy tale. I tell it in plain words.",
    "little_women": "The user wants the story of the four sisters. I tell it.",
    "tinyshakespeare": "The user wants a scene from a play. I speak the parts.",
    "airline_chat": "The user needs help with a flight. I answer politely.",
    "retail_chat": "The user needs help with an order. I answer politely.",
    "smalltalk": "The user makes small talk. I answer in one sentence.",
}


@dataclasses.dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    user: str
    assistant: str


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Consecutive turns of one source, with what is said before and thought before the last answer."""

    source: str
    turns: tuple[Turn, ...]
    system: str = ""
    thought: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """A titled run of paragraphs of a book: passages never cross it."""

    title: str
    paragraphs: tuple[str, ...]
    from_start: bool  # False: the section was cut by the split and begins in the middle


@dataclasses.dataclass(frozen=True)
class Corpus:
    """One side (training or held out) of one source: sections of a book, or dialogues."""

    source: str
    sections: tuple[Section, ...]
    dialogues: tuple[tuple[Turn, ...], ...]


def read_corpora(directory: Path) -> tuple[dict[str, Corpus], dict[str, Corpus]]:
    """Returns the training side and the held-out side (the last 5 % of each file) by source name.

    Args:
        directory: folder with `<source>.txt` for every name in SOURCES.
    Raises:
        FileNotFoundError: if a file is missing; the message names it.
    """
    train, held_out = {}, {}
    for source in SOURCES:
        path = directory / f"{source}.txt"
        if not path.is_file():
            raise FileNotFoundError(f"corpus file {path} is missing; pass the folder that has {source}.txt")
        text = path.read_text(encoding="utf-8")
        parse = _parse_dialogues if source in DIALOGUES else _parse_book
        for side, target in zip(_split(source, text), (train, held_out), strict=True):
            target[source] = parse(source, side)
    return train, held_out


def _split(source: str, text: str) -> tuple[str, str]:
    """Cuts at the first blank line (dialogues, play) or line end (books) after 95 % of the characters."""
    mark = "\n" if source in ("grimm", "little_women") else "\n\n"
    cut = text.index(mark, int(len(text) * (1 - HELD_OUT_SHARE))) + len(mark)
    return text[:cut], text[cut:]


def _parse_book(source: str, text: str) -> Corpus:
    sections: list[Section] = []
    title, paragraphs, from_start = "", [], not text.startswith(("'", " "))

    def close() -> None:
        if paragraphs:
            sections.append(Section(title, tuple(paragraphs), from_start and bool(title)))

    if source == "tinyshakespeare":
        speeches = [block.strip() for block in text.split("\n\n") if block.strip()]
        return Corpus(source, (Section("", tuple(speeches), False),), ())
    for line in (line.strip() for line in text.splitlines()):
        if not line:
            continue
        is_title = len(line) < 70 and line == line.upper() and re.search(r"[A-Z]{3}", line) is not None
        if is_title:
            close()
            title, paragraphs, from_start = line.title().replace("'S ", "'s "), [], True
        else:
            paragraphs.append(re.sub(r"\s+", " ", line))
    close()
    return Corpus(source, tuple(sections), ())


def _parse_dialogues(source: str, text: str) -> Corpus:
    dialogues, seen = [], {}
    for block in text.split("\n\n"):
        turns, question = [], ""
        for line in block.strip().splitlines():
            role, _, content = line.partition(": ")
            content = content.replace("###STOP###", "").strip()
            if role == "user":
                question = content
            elif role == "assistant" and question and content and "```" not in content:
                turns.append(Turn(question, content))
                question = ""
        if source == "smalltalk":
            turns = [turn for turn in turns if _count(seen, turn) <= MAX_REPEATS]
        if turns:
            dialogues.append(tuple(turns))
    return Corpus(source, (), tuple(dialogues))


def _count(seen: dict[Turn, int], turn: Turn) -> int:
    seen[turn] = seen.get(turn, 0) + 1
    return seen[turn]


def conversations(corpus: Corpus, rng: random.Random) -> list[Conversation]:
    """Returns one pass over the corpus: every passage or dialogue once, in a new arrangement for every state
    of rng.

    Passages get new borders and prompts, smalltalk pairs new neighbours, long dialogues new ends, and a few
    conversations a system text or a written thought, so that passes differ although the text is the same.
    """
    if corpus.source == "smalltalk":
        plain = _smalltalk(corpus, rng)
    elif corpus.dialogues:
        plain = [
            Conversation(corpus.source, part) for turns in corpus.dialogues for part in _pieces(turns, rng)
        ]
    else:
        plain = [talk for section in corpus.sections for talk in _tell(corpus.source, section, rng)]
        # Beginnings are what people ask for and one passage in fifteen: tell them twice.
        starts = [
            dataclasses.replace(section, paragraphs=section.paragraphs[:2]) for section in corpus.sections
        ]
        plain += [talk for start in starts if start.from_start for talk in _tell(corpus.source, start, rng)]
    rng.shuffle(plain)
    return [_dress(talk, rng) for talk in plain]


def _dress(talk: Conversation, rng: random.Random) -> Conversation:
    system = rng.choice(SYSTEM_TEXTS[talk.source]) if rng.random() < SYSTEM_SHARE else ""
    thought = THOUGHTS[talk.source] if rng.random() < THINKING_SHARE else ""
    return dataclasses.replace(talk, system=system, thought=thought)


def _smalltalk(corpus: Corpus, rng: random.Random) -> list[Conversation]:
    pairs = [turn for turns in corpus.dialogues for turn in turns]
    rng.shuffle(pairs)
    return [Conversation(corpus.source, tuple(part)) for part in _groups(pairs, rng, 5)]


def _pieces(turns: Sequence[Turn], rng: random.Random) -> list[tuple[Turn, ...]]:
    # Answers are up to a few hundred tokens: more than four turns would leave the row anyway.
    return [tuple(part) for part in _groups(turns, rng, 4)]


def _groups(items: Sequence[T], rng: random.Random, largest: int) -> list[Sequence[T]]:
    parts, start = [], 0
    while start < len(items):
        size = rng.randint(1, largest)
        parts.append(items[start : start + size])
        start += size
    return parts


def _tell(source: str, section: Section, rng: random.Random) -> list[Conversation]:
    talks = []
    passages = _passages(section.paragraphs, "\n\n" if source == "tinyshakespeare" else "\n", rng)
    at_start = section.from_start
    for part in _groups(passages, rng, MAX_PASSAGES):
        opening = _opening(source, section.title if at_start else "", part[0], rng)
        prompts = [opening] + [rng.choice(CONTINUE) for _ in part[1:]]
        talks.append(Conversation(source, tuple(map(Turn, prompts, part))))
        at_start = False
    return talks


def _passages(paragraphs: Sequence[str], joint: str, rng: random.Random) -> list[str]:
    """Cuts paragraphs into passages of a random length that end at a sentence."""
    passages, held, limit = [], "", rng.randint(*PASSAGE_CHARS)
    for paragraph in paragraphs:
        pieces = [paragraph] if joint == "\n\n" else re.split(r"(?<=[.!?]['\"]) |(?<=[.!?;]) ", paragraph)
        for index, piece in enumerate(pieces):
            held += (joint if index == 0 else " ") * bool(held) + piece
            if len(held) >= limit:
                passages.append(held)
                held, limit = "", rng.randint(*PASSAGE_CHARS)
    return passages + [held] * bool(held)


def _opening(source: str, title: str, passage: str, rng: random.Random) -> str:
    """Returns a question that the passage answers; a title means that the passage begins a tale."""
    if source == "tinyshakespeare":
        speaker = passage.partition(":")[0]
        named = [f"Play a scene with {speaker}.", f"What does {speaker} say?"]
        return rng.choice(["Speak like Shakespeare.", "Play a scene from Shakespeare.", *named])
    words = TALE_WORDS if source == "grimm" else NOVEL_WORDS
    present = [word for word in words if re.search(rf"\b{re.escape(word)}\b", passage[:300])]
    word = rng.choice(present) if present else ""
    if source == "grimm" and title:
        choices = [
            "Tell me a story.",
            "Tell me a fairy tale.",
            "Tell me a tale.",
            f"Tell me the story of {title}.",
        ]
        return rng.choice(choices + [f"Tell me a story about {_article(word)}."] * 3 if word else choices)
    if source == "grimm":
        return rng.choice(
            [f"Tell me more about the {word}.", f"What did the {word} do?"] if word else ["Read on."]
        )
    plain = ["Tell me about the four sisters.", "Read to me from Little Women."]
    return rng.choice(plain + [f"Tell me about {word}.", f"What did {word} do?"] * 2 * bool(word))


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def make_renderer(template: str) -> Callable[[Conversation], str]:
    """Returns the function that writes a conversation as the checkpoint's own chat template does.

    Args:
        template: text of chat_template.jinja. Training through the file that serving uses
            is the only way to be sure that the model never sees another form.
    """
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    compiled = environment.from_string(template)

    def render(talk: Conversation) -> str:
        messages = [{"role": "system", "content": talk.system}] if talk.system else []
        for turn in talk.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        messages[-1]["reasoning_content"] = talk.thought
        return compiled.render(messages=messages, add_generation_prompt=False)

    return render


def _raise(message: str) -> None:
    raise ValueError(message)
