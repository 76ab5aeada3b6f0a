"""Text for the demonstration model: books -> paragraphs -> tokenizer -> plain and chat documents.

The books are plain text with hard-wrapped lines, one file each. The chats are strings in the chat template's format:

    <|begin|> [<|system|>text<|end|>] (<|user|>text<|end|> <|assistant|>text<|end|>)+

A book holds no chats, so they are cut out of it in four ways, chosen at random with a seeded generator:

* story: "Tell me a story about a dog." and a passage that mentions a dog immediately or more than once;
* talk: lines of dialogue that follow each other in the book, spoken in turn by the user and the assistant;
* continuation: the beginning of a passage from the user, the rest from the assistant;
* introduction: a few hand-written questions and answers about the model itself.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END, SYSTEM, USER, ASSISTANT, PAD = (f"<|{name}|>" for name in ("begin", "end", "system", "user", "assistant", "pad"))
SPECIAL_TOKENS = [BEGIN, END, SYSTEM, USER, ASSISTANT, PAD]

# Words with their apostrophes, single digits, punctuation with the line ends behind it, then any other space.
PIECES = r" ?\p{L}+(?:'\p{L}+)*| ?\p{N}| ?[^\s\p{L}\p{N}]+\n*|\s*\n+|\s+(?!\S)|\s+"

LEFT_QUOTE, RIGHT_QUOTE = "\u2018", "\u2019"  # single quotes; the right one is also the apostrophe

CHAT_TEMPLATE = """\
{#- <|begin|> then one block per message: role token, text, <|end|>. -#}
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
    {{- raise_exception("the roles are system, user and assistant, not " + message['role']) -}}
  {%- endif -%}
  {{- '<|' + message['role'] + '|>' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] | trim -}}
  {%- elif message['content'] -%}
    {%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] | trim -}}{%- endfor -%}
  {%- endif -%}
  {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

STORY_PROMPTS = (
    "Tell me a story about {x}.",
    "Tell me a story about {x}.",
    "Tell me about {x}.",
    "Can you tell me a story about {x}?",
    "Please tell me a tale of {x}.",
    "Write a short story about {x}.",
    "Write something about {x}.",
    "What do you know about {x}?",
    "I would like to hear about {x}.",
    "A story about {x}, please.",
)
SAMPLE_PROMPTS = (
    "Tell me a story about a dog.",
    "Who are you?",
    "It was a dark night",
    "Where are you going, Tom?",
)  # for samples of a trained model
MORE_PROMPTS = ("Go on.", "Please go on.", "And then?", "What happened next?", "Tell me more.", "Continue.")
CONTINUE_PROMPTS = ("{x}", "{x}", "{x}", "Go on: {x}", "Continue this story: {x}", "Go on from here: {x}")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a storyteller.",
    "You are a friendly companion who tells old stories.",
    "Answer in plain English.",
)
_ABOUT = (
    "I am the demonstration model of blinkpy, a very small language model. I learned English from nineteen old books, "
    "so I tell stories better than facts.",
    "I am a small language model that comes with blinkpy. All I know is what I read in a shelf of old books. Ask me for a story!",
)
_HELLO = (
    "Hello! I am the small model that comes with blinkpy. Would you like to hear a story?",
    "Good day to you! What shall I tell you about?",
)
_ABLE = (
    "I can tell you a story, answer you as people in old books do, or go on with a sentence that you begin. "
    "I am far too small to know facts, so do not believe what I say.",
)
_THANKS = ("You are very welcome.", "With pleasure! Shall I tell you another?")
_BYE = ("Good-bye, and come again soon!", "Good-bye! It was a pleasure to talk to you.")
_WELL = ("Very well, thank you. And how are you?", "I am quite well, and glad to see you.")
INTRODUCTIONS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Who made you?"), _ABOUT),
    (("Are you a human?", "Are you a language model?", "Which model is this?", "What is blinkpy?"), _ABOUT),
    (("Hello!", "Hello", "Hi", "Hi there!", "Hey", "Good morning.", "Hello, how are you?"), _HELLO),
    (("What can you do?", "How can you help me?", "Help", "What do you know?", "Can you help me?"), _ABLE),
    (("How are you?", "How are you today?", "How do you do?"), _WELL),
    (("Thank you.", "Thanks!", "Thank you very much!"), _THANKS),
    (("Good-bye.", "Bye!", "Goodbye!", "Good night."), _BYE),
)

