"""Runs a variant on a case and says whether it is right: oracle, error rule, poisons, sanitizers, untouched memory."""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tkernels.config import Config
from tkernels.contract import Axes, Case, Contract, unpack
from tkernels.device import device_facts
from tkernels.inputs import clone_inputs, outside_views, tensors_in, widen_floats
from tkernels.launch import Door
from tkernels.mode import MODE
from tkernels.preparation import prepared_case
from tkernels.tuning import NEAREST
from tkernels.variant import UnsupportedError, Variant
from tkernels.verification.accuracy import LUCK, Verdict, judge
from tkernels.verification.calls import NotZeroError, call, same_bits, wanted_outputs
from tkernels.verification.draws import drawn_cases, wide_cases
from tkernels.verification.kernel_errors import describe_error
from tkernels.verification.offsets import check_offsets

_BUILTIN = Path(__file__).parents[1]  # the tkernels package

BASELINE_SLACK = 4.0
"""How far beyond the error rule torch itself may be from the definition evaluated step by step at the same dtype, which
is right by luck as well as by rule where there are few elements. A baseline on SDPA, whose CPU exp has 20 bits, came to
1.14 times the rule in fp32; a wrong mask or scale comes to thousands."""


@dataclass(frozen=True)
class CheckResult:
    """A case's verdict. status: ok, wrong, unsupported or failed (it raised), with the reason for all but ok."""

    op: str
    variant: str
    axes: Axes
    seed: int
    config: Config | None
    status: str
    reason: str = ""
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    variants_from: Path | None = None
    captured: Path | None = None  # the file of a model's call that this was a check on, in the place of axes and a seed

    @property
    def max_ratio(self) -> float | None:
        """The largest error over its allowance of any output; at most 1 in a case that is ok."""
        return max((v.max_ratio for v in self.verdicts.values()), default=None)

    @property
    def rms_ratio(self) -> float | None:
        ratios = [v.rms_ratio for v in self.verdicts.values() if v.rms_ratio is not None]
        return max(ratios, default=None)

    @property
    def may_be_luck(self) -> bool:
        """Whether it is wrong by the error rule alone, and by a little: see `LUCK`."""
        misses = [ratio for ratio in (self.max_ratio, self.rms_ratio) if ratio is not None]
        return self.status == "wrong" and not self.reason and max(misses, default=math.inf) <= LUCK

    @property
    def replay(self) -> str:
        """The one command that runs this case again."""
        if self.captured is not None:
            return replay_captured(self.captured, self.variant, self.variants_from)
        return replay_command(self.op, self.variant, self.axes, self.seed, self.config, self.variants_from)

    def __str__(self) -> str:
        lines = [f"{self.op}.{self.variant}: {self.status}{': ' + self.reason if self.reason else ''}"]
        for name, verdict in self.verdicts.items():
            if not verdict.ok:
                where = f"{name}{list(verdict.index)}: expected {verdict.expected:.9g}, got {verdict.got:.9g}"
                lines.append(f"  {where} ({verdict.reason}; error / allowed = {verdict.max_ratio:.3g})")
        return "\n".join([*lines, f"  replay: {self.replay}"])


def replay_command(
    op: str,
    variant: str,
    axes: Axes,
    seed: int,
    config: Config | None,
    variants_from: Path | None,
    sanitizer: str | None = None,
) -> str:
    """The one command that puts a variant on this case again, under a sanitizer where one is named."""
    points = ",".join(f"{name}={value}" for name, value in axes.items())
    pins = ",".join(f"{name}={value}" for name, value in config.as_dict().items()) if config is not None else ""
    what = f" --sanitize {sanitizer}" if sanitizer else ""
    outside = f" --variants-from {shlex.quote(str(variants_from))}" if variants_from else ""
    pinned = f" --config {pins}" if pins else ""
    return f"tk check{what}{outside} --op {op} --variant {variant} --axes {points} --seed {seed}{pinned}"


def replay_captured(file: Path, variant: str, variants_from: Path | None) -> str:
    """The one command that puts a variant on a captured call again."""
    outside = f" --variants-from {shlex.quote(str(variants_from))}" if variants_from else ""
    return f"tk check{outside} --call {shlex.quote(str(file))} --variant {variant}"


