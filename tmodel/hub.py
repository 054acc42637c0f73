"""Models of the Hugging Face hub, in its own cache: fetched as far as they are needed, and checked once they are there.

huggingface_hub fetches: it shows its progress, goes on where a connection broke, and keeps whole files. The hub names a
file by the hash of its content. A file that has another is removed, and the model is not served.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tmodel.json_files import ConfigError
from tmodel.presets import cache_folder
from tmodel.weights import INDEX, SINGLE, read_index

_CONFIG_FILES = ("*.json",)
_TOKENIZER_FILES = ("*.json", "merges.txt", "tokenizer.model", "chat_template.jinja")
"""Beside the weights, all that is ever fetched: no pickles, no code."""

_NAME = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(\w(?:[\w/-]|\.(?!\.))*))?")
_CHUNK_BYTES = 2**20


class HubError(ConfigError):
    """A model cannot be fetched from the Hugging Face hub, and is not in its local cache; or a file is damaged."""


@dataclass(frozen=True)
class HubName:
    """A model of the hub.

    Attributes:
        repo: "owner/name".
        revision: A branch, a tag or a commit; None is the main branch.
    """

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_hub_name(text: str) -> HubName | None:
    """Reads "owner/name" or "owner/name@revision"; None where `text` is neither."""
    found = _NAME.fullmatch(text)
    return None if found is None else HubName(found[1], found[2])


def fetch_config(name: HubName) -> Path:
    """Fetches a model's JSON files.

    Returns:
        Their folder in the hub's cache, which is of one commit.

    Raises:
        HubError: They can neither be fetched nor are in the cache.
    """
    return _fetch(name, name.revision, _CONFIG_FILES)


def fetch_model(name: HubName, config: Path) -> Path:
    """Fetches the weights and the tokenizer of the commit whose JSON files `fetch_config` has fetched.

    Of the weights it takes the files that the index names, and no others that may lie there.

    Returns:
        Their folder, which is `config`.

    Raises:
        HubError: As `fetch_config`, or there are no safetensors.
        WeightError: The index is damaged.
    """
    index = config / INDEX
    weights = sorted(read_index(index)) if index.exists() else [SINGLE]
    folder = _fetch(name, config.name, (*_TOKENIZER_FILES, *weights))
    missing = [file for file in weights if not (folder / file).exists()]
    if missing:
        raise HubError(
            f"{str(name)!r} has no {missing[0]} in the Hugging Face hub's local cache, nor to be fetched. Where the "
            f"hub has pickles alone, {_download(name)} --local-dir DIR` takes them, and `tk convert` makes safetensors"
        )
    return folder


def _download(name: HubName) -> str:
    revision = "" if name.revision is None else f" --revision {name.revision}"
    return f"`hf download {name.repo}{revision}"


def _fetch(name: HubName, revision: str | None, patterns: Sequence[str]) -> Path:
    # Late: few models come from the hub.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        fetched = snapshot_download(
            name.repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
    except LocalEntryNotFoundError as error:
        raise HubError(
            f"{str(name)!r} is not in the Hugging Face hub's local cache ({constants.HF_HUB_CACHE}), or not whole, and "
            f"cannot be fetched: {_in_one_line(error)} To fetch it where there is a network: {_download(name)}`, and "
            "copy the cache's folder here"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:  # the hub's own answer
        raise HubError(f"{str(name)!r} cannot be fetched from the Hugging Face hub: {_in_one_line(error)}") from error
    except Exception as error:  # of its HTTP client, the disk, the connection
        raise HubError(
            f"{str(name)!r} was not wholly fetched from the Hugging Face hub: {type(error).__name__}: "
            f"{_in_one_line(error)} The files that came whole are kept: ask again for the others"
        ) from error
    _check_hashes(name, Path(fetched), patterns)
    return Path(fetched)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_hashes(name: HubName, folder: Path, patterns: Sequence[str]) -> None:
    """Hashes each file once: what was hashed stays written down as long as the file is the same.

    A file in the cache is a link to one that is called by its hash. One that is no link was put there by hand.
    """
    for file in sorted(folder.iterdir()):
        if not (file.is_symlink() and file.exists() and any(fnmatch(file.name, pattern) for pattern in patterns)):
            continue
        blob = file.parent / os.readlink(file)
        status = blob.stat()
        seen = cache_folder() / "hub" / blob.name
        state = f"{os.path.realpath(blob)} {status.st_size} {status.st_mtime_ns}"
        if seen.is_file() and seen.read_text(encoding="utf-8") == state:
            continue
        found = _hash(blob, len(blob.name), status.st_size)
        if found and blob.name not in found:
            file.unlink()
            blob.unlink()
            raise HubError(
                f"{str(name)!r}: {file.name} is damaged: its hash is {found[0]}, and the Hugging Face hub's is "
                f"{blob.name}. It was removed from the cache: ask again, and it is fetched again"
            )
        with contextlib.suppress(OSError):  # it is then hashed each time
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.write_text(state, encoding="utf-8")


def _hash(file: Path, num_digits: int, num_bytes: int) -> list[str]:
    """The hashes of so many hexadecimal digits that a hub names a file by; none where it names files otherwise.

    Large files have their SHA-256, the others git's SHA-1, for which some mirrors of the hub have a plain one.
    """
    kinds = {64: [hashlib.sha256()], 40: [hashlib.sha1(b"blob %d\0" % num_bytes), hashlib.sha1()]}
    hashes = kinds.get(num_digits, [])
    with file.open("rb") as stream:
        while hashes and (chunk := stream.read(_CHUNK_BYTES)):
            for one in hashes:
                one.update(chunk)
    return [one.hexdigest() for one in hashes]