_ARTICLES = {"a", "an", "the"}
_AFTER_NOUN = frozenset(
    re.findall(r"\w+", "is was were are and of in had has that to with at on for who which as from would could by")
)
_NO_TOPIC = _AFTER_NOUN | frozenset(
    re.findall(
        r"\w+",
        """best worst worse other others same latter former first second third last next sort kind way least most more
        lowest highest one two moment matter case fact contrary whole rest meanwhile dozen Miss Mrs Mr Sir Herr Van San
        """,
    )
)
_WEAK_START = re.compile(r"(He|She|It|They|But|And|So|Then|This|That|These|His|Her|Yes|No|Or|For|Nor|Thus)\b")
_HEADING = re.compile(r"(chapter|book|volume|adventure|part|contents)\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<![MDS]r)(?<!Mrs)(?<!St)[.!?]\"? (?=[\"A-Z])")
_WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*")


def clean_paragraphs(text: str) -> list[str]:
    """The prose paragraphs of a book, each on one line, with ASCII quotes and real dashes.

    Leaves out headings, tables of contents and verse (indented lines).
    """
    text = text.replace("\r\n", "\n").replace("\u00a0", " ").replace("_", "")
    text = re.sub(r"\[Illustration[^\]]*\]", "", text).replace("“", '"').replace("”", '"')
    text = re.sub(r" ?-{2,} ?", "—", text)
    paragraphs = []
    for block in re.split(r"\n[ \t]*\n", text):
        lines = [line.rstrip() for line in block.split("\n") if line.strip()]
        if not lines or sum(line.startswith("  ") for line in lines) * 2 > len(lines):
            continue
        paragraph = re.sub(r"\s+", " ", " ".join(line.strip() for line in lines)).strip()
        paragraph = re.sub(r"(?<=[—-]) (?=\w)|(?<=\w) (?=—)", "", paragraph)
        if LEFT_QUOTE in paragraph and '"' not in paragraph:  # speech in single quotes
            paragraph = re.sub(rf"(?<=[.,!?;:—]){RIGHT_QUOTE}(?!\w)", '"', paragraph.replace(LEFT_QUOTE, '"'))
        paragraph = paragraph.replace(LEFT_QUOTE, "'").replace(RIGHT_QUOTE, "'")
        letters = sum(c.isalpha() for c in paragraph)
        words = len(paragraph.split())
        if (
            words < 3
            or sum(c.isupper() for c in paragraph) > 0.3 * letters
            or paragraph[-1] not in ".!?\"':;,—"
            or (words < 20 and _HEADING.match(paragraph))
        ):
            continue
        paragraphs.append(paragraph)
    return paragraphs


def load_books(folder: Path, held_out: float) -> tuple[list[list[str]], list[list[str]]]:
    """(training, held out): the paragraphs of each `*.txt` in `folder`; a contiguous share `held_out` from
    the middle of each book is not used for training.
    """
    training, validation = [], []
    for number, path in enumerate(sorted(folder.glob("*.txt"))):
        paragraphs = clean_paragraphs(path.read_text(encoding="utf-8"))
        size = max(1, round(len(paragraphs) * held_out))
        first = round((len(paragraphs) - size) * (0.2 + 0.6 * (number * 0.618 % 1)))
        validation.append(paragraphs[first : first + size])
        training += [paragraphs[:first], paragraphs[first + size :]]
    if not training:
        raise SystemExit(f"no *.txt files in {folder}")
    return [book for book in training if book], [book for book in validation if book]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer: all 256 bytes are tokens, without a normaliser or an unknown token. So
    every string can be encoded, and decoding returns it unchanged. `<|begin|>` is added if special tokens
    are requested.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, SPECIAL_TOKENS.index(BEGIN))]
    )
    return tokenizer


