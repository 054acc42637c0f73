"""Arms and variants side by side, where no curve has them all: a dot each, with its spread."""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.reporting.arms import swept_names, title_of
from experiments.reporting.pictures import INK, PAPER, SERIES, SOFT, WIDTH, Picture, compact, label, legend, log_ticks
from experiments.reporting.points import quartiles
from experiments.runs.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 40
"""Dots of a picture: of each group the best, and the first, which the others are beside. All are in the CSV."""

_MOST_MARKS = 50
_LINE = 0.24  # inches of height for each line of a picture
_WAITS = {"ttft_s": "time to first token", "tpot_s": "time per output token", "gap_s": "gap between two tokens"}


@dataclass(frozen=True)
class _Dot:
    """values: the median alone, or p50, p90 and p99. low, high: its quartiles. samples: what these are of, if shown."""

    group: str
    name: str
    values: tuple[float, ...]
    low: float
    high: float
    samples: tuple[float, ...] = ()


def throughput_picture(rows: Sequence[Row], about: str) -> Picture | None:
    """Tokens per second of every arm and peer, workload by workload; None where fewer than two were timed."""
    dots = []
    for row, name in _served(rows):
        assert row.tokens_per_s is not None
        rates = tuple((row.output_tokens or 0) / second for second in row.seconds or ())
        low, high = quartiles(rates, row.tokens_per_s, row.tokens_per_s_iqr)
        dots.append(_Dot(str(row.workload), name, (row.tokens_per_s,), low, high, rates))
    marks = "; small marks: what they are of" if any(map(_marked, dots)) else ""
    return _picture("throughput", "Output tokens per second", "tokens/s", dots, f"Bars: quartiles{marks}. {about}")


def _marked(dot: _Dot) -> bool:
    """Whether its samples are few enough to be drawn."""
    return 1 < len(dot.samples) <= _MOST_MARKS


def waiting_pictures(
    rows: Sequence[Row], about: str, on_curves: Collection[str] = ()
) -> list[Picture]:  # fmt: skip
    """What users wait for: p50, p90 and p99 of every arm and peer; but of columns that curves show in full."""
    pictures = []
    for field, title in _WAITS.items():
        if field in on_curves:
            continue
        dots = []
        for row, name in _served(rows):
            if waits := getattr(row, field):
                values = tuple(waits[key] * 1e3 for key in ("p50", "p90", "p99"))
                dots.append(_Dot(str(row.workload), name, values, values[0], values[-1]))
        stem = f"waiting-{field.removesuffix('_s')}"
        capital = title[:1].upper() + title[1:]
        pictures.append(_picture(stem, capital, f"{title}, ms", dots, about))
    return [picture for picture in pictures if picture is not None]


def variant_pictures(rows: Sequence[Row], on_curves: Collection[str], about: str) -> list[Picture]:
    """Times of an op's variants at each point, of which several were timed, but of ops that curves show in full."""
    pictures = []
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op and row.status == "ok" and row.median_us is not None]
        dots = []
        for row in mine:
            assert row.median_us is not None
            low, high = quartiles(row.samples_us or (), row.median_us, row.iqr_us)
            dots.append(_Dot(str(row.point), str(row.variant), (row.median_us,), low, high))
        if len({row.variant for row in mine}) > 1 and op not in on_curves:
            order = list(dict.fromkeys(dot.group for dot in dots))
            dots.sort(key=lambda dot: order.index(dot.group))
            pictures.append(
                _picture(f"variants-{op}", f"Variants of {op}", "time, µs", dots, f"Bars: quartiles. {about}")
            )
    return [picture for picture in pictures if picture is not None]


