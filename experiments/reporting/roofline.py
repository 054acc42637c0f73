"""Every timed variant against the device's limits; where those are not known, against arithmetic intensity alone."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from experiments.reporting.arms import select_timed
from experiments.reporting.drawing import Series, draw_series, format_tick, point_without_spread, set_log_ticks
from experiments.reporting.pictures import SOFT, Picture
from experiments.reporting.table_style import group_by
from experiments.runs.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tkernels.roofline import Peaks

NO_ROOFLINE = "no roofline known for this device"
_TERA_FROM = 10_000  # GFLOP/s, from which on the axis is in TFLOP/s


class _Rates(NamedTuple):
    """What a timed variant reached at one point, by the contract's counts."""

    op: str
    variant: str
    point: str
    dtype: str
    flops_per_byte: float | None
    gflop_per_s: float
    gb_per_s: float
    roofline_fraction: float | None
    bound: str | None


def roofline_pictures(
    rows: Sequence[Row], device: str, about: str, rates: Mapping[str, float] | None = None
) -> list[Picture]:
    """All timed rows over their arithmetic intensity: the FLOPs that they reach, and the bytes; none where nothing was
    timed.

    Args:
        rows: Of the kernels stage, merged.
        device: Its name as the driver gives it, by which its peaks are known.
        about: Device, timer and spread, for the caption.
        rates: What a CPU was measured at (`experiments.runs.cpu_rates`): its limits, for no data sheet has them.
    """
    from tkernels.roofline import PEAKS

    records = [_rates_of(row, row.median_us or 0.0) for row in select_timed(rows)]
    computing = [record for record in records if record.gflop_per_s]
    peaks, figures = PEAKS.get(device) or _measured_peaks(rates), [record._asdict() for record in records]
    ending = f" {about}{_explain_limits(rows, peaks)}"
    pictures = []
    if computing:
        caption = f"FLOPs by the contract's own count, over the median time.{ending}"
        title = "Roofline" if peaks else "FLOP/s achieved"
        pictures.append(Picture("roofline", title, caption, figures, lambda one: _draw_flops(one, computing, peaks)))
    if records:
        caption = "Bytes by the contract's own count, each unique byte once, over the median time."
        caption += ' Ops that compute nothing stand at "none".' * (len(computing) < len(records)) + ending
        title = "Bandwidth achieved"
        pictures.append(Picture("bandwidth", title, caption, figures, lambda one: _draw_bytes(one, records, peaks)))
    return pictures


def _measured_peaks(rates: Mapping[str, float] | None) -> "Peaks | None":
    from tkernels.roofline import Peaks

    if not rates:
        return None
    source = "a large copy and a large float32 product, measured on this machine; what its caches hold may be above"
    return Peaks(rates["copy_bytes_per_s"], {"float32": rates["matmul_flops_per_s"]}, source)


def _explain_limits(rows: Sequence[Row], peaks: "Peaks | None") -> str:
    """Where the limits come from, and what has none or is not shown."""
    text = f" Limits: {peaks.source}." if peaks else f" There is {NO_ROOFLINE}."
    if peaks and (unknown := {row.dtype for row in select_timed(rows)} - set(peaks.flops_per_s)):
        text += f" No peak is known for {', '.join(sorted(unknown))}."
    untimed = dict.fromkeys(f"{row.op}.{row.variant}" for row in rows if row.status == "ok" and row.median_us is None)
    return text + (f" Not measured, and so not shown: {', '.join(untimed)}." if untimed else "")


def _rates_of(row: Row, us: float) -> _Rates:
    flops, size = row.flops or 0, row.bytes_moved or 0
    return _Rates(
        str(row.op), str(row.variant), str(row.point), row.dtype, flops / size if size else None, flops / us / 1e3,
        size / us / 1e3, row.roofline_fraction, row.roofline_bound,
    )  # fmt: skip


