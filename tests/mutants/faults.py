"""Mutants of a module's source, each with one fault by one of mutmut's operators."""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import libcst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper
from mutmut.mutation.mutators import mutation_operators

from tests.mutants.packages import ROOT

_LEFT_ALONE = (libcst.Annotation, libcst.Decorator, libcst.Import, libcst.ImportFrom)
"""What mutmut leaves alone too: types, of which no test knows, and what runs at the definition of something else."""


@dataclass(frozen=True)
class Mutant:
    """A module with one fault.

    file    from the repository's root
    line    the first of the original that is another
    before  the lines that went
    after   the lines that came
    source  the whole module
    """

    file: str
    line: int
    before: str
    after: str
    source: str

    @property
    def change(self) -> str:
        """What is another, wherever in the file it stands."""
        return f"{' '.join(self.before.split())} -> {' '.join(self.after.split())}"

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"

    def diff(self) -> str:
        return "".join(difflib.unified_diff(
            (ROOT / self.file).read_text().splitlines(True), self.source.splitlines(True), self.file, self.file, n=2
        ))  # fmt: skip


class _Finder(libcst.CSTVisitor):
    """(node, what stands in its place) of each fault that a module could have."""

    def __init__(self) -> None:
        self.found: list[tuple[libcst.CSTNode, libcst.CSTNode]] = []

    def on_visit(self, node: libcst.CSTNode) -> bool:
        if isinstance(node, _LEFT_ALONE):
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                self.found += [(node, mutated) for mutated in operator(node)]
        return True


class Module:
    """A module's source, and how many mutants it has."""

    def __init__(self, file: str) -> None:
        self.file = file
        tree = MetadataWrapper(libcst.parse_module((ROOT / file).read_text()), unsafe_skip_copy=True)
        finder = _Finder()
        tree.module.visit(finder)
        self._tree, self._found = tree.module, finder.found
        self._spans = tree.resolve(ByteSpanPositionProvider)

    def __len__(self) -> int:
        return len(self._found)

    def ranks(self, seed: int) -> list[bytes]:
        """Of each mutant, its place among all that there are anywhere, by the seed: of its own text and its file's name
        alone, so that what changes elsewhere leaves it where it is.
        """
        seen, ranks = Counter[tuple[str, str]](), []
        for node, mutated in self._found:
            change = self._tree.code_for_node(node), self._tree.code_for_node(mutated)
            text = "\0".join((str(seed), self.file, *change, str(seen[change])))
            ranks.append(hashlib.sha256(text.encode()).digest())
            seen[change] += 1
        return ranks

    def mutant(self, number: int) -> Mutant | None:
        """The mutant of that number; None where it is no Python."""
        node, mutated = self._found[number]
        code, span = self._tree.bytes, self._spans[node]
        new = self._tree.code_for_node(mutated).encode()
        source = (code[: span.start] + new + code[span.start + span.length :]).decode()
        try:
            ast.parse(source)
        except SyntaxError:
            return None
        old_lines, lines = self._tree.code.splitlines(), source.splitlines()
        begin = _count_same(old_lines, lines)
        same = _count_same(old_lines[begin:][::-1], lines[begin:][::-1])
        before, after = old_lines[begin : len(old_lines) - same], lines[begin : len(lines) - same]
        return Mutant(self.file, begin + 1, "\n".join(before), "\n".join(after), source) if before != after else None


def _count_same(one: list[str], other: list[str]) -> int:
    """How many of their first lines are the same."""
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def draw_mutants(files: list[str], count: int, seed: int) -> Iterator[Mutant]:
    """`count` distinct mutants of all that the `files` have, by a fixed seed; fewer where there are no more.

    A change of the files changes those of its own lines alone, so most fates and reasons of the others still hold.
    """
    modules = [Module(file) for file in files]
    ranked = sorted(
        (rank, index, number) for index, module in enumerate(modules) for number, rank in enumerate(module.ranks(seed))
    )
    sources = set[str]()
    for _, index, number in ranked:
        module = modules[index]
        if len(sources) == count:
            return
        mutant = module.mutant(number)
        if mutant is not None and mutant.source not in sources:
            sources.add(mutant.source)
            yield mutant