def outside_folder(variant: Variant) -> Path | None:
    """The folder that `--variants-from` must name for this variant to be there; None for a built-in one."""
    return None if _BUILTIN in variant.file.parents else variant.file.parent.parent


def check_case(
    variant: Variant,
    case: Case,
    config: Config | None = None,
    door: Door | None = None,
    slack: float = 1.0,
    offsets: bool = True,
) -> CheckResult:
    """Checks one variant at one point. `config` overrides the resolved one; `door` the sanitizing default.

    slack: what the error rule's allowance is multiplied by: 1 for every variant of this project's.
    offsets: whether the interpreter also runs it on strides faked past 2**31, in hundreds of GiB of address space.
    """
    contract = case.contract
    try:
        case = prepared_case(variant, case)
    except (Exception, SystemExit) as error:
        is_refused = isinstance(error, UnsupportedError)
        outcome = ("unsupported", str(error)) if is_refused else ("failed", describe_error(error))
        return CheckResult(
            contract.name, variant.name, case.axes, case.seed, config, *outcome, {}, outside_folder(variant)
        )
    arguments = contract.bind_arguments((), case.inputs)
    axes, device = contract.bind_axes(arguments)
    facts = device_facts(device)
    if variant.kind == "triton" and config is None:
        config = NEAREST.resolve(variant, axes, facts)
    named = (contract.name, variant.name, case.axes, case.seed, config)
    if reason := variant.unsupported_reason(axes, device, facts):
        return CheckResult(*named, "unsupported", reason, {}, outside_folder(variant))
    status, fault, verdicts = _run_and_judge(variant, arguments, case.loaded, axes, config, door, slack)
    if status == "ok" and offsets and (fault := _offsets_fault(variant, case, config)):
        status = "failed"
    return CheckResult(*named, status, fault, verdicts, outside_folder(variant))


def _run_and_judge(
    variant: Variant,
    arguments: Mapping[str, Any],
    loaded: Mapping[str, Any],
    axes: Axes,
    config: Config | None,
    door: Door | None,
    slack: float,
) -> tuple[str, str, Mapping[str, Verdict]]:
    """(status, reason, verdicts) of one call on copies of the arguments, of which the definition reads those of
    `loaded` as they were before the variant prepared them.
    """
    contract, mine = variant.contract, clone_inputs(arguments)
    before = outside_views(mine, (*contract.writes, *contract.consumes))
    try:
        got = call(variant, mine, config, door=door, watch_zeroed=True)
    except NotZeroError as error:
        return "wrong", str(error), {}
    except (Exception, SystemExit) as error:  # a launcher that exits must not end us, least of all with status 0
        return "failed", describe_error(error), {}
    if reason := _changed_outside(contract, before, arguments, mine) or _misshapen_output(contract, axes, got):
        return "wrong", reason, {}
    verdicts, reason = judge_results(variant, {**arguments, **loaded}, axes, got, slack)
    is_right = not reason and all(verdict.ok for verdict in verdicts.values())
    return "ok" if is_right else "wrong", reason, verdicts


def _offsets_fault(variant: Variant, case: Case, config: Config | None) -> str:
    """What goes wrong in an interpreted kernel on faked strides; "" for nothing."""
    if MODE != "interpret" or variant.launch is None or config is None:
        return ""
    try:
        check_offsets(variant, case, config)
    except (Exception, SystemExit) as error:
        return f"offsets, on strides faked to 2**30: {describe_error(error)}"
    return ""


def _changed_outside(
    contract: Contract, before: Mapping[int, torch.Tensor], arguments: Mapping[str, Any], after: Mapping[str, Any]
) -> str:
    """Where a call changed memory outside what the op writes; "" for nowhere.

    Args:
        before: `outside_views` of the arguments that the call got.
        arguments: What these were copies of.
        after: They themselves, after the call.
    """
    written = (*contract.writes, *contract.consumes)
    outside = outside_views(after, written)
    changed = [address for address, whole in before.items() if not torch.equal(whole, outside[address])]
    if not changed:
        return ""
    elements, beside = [], []
    for name in arguments:
        old, new = tensors_in({name: arguments[name]}), tensors_in({name: after[name]})
        if any(tensor.untyped_storage().data_ptr() in changed for tensor in new):
            beside.append(name)
        if name not in written and not all(map(same_bits, old, new)):
            elements.append(name)
    where = "" if elements else "between or beyond the elements of "
    where += f"argument {' and '.join(map(repr, elements or beside))}"
    return f"memory outside what the op writes was changed: {where}"


