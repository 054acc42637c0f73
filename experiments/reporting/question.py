"""What an experiment asks: the comment at the top of its YAML."""

import re
from dataclasses import dataclass

_LABEL = re.compile(r"[A-Z][a-z]+: ")
_MOST_IN_A_HEADING = 220  # characters; a longer sentence is read better as text


@dataclass(frozen=True)
class Question:
    """heading: the comment's first sentence, or the experiment's name. text: the rest, in paragraphs: one begins after
    an empty line, and where a line begins with a label ("Read: ...").
    """

    heading: str
    text: tuple[str, ...]
    asked: bool


def question_of(source: str, name: str) -> Question:
    """The comment before the first key; `asked` is false where there is none."""
    paragraphs: list[list[str]] = [[]]
    for line in source.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            if words := stripped.lstrip("#").strip():
                if _LABEL.match(words):  # "Read: ..." is a paragraph of its own
                    paragraphs.append([])
                paragraphs[-1].append(words)
            else:
                paragraphs.append([])
        elif stripped and stripped != "---":
            break
        else:
            paragraphs.append([])
    texts = [" ".join(lines) for lines in paragraphs if lines]
    if not texts:
        return Question(name, (), False)
    texts[0] = re.sub(r"^Question: *(.)", lambda match: match[1].upper(), texts[0])
    first, *rest = re.split(r"(?<=[.?!])\s+", texts[0], maxsplit=1)
    if len(first) > _MOST_IN_A_HEADING:
        return Question(name, tuple(texts), True)
    return Question(first, (*rest, *texts[1:]), True)
