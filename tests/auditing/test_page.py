import math
import re
from dataclasses import replace
from fractions import Fraction
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gramcert.auditing.findings import FormBlock, Profile
from gramcert.auditing.page import to_html
from gramcert.auditing.readable import shown_down, shown_seconds, shown_text, shown_up
from gramcert.auditing.result import Audit
from gramcert.cli.audit_table import audit_table
from gramcert.operators.propagation import Row
from gramcert.rounding import ASSUMPTIONS

VOID = {"meta", "br", "hr", "img", "input", "link"}

HOSTILE = "<script>alert('x')</script>[bold red]\x1b[31m\x00\u202e\ud800&quot;\"' onload=$title ${x} "


def audit(rows, upper, **changes):
    shape = {"reasons": (), "trivial": {"relu": 19, "flatten": 1}, "outputs": {"output": upper}, "profiles": ()}
    rest = {"model": "resnet20.pt2", "input_shape": (3, 32, 32), "tol": 1e-3, "assumptions": ASSUMPTIONS}
    more = {"seconds": 41.87, "certificate": {}, "product": upper, "blocks": (), "forms": "", "lower": None}
    origin = {"date": "2026-01-02T03:04:05Z", "version": "0.1.0", "sha256": "ab" * 32}
    return Audit(upper, rows=tuple(rows), **(shape | rest | more | origin | changes))


def chain(steps):
    """Rows (name, kind, geometry, upper), one after the other."""
    total = sum(abs(math.log(step[3])) for step in steps)
    constant, rows = 1.0, []
    for index, (name, kind, geometry, upper) in enumerate(steps):
        constant *= upper
        linear = kind in ("convolution", "matrix")
        rows.append(
            Row(
                name,
                kind,
                geometry,
                upper * (1 - 7e-4 / (1 + index % 5)) if linear else None,
                upper,
                constant,
                math.log(upper) / total if 0 < total < math.inf else None,
                (0.21 + 0.37 * (index % 4)) * linear,
                "Cholesky proof of one size" if linear else "",
            )
        )
    return rows


def profile(name, top, count=600):
    return Profile(name, tuple(top * (1 - (k / count) ** (0.3 + len(name) % 5)) ** top for k in range(count)))


def resnet():
    same, channels, size = "padding 1, zeros, at", 16, 32
    steps = [("conv1 + bn1", "convolution", f"3→16, 3×3, stride 1, {same} 32×32", 6.127)]
    for stage in (1, 2, 3):
        for block in range(3):
            stride = 2 if block == 0 and stage > 1 else 1
            for index, gain in ((1, 2.931 - 0.31 * block), (2, 0.742 + 0.11 * stage)):
                into = channels // 2 if stride == 2 and index == 1 else channels
                geometry = f"{into}→{channels}, 3×3, stride {stride if index == 1 else 1}, {same} {size}×{size}"
                name = f"layer{stage}.{block}"
                steps.append((f"{name}.conv{index} + {name}.bn{index}", "convolution", geometry, gain * 1.35))
            steps.append((f"layer{stage}.{block}.add", "sum", "", 1.3718))
        channels, size = 2 * channels, size // 2
    steps.append(("linear", "matrix", "64→10", 7.3))
    rows = chain(steps)
    rows[9] = replace(rows[9], share=None)
    missed = "tolerance 0.001 missed: no memory for the band"
    rows[13] = replace(rows[13], notes=(missed,), lower=rows[13].upper * 0.98)
    rows[5] = replace(rows[5], cached=True)
    spectra = tuple(profile(row.name, row.upper * 0.999) for row in rows if row.kind == "convolution")
    return audit(rows, rows[-1].constant, profiles=spectra, outputs={"logits": rows[-1].constant, "features": 3.1e6})


def attention():
    steps = [
        ("patch_embed.proj", "convolution", "3→192, 16×16, stride 16, at 224×224", 4.62),
        ("pos", "scale", "", 1.1),
    ]
    rows = chain(
        [*steps, ("blocks.0.attn", "unbounded", "", math.inf), ("blocks.0.mlp.fc1", "matrix", "192→768", 9.25)]
    )
    reasons = (
        "blocks.0.attn: self-attention by dot products has no global Lipschitz constant",
        "blocks.0.norm1: layer norm divides by the deviation of its input, which may be 0",
    )
    return audit(rows, math.inf, reasons=reasons, model="vit_tiny.pt2", input_shape=(3, 224, 224))


def tiny():
    rows = chain([(f"{index}.sll", "residual", "16→16", 1.0) for index in range(5)])
    return audit(rows, 1.0, model="lipschitz.pt2", trivial={})


def hostile():
    row = Row(HOSTILE * 1000, HOSTILE, HOSTILE, 0.0, 5e-324, 1e308, -3.0, 1e5, HOSTILE, (HOSTILE,))
    rows = [row, replace(row, upper=math.inf, constant=math.inf, share=math.nan), replace(row, upper=0.0, constant=0.0)]
    named = {HOSTILE: 1, "b" * 100_000: 2}
    return audit(
        rows,
        math.inf,
        reasons=(HOSTILE, "a" * 100_000),
        model="$facts" + HOSTILE * 1000,
        trivial=named,
        outputs={HOSTILE: math.inf, "c": 0.0},
        profiles=(Profile(HOSTILE * 1000, (math.nan, 0.0)), Profile("empty", ())),
    )