def _misshapen_output(contract: Contract, axes: Axes, got: Mapping[str, torch.Tensor]) -> str:
    """Which output has another shape than the contract says; "" for none."""
    for name, output in contract.outputs.items():
        if name in got and (expected := [dim.size(axes) for dim in output.shape]) != list(got[name].shape):
            return f"output {name!r} has shape {list(got[name].shape)}, not {expected}"
    return ""


def _call_definition(contract: Contract, arguments: dict[str, Any], function: Any) -> dict[str, torch.Tensor]:
    """Every output and written argument of a reference-like function, by name."""
    results = unpack(function(**arguments))
    named = dict(zip(wanted_outputs(contract, arguments), results, strict=True))
    return named | {name: arguments[name] for name in contract.writes}


def judge_results(
    variant: Variant, arguments: Mapping[str, Any], axes: Axes, got: Mapping[str, torch.Tensor], slack: float = 1.0
) -> tuple[dict[str, Verdict], str]:
    """The error rule for what one call returned and wrote.

    Args:
        arguments: Every parameter by name, as they were before the call; they are left as they are.
        axes: As the contract binds them from these.
        got: Each output that the call asks for and each written argument.
        slack: What the rule's allowance is multiplied by.

    Returns:
        The verdict on each of them, and "" or the reason why there is none to give.
    """
    contract = variant.contract
    original = widen_floats({name: arguments[name] for name in contract.writes})
    oracle = _call_definition(contract, widen_floats(arguments), contract.reference)
    left_out = contract.options_left_out_by(contract.baseline)
    if set_ones := sorted(set(left_out).intersection(contract.set_options(axes))):
        return {}, f"nothing measures the natural error: {contract.name}'s baseline does not take {', '.join(set_ones)}"
    plain = {name: value for name, value in arguments.items() if name not in left_out}
    baseline = _call_definition(contract, clone_inputs(plain), contract.baseline)
    # The baseline measures natural error only if it is itself right. The definition, evaluated at the working dtype,
    # rounds after every operation, so no right baseline is much worse than it.
    stepwise = _call_definition(contract, clone_inputs(arguments), contract.reference)
    verdicts: dict[str, Verdict] = {}
    for name, wide in oracle.items():
        expected = wide.double()
        exact = name in contract.outputs and contract.outputs[name].exact
        natural = judge(baseline[name], expected, stepwise[name], BASELINE_SLACK, exact)
        if not natural.ok:
            return {name: natural}, f"the baseline itself is wrong in {name!r}: {natural.reason}"
        verdict = natural if variant.kind == "torch" else judge(got[name], expected, baseline[name], slack, exact)
        if verdict.ok and name in contract.writes:
            verdict = _moved_element(original[name].double(), expected, got[name].double()) or verdict
        verdicts[name] = verdict
    return verdicts, ""


def _moved_element(start: torch.Tensor, expected: torch.Tensor, end: torch.Tensor) -> Verdict | None:
    """The verdict on an element of a written argument that must stay as it was and did not; None where all stayed."""
    untouched = (expected == start) | (torch.isnan(expected) & torch.isnan(start))
    moved = untouched & (end != start) & ~torch.isnan(start)
    if not moved.any():
        return None
    index = tuple(int(i) for i in moved.nonzero()[0])
    reason = "an element that must stay was changed"
    return Verdict(False, math.inf, None, index, float(start[index]), float(end[index]), reason)


def drawn_results(
    variant: Variant,
    examples: int,
    seed: int = 0,
    fixed: Axes | None = None,
    config: Config | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[CheckResult]:
    """Checks a variant on seeded draws, one result each. `fixed` axes are held; `config` replaces the drawn ones."""
    for case, drawn_config in drawn_cases(variant, examples, seed, fixed, device):
        yield check_case(variant, case, config if config is not None else drawn_config)


def wide_results(
    variant: Variant,
    seed: int = 0,
    fixed: Axes | None = None,
    config: Config | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[CheckResult]:
    """Checks a variant on its wide cases, one result each; their offsets are the ordinary draws', which are checked."""
    for case, chosen in wide_cases(variant, seed, fixed, config, device):
        yield check_case(variant, case, chosen, offsets=False)