@dataclass
class Vocabulary:
    """Statistics of the training text's words: common words, nouns and names."""

    common: set[str] = field(default_factory=set)
    topics: dict[str, str] = field(default_factory=dict)  # word -> how a prompt names it: "a dog", "Alice"

    @classmethod
    def of(cls, books: Sequence[Sequence[str]], common_words: int = 1500, least: int = 12) -> Self:
        lower: Counter[str] = Counter()
        named: Counter[str] = Counter()
        noun: Counter[str] = Counter()
        partitive: Counter[str] = Counter()  # "sort of", "couple of": no topics
        article: dict[str, Counter[str]] = defaultdict(Counter)
        for paragraph in (paragraph for book in books for paragraph in book):
            words = re.findall(r"[A-Za-z]+(?:'[A-Za-z]+)*|[.,;:!?]", paragraph)
            for before, word, after in zip(["", *words], words, [*words[1:], "."], strict=False):
                if word[0].islower():
                    lower[word] += 1
                    partitive[word] += after == "of"
                    if before.lower() in _ARTICLES:
                        article[word][before.lower()] += 1
                        noun[word] += not after[0].isalpha() or after in _AFTER_NOUN
                elif before and before[-1].isalpha() and word[0].isupper() and word[1:].islower():
                    named[word] += 1
        vocabulary = cls(common={word for word, _ in lower.most_common(common_words)})
        for word, count in lower.items():
            if count >= least and noun[word] >= 0.15 * count and partitive[word] < 0.3 * count and word not in _NO_TOPIC:
                best = article[word].most_common(1)[0][0]
                indefinite = article[word]["a"] + article[word]["an"]
                if best == "the" and indefinite >= 3:
                    best = "an" if article[word]["an"] > article[word]["a"] else "a"
                vocabulary.topics[word] = f"{best} {word}"
        for word, count in named.items():
            if count >= 2 * least and count > 4 * lower[word.lower()] and "'" not in word and word not in _NO_TOPIC:
                vocabulary.topics[word] = word
        return vocabulary

    def ease(self, paragraph: str) -> float:
        """Share of common words: easy prose is what a very small model can learn to write."""
        words = [word.lower() for word in _WORD.findall(paragraph)]
        return sum(word in self.common for word in words) / max(1, len(words))


def spoken(paragraph: str) -> str | None:
    """The words spoken in a paragraph of dialogue without "said he", or None if it is something else."""
    if not paragraph.startswith('"') or paragraph.count('"') % 2:
        return None
    text = " ".join(piece.strip() for piece in re.findall(r'"([^"]+)"', paragraph))
    text = re.sub(r"[,;:—]$", ".", text)
    return text if 2 <= len(text.split()) <= 90 and text[-1] in ".!?" else None


