"""What an experiment asks: the comment at the top of its YAML."""

import re
from dataclasses import dataclass

_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=[A-Z][a-z]+: )")
"""Where one ends: at an empty line, and before a line that begins with a label ("Read: ...")."""

_MOST_IN_A_HEADING = 220  # characters; a longer sentence is read better as text


@dataclass(frozen=True)
class Question:
    """heading: the comment's first sentence, or the experiment's name. text: the rest, in paragraphs."""

    heading: str
    text: tuple[str, ...]
    asked: bool


def question_of(source: str, name: str) -> Question:
    """The comment before the first key; `asked` is false where there is none."""
    comment = []
    for line in map(str.strip, source.splitlines()):
        if line and line != "---" and not line.startswith("#"):
            break
        comment.append(line.lstrip("#").strip() if line.startswith("#") else "")
    texts = [text for part in _PARAGRAPH.split("\n".join(comment)) if (text := " ".join(part.split()))]
    if not texts:
        return Question(name, (), False)
    texts[0] = re.sub(r"^Question: *(.)", lambda match: match[1].upper(), texts[0])
    first, *rest = re.split(r"(?<=[.?!])\s+", texts[0], maxsplit=1)
    if len(first) > _MOST_IN_A_HEADING:
        return Question(name, tuple(texts), True)
    return Question(first, (*rest, *texts[1:]), True)
