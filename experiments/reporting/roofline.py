"""Every timed variant against the device's limits; where those are not known, against arithmetic intensity alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.reporting.pictures import (
    INK,
    PAPER,
    SOFT,
    WIDTH,
    Picture,
    compact,
    legend,
    legend_rows,
    log_ticks,
    look,
)
from experiments.runs.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tkernels.roofline import Peaks

NO_ROOFLINE = "no roofline known for this device"
_COLUMNS = (
    "op",
    "variant",
    "point",
    "dtype",
    "flops_per_byte",
    "gflop_per_s",
    "gb_per_s",
    "roofline_fraction",
    "bound",
)
_INTENSITY, _GFLOPS, _GBYTES = 4, 5, 6
_TERA_FROM = 10_000  # GFLOP/s, from which on the axis is in TFLOP/s


def roofline_pictures(rows: Sequence[Row], device: str, about: str) -> list[Picture]:
    """All timed rows over their arithmetic intensity: the FLOPs that they reach, and the bytes; none where nothing was
    timed.

    Args:
        rows: of the kernels stage, merged.
        device: its name as the driver gives it, by which its peaks are known.
        about: device, timer and spread, for the caption.
    """
    from tkernels.roofline import PEAKS

    timed = [row for row in rows if row.status == "ok" and row.median_us is not None]
    if not timed:
        return []
    records = tuple(_record(row) for row in timed)
    peaks = PEAKS.get(device)
    untimed = list(dict.fromkeys(f"{r.op}.{r.variant}" for r in rows if r.status == "ok" and r.median_us is None))
    ending = f" {about}" + (f" Limits: {peaks.source}." if peaks else f" There is {NO_ROOFLINE}.")
    unknown = sorted({record[3] for record in records} - set(peaks.flops_per_s)) if peaks else []
    if unknown:
        ending += f" No peak is known for {', '.join(unknown)}."
    if untimed:
        ending += f" Not measured, and so not shown: {', '.join(untimed)}."
    computing = tuple(record for record in records if record[_GFLOPS])
    pictures = []
    if computing:
        caption = f"FLOPs by the contract's own count, over the median time.{ending}"
        title = "Roofline" if peaks else "FLOP/s achieved"
        pictures.append(Picture("roofline", title, caption, _COLUMNS, records, _drawing(computing, peaks, flops=True)))
    caption = "Bytes by the contract's own count, each unique byte once, over the median time."
    if len(computing) < len(records):
        caption += ' Ops that compute nothing stand at "none".'
    draw = _drawing(records, peaks, flops=False)
    pictures.append(Picture("bandwidth", "Bandwidth achieved", caption + ending, _COLUMNS, records, draw))
    return pictures


def _record(row: Row) -> tuple[Any, ...]:
    assert row.median_us is not None
    assert row.bytes_moved is not None
    assert row.flops is not None
    intensity = row.flops / row.bytes_moved if row.bytes_moved else None
    rates = (row.flops / row.median_us / 1e3, row.bytes_moved / row.median_us / 1e3)
    about = (row.op, row.variant, row.point, row.dtype)
    return (*about, intensity, *rates, row.roofline_fraction, row.roofline_bound)


def _names(records: Sequence[tuple[Any, ...]]) -> dict[tuple[str, str], str]:
    """(op, variant) -> what tells it apart: the variant where there is one op, the op where it has one variant."""
    keys = list(dict.fromkeys((str(record[0]), str(record[1])) for record in records))
    ops = [op for op, _ in keys]
    if len(set(ops)) == 1:
        return {key: key[1] for key in keys}
    return {key: key[0] if ops.count(key[0]) == 1 else f"{key[0]}.{key[1]}" for key in keys}


def _drawing(records: Sequence[tuple[Any, ...]], peaks: "Peaks | None", *, flops: bool) -> Callable[["Figure"], None]:
    column = _GFLOPS if flops else _GBYTES
    dtypes = list(dict.fromkeys(str(record[3]) for record in records))
    known = {name: peaks.flops_per_s[name] / 1e9 for name in dtypes if name in peaks.flops_per_s} if peaks else {}
    highest = max([*known.values(), *(record[column] for record in records)])
    scale, unit = (1e3, "TFLOP/s") if flops and highest >= _TERA_FROM else (1.0, "GFLOP/s" if flops else "GB/s")

    def draw(figure: "Figure") -> None:
        names = _names(records)
        styles = {key: look(index) for index, key in enumerate(names)}
        figure.set_size_inches(WIDTH, 3.1 + 0.17 * legend_rows(list(names.values())))
        axes = figure.subplots()
        positive = [record[_INTENSITY] for record in records if record[_INTENSITY]]
        none_at = min(positive, default=4.0) / 4
        for key, style in styles.items():
            mine = [record for record in records if (record[0], record[1]) == key]
            places = [record[_INTENSITY] or none_at for record in mine]
            rates = [record[column] / scale for record in mine]
            axes.plot(places, rates, linestyle="none", markeredgecolor=PAPER, markeredgewidth=0.5, **style)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.margins(0.06, 0.1)
        axes.set_title(f"{unit}, by the contract's count", color=INK)
        if peaks is None:
            axes.text(0.99, 0.03, NO_ROOFLINE, transform=axes.transAxes, ha="right", color=SOFT, style="italic")
        else:
            _limits(axes, peaks, {name: peak / scale for name, peak in known.items()} if flops else None, scale, unit)
        axes.set_xlabel("arithmetic intensity, FLOP per byte")
        log_ticks(axes.yaxis)
        log_ticks(axes.xaxis)
        if len(positive) < len(records):
            _none(axes, none_at)
        legend(figure, [(name, {**styles[key], "linestyle": "none"}) for key, name in names.items()])

    return draw


def _none(axes: "Axes", place: float) -> None:
    """A tick for ops that compute nothing, left of all that do."""
    low, high = min(axes.get_xlim()[0], place / 1.6), axes.get_xlim()[1]
    ticks = [tick for tick in axes.get_xticks() if place * 1.5 < tick < high]
    axes.set_xticks([place, *ticks], ["none", *map(compact, ticks)])
    axes.set_xlim(low, high)


def _limits(axes: "Axes", peaks: "Peaks", flops: Mapping[str, float] | None, scale: float, unit: str) -> None:
    """The roof: a line for each dtype's peak, whose slope is the memory's; of bytes (None), the memory's bandwidth."""
    bandwidth = peaks.memory_bytes_per_s / 1e9
    slope = bandwidth / scale
    low, high = axes.get_xlim()
    low /= 1.3
    if flops is None:
        axes.axhline(bandwidth, color=SOFT, linewidth=1.2)
        axes.text(low, bandwidth, f" {compact(bandwidth)} {unit} of memory", color=SOFT, va="bottom", fontsize=8)
    elif not flops:  # the memory's limit is known, and no peak of this dtype
        axes.plot([low, high], [low * slope, high * slope], color=SOFT, linewidth=1.2)
    for place, (dtype, peak) in enumerate((flops or {}).items()):
        ridge = peak / slope
        high = max(high, ridge * 4)
        dashes = ("-", "--", ":")[place % 3]
        axes.plot([low, ridge, high], [low * slope, peak, peak], color=SOFT, linewidth=1.2, linestyle=dashes)
        axes.text(high, peak, f"{peak:,.4g} {unit}, {dtype} ", color=SOFT, ha="right", va="bottom", fontsize=8)
    axes.set_xlim(low, high)
