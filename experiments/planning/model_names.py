"""What a model is called in rows, keys and rules: the same wherever its experiment lies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_KINDS = ("preset", "path", "hub")


def whole_sources(written: Any, folder: Path) -> Any:
    """The section `model`, a source or a list of them, its directories found from anywhere."""
    return (
        [whole_source(one, folder) for one in written] if isinstance(written, list) else whole_source(written, folder)
    )


def whole_source(source: Any, folder: Path) -> Any:
    """One source, in the only form of what it means; as it is where the schema refuses it."""
    kind = _kind(source)
    if kind is None:
        return source
    return {kind: str(whole_path(folder, source[kind])) if kind == "path" else source[kind]}


def whole_path(folder: Path, path: str) -> Path:
    """Links on the way are followed; the last name, which the model is called by, is kept."""
    whole = folder / path
    return whole.resolve() if whole.name == ".." else whole.parent.resolve() / whole.name


def model_labels(sources: Sequence[Any]) -> tuple[str, ...]:
    """Of each source, a preset's name, a hub id, or so much of a directory's end as tells it from the others."""
    kinds = [_kind(source) for source in sources]
    taken = [str(source[kind]) for source, kind in zip(sources, kinds, strict=True) if kind in ("preset", "hub")]
    directories = [Path(source["path"]).parts for source, kind in zip(sources, kinds, strict=True) if kind == "path"]

    def label(source: Any, kind: str | None) -> str:
        if kind != "path":
            return str(source if kind is None else source[kind])
        parts = Path(source["path"]).parts
        ends = [parts[-length:] for length in range(1, len(parts) + 1)]
        alone = (
            str(Path(*end))
            for end in ends
            if str(Path(*end)) not in taken and sum(other[-len(end) :] == end for other in directories) == 1
        )
        return next(alone, source["path"])

    return tuple(label(source, kind) for source, kind in zip(sources, kinds, strict=True))


def _kind(source: Any) -> str | None:
    """Which kind of source it is, where it is one of a text."""
    given = {key: value for key, value in source.items() if value is not None} if isinstance(source, dict) else {}
    (kind,) = given if len(given) == 1 else (None,)
    return kind if kind in _KINDS and isinstance(given[kind], str) else None