def large(rows=200, spectra=60):
    names = [f"encoder.blocks.{k}.conv + encoder.blocks.{k}.bn" for k in range(rows)]
    found = chain([(name, "convolution", "64→64, 3×3, at 32×32", 1.6) for name in names])
    return audit(found, found[-1].constant, profiles=tuple(profile(name, 1.6, 5000) for name in names[:spectra]))


EVERY = [resnet, attention, tiny, hostile, large]


class Page(HTMLParser):
    """Fails on tags that do not match; collects texts, attributes and the cells of tables."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts, self.data = [], [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "data":
            self.data.append([dict(attrs)["value"], ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if "data" in self.open:
            self.data[-1][1] += f"e{data}" if self.open[-1] == "sup" else data.removesuffix("×10")


def read(shown):
    """The exact number that a shown one says."""
    return Fraction(shown.replace("−", "-"))


def printed(renderable, width):
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


@given(st.floats(0, allow_nan=False, allow_infinity=False), st.integers(1, 17))
def test_numbers_are_rounded_to_the_safe_side(value, digits):
    low, high = Fraction(shown_down(value, digits)), Fraction(shown_up(value, digits))
    assert low <= Fraction(value) <= high
    assert high - low <= Fraction(10) ** (1 - digits) * high
    assert len(shown_up(value, digits)) <= digits + 7


def test_numbers_by_example():
    assert [shown_up(x) for x in (0.0, -0.0, 1.0, 1e300, 5e-324, 0.1, 123456.5)] == [
        "0", "0", "1", "1.00001e+300", "4.94066e-324", "0.100001", "123457"
    ]  # fmt: skip
    assert [shown_down(x) for x in (1e300, 5e-324, 0.1, 2.5, -1.5)] == [
        "1.00000e+300", "4.94065e-324", "0.100000", "2.5", "-1.5"
    ]  # fmt: skip
    assert (shown_up(math.inf), shown_down(-math.inf)) == ("∞", "-∞")
    assert shown_seconds(59.96) == "1 min 0 s"


@given(st.text("aé名 \t\n\x00\x1b\u202e\ud800\u2028", max_size=100), st.integers(3, 50))
def test_text_of_strangers_is_harmless_and_short(text, most):
    shown = shown_text(text, most)
    assert len(shown) <= most
    assert shown.isprintable()
    shown.encode()
    assert shown == text or len(text) > most or not text.isprintable()


@pytest.mark.parametrize("make", EVERY)
def test_page_is_well_formed_and_always_the_same(make):
    page = to_html(make())
    assert page == to_html(make())
    found = Page(page)
    assert {"main", "h1", "table", "svg"} <= set(found.tags)
    assert found.tags.count("h1") == 1
    assert ("lang", "en") in found.attributes
    assert ("scope", "row") in found.attributes
    assert found.attributes.count(("role", "img")) == sum(name == "aria-label" for name, _ in found.attributes) > 0
    page.encode()


@pytest.mark.parametrize("make", EVERY)
def test_page_asks_for_nothing(make):
    page = to_html(make())
    for forbidden in ("http://", "https://", "src=", "@import", "url(", "<link", "<script", "href", "javascript:"):
        assert forbidden not in page
    assert not any(name.startswith("on") for name, _ in Page(page).attributes)


def test_hostile_names_are_only_text():
    page = to_html(hostile())
    assert "&lt;script&gt;alert(&#x27;x&#x27;)" in page
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", page)
    assert "$facts&lt;script" in page
    assert len(page) < 80_000


@pytest.mark.parametrize("make", [resnet, attention, tiny, large])
def test_page_has_every_row_and_reason(make):
    given_audit = make()
    texts = Page(to_html(given_audit)).texts
    every = "\n".join(texts)
    for row in given_audit.rows:
        assert row.name in texts
        assert row.geometry in every
        assert all(note in texts for note in row.notes)
    assert all(f"{reason}." in texts for reason in given_audit.reasons)
    assert all(profile.name in texts for profile in given_audit.profiles)
    assert all(kind in texts for kind in given_audit.trivial)


@pytest.mark.parametrize("make", [resnet, tiny, large])
def test_page_never_shows_less_than_the_constant(make):
    given_audit = make()
    numbers = [(float(value), read(shown)) for value, shown in Page(to_html(given_audit)).data]
    lowers = {row.lower for row in given_audit.rows} - {row.upper for row in given_audit.rows}
    assert numbers[0][0] == given_audit.upper
    assert {row.upper for row in given_audit.rows} | {row.constant for row in given_audit.rows} <= {
        v for v, _ in numbers
    }
    for value, shown in numbers:
        assert shown <= value if value in lowers else shown >= value
        assert abs(shown - Fraction(value)) <= Fraction(value) / 10**5


def test_verdicts():
    assert "unbounded" in Page(to_html(attention())).texts
    assert any("Two outputs are never farther apart" in text for text in Page(to_html(tiny())).texts)
    assert any("taken together" in text for text in Page(to_html(resnet())).texts)
    assert any("No reason was recorded" in text for text in Page(to_html(replace(attention(), reasons=()))).texts)


def test_the_command_to_verify_is_shown_only_where_there_is_one():
    command = "gramcert verify 'a b.json' m.onnx --fix 'x=<1>'"
    assert command in Page(to_html(resnet(), command)).texts
    assert "gramcert verify" not in to_html(resnet())
    assert f"To check the certificate: {command}" in printed(audit_table(resnet(), verify=command), 120)
    assert "gramcert verify" not in printed(audit_table(resnet()), 120)


def test_the_lower_bound_stands_beside_the_constant():
    found = audit([], 3.0, lower=2.0)
    sentence = "At least 2: two inputs were found whose outputs are so many times as far apart, "
    assert any(sentence + "so 3 is at most 1.51 times too large." in text for text in Page(to_html(found)).texts)
    assert sentence in printed(audit_table(found), 120)
    assert "At least" not in to_html(audit([], 3.0)) + printed(audit_table(audit([], 3.0)), 120)


def test_where_it_comes_from_is_said():
    for found, digest in (
        (resnet(), "ab" * 32),
        (audit([], 2.0, sha256=None, certificate={"weights": "cd" * 32}), "cd" * 32),
    ):
        output, texts = printed(audit_table(found), 120), Page(to_html(found)).texts
        for word in ("gramcert 0.1.0", digest):
            assert any(word in text for text in texts)
            assert word in output
        assert "2026-01-02 03:04:05 UTC" in output
        assert {"2026-01-02 "} <= set(texts)
        assert ("no file" in output) == (found.sha256 is None)
        assert any("Not from a file" in text for text in texts) == (found.sha256 is None)


@pytest.mark.parametrize(
    ("upper", "name", "style"),
    [
        (0.5, "good", "32"),
        (1 + 1e-7, "good", "32"),
        (7.0, "moderate", ""),
        (2e10, "large", "33"),
        (math.inf, "unbounded", "31"),
    ],
)
def test_only_small_constants_are_green(upper, name, style):
    found = audit([], upper, reasons=("a: b",) if math.isinf(upper) else ())
    assert ("class", name) in Page(to_html(found)).attributes
    console = Console(width=100, color_system="standard", force_terminal=True, _environ={})
    with console.capture() as capture:
        console.print(audit_table(found))
    (line,) = (line for line in capture.get().splitlines() if "resnet20.pt2" in line)
    colours = set(re.findall(r"\x1b\[(?:1;)?(3\d)m", line))
    assert colours == ({style} if style else set())
    assert ("rules out little" in capture.get()) == (name == "large")


@pytest.mark.parametrize("width", [40, 50, 60])
def test_names_of_layers_are_kept_in_narrow_terminals(width):
    found = replace(resnet(), blocks=(FormBlock("layer1.0.conv1", 12.0, 3.0, "16 frequencies"),), upper=1e6)
    output = printed(audit_table(found), width)
    assert max(map(len, output.splitlines())) <= width
    for row in found.rows:
        assert row.name.split(" + ")[0] in output
        assert shown_up(row.upper) in output
    assert re.search(r"^layer1\.0\.conv1 .*\b3 ", output, re.MULTILINE)


def test_page_of_an_identity():
    page = to_html(audit([], 1.0, trivial={}, assumptions=(), input_shape=()))
    assert {"table", "svg", "figure"}.isdisjoint(Page(page).tags)


def test_page_of_a_large_model_is_small():
    assert len(to_html(large()).encode()) < 500_000


@pytest.mark.parametrize("constants", [(1.0,), (0.0, 0.0), (5e-324, 1.7e308), (0.5, 4.9, 10.0), (0.3, 0.01), (1e-9,)])
def test_plot_of_any_constants_stays_inside(constants):
    rows = [Row("a", "scale", "", None, 1.0, value, None, 0.0, "") for value in constants]
    page = to_html(audit(rows, constants[-1]))
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)%"', page)]
    assert len(heights) == len(rows) + 1
    assert all(0 <= y <= 100 for y in heights)
    assert 2 <= page.count('class="grid"') <= 8


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("make", EVERY)
def test_table_in_the_terminal(make, width):
    given_audit = make()
    output = printed(audit_table(given_audit), width)
    assert max(map(len, output.splitlines())) <= width
    for row in given_audit.rows:
        assert shown_up(row.upper) in output
        assert shown_text(row.name)[:12] in output
    assert "unbounded" in output if given_audit.reasons else f"≤ {shown_up(given_audit.upper)} ‖x - y‖" in output
    joined = "".join(output.split())
    assert all("".join(shown_text(reason, 1000).split()) in joined for reason in given_audit.reasons)
    assert ("3→16" in output) == (width == 120 and make is resnet)


def test_terminal_takes_no_orders_from_a_model():
    output = printed(audit_table(hostile()), 120)
    assert "[bold red]" in output
    assert "\x1b" not in output
    assert "\x00" not in output
