"""The book's figures and their sliders: one style, the same bytes every time, and what nbval compares of them."""

import functools
import html
import itertools
import json
import os
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import nbformat
import numpy as np
import pytest
from conftest import ROOT, run_nbval
from ipc_kernels import SocketKernelManager
from matplotlib import pyplot
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from nbclient import NotebookClient
from store_outputs import WIDGET_VIEW

from helpers.figures import drawing as figures
from helpers.figures import sliders as widgets
from helpers.figures.ddp import ddp_overlap, exposed, overlap_schedule, replicas
from helpers.figures.drawing import RANK_COLORS, canvas, rank_color, rank_hatch, show
from helpers.figures.sliders import explore

# How dichromats see linear RGB, from Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of
# color vision deficiency", 2009, severity 1.
SIGHT = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
OKLAB = (  # Ottosson, "A perceptual color space for image processing", 2020
    [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
     [0.0883024619, 0.2817188376, 0.6299787005]],
    [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
     [0.0259040371, 0.7827717662, -0.808675766]],
)  # fmt: skip


def linear(color):
    """A colour ``#rrggbb`` as linear RGB, with values from 0 to 1."""
    rgb = np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def stand_out(colors):
    """Check WCAG's contrast ratio, 1 to 21, of each colour with the theme's light and dark page."""
    for pair in itertools.product(colors, ["#ffffff", "#121212"]):
        darker, lighter = sorted(linear(color) @ [0.2126, 0.7152, 0.0722] + 0.05 for color in pair)
        assert lighter / darker >= 3, pair


def differ(colors):
    """Check the distance of any two colours in OKLab, where CSS Color 4 calls 0.02 just noticeable."""
    for sight, matrix in SIGHT.items():
        rgbs = [np.clip(linear(color) @ np.array(matrix).T, 0, 1) for color in colors]
        labs = [np.cbrt(rgb @ np.array(OKLAB[0]).T) @ np.array(OKLAB[1]).T for rgb in rgbs]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(labs, 2)) > 0.065, sight


WRONG_COLORS = [  # the last three pairs differ for all but one kind of sight
    (stand_out, "#ffbb00 #3355ee"), (stand_out, "#3355ee #113388"), (differ, "#3355ee #3344ee"),
    (differ, "#cc4400 #776600"), (differ, "#227755 #885544"), (differ, "#3388cc #339999"),
]  # fmt: skip


@pytest.mark.parametrize("check, wrong", WRONG_COLORS)
def test_rank_colors_stand_out_and_differ_for_every_kind_of_sight(check, wrong):
    check(RANK_COLORS)
    with pytest.raises(AssertionError):
        check(wrong.split())


def test_the_same_rank_has_the_same_color_in_every_figure_and_no_rank_looks_like_another():
    assert len({(rank_color(rank), rank_hatch(rank)) for rank in range(32)}) == 32
    assert (rank_color(11), rank_hatch(11)) == (RANK_COLORS[3], "///")
    with pytest.raises(ValueError, match="whole number"):
        rank_color(-1)
    three = {rank: 10.0 - rank for rank in range(3)}
    curves = figures.lines({rank: [1, value] for rank, value in three.items()}, [0, 1], "step", "loss")
    for fig in [figures.bars(three, "samples/s"), curves, replicas(3), ddp_overlap(3, 2)]:
        assert set(re.findall(r"#[0-9a-f]{6}\b", show(fig, "a").page)) == set(RANK_COLORS[:3])


def every_figure():
    for world_size, buckets in itertools.product([1, 2, 8], [1, 4, 16]):
        yield ddp_overlap(world_size, buckets)
    for world_size in [1, 4, 8]:
        yield replicas(world_size)
    yield figures.lines({0: [3, 2, 1], 9: [1, 2, 3]}, [1, 2, 3], "step", "loss")
    yield figures.lines({"plain": [3, 2, 1], "no_sync": [1, 2, 3]}, [1, 2, 3], "step", "time (ms)")
    yield figures.bars({"fp32": 4.0, "fp16": 2.0}, "megabytes")
    yield figures.timeline({rank: [("compute", 0, 3, "a"), ("network", 2, 4, "b")] for rank in (0, 1)}, "time (ms)")
    yield ddp_overlap(4, 3, forward=100, backward=250)


