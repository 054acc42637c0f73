"""What a model is called in rows, keys and rules: the same wherever its experiment lies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.document import as_mapping


def whole_source(source: Any, folder: Path) -> Any:
    """One source, in the only form of what it means; as it is where the schema refuses it.

    Of a directory, links on the way are followed; the last name, which the model is called by, is kept.
    """
    given = [(kind, name) for kind, name in as_mapping(source).items() if name is not None]
    if len(given) != 1 or given[0][0] not in ("preset", "path", "hub") or not isinstance(given[0][1], str):
        return source
    ((kind, name),) = given
    if kind == "path":
        whole = folder / name
        name = str(whole.resolve() if whole.name == ".." else whole.parent.resolve() / whole.name)
    return {kind: name}


def model_labels(sources: Sequence[Any]) -> list[str]:
    """Of each whole source, a preset's name, a hub id, or so much of a directory's end as tells it from the others."""
    paths = [str(as_mapping(one).get("path", "")) for one in sources]
    directories = {Path(path).parts for path in paths}
    others = [" ".join(map(str, as_mapping(one).values())) or str(one) for one in sources]
    taken = {name for name, path in zip(others, paths, strict=True) if not path}

    def label(path: str) -> str:
        parts = Path(path).parts
        for length in range(1, len(parts)):
            end = str(Path(*parts[-length:]))
            if end not in taken and sum(other[-length:] == parts[-length:] for other in directories) == 1:
                return end
        return path

    return [label(path) if path else name for path, name in zip(paths, others, strict=True)]
