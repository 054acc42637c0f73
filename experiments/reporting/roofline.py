"""Every timed variant against the device's limits; where those are not known, against arithmetic intensity alone."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.reporting.pictures import INK, PAPER, SOFT, WIDTH, Picture, compact, legend, log_ticks, look
from experiments.rows import KernelRow

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


def roofline_picture(rows: Sequence[KernelRow], device: str, about: str) -> Picture | None:
    """All timed rows on one picture; None where nothing was timed.

    Args:
        rows: of the kernels stage, merged.
        device: its name as the driver gives it, by which its peaks are known.
        about: device, timer and spread, for the caption.
    """
    from tkernels.roofline import PEAKS

    timed = [row for row in rows if row.status == "ok" and row.median_us is not None]
    if not timed:
        return None
    records = tuple(_record(row) for row in timed)
    peaks = PEAKS.get(device)
    untimed = list(dict.fromkeys(f"{r.op}.{r.variant}" for r in rows if r.status == "ok" and r.median_us is None))
    caption = f"Achieved rates by the contract's own counts of bytes (each unique byte once) and FLOPs. {about}"
    caption += f" Limits: {peaks.source}." if peaks else f" There is {NO_ROOFLINE}."
    if untimed:
        caption += f" Not measured, and so not shown: {', '.join(untimed)}."
    if any(not record[4] for record in records):
        caption += ' Ops that compute nothing stand at "none".'

    def draw(figure: "Figure") -> None:
        _draw(figure, records, peaks)

    return Picture("roofline", "Roofline" if peaks else "Achieved rates", caption, _COLUMNS, records, draw)


def _record(row: KernelRow) -> tuple[Any, ...]:
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


def _draw(figure: "Figure", records: Sequence[tuple[Any, ...]], peaks: "Peaks | None") -> None:
    names = _names(records)
    figure.set_size_inches(WIDTH, 5.0 + 0.17 * max(0, len(names) - 6) / 2)
    flops, bytes_ = figure.subplots(2, 1, sharex=True)
    styles: dict[tuple[str, str], Mapping[str, Any]] = {key: look(index) for index, key in enumerate(names)}
    positive = [record[4] for record in records if record[4]]
    none_at = min(positive) / 4 if positive else 1.0
    for axes, column, unit in ((flops, 5, "GFLOP/s"), (bytes_, 6, "GB/s")):
        for key, style in styles.items():
            mine = [r for r in records if (r[0], r[1]) == key and r[column] > 0]
            places = [r[4] or none_at for r in mine]
            axes.plot(
                places, [r[column] for r in mine], linestyle="none", markeredgecolor=PAPER, markeredgewidth=0.5, **style
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.margins(0.06, 0.1)
        axes.set_title(f"{unit} achieved", color=INK)
    flops.tick_params(labelbottom=False)
    if peaks is None:
        for axes in (flops, bytes_):
            axes.text(0.99, 0.03, NO_ROOFLINE, transform=axes.transAxes, ha="right", color=SOFT, style="italic")
    else:
        _limits(flops, bytes_, peaks, list(dict.fromkeys(str(record[3]) for record in records)))
    bytes_.set_xlabel("arithmetic intensity, FLOP per byte")
    for axis in (flops.yaxis, bytes_.yaxis, bytes_.xaxis):
        log_ticks(axis)
    if len(positive) < len(records):
        bytes_.set_xlim(left=none_at / 1.6)
        ticks = [tick for tick in bytes_.get_xticks() if tick > none_at * 1.5]
        low, high = bytes_.get_xlim()
        bytes_.set_xticks([none_at, *ticks], ["none", *map(compact, ticks)])
        bytes_.set_xlim(low, high)
    entries = [(name, {**styles[key], "linestyle": "none"}) for key, name in names.items()]
    legend(figure, entries)


def _limits(flops: "Axes", bytes_: "Axes", peaks: "Peaks", dtypes: Sequence[str]) -> None:
    """The roof over each panel: a line for each dtype's peak, whose slope is the memory's."""
    bandwidth = peaks.memory_bytes_per_s / 1e9
    low, high = bytes_.get_xlim()
    low /= 1.3
    for place, dtype in enumerate(one for one in dtypes if one in peaks.flops_per_s):
        peak = peaks.flops_per_s[dtype] / 1e9
        ridge = peak / bandwidth
        high = max(high, ridge * 4)
        dashes = ("-", "--", ":")[place % 3]
        flops.plot([low, ridge, high], [low * bandwidth, peak, peak], color=SOFT, linewidth=1.2, linestyle=dashes)
        flops.text(high, peak, f"{compact(peak)} GFLOP/s, {dtype} ", color=SOFT, ha="right", va="bottom", fontsize=8)
    bytes_.axhline(bandwidth, color=SOFT, linewidth=1.2)
    bytes_.text(low, bandwidth, f" {compact(bandwidth)} GB/s of memory", color=SOFT, va="bottom", fontsize=8)
    bytes_.set_xlim(low, high)