def test_a_figure_has_the_same_bytes_every_time_whatever_the_style_around_it():
    first = [show(fig, "a", "c").page for fig in every_figure()]
    with pyplot.style.context("dark_background"), pyplot.rc_context({"font.size": 30, "svg.fonttype": "path"}):
        assert [show(fig, "a", "c").page for fig in every_figure()] == first


def plain(drawing):
    """Check that a drawing is small, in the page's ink and font, and says nothing to the rest of the page."""
    root = ElementTree.fromstring(drawing)
    assert root.tag == "svg" and root.get("viewBox").startswith("0 0 ")
    tags = {element.tag for element in root.iter()}
    assert tags <= {"svg", "g", "path", "text", "tspan", "defs", "clipPath", "rect", "use", "pattern"}
    assert all("".join(text.itertext()).strip() for text in root.iter("text")), "a text without words"
    assert all(part.text for part in root.iter("tspan")), "a part of a text without words"
    assert "currentColor" in drawing and not re.search("#000|black|#ffffff|font-family|DejaVu|http", drawing)
    assert not re.search(r"\d\.\d{3}", drawing), "numbers are rounded"
    assert len(drawing) < 21_000


def legible(drawing):
    """Check that words are large enough, lie within the drawing, and nowhere on each other."""
    root = ElementTree.fromstring(drawing)
    width, height = (float(root.get(name)) for name in ("width", "height"))
    places = []
    for text in root.iter("text"):
        assert not text.get("transform"), "a turned text is placed by the width of another font"
        rules = dict(rule.split(":") for rule in text.get("style").split(";"))
        size = float(rules["font-size"].removesuffix("px"))
        font = FontProperties(family="DejaVu Sans", size=size, weight=rules.get("font-weight", "normal"))
        wide = TextPath((0, 0), text.text, prop=font).get_extents().x1
        left = float(text.get("x")) - {"middle": wide / 2, "end": wide}.get(rules.get("text-anchor"), 0)
        top, right, bottom = float(text.get("y")) - 0.7 * size, left + wide, float(text.get("y"))
        assert size >= 10 and left > -1 and right < width + 1 and top > 0 and bottom < height, text.text
        for word, (before, above, behind, below) in places:
            assert right < before or behind < left or bottom < above or below < top, (word, text.text)
        places.append((text.text, (left, top, right, bottom)))
    assert places


def gradients(*places, **look):
    """A figure of the word "gradient" at these places."""
    fig, ax = canvas(200, 100)
    for x, y in places:
        ax.text(x, y, "gradient", **look)
    return fig


WRONG_FIGURES = {
    "a background": (plain, gradients((20, 40), backgroundcolor="#ffffff")),
    "large": (plain, gradients(*itertools.product(range(20), range(20)))),
    "no word": (legible, gradients()),
    "on each other": (legible, gradients((20, 40), (60, 45))),
    "outside": (legible, gradients((170, 40))),
    "turned": (legible, gradients((20, 40), rotation=90)),
    "small": (legible, gradients((20, 40), fontsize=8)),
}


@pytest.mark.parametrize("check", [plain, legible])
def test_every_figure_is_plain_and_legible(check):
    for fig in [*every_figure(), gradients((20, 40), (20, 60))]:
        check(figures.svg(fig))


@pytest.mark.parametrize("check, fig", WRONG_FIGURES.values(), ids=WRONG_FIGURES)
def test_a_wrong_figure_is_noticed(check, fig):
    with pytest.raises(AssertionError):
        check(figures.svg(fig))


def test_a_log_axis_has_numbers():
    """matplotlib writes a power as parts of a text, <tspan>: 10, and its exponent."""
    fig, ax = pyplot.subplots()
    ax.loglog([1, 1000], [1e-6, 1])
    drawing = figures.svg(fig)
    root = ElementTree.fromstring(drawing)
    powers = {"".join(text.itertext()).replace("\u2212", "-") for text in root.iter("text")}
    assert {"100", "103", "10-6"} <= powers and all(part.text for part in root.iter("tspan"))
    with pytest.raises(AssertionError):
        plain(re.sub(r"(<tspan[^>]*>)[^<]*", r"\1", drawing))


