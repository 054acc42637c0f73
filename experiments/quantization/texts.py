"""Text files as a model's tokens: what it is calibrated on, and what it is judged by."""

from pathlib import Path

import torch

from experiments.document import ExperimentError
from tsched.requests.tokenizer import load_tokenizer


def read_text(file: Path, option: str) -> str:
    """The text in `file`; an ExperimentError that names `option` where it is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ExperimentError([f"{option} {file}: no such file"]) from None
    except IsADirectoryError:
        raise ExperimentError([f"{option} {file}: is a folder, not a text file"]) from None
    except UnicodeDecodeError as error:
        raise ExperimentError([f"{option} {file}: is not UTF-8 text: {error}"]) from None
    if not text.strip():
        raise ExperimentError([f"{option} {file}: is empty"])
    return text


def tokenize_text(text: str, directory: Path) -> torch.Tensor:
    """[T] int64, by the tokenizer in the model's `directory`, with no special tokens."""
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ExperimentError([f"{directory}: has no tokenizer, and texts have to become its tokens"])
    # The backend's own encode warns of no length: windows are cut from the tokens afterwards.
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
