"""What a command line chooses by name: variants of a registry, axes, configs, a device."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import tkernels
from experiments.document import ExperimentError
from experiments.peers import KERNELS
from experiments.reporting.table_style import format_value
from tkernels import Config, ContractError, Registry, UnknownNameError, VariantError
from tkernels.contract import Axes, Contract, Int, Value
from tkernels.measurement import realistic_point
from tkernels.outside import broken_files
from tkernels.silence import silenced
from tkernels.variant import Op, Variant
from tsched.torch_free import suggest_name

CUDA = torch.device("cuda")
_WHOLE_NUMBER = re.compile("-?[0-9]+")


def open_registry(folders: Sequence[Path]) -> Registry:
    """The built-in ops and the variants of each folder, less those whose files are broken, which are unavailable.

    Raises:
        ExperimentError: A folder is none, or defines again what there is.
    """
    ops, broken = tkernels.OPS, broken_files(folders)
    for folder in folders:
        try:
            with silenced():
                ops = ops.with_variants_from(folder, broken)
        except (VariantError, ContractError) as error:
            raise ExperimentError([f"--variants-from: {error}"]) from None
    return ops


def find_op(ops: Registry, name: str) -> Op:
    """The op of that name; ExperimentError with the nearest where there is none."""
    try:
        return ops[name]
    except UnknownNameError as error:
        raise _unknown(ops, error) from None


def _unknown(ops: Registry, error: UnknownNameError) -> ExperimentError:
    """A name that is nowhere, with the outside folders that it could have been in and what of them was left out."""
    given = [str(folder) for folder in ops.folders if folder != KERNELS]
    folders = f"; --variants-from {' '.join(given)} was looked in too" if given else ""
    left_out = [f"--variants-from: {line}" for reason in ops.broken.values() for line in reason.splitlines()]
    return ExperimentError([f"{error}{folders}", *dict.fromkeys(left_out)])


def choose_variants(ops: Registry, op: str | None, variant: str | None) -> list[Variant]:
    """The variants of one op or of all, all of them or those of one name.

    Raises:
        ExperimentError: A name is unknown, or any of the variants is unavailable.
    """
    _refuse_broken(ops, op, variant)
    try:
        if op is not None:
            variants = ops[op].variants
            return list(variants.values()) if variant is None else [variants[variant]]
    except UnknownNameError as error:
        raise _unknown(ops, error) from None
    every = [one for each in ops.values() for one in each.variants.values()]
    found = [one for one in every if variant in (None, one.name)]
    if not found:
        known = sorted({one.name for one in every})
        raise ExperimentError([f"no op has a variant {variant!r}; there is {', '.join(known)}"])
    return found


def _refuse_broken(ops: Registry, op: str | None, variant: str | None) -> None:
    """Raises ExperimentError where a file that would be one of these variants is broken."""
    named = {file: reason for file, reason in ops.broken.items() if op in (None, file.parent.name)}
    reasons = [reason for file, reason in named.items() if variant in (None, file.stem)]
    problems = [f"--variants-from: {line}" for reason in reasons for line in reason.splitlines()]
    if problems:
        raise ExperimentError(list(dict.fromkeys(problems)))


def only_contract(variants: Sequence[Variant], options: str) -> Contract:
    """The contract of the one op that the variants are of; ExperimentError names the options that need it."""
    first, *others = {variant.contract.name: variant.contract for variant in variants}.values()
    if others:
        raise ExperimentError([f"{options} belong to one op: name it with --op"])
    return first


def parse_axes(contract: Contract, text: str, option: str = "--axes") -> dict[str, Value]:
    """ "T=3,activation=float16" -> values of the contract's axes; ExperimentError names what is not one."""
    axes: dict[str, Value] = {}
    for name, value in _pairs(option, text):
        axis = contract.axis_by_name.get(name)
        if axis is None:
            known = contract.axis_by_name
            message = f"{contract.name} has no axis {name!r}: there is {', '.join(known)}{suggest_name(name, known)}"
            raise ExperimentError([f"{option}: {message}"])
        if isinstance(axis, Int):
            parsed: Value | None = int(value) if _WHOLE_NUMBER.fullmatch(value) else None
        else:
            parsed = axis.parse(value)
        if parsed is None or not axis.allows(parsed):
            raise ExperimentError([f"{option}: {name}={value}, but {axis.rule}"])
        axes[name] = parsed
    return axes