def test_the_smallest_words_keep_nine_pixels_on_a_phone():
    fig, ax = canvas(260, 40)
    ax.text(10, 20, "large", fontsize=13)
    assert "min-width:180px" in figures.svg(fig)
    ax.text(90, 20, "small", fontsize=10)
    assert "min-width:234px" in figures.svg(fig)


def test_figures_of_one_page_share_no_id():
    fig = figures.lines({0: [3, 2, 1]}, [1, 2, 3], "step", "loss")
    pages = [show(fig, "a").page, show(fig, "a", "another caption").page, show(fig, "b").page]
    pages += [explore(ddp_overlap, alt="a", caption=word, world_size=[1, 2], buckets=[1, 2]).page() for word in "cd"]
    ids = [re.findall(r'\bid="([^"]+)"', page) for page in pages]
    assert all(ids), "a clip path or a hatch is needed for this test"
    assert len(set(itertools.chain(*ids))) == sum(map(len, ids))
    for page, own in zip(pages, ids, strict=True):
        assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', page)) == set(own)


def test_show_escapes_its_words_has_a_short_repr_and_closes_a_pyplot_figure_which_would_be_drawn_twice():
    fig, ax = pyplot.subplots()
    ax.set_xlabel("1.23456  two  spaces <b> d")
    shown = show(fig, alt='two <ranks> & "one" model', caption="`no_sync` < *all* 2 * 3 * 4")
    assert not pyplot.fignum_exists(fig.number)
    assert ">1.23456  two  spaces &lt;b&gt; d</text>" in shown.page
    assert 'role="img" tabindex="0" aria-label="two &lt;ranks&gt; &amp; &quot;one&quot; model"' in shown.page
    assert "<figcaption><code>no_sync</code> &lt; <em>all</em> 2 * 3 * 4</figcaption>" in shown.page
    assert repr(shown) == 'Figure: two <ranks> & "one" model'
    assert "<figcaption>" not in show(replicas(2), alt="a").page


def test_the_picture_of_the_three_places_has_the_ranks_colors_and_says_what_it_shows():
    text = (ROOT / "book" / "three_places.svg").read_text()
    root = ElementTree.fromstring(text)
    assert [element.tag.rpartition("}")[2] for element in root][:3] == ["title", "desc", "style"]
    assert dict(re.findall(r"\.r(\d) { fill: (#\w+) }", text)) == {str(k): color for k, color in enumerate(RANK_COLORS)}
    assert "prefers-color-scheme: dark" in text and text.count("http") == 1, "the namespace is the only address"


# --- the model behind ddp_overlap -------------------------------------------------------------------------------------


def test_all_reduces_wait_for_their_gradients_and_for_the_network():
    # Of two buckets each takes 1 ms + 2 * 3/4 * 50 MB / (10 GB/s) = 8.5 ms. The first is ready after half of backward.
    assert overlap_schedule(4, 2) == [
        ("compute", 0, 10, "forward"),
        ("compute", 10, 20, "backward"),
        ("network", 20, 28.5, "all-reduce"),
        ("compute", 20, 30, "backward"),
        ("network", 30, 38.5, "all-reduce"),
        ("compute", 30, 38.5, "wait"),
        ("compute", 38.5, 41.5, "step"),
    ]
    # Many buckets queue for the network, and each pays the latency.
    waits = {n: exposed(overlap_schedule(4, n)) for n in (1, 2, 4, 8, 16)}
    assert waits == pytest.approx({1: 16, 2: 8.5, 4: 4.75, 8: 5.5, 16: 12.25})
    assert exposed(overlap_schedule(4, 8, latency=0, gigabytes_per_second=1000)) == pytest.approx(0.01875)
    assert [span[3] for span in overlap_schedule(1, 2)] == ["forward", "backward", "backward", "step"]
    for sizes in [(0, 1), (4, 0)]:
        with pytest.raises(ValueError, match="at least one"):
            overlap_schedule(*sizes)


# --- sliders ----------------------------------------------------------------------------------------------------------