def _served(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """The timed rows with their names, those of a workload together."""
    names = swept_names([row for row in rows if row.stage == "engine"])
    timed = [(row, title_of(row, names)) for row in rows if row.status == "ok" and row.tokens_per_s is not None]
    order = list(dict.fromkeys(row.workload for row, _ in timed))
    return sorted(timed, key=lambda pair: order.index(pair[0].workload))


def _picture(name: str, title: str, unit: str, dots: Sequence[_Dot], caption: str) -> Picture | None:
    if len(dots) < 2:
        return None
    if len(dots) > MOST:
        caption += f" {MOST} of {len(dots)}: the best and the first of each group; all are in the CSV."
    several = len(dots[0].values) > 1
    figures = ("p50", "p90", "p99") if several else ("median", "low", "high")
    records = [(d.group, d.name, *(d.values if several else (d.values[0], d.low, d.high)), unit) for d in dots]
    columns = ["group", "name", *figures, "unit"]
    if any(dot.samples for dot in dots):
        columns.append("samples")
        records = [(*record, dot.samples) for record, dot in zip(records, dots, strict=True)]
    shown = _best(dots, -1 if unit == "tokens/s" else 1)

    def draw(figure: "Figure") -> None:
        _draw(figure, shown, unit)

    return Picture(name, title, caption.strip(), tuple(columns), tuple(records), draw)


def _best(dots: Sequence[_Dot], sign: int) -> list[_Dot]:
    """As many as a picture holds, in their order: of each group in turn the best, the first, the second best and so
    on. sign: 1 where less is better.
    """
    groups: dict[str, list[int]] = {}
    for place, dot in enumerate(dots):
        groups.setdefault(dot.group, []).append(place)
    ranked: list[tuple[int, int]] = []
    for mine in groups.values():
        best, *others = sorted(mine, key=lambda place: sign * dots[place].values[0])
        order = dict.fromkeys([best, mine[0], *others])
        ranked += [(rank, place) for rank, place in enumerate(order)]
    return [dots[place] for place in sorted(place for _, place in sorted(ranked)[:MOST])]


def _draw(figure: "Figure", dots: Sequence[_Dot], unit: str) -> None:
    groups = list(dict.fromkeys(dot.group for dot in dots))
    headed = len(groups) > 1
    names = ["\n".join(textwrap.wrap(label(dot.name, 56), 28)) or "-" for dot in dots]
    places: list[float] = []
    heads: list[tuple[float, str]] = []
    at = 0.0
    for index, dot in enumerate(dots):
        if headed and (index == 0 or dots[index - 1].group != dot.group):
            at += 0.35 if index else 0.0
            heads.append((at, dot.group))
            at += 1.0
        extra = 0.55 * names[index].count("\n")
        places.append(at + extra / 2)
        at += 1.0 + extra
    several = len(dots[0].values) > 1
    figure.set_size_inches(WIDTH, 1.0 + _LINE * at + (0.25 if several else 0))
    axes = figure.subplots()
    axes.set_ylim(at - 0.4, -0.7)
    _marks(axes, dots, places)
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", labelcolor=INK)
    for place, text in heads:
        where: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "weight": "bold"}
        axes.text(0.0, place, f" {label(text)}", color=SOFT, fontsize=8.5, **where)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    largest = max(max(*dot.values, dot.high, *dot.samples) for dot in dots)
    smallest = min(min(dot.values) for dot in dots)
    if smallest > 0 and largest / smallest > 30:
        axes.set_xscale("log")
        log_ticks(axes.xaxis)
    else:
        axes.set_xlim(0, largest * 1.08)
        axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    axes.set_xlabel(unit)
    if several:
        legend(figure, [(key, _style(place)) for place, key in enumerate(("p50", "p90", "p99"))])


def _style(place: int) -> Mapping[str, Any]:
    """Of p50, p90 and p99: one colour, told apart by shape and filling."""
    return {
        "marker": ("o", "D", "|")[place],
        "color": SERIES[0],
        "linestyle": "none",
        "markerfacecolor": (SERIES[0], PAPER, SERIES[0])[place],
        "markersize": (6.5, 5, 9)[place],
    }


def _marks(axes: Any, dots: Sequence[_Dot], places: Sequence[float]) -> None:
    for dot, place in zip(dots, places, strict=True):
        if len(dot.values) > 1:
            axes.hlines(place, dot.values[0], dot.values[-1], color=SERIES[0], linewidth=1.2)
            for index, value in enumerate(dot.values):
                axes.plot([value], [place], zorder=3, **_style(index))
            continue
        if _marked(dot):
            axes.plot(dot.samples, [place + 0.28] * len(dot.samples), "|", color=SOFT, markersize=3.5)
        axes.hlines(place, dot.low, dot.high, color=SERIES[0], linewidth=6, alpha=0.35)
        axes.plot([dot.values[0]], [place], "o", color=SERIES[0], markersize=6.5, markeredgecolor=PAPER, zorder=3)