def parse_point(contract: Contract, text: str, option: str, device: torch.device = CUDA) -> dict[str, Value]:
    """All axes of a point of which `text` names some: the others are a realistic point's, cut down where the device is
    a CPU.
    """
    try:
        return realistic_point(contract, parse_axes(contract, text, option), device)
    except ContractError as error:
        raise ExperimentError([f"{option}: {error}"]) from None


def describe_open_axes(text: str, axes: Axes) -> str:
    """What of a point `text` did not name, for people to read beneath its figures; "" where it named every axis."""
    named = {name for name, _ in _pairs("--axes", text)}
    filled = [f"{name}={format_value(value)}" for name, value in axes.items() if name not in named]
    return f"The other axes are {', '.join(filled)}." if filled else ""


def parse_config(variant: Variant, text: str) -> Config:
    """ "BLOCK_N=64,num_warps=8" over the variant's default config."""
    if variant.launch is None:
        raise ExperimentError([f"--config: {variant.contract.name}.{variant.name} has no config"])
    pins: dict[str, int] = {}
    for name, value in _pairs("--config", text):
        if not _WHOLE_NUMBER.fullmatch(value):
            raise ExperimentError([f"--config: {name} must be a number, got {value!r}"])
        pins[name] = int(value)
    try:
        return variant.default[""].pinned(pins)
    except ValueError as error:
        raise ExperimentError([f"--config: {error}"]) from None


def _pairs(option: str, text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise ExperimentError([f"{option}: {part!r} must be name=value, several separated by commas"])
        yield name.strip(), value.strip()


def cuda_device(name: str, command: str) -> torch.device:
    """The CUDA device of that name; an ExperimentError says what is missing."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ExperimentError([f"--device {name}: not a device; cuda or cuda:1 is meant"]) from None
    if device.type != "cuda":
        raise ExperimentError([f"--device {name}: {command} times kernels on a CUDA device"])
    if not torch.cuda.is_available():
        build = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU or no driver"
        raise ExperimentError([f"{command} needs a CUDA device, and there is none here: {build}"])
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ExperimentError([f"--device {name}: there are {torch.cuda.device_count()} devices here"])
    return torch.device("cuda", index)


@dataclass(frozen=True)
class Subject:
    """A variant that is checked, and what is held while its cases are drawn: axes, and a config where one is given."""

    variant: Variant
    axes: Axes
    config: Config | None

    @property
    def title(self) -> str:
        return f"{self.variant.contract.name}.{self.variant.name}"

    @property
    def is_one_case(self) -> bool:
        """Whether the axes leave nothing to draw: one case is replayed."""
        return self.axes.keys() == self.variant.contract.axis_by_name.keys()


def choose_subjects(variants: Sequence[Variant], axes: str | None, config: str | None) -> list[Subject]:
    """The variants with what "T=3,..." and "BLOCK_N=64,..." hold; ExperimentError where these are not theirs."""
    contract = only_contract(variants, "--axes and --config") if axes or config else variants[0].contract
    held = parse_axes(contract, axes) if axes else {}
    return [Subject(variant, held, parse_config(variant, config) if config else None) for variant in variants]


def case_size(axes: Axes) -> int:
    """How large a case is, for the smallest to be shown first: the product of its sizes."""
    return math.prod(max(1, one) for one in axes.values() if isinstance(one, int) and not isinstance(one, bool))