def word(text="a", size=1, **other):
    fig, ax = canvas(200, 40)
    ax.text(10, 20, f"{text} at {size}")
    return fig


def words_of(page):
    """The words in a page's frames, in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", page)


def test_there_is_one_frame_for_each_combination_and_the_last_slider_runs_fastest():
    page = explore(word, alt="a word", text=["x", "y"], size=[1, 2, 3]).page()
    assert words_of(page) == ["x at 1", "x at 2", "x at 3", "y at 1", "y at 2", "y at 3"]
    alts = re.findall(r'aria-label="([^"]*)"', page)
    assert alts[0] == "a word (text x, size 1)" and alts[-1] == "a word (text y, size 3)" and len(alts) == 6
    assert page.count('class="wso-view wso-on"') == 1 and page.count('class="wso-view"') == 5
    assert page.count("<script>") == 1


def test_a_control_has_a_label_names_values_of_any_type_and_starts_at_the_default():
    """Up to five values are buttons, more are a slider."""
    sliders = {"world_size": [None, "<two>"], "size": [0.5, 3], "step": range(6)}
    explorer = explore(functools.partial(word, size=3), alt="a", **sliders)
    assert repr(explorer) == "explore(word, world_size=[None, '<two>'], size=[0.5, 3], step=[0, 1, 2, 3, 4, 5])"
    page = explorer.page()
    assert re.findall(r'wso-on" [^>]*aria-label="([^"]*)"', page) == ["a (world size None, size 3, step 0)"]
    labels = [json.loads(html.unescape(label)) for label in re.findall(r'data-labels="([^"]*)"', page)]
    assert labels == [["None", "<two>"], ["0.5", "3"], ["0", "1", "2", "3", "4", "5"]]
    assert re.findall(r"<legend>(.*?)</legend>", page) == ["world size", "size"]
    assert re.findall(r" checked><span>(.*?)</span>", page) == ["None", "3"] and "<span>&lt;two&gt;</span>" in page
    names = re.findall(r'type="radio" name="(.*?)"', page)
    assert names[0] == names[1] != names[2] == names[3]
    assert '<button type="button" aria-label="Play the steps"></button><label><span>step</span><input' in page
    assert '<output aria-live="off" style="width:1ch">0</output>' in page
    assert [knob.value for knob in explorer.live().children[:3]] == [0, 1, 0]


def test_a_unit_stands_behind_the_number_and_a_short_name_is_said_in_words():
    page = explore(word, alt="a", save_seconds=[1, 60], restart_minutes=[1, 5], tp=[1, 8]).page()
    assert re.findall(r"<legend>(.*?)</legend>", page) == ["save", "restart", "tensor parallel"]
    assert re.findall(r"<span>(.*?)</span>", page) == ["1 s", "60 s", "1 min", "5 min", "1", "8"]


def test_all_frames_are_as_tall_as_the_tallest_so_that_the_page_below_stays_in_place():
    def tall(height):
        fig, ax = canvas(200, height)
        ax.text(10, 20, "a")
        return fig

    page = explore(tall, alt="a", height=[40, 60, 90]).page()
    assert re.findall(r'viewBox="0 0 200 (\d+)" width="200" height="(\d+)"', page) == [("90", "90")] * 3


def test_a_live_slider_changes_the_drawing():
    explorer = explore(word, alt="a", caption="c", text=["x", None], size=[1, 2])
    text, size, drawing = explorer.live().children
    assert (text.description, size.description) == ("text", "size")
    assert [name for name, _ in text.options] == ["x", "None"]
    assert words_of(drawing.value) == ["x at 1"]
    text.value = 1
    assert words_of(drawing.value) == ["None at 1"]
    size.value = 1
    assert words_of(drawing.value) == ["None at 2"]
    assert drawing.value == show(word(None, 2), "a (text None, size 2)", "c").page  # what show() would put there
    assert explorer.live().children[2] is drawing


def test_the_widget_is_in_the_bundle_only_where_a_kernel_is_live(monkeypatch):
    explorer = explore(word, alt="a", size=[1, 2])
    for shell in [None, SimpleNamespace()]:
        monkeypatch.setattr(widgets, "get_ipython", lambda shell=shell: shell)
        assert explorer._repr_mimebundle_() == {"text/plain": repr(explorer), "text/html": explorer.page()}
    monkeypatch.setattr(widgets, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    view = explorer._repr_mimebundle_()[WIDGET_VIEW]
    assert view["model_id"] == explorer.live().model_id == explorer._repr_mimebundle_()[WIDGET_VIEW]["model_id"]


@pytest.mark.parametrize(
    "error, match, fn, sliders",
    [
        (ValueError, "has no slider", word, {}),
        (ValueError, "no values", word, {"size": []}),
        (ValueError, "repeats a value", word, {"size": [1, "1"]}),
        (ValueError, "does not ascend", word, {"size": [2, 1, 3]}),
        (ValueError, "does not ascend", word, {"size": ["50 %", "0 %"]}),
        (ValueError, "at most 64 frames, not 66", word, {"size": range(11), "text": range(6)}),
        (TypeError, "Figure was expected, not Axes", lambda size: word().axes[0], {"size": [1]}),
        (ValueError, "alt text is empty", word, {"size": [1], "alt": ""}),
    ],
)
def test_what_cannot_be_explored_is_refused_in_one_line(error, match, fn, sliders):
    with pytest.raises(error, match=match) as raised:
        explore(fn, **{"alt": "a", **sliders})
    assert "\n" not in str(raised.value)


def two_explorers():
    first = explore(word, alt="first", text=["x", "y"], size=[1, 2, 3])
    second = explore(word, alt="second", caption="c", step=range(6))
    return f"<!doctype html><title>t</title><main>{first.page()}{second.page()}</main>"


def shown(page):
    """The alt texts of the visible frames."""
    return [view.get_attribute("aria-label") for view in page.locator(".wso-view").all() if view.is_visible()]


def test_a_control_moves_its_own_figure_alone(browser):
    """By keyboard; test_browser.py clicks the controls of all pages."""
    page = browser.new_page()
    page.set_content(two_explorers())
    assert shown(page) == ["first (text x, size 1)", "second (step 0)"]
    page.get_by_role("radio", name="x", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert shown(page) == ["first (text y, size 1)", "second (step 0)"]
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowLeft")
    assert shown(page) == ["first (text y, size 3)", "second (step 0)"]
    step = page.get_by_role("slider", name="step")
    step.press("End")
    assert shown(page) == ["first (text y, size 3)", "second (step 5)"]
    assert step.get_attribute("aria-valuetext") == page.locator("output").text_content() == "5"
    page.locator(".wso-on").nth(1).press("ArrowLeft")
    assert shown(page) == ["first (text y, size 3)", "second (step 4)"]
    page.close()


def parcel(step=0):
    """A square that comes from the left in each step but the first."""
    fig, ax = canvas(200, 40)
    ax.text(10, 20, f"{step}")
    figures.boxes(ax, [(60 + 20 * step, 10, 10, 10)], facecolor=figures.INK, gid="move -20 0" if step else None)
    return fig


@pytest.mark.parametrize("motion, moves", [("no-preference", 1), ("reduce", 0)])
def test_steps_are_played_and_parcels_move_unless_a_reader_wants_no_motion(browser, motion, moves):
    page = browser.new_page(reduced_motion=motion)
    page.set_content(explore(parcel, alt="a", step=range(6)).page())
    page.clock.install()
    play, figure = page.get_by_role("button", name="Play the steps"), page.locator("figure")
    play.click()
    assert shown(page) == ["a (step 1)"] and "wso-playing" in figure.get_attribute("class")
    assert page.evaluate("document.getAnimations().map(it => it.effect.getKeyframes()[0].transform)") == (
        ["translate(-20px, 0px)"] * moves
    )
    page.clock.run_for(1300)
    assert shown(page) == ["a (step 2)"]
    play.click()
    page.clock.run_for(5000)
    assert shown(page) == ["a (step 2)"] and "wso-playing" not in figure.get_attribute("class")
    play.click()
    page.clock.run_for(10_000)
    assert shown(page) == ["a (step 5)"] and "wso-playing" not in figure.get_attribute("class")
    play.click()
    assert shown(page) == ["a (step 0)"]
    page.close()


def test_a_notebook_that_is_not_trusted_asks_to_run_the_cell_and_shows_no_stray_words(browser):
    page = browser.new_page()
    kept = re.sub(r"(?s)<(script|style)>.*?</\1>", "", two_explorers())  # JupyterLab's sanitizer removes these
    kept = re.sub(r"</?(svg|g|path|text|defs|clipPath|rect|use|pattern)\b[^>]*>", "", kept)
    kept = re.sub(r' (role|tabindex|aria-label)="[^"]*"| hidden(?=[ >])', "", kept)  # hidden="hidden" stays
    page.set_content(kept + show(word(), "a").page.replace("<svg", "<svg class='trusted'"))
    assert page.locator("svg").count() == 1 and page.locator("svg").is_visible()
    notes = page.locator(".wso-note")
    assert [note.is_visible() for note in notes.all()] == [True, True, False]
    assert page.locator("main").inner_text().split("\n\n") == ["Run this cell to draw the figure."] * 2 + ["c"]
    page.close()


# --- what nbval compares ----------------------------------------------------------------------------------------------

SLIDERS = "explore(ddp_overlap, alt='a', caption='c', world_size=[1, 2], buckets=[1, 4])"
CELLS = {
    "import": "from helpers.figures.ddp import ddp_overlap\nfrom helpers.figures.drawing import bars, show\n"
    "from helpers.figures.sliders import explore\nvalue = float(open('value').read())",
    "measured": "show(bars({0: 2, 1: value}, 'ms'), alt='two bars', measured=True)",
    "not measured": "show(bars({0: 2, 1: value}, 'ms'), alt='two bars')",
    "measured, caption": "show(bars({0: 2, 1: 1}, 'ms'), alt='two bars', caption=f'{value}', measured=True)",
    "measured, alt": "show(bars({0: 2, 1: 1}, 'ms'), alt=f'two bars {value}', measured=True)",
    "measured, and text": "print(value)\nshow(bars({0: 2, 1: 1}, 'ms'), alt='two bars', measured=True)",
    "two measured": "for n in 1, 2:\n    display(show(bars({0: n, 1: value}, 'ms'), alt='two bars', measured=True))",
    "words between": (
        "from IPython.display import HTML\n"
        "page = [show(bars({0: n, 1: value}, 'ms'), alt='two bars', measured=True).page for n in (1, 2)]\n"
        "HTML(f'{page[0]} {value} {page[1]}')"
    ),
    "sliders": SLIDERS,
    "sliders, stored otherwise": SLIDERS,
}


def test_nbval_masks_the_drawing_of_a_measured_figure_and_nothing_else(tmp_path):
    """Sliders are equal on every run, with a stored widget and without one. A page that differs is noticed."""
    path = tmp_path / "figures.ipynb"
    (tmp_path / "value").write_text("3")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS.values()])
    options = {"kernel_manager_class": SocketKernelManager, "kernel_name": "python3"}
    client = NotebookClient(notebook, **options, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    sliders = [cell for cell in notebook.cells if cell.source == SLIDERS]
    assert all(WIDGET_VIEW in cell.outputs[0].data for cell in sliders)

    def passing():
        """The cells that pass nbval with the project's sanitising, and its report."""
        nbformat.write(notebook, path)
        report = run_nbval(path, "-q", f"--nbval-sanitize-with={ROOT / 'tests' / 'nbval_sanitize.cfg'}").stdout
        outcomes = re.search(r"^([.FEsx]+) +\[100%\]$", report, re.MULTILINE)
        assert outcomes, report
        return [name for name, outcome in zip(CELLS, outcomes[1], strict=True) if outcome == "."], report

    assert passing()[0] == list(CELLS)
    (tmp_path / "value").write_text("1.5")
    notebook.metadata.pop("widgets", None)
    for cell in sliders:
        del cell.outputs[0].data[WIDGET_VIEW]
    sliders[1].outputs[0].data["text/html"] += " "
    names, report = passing()
    assert names == ["import", "measured", "two measured", "sliders"], report