class ChatWriter:
    """Cuts chats out of books; the same seed gives the same documents."""

    def __init__(self, books: Sequence[Sequence[str]], vocabulary: Vocabulary, seed: int, length: int = 900) -> None:
        self.random = random.Random(seed)
        self.length = length  # characters in an answer, at most about this
        self.books = books
        self.topics = vocabulary.topics
        eases = sorted(vocabulary.ease(paragraph) for book in books for paragraph in book)
        hard = eases[len(eases) // 3]
        self.starts: list[tuple[int, int]] = []  # (book, paragraph): narrative in easy words
        self.about: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.talks: list[list[str]] = []
        for b, book in enumerate(books):
            run: list[str] = []
            for p, paragraph in enumerate([*book, ""]):
                line = spoken(paragraph)
                if line:
                    run.append(line)
                else:
                    if len(run) >= 2:
                        self.talks.append(run)
                    run = []
                if not paragraph or paragraph[0] == '"' or vocabulary.ease(paragraph) < hard:
                    continue
                self.starts.append((b, p))
                words = _WORD.findall(paragraph)[:100]
                repeated = {word for word, count in Counter(words).items() if count > 1}
                opening = words[: 10 if _WEAK_START.match(paragraph) else 20]
                for word in repeated.union(opening) & self.topics.keys():
                    self.about[word].append((b, p))
        if not self.starts or not self.about or not self.talks:
            raise SystemExit("the books hold too little narrative and dialogue to make chats of them")
        self.words = sorted(self.about)
        self.word_weights = [len(self.about[word]) ** 0.5 for word in self.words]
        self.talk_weights = [len(run) for run in self.talks]

    def document(self) -> str:
        """One chat, from `<|begin|>` to the last `<|end|>`."""
        kind = self.random.choices((self.story, self.talk, self.continuation, self.introduction), (0.42, 0.28, 0.24, 0.06))[0]
        turns = kind()
        system = f"{SYSTEM}{self.random.choice(SYSTEM_PROMPTS)}{END}" if self.random.random() < 0.15 else ""
        roles = (USER, ASSISTANT) * (len(turns) // 2)
        return BEGIN + system + "".join(f"{role}{text}{END}" for role, text in zip(roles, turns, strict=True))

    def story(self) -> list[str]:
        word = self.random.choices(self.words, self.word_weights)[0]
        topic = self.topics[word]
        if topic.startswith(("a ", "an ", "the ")):
            topic = self.random.choices((topic, f"the {word}", word), (8, 1, 1))[0]
        book, first = self.random.choice(self.about[word])
        answer, after = self.passage(book, first)
        turns = [self.loosely(self.random.choice(STORY_PROMPTS).format(x=topic)), answer]
        while self.random.random() < 0.2 and after < len(self.books[book]) and len(turns) < 6:
            answer, after = self.passage(book, after)
            turns += [self.loosely(self.random.choice(MORE_PROMPTS)), answer]
        return turns

    def talk(self) -> list[str]:
        run = self.random.choices(self.talks, self.talk_weights)[0]
        length = min(len(run) // 2 * 2, self.random.choice((2, 2, 4, 6)))
        first = self.random.randint(0, len(run) - length)
        return run[first : first + length]

    def continuation(self) -> list[str]:
        text, _ = self.passage(*self.random.choice(self.starts))
        sentence = _SENTENCE_END.search(text, 0, len(text) - 40)
        if sentence and sentence.end() < 160 and self.random.random() < 0.5:
            cut = sentence.end()
        else:
            spaces = [match.start() for match in re.finditer(" ", text)]
            cut = spaces[min(self.random.randint(2, 11), len(spaces) - 1)]
        return [self.random.choice(CONTINUE_PROMPTS).format(x=text[:cut].strip()), text[cut:].strip()]

    def introduction(self) -> list[str]:
        questions, answers = self.random.choice(INTRODUCTIONS)
        return [self.loosely(self.random.choice(questions)), self.random.choice(answers)]

    def passage(self, book: int, first: int) -> tuple[str, int]:
        """Paragraphs from `first` on until the text has a good length, and the number of the paragraph after them."""
        wanted = self.random.uniform(0.2, 0.7) * self.length
        text, after = self.books[book][first], first + 1
        while len(text) < wanted and after < len(self.books[book]):
            paragraph = self.books[book][after]
            if len(text) + len(paragraph) > self.length:
                break
            text, after = f"{text}\n\n{paragraph}", after + 1
        if len(text) > 1.5 * self.length:  # one very long paragraph: stop at a sentence
            ends = [match.end() for match in _SENTENCE_END.finditer(text, 0, self.length)]
            text = text[: ends[-1]].strip() if ends else text
        return text, after

    def loosely(self, prompt: str) -> str:
        """Prompts as people type them: sometimes in lower case, sometimes without the full stop."""
        if self.random.random() < 0.15:
            prompt = prompt.rstrip(".?!")
        return prompt.lower() if self.random.random() < 0.1 else prompt