def _draw_flops(figure: "Figure", records: Sequence[_Rates], peaks: "Peaks | None") -> None:
    dtypes = dict.fromkeys(record.dtype for record in records)
    known = {name: peaks.flops_per_s[name] / 1e9 for name in dtypes if name in peaks.flops_per_s} if peaks else {}
    highest = max(*known.values(), *(record.gflop_per_s for record in records), 0.0)
    scale, unit = (1e3, "TFLOP/s") if highest >= _TERA_FROM else (1.0, "GFLOP/s")
    axes = _draw_rates(figure, records, [record.gflop_per_s / scale for record in records], unit, peaks)
    if peaks is not None:
        roof = {name: peak / scale for name, peak in known.items()}
        _draw_roof(axes, roof, peaks.memory_bytes_per_s / 1e9 / scale, unit)
    _set_ticks(axes)


def _draw_bytes(figure: "Figure", records: Sequence[_Rates], peaks: "Peaks | None") -> None:
    axes = _draw_rates(figure, records, [record.gb_per_s for record in records], "GB/s", peaks)
    if peaks is not None:
        bandwidth, low = peaks.memory_bytes_per_s / 1e9, axes.get_xlim()[0] / 1.3
        axes.axhline(bandwidth, color=SOFT, linewidth=1.2)
        axes.text(low, bandwidth, f" {format_tick(bandwidth)} GB/s of memory", color=SOFT, va="bottom", fontsize=8)
        axes.set_xlim(left=low)
    _set_ticks(axes)
    if any(not record.flops_per_byte for record in records):
        _name_none(axes, _none_at(records))


def _none_at(records: Sequence[_Rates]) -> float:
    """Where ops that compute nothing stand: left of all that do."""
    return min((record.flops_per_byte for record in records if record.flops_per_byte), default=4.0) / 4


def _draw_rates(
    figure: "Figure", records: Sequence[_Rates], rates: Sequence[float], unit: str, peaks: "Peaks | None"
) -> "Axes":
    """A mark for each record, on logarithmic axes."""
    variants = group_by(zip(records, rates, strict=True), lambda pair: (pair[0].op, pair[0].variant))
    ops = [op for op, _ in variants]
    none_at = _none_at(records)
    lines = []
    for (op, variant), mine in variants.items():
        # What tells it apart: the variant where there is one op, the op where it has one variant.
        name = variant if len(set(ops)) == 1 else op if ops.count(op) == 1 else f"{op}.{variant}"
        points = tuple(point_without_spread(record.flops_per_byte or none_at, rate) for record, rate in mine)
        lines.append(Series(name, points, joined=False))
    axes = draw_series(figure, lines, "arithmetic intensity, FLOP per byte", f"{unit}, by the contract's count")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.06, 0.1)
    if peaks is None:
        axes.text(0.99, 0.03, NO_ROOFLINE, transform=axes.transAxes, ha="right", color=SOFT, style="italic")
    return axes


def _draw_roof(axes: "Axes", peaks: Mapping[str, float], slope: float, unit: str) -> None:
    """A line for each dtype's peak, whose slope is the memory's; that alone where no peak is known."""
    low, high = axes.get_xlim()
    low /= 1.3
    if not peaks:
        axes.plot([low, high], [low * slope, high * slope], color=SOFT, linewidth=1.2)
    for place, (dtype, peak) in enumerate(peaks.items()):
        ridge = peak / slope
        high = max(high, ridge * 4)
        dashes = ("-", "--", ":")[place % 3]
        axes.plot([low, ridge, high], [low * slope, peak, peak], color=SOFT, linewidth=1.2, linestyle=dashes)
        axes.text(high, peak, f"{peak:,.4g} {unit}, {dtype} ", color=SOFT, ha="right", va="bottom", fontsize=8)
    axes.set_xlim(low, high)


def _set_ticks(axes: "Axes") -> None:
    set_log_ticks(axes.yaxis)
    set_log_ticks(axes.xaxis)


def _name_none(axes: "Axes", place: float) -> None:
    """A tick for ops that compute nothing, left of all that do."""
    low, high = min(axes.get_xlim()[0], place / 1.6), axes.get_xlim()[1]
    ticks = [tick for tick in axes.get_xticks() if place * 1.5 < tick < high]
    axes.set_xticks([place, *ticks], ["none", *map(format_tick, ticks)])
    axes.set_xlim(low, high)
