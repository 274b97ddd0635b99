"""An audit as one HTML page that asks the network for nothing: its text, its table and its plots."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from string import Template

from gramcert.auditing.findings import Findings, Profile
from gramcert.auditing.meaning import from_below, meaning, tone
from gramcert.auditing.readable import powers_of_ten, shown_down, shown_seconds, shown_share, shown_text, shown_up
from gramcert.operators.propagation import Row

# A reason or an assumption is a sentence, a name is not.
LONGEST_SENTENCE = 1000

# Points of one curve: more cannot be seen in a small picture.
MOST_POINTS = 80

NONE, NO_METHOD = '<td class="number soft none">–</td>', '<td class="method none"></td>'


def to_html(audit: Findings, verify: str = "") -> str:
    """A page that needs no other file, the same for the same audit.

    Upper bounds are rounded up and lower bounds down; all that comes from the model is escaped. ``verify`` is the
    command that checks the certificate, if one was written.
    """
    template = Template(files("gramcert.auditing").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        title=f"{_text(audit.model)}: Lipschitz constant",
        tone=tone(audit.upper),
        verdict=_verdict(audit),
        facts=_facts(audit),
        outputs=_outputs(audit),
        plots=_plots(audit),
        table=_forms(audit) + _table(audit),
        profiles=_profiles(audit),
        trivial=_trivial(audit),
        assumptions=_assumptions(audit),
        check=_check(verify),
    )


def _text(text: str, most: int = 160) -> str:
    return html.escape(shown_text(text, most))


def _sentence(text: str) -> str:
    text = text.strip()
    return _text(text if text.endswith((".", "!", "?")) else f"{text}.", LONGEST_SENTENCE)


def _number(number: str) -> str:
    mantissa, e, exponent = number.partition("e")
    return (f"{mantissa}×10<sup>{int(exponent)}</sup>" if e else mantissa).replace("-", "−")


def _upper(value: float, digits: int = 6) -> str:
    return _number(shown_up(value, digits))


def _data(value: float, shown: str) -> str:
    """A rounded number that knows all of its digits."""
    return f'<data value="{value!r}" title="{value!r}">{shown}</data>' if math.isfinite(value) else shown


def _list(kind: str, items: Iterable[str]) -> str:
    return f'<ul class="{kind}">' + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _section(title: str, intro: str, body: str, kind: str = "") -> str:
    opening = f'<section class="{kind}">' if kind else "<section>"
    return f"{opening}\n<h2>{title}</h2>\n<p>{intro}</p>\n{body}\n</section>"


def _verdict(audit: Findings) -> str:
    model = f'<b class="name">{_text(audit.model)}</b>'
    claim = "‖<var>f</var>(<var>x</var>) − <var>f</var>(<var>y</var>)‖ ≤ {} ‖<var>x</var> − <var>y</var>‖"
    if not math.isfinite(audit.upper):
        return (
            f"<h1><small>Lipschitz constant of {model}</small> <strong>unbounded</strong></h1>\n"
            f"<p>No finite <var>L</var> was proved with {claim.format('<var>L</var>')} for all inputs <var>x</var> and "
            f"<var>y</var> in the l2 norm, because:</p>\n"
            + _list("reasons", map(_sentence, audit.reasons or ("No reason was recorded",)))
        )
    constant = _upper(audit.upper)
    together = ", all outputs taken together" if len(audit.outputs) > 1 else ""
    below = ""
    if audit.lower is not None:
        below = f'\n<p class="below">{_numbers(from_below(audit.lower, audit.upper))}</p>'
    return (
        f"<h1><small>Certified Lipschitz constant of {model}</small> "
        f"<strong>{_data(audit.upper, constant)}</strong></h1>\n"
        f'<p class="formula">{claim.format(constant)}</p>\n'
        f"<p>for all inputs <var>x</var> and <var>y</var>, in the l2 norm{together}. "
        f"{_numbers(meaning(audit.upper))}</p>{below}"
        + "".join(f"\n<p>Note: {_sentence(note)}</p>" for note in audit.notes)
    )


def _numbers(text: str) -> str:
    """A sentence of ours, its powers of ten as mathematicians write them."""
    return re.sub(r"[\d.]+e[+-]?\d+", lambda found: _number(found[0]), text)


def _facts(audit: Findings) -> str:
    widths = [row.relative_width for row in audit.rows if row.relative_width is not None]
    nothing = "not needed for the answer" if audit.reasons else "nothing to measure"
    measured = f"{len(widths)} linear {'map' if len(widths) == 1 else 'maps'}"
    facts = {
        "Input": (" × ".join(map(str, audit.input_shape)) or "scalar", "without the batch"),
        "Guarantee": ("l2 norm", "all inputs; rounding of the proof included"),
        "Measured": (measured, f"widest relative width {_upper(max(widths), 2)}" if widths else nothing),
        "Tolerance": (_number(f"{audit.tol:g}"), "relative width asked of each"),
        "Audited": (audit.date.partition("T")[0], f"{_clock(audit.date)}, in {shown_seconds(audit.seconds)}"),
        "By": (f"gramcert {_text(audit.version)}", "version of the program"),
    }
    cells = (f"<div><dt>{name}</dt><dd>{what} <small>{more}</small></dd></div>" for name, (what, more) in facts.items())
    return f'<dl class="facts">{"".join(cells)}{_digest(audit)}</dl>'


def _clock(date: str) -> str:
    return date.partition("T")[2].replace("Z", " UTC")


def _digest(audit: Findings) -> str:
    """By which the model is known again."""
    weights = str(audit.certificate.get("weights", ""))
    what, digest = ("SHA-256 of the file", audit.sha256) if audit.sha256 else ("Not from a file; its weights", weights)
    return f'<div class="digest"><dt>{what}</dt><dd class="name">{_text(digest)}</dd></div>' if digest else ""


def _outputs(audit: Findings) -> str:
    if len(audit.outputs) < 2:
        return ""
    items = (
        f'<span class="name">{_text(name)}</span> {_data(value, _upper(value))}'
        for name, value in audit.outputs.items()
    )
    return _section("Each output alone", "The constant from the input to one output.", _list("outputs card", items))


def _plots(audit: Findings) -> str:
    if not audit.rows:
        return ""
    of_norms = "product of norms" if audit.blocks else "constant"
    figure, intro = _running_plot(audit.rows), f"How the {of_norms} grows on its way."
    if any(map(_has_share, audit.rows)):
        figure += f"<p>Share of each step in the stretching and shrinking</p>{_share_plot(audit.rows)}"
        top = max(filter(_has_share, audit.rows), key=lambda row: abs(row.share or 0.0))
        intro = (
            f"The largest share of all stretching and shrinking, {shown_share(top.share or 0.0)}, is that of "
            f'<span class="name">{_text(top.name)}</span>. Shares are of the logarithms and add up to 100\u202f% '
            f"without their signs; a negative one makes the {of_norms} smaller."
        )
    return _section(
        "From the input to the output",
        intro,
        f'<figure class="card plots"><figcaption>Certified constant, by norms, from the input up to each step of the '
        f"table below</figcaption>{figure}{_key(audit.rows)}</figure>",
        "short",
    )


def _has_share(row: Row) -> bool:
    return row.share is not None and math.isfinite(row.share)


def _key(rows: Sequence[Row]) -> str:
    off = any(map(_has_share, rows)) and not all(map(_has_share, rows))
    stops = any(math.isinf(row.upper) for row in rows)
    after = any(math.isinf(row.constant) and math.isfinite(row.upper) for row in rows)
    marks = [
        (off, "on the path that dominates", '<circle class="on" cx="7" cy="7" r="4"/>'),
        (off, "off it", '<circle class="off" cx="7" cy="7" r="3.5"/>'),
        (stops, "no bound for this step", '<path class="cross" d="M3 3L11 11M11 3L3 11"/>'),
        (after, "unbounded by then", '<circle class="gone" cx="7" cy="7" r="3.5"/>'),
    ]
    items = [f'<svg aria-hidden="true">{mark}</svg>{text}' for wanted, text, mark in marks if wanted]
    return _list("key", items) if items else ""


class _Axis:
    """Where a constant is on the y axis, in percent from the top: logarithmic beyond one decade."""

    def __init__(self, constants: Iterable[float], unbounded: bool) -> None:
        logs = [math.log10(value) for value in (1.0, *constants) if 0 < value < math.inf]
        self.low: float
        self.high: float
        self.top = 14.0 if unbounded else 0.0  # room for infinity
        self.log = max(logs) - min(logs) > 1
        if self.log:
            low, high = math.floor(min(logs)), math.ceil(max(logs))
            every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200) if high - low <= 6 * step)
            decades = range(-(-max(low, -323) // every) * every, min(high, 308) + 1, every)
            self.low, self.high = low, high
            self.ticks = {10.0**n: powers_of_ten(f"1e{n}") if abs(n) > 1 else f"{10.0**n:g}" for n in decades}
        else:
            largest = 10 ** max(logs)
            step = next(step for step in (0.25, 0.5, 1, 2, 5) if largest <= 5 * step)
            self.low, self.high = 0, math.ceil(largest / step - 1e-9) * step
            self.ticks = {step * n: f"{step * n:g}" for n in range(round(self.high / step) + 1)}

    def __call__(self, value: float) -> float:
        if not math.isfinite(value):
            return 0.0
        if self.log:
            value = math.log10(value) if value > 0 else -math.inf
        share = (value - self.low) / (self.high - self.low)
        return 100 - (100 - self.top) * min(max(share, 0.0), 1.0)


def _running_plot(rows: Sequence[Row]) -> str:
    unbounded = any(not math.isfinite(row.constant) for row in rows)
    axis = _Axis((row.constant for row in rows), unbounded)
    path = any(_has_share(row) for row in rows)
    column = 100 / (len(rows) + 1)
    radius = 4 if len(rows) <= 60 else 2.5
    parts = [_grid_line(axis(value), label) for value, label in axis.ticks.items()]
    if unbounded:
        parts.append(_grid_line(0.0, "∞", "edge"))
    parts += [_x_label(column * (k + 0.5), f"{k}" if k else "input") for k in _x_ticks(len(rows))]
    x, y = column / 2, axis(1.0)
    marks = [_mark(x, y, "on", radius)]
    for index, row in enumerate(rows, 1):
        at, height = column * (index + 0.5), axis(row.constant)
        on = _has_share(row) or not path
        if on and math.isfinite(row.constant):
            parts.append(_line(x, y, at, height, "path"))
            x, y = at, height
        kind = "on" if on else "off"
        if not math.isfinite(row.constant):
            kind = "gone" if math.isfinite(row.upper) else "cross"
        about = f"{index}. {_text(row.name)}: constant so far {powers_of_ten(shown_up(row.constant))}"
        marks.append(_step(about, column * index, column, _mark(at, height, kind, radius)))
    scale = "logarithmic" if axis.log else "linear"
    label = (
        f"Certified constant after each of {len(rows)} steps, {scale} scale, {shown_up(rows[-1].constant)} at the end"
    )
    return _plot("running", label, parts + marks)


def _share_plot(rows: Sequence[Row]) -> str:
    shares = [row.share if row.share is not None and math.isfinite(row.share) else 0.0 for row in rows]
    low, high = min(0.0, *shares), max(0.0, *shares)
    scale = 100 / (high - low or 1.0)
    column = 100 / (len(rows) + 1)
    levels = [level for level in (high, low) if abs(level) > 0.2 * (high - low)]  # else too close to 0
    parts = [_grid_line(scale * (high - level), shown_share(level)) for level in levels]
    parts += [_x_label(column * (k + 0.5), f"{k}") for k in _x_ticks(len(rows)) if k]
    for index, (row, share) in enumerate(zip(rows, shares, strict=True), 1):
        about = shown_share(share) if _has_share(row) else "off the path that dominates"
        bar = (
            f'<rect class="{"more" if share >= 0 else "less"}" x="{column * (index + 0.2):.2f}%" '
            f'y="{scale * (high - max(share, 0.0)):.2f}%" width="{0.6 * column:.2f}%" '
            f'height="{scale * abs(share):.2f}%"/>'
        )
        parts.append(_step(f"{index}. {_text(row.name)}: {about}", column * index, column, bar))
    parts.append(_grid_line(scale * high, "0", "base"))
    return _plot("shares", f"Share of the stretching and shrinking for each of {len(rows)} steps", parts)


def _plot(kind: str, label: str, parts: Iterable[str]) -> str:
    """All places are percentages, so that lines stretch with the page and letters do not."""
    return f'<svg class="plot {kind}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _x_ticks(count: int) -> range:
    return range(0, count + 1, next(step for step in (1, 2, 5, 10, 20, 50, 100, count) if count <= 12 * step))


def _x_label(x: float, label: str) -> str:
    return f'<text x="{x:.2f}%" y="100%" dy="18" text-anchor="middle">{label}</text>'


def _grid_line(y: float, label: str, kind: str = "grid") -> str:
    return (
        f'<line class="{kind}" x1="0" x2="100%" y1="{y:.2f}%" y2="{y:.2f}%"/>'
        f'<text x="-8" y="{y:.2f}%" dy="4" text-anchor="end">{label}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.2f}%" y1="{y1:.2f}%" x2="{x2:.2f}%" y2="{y2:.2f}%"/>'


def _mark(x: float, y: float, kind: str, radius: float) -> str:
    if kind == "cross":
        return f'<svg x="{x:.2f}%" y="{y:.2f}%" overflow="visible"><path class="cross" d="M-5-5L5 5M5-5L-5 5"/></svg>'
    return f'<circle class="{kind}" cx="{x:.2f}%" cy="{y:.2f}%" r="{radius - 0.5 * (kind != "on")}"/>'


def _step(about: str, x: float, width: float, mark: str) -> str:
    """Something drawn, and the column of it, which says what it is when pointed at."""
    hit = f'<rect class="hit" x="{x:.2f}%" y="0" width="{width:.2f}%" height="100%"/>'
    return f'<g class="step"><title>{about}</title>{hit}{mark}</g>'


def _table(audit: Findings) -> str:
    if not audit.rows:
        return ""
    longest = max((abs(row.share or 0.0) for row in audit.rows if _has_share(row)), default=0.0)
    shares = ("share",) if longest else ()
    words = ("lower bound", "upper bound", "relative width", *shares, "constant so far", "time")
    head = '<th scope="col" class="index">#</th><th scope="col">layer</th><th scope="col">geometry</th>'
    head += "".join(f'<th scope="col" class="number">{word}</th>' for word in words) + '<th scope="col">method</th>'
    body = "\n".join(_row(index, row, audit.tol, longest) for index, row in enumerate(audit.rows, 1))
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return _section(
        "Step by step",
        "In order of execution, without the steps that are exactly 1 by their nature. Lower and upper bounds enclose "
        "the norm of a linear map.",
        f'<div class="card scroll">{table}</div>',
    )


def _forms(audit: Findings) -> str:
    """Where forms of the whole network gained, block by block."""
    if not audit.blocks:
        return ""
    words = ("product of norms", "by forms", "smaller by")
    head = '<th scope="col">block from</th>' + "".join(f'<th scope="col" class="number">{word}</th>' for word in words)
    body = "\n".join(_block(_text(b.name), b.product, b.factor, b.lattice) for b in audit.blocks)
    if len(audit.blocks) > 1:
        body += _block("<b>all of it</b>", audit.product, audit.upper, "")
    table = (
        f'<table>\n<thead><tr>{head}<th scope="col">proved on</th></tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>'
    )
    return _section(
        "Gained by forms",
        "Norms multiply as if every step stretched the same direction most. Quadratic forms follow directions through "
        "the whole network, and the constant above is proved by them. Each block goes on to the next one.",
        f'<div class="card scroll">{table}</div>\n',
    )


def _block(name: str, product: float | None, factor: float, lattice: str) -> str:
    norms = NONE if product is None else _cell("product of norms", _data(product, _upper(product, 4)))
    gain = NONE if product is None else _cell("smaller by", f"{product / factor:.4g}\u202f×")
    forms = _cell("by forms", _data(factor, _upper(factor, 4)))
    return (
        f'<tr><th scope="row"><span class="name">{name}</span></th>{norms}{forms}{gain}'
        f'<td class="method">{_text(lattice)}</td></tr>'
    )


def _row(index: int, row: Row, tol: float, longest: float) -> str:
    notes = "".join(f'<span class="note">{_text(note, LONGEST_SENTENCE)}</span>' for note in row.notes)
    geometry = f"<b>{_text(row.kind)}</b> {_text(row.geometry)}".rstrip()
    width = row.relative_width
    bounded = math.isfinite(row.upper)
    time = "cached" if row.cached else shown_seconds(row.seconds) if row.seconds else ""
    cells = [
        f'<td class="index">{index}</td>',
        f'<th scope="row"><span class="name">{_text(row.name)}</span>{notes}</th>',
        f'<td class="geometry">{geometry}</td>',
        NONE if row.lower is None else _cell("lower bound", _data(row.lower, _number(shown_down(row.lower)))),
        _cell("upper bound", _data(row.upper, _upper(row.upper)), "" if bounded else " warn"),
        NONE if width is None else _cell("relative width", _upper(width, 2), " warn" if width > tol else ""),
        *([_cell("share", _share_bar(row.share or 0.0, longest)) if _has_share(row) else NONE] if longest else []),
        _cell("constant so far", _data(row.constant, _upper(row.constant))),
        _cell("time", time, " soft") if time else NONE,
        f'<td class="method" data-label="method">{_text(row.method)}</td>' if row.method else NO_METHOD,
    ]
    opening = "<tr>" if bounded else '<tr class="stop">'
    return f"{opening}{''.join(cells)}</tr>"


def _cell(label: str, content: str, kind: str = "") -> str:
    return f'<td class="number{kind}" data-label="{label}">{content}</td>'


def _share_bar(share: float, longest: float) -> str:
    kind, width = "more" if share >= 0 else "less", 100 * abs(share) / longest
    bar = f'<rect class="{kind}" width="{width:.1f}%" height="100%" rx="2"/>'
    return f'{shown_share(share)}<svg class="bar" aria-hidden="true">{bar}</svg>'


def _profiles(audit: Findings) -> str:
    if not audit.profiles:
        return ""
    bounds: dict[str, list[float]] = {}
    for row in audit.rows:
        if row.lower is not None and math.isfinite(row.upper):
            bounds.setdefault(row.name, []).append(row.upper)
    figures = []
    for profile in audit.profiles:
        mine = bounds.get(profile.name, [])
        figures.append(_profile(profile, mine.pop(0) if len(mine) > 1 else mine[0] if mine else None))
    return _section(
        "Singular values",
        "Of each convolution, the largest first, each picture with a scale of its own from 0. The curves are "
        "estimates; the dashed line is the certified upper bound, whose value is below.",
        f'<div class="card profiles">{"".join(figures)}</div>',
    )


def _profile(profile: Profile, bound: float | None) -> str:
    values = [value for value in profile.values if math.isfinite(value)] or [0.0]
    chosen = values if len(values) <= MOST_POINTS else _thinned(values)
    top = max(*chosen, bound or 0.0, 0.0) or 1.0
    points = [
        f"{100 * index / max(len(chosen) - 1, 1):.1f} {100 - 94 * max(value, 0.0) / top:.1f}"
        for index, value in enumerate(chosen)
    ]
    curve = "L".join(points if len(points) > 1 else [*points, f"100 {points[0].split()[1]}"])
    stretch = 'vector-effect="non-scaling-stroke"'
    drawing = f'<path class="area" d="M{curve}L100 100L0 100Z"/><path class="curve" {stretch} d="M{curve}"/>'
    claim = "no bound of it alone"
    if bound is not None:
        height = 100 - 94 * bound / top
        drawing += f'<path class="bound" {stretch} d="M0 {height:.1f}H100"/>'
        claim = f"norm ≤ {_data(bound, _upper(bound))}"
    about = f"Estimate of {len(values)} singular values of {_text(profile.name)}: {values[0]:.4g} to {values[-1]:.4g}"
    return (
        f'<figure><svg role="img" aria-label="{about}" viewBox="0 0 100 100" preserveAspectRatio="none">'
        f"<title>{about}</title>{drawing}</svg>"
        f'<figcaption><span class="name">{_text(profile.name)}</span><span class="soft">{claim}</span></figcaption>'
        f"</figure>"
    )


def _thinned(values: Sequence[float]) -> list[float]:
    return [values[round(index * (len(values) - 1) / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]


def _trivial(audit: Findings) -> str:
    if not audit.trivial:
        return ""
    items = (f'<span class="name">{_text(kind)}</span> × {count}' for kind, count in audit.trivial.items())
    intro = "These steps never move two points apart, by their definition; they are not in the table."
    return _section("Counted as exactly 1", intro, _list("chips", items), "short")


def _assumptions(audit: Findings) -> str:
    if not audit.assumptions:
        return ""
    body = _list("card plain", map(_sentence, audit.assumptions))
    return _section("Assumptions", "What the guarantee rests on, besides the program itself.", body, "short")


def _check(command: str) -> str:
    """Only where it works as it is printed."""
    if not command:
        return ""
    return _section(
        "Check it yourself",
        "The certificate that was written with this report is checked against the model, by other proofs, by:",
        f'<pre class="card"><code>{html.escape(command)}</code></pre>',
        "short",
    )
