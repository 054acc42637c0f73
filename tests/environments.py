"""Virtual environments of other tools, for scripts that compare with them: their pins clash with this project's."""

import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

INSTALLED = "installed.txt"
"""The file in an environment that says what pip installed; without it the environment is made again."""


def make_environment(folder: Path, requirements: Sequence[str]) -> Path | None:
    """The interpreter of an environment, made where it is not there; an index must be in reach.

    Returns:
        None where the requirements do not install here, which is printed with pip's last words.
    """
    python, ready = folder / "bin" / "python", folder / INSTALLED
    if ready.exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    done = run_command([python, "-m", "pip", "install", "--quiet", *requirements])
    if done.returncode:
        print(f"{folder.name}: does not install here:\n{done.stderr.strip()[-2000:]}", file=sys.stderr)
        return None
    ready.write_text(run_command([python, "-m", "pip", "freeze"]).stdout)
    return python


def run_command(
    command: Sequence[object], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, and keeps what it printed."""
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd, env=env)
