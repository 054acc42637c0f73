"""What to bring home from a machine that keeps nothing: few files, always as the report stands, which go on elsewhere.

<out>/home/report.tar.gz          the folder, without the runs of the engine's marks that are at their end
<out>/home/<mark>.tar.gz          each of those
<out>/home/report.md              for the eye
"""

import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.document import ExperimentError
from tkernels.files import PARTIAL, replacing

FOLDER, PACKED, RUNS, TABLE = "home", "report.tar.gz", "runs", "report.md"

MOST_FILES = 8
"""As many are written at most."""


def pack(out: Path, finished: Sequence[str]) -> None:
    """Packs the report in `out`, each file in place of the one before; run while nothing else writes there.

    Args:
        finished: The runs that are at their end, by the names of their folders: packed once.
    """
    home = out / FOLDER
    home.mkdir(exist_ok=True)
    done = [out / RUNS / name for name in finished if (out / RUNS / name).is_dir()]
    for run in done:
        if not (target := home / f"{run.name}.tar.gz").exists():
            _pack(target, out, [run])
    runs = [run for run in _entries(out / RUNS) if run not in done]
    own = [one for one in _entries(out) if one.name not in (FOLDER, RUNS)]
    # run.json last: what is laid out without it is no report yet.
    _pack(home / PACKED, out, [*runs, *sorted(own, key=lambda one: one.name == "run.json")])
    if (out / TABLE).exists():
        shutil.copyfile(out / TABLE, home / TABLE)


def _entries(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.iterdir()) if folder.is_dir() else ()


def _pack(target: Path, out: Path, paths: Sequence[Path]) -> None:
    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name.endswith((".lock", PARTIAL)) else member

    with replacing(target) as partial, tarfile.open(partial, "w:gz", compresslevel=1) as archive:
        for path in paths:
            archive.add(path, path.relative_to(out), filter=keep)


def unpack(out: Path) -> None:
    """Lays out what was brought home, where there is no report in `out` but its home.

    Raises:
        ExperimentError: A file is damaged.
    """
    home = out / FOLDER
    if (out / "run.json").exists() or not (home / PACKED).exists():
        return
    # The report last: without it there is nothing that would be gone on with.
    for file in sorted(home.glob("*.tar.gz"), key=lambda file: file.name == PACKED):
        _unpack(file, out)


@contextmanager
def laid_out_elsewhere(out: Path) -> Iterator[Path]:
    """Gives a folder with the report that was brought home to `out`, which stays as it is; an empty one where there is
    none.

    Raises:
        ExperimentError: A file is damaged. What the block raises of the folder names the packed file.
    """
    packed = out / FOLDER / PACKED
    with TemporaryDirectory() as folder:
        if packed.exists():
            _unpack(packed, Path(folder))
        try:
            yield Path(folder)
        except ExperimentError as error:
            raise ExperimentError([problem.replace(folder, str(packed)) for problem in error.problems]) from None


def _unpack(file: Path, to: Path) -> None:
    try:
        with tarfile.open(file) as archive:
            archive.extractall(to, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        problem = f"{file}: cannot be unpacked: {type(error).__name__}: {' '.join(str(error).split())}"
        raise ExperimentError([f"{problem}; bring it home again, or remove it to begin without it"]) from None
