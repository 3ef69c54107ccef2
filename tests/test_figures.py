"""The book's figures and their sliders: one style, the same bytes every time, and what nbval compares of them."""

import functools
import html
import json
import re
from xml.etree import ElementTree

import pytest
from conftest import ROOT
from matplotlib import pyplot
from nbval.plugin import get_sanitize_patterns

from helpers.figures import drawing
from helpers.figures.collectives import machines, ring_step, speeds_by_size, tensors
from helpers.figures.ddp import ddp_overlap, exposed, overlap_schedule, replicas
from helpers.figures.drawing import RANK_COLORS, canvas, rank_color, show
from helpers.figures.sliders import explore

# --- colours ----------------------------------------------------------------------------------------------------------


def test_a_rank_is_a_whole_number_from_0_on():
    assert [rank_color(rank) for rank in range(8)] == RANK_COLORS
    with pytest.raises(ValueError, match="whole number"):
        rank_color(-1)


def test_a_rank_has_the_same_color_in_every_figure():
    curves = drawing.lines({rank: [1, rank] for rank in range(3)}, [0, 1], "step", "loss")
    bars = drawing.bars({rank: 1.0 + rank for rank in range(3)}, "samples/s")
    for fig in [curves, bars, ddp_overlap(3, 2)]:
        assert set(re.findall(r"#[0-9a-f]{6}\b", show(fig, "a").page)) == set(RANK_COLORS[:3])


def test_the_picture_of_the_three_places_has_the_ranks_colors():
    drawing_of_page = (ROOT / "book" / "three_places.svg").read_text(encoding="utf-8")
    colors = dict(re.findall(r"\.r(\d) { fill: (#\w+) }", drawing_of_page))
    assert colors == {str(rank): color for rank, color in enumerate(RANK_COLORS)}


# --- the SVG ----------------------------------------------------------------------------------------------------------


def every_figure():
    """A new matplotlib figure of each kind that the book has, with small numbers."""
    rows_before_all_reduce = [[1, 2], [10, 20]]  # one row for each rank
    rows_after_all_reduce = [[11, 22], [11, 22]]
    steps_of_rank_0 = [[1, 2], [1, 22], [11, 22]]  # its row before the ring's first step, after it, after the second
    steps_of_rank_1 = [[10, 20], [11, 20], [11, 22]]
    steps_by_world_size = {2: [steps_of_rank_0, steps_of_rank_1]}
    seconds_by_ranks = {2: [1e-4, 2e-3], 4: [2e-4, 4e-3]}
    spans = [("compute", 0, 3, ""), ("network", 2, 4, "")]
    return [
        replicas(),
        ddp_overlap(8, 16),
        machines(2, 4),
        tensors({"before": rows_before_all_reduce, "after": rows_after_all_reduce}),
        ring_step(steps_by_world_size, world_size=2, step=1),
        speeds_by_size([2**14, 2**20], seconds_by_ranks),
        drawing.lines({0: [3, 2, 1], "plain": [1, 2, 3]}, [1, 2, 3], "step", "loss"),
        drawing.bars({"fp32": 4.0, "fp16": 2.0}, "megabytes"),
        drawing.timeline({0: spans, 1: spans}, "time (ms)"),
    ]


@functools.cache
def every_drawing():
    """The figures of ``every_figure`` as SVG. They are drawn once for all tests."""
    return [drawing.svg(fig) for fig in every_figure()]


def test_a_figure_has_the_same_bytes_every_time_whatever_the_style_around_it():
    drawings = every_drawing()
    with pyplot.style.context("dark_background"), pyplot.rc_context({"font.size": 30, "svg.fonttype": "path"}):
        assert [drawing.svg(fig) for fig in every_figure()] == drawings


def test_a_drawing_is_small_and_has_the_pages_ink_and_font():
    for svg in every_drawing():
        tags = {element.tag for element in ElementTree.fromstring(svg).iter()}
        assert tags <= {"svg", "g", "path", "text", "tspan", "defs", "clipPath", "rect", "use", "pattern"}
        assert "currentColor" in svg
        assert not re.search("#000|black|#ffffff|font-family|DejaVu|http", svg)
        assert not re.search(r"\d\.\d{3}", svg), "numbers are rounded"
        assert len(svg) < 21_000


def test_a_log_axis_has_numbers():
    """Of a power, matplotlib writes 10 and the exponent as two parts of one text, so 10 to the third is read as 103."""
    fig, ax = pyplot.subplots()
    ax.loglog([1, 1000], [1e-6, 1])
    root = ElementTree.fromstring(drawing.svg(fig))
    texts = set()
    for element in root.iter("text"):
        text = "".join(element.itertext())
        texts.add(text.replace("\u2212", "-"))  # the sign that is as wide as a plus
    assert {"100", "103", "10-6"} <= texts


def test_figures_of_one_page_share_no_id():
    """An SVG refers to its parts by ids. If two figures had the same id, one would be drawn with the other's part."""
    fig = drawing.lines({0: [3, 2, 1]}, [1, 2, 3], "step", "loss")
    pages = [
        show(fig, "a").page,
        show(fig, "a", "another caption").page,
        show(fig, "b").page,
        explore(ddp_overlap, alt="a", caption="c", buckets=[1, 2]).page,
        explore(ddp_overlap, alt="a", caption="d", buckets=[1, 2]).page,
    ]
    all_ids = []
    for page in pages:
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert ids, "a clip path or a hatch is needed for this test"
        ids_in_use = re.findall(r'(?:url\(#|href="#)([^)"]+)', page)  # url(#an-id) or href="#an-id"
        assert set(ids_in_use) == set(ids)
        all_ids += ids
    assert len(set(all_ids)) == len(all_ids)


# --- show() -----------------------------------------------------------------------------------------------------------


def test_show_escapes_its_words_and_has_a_short_repr():
    fig, ax = canvas(200, 40)
    ax.text(10, 20, "two  spaces <b>")
    shown = show(fig, alt='two <ranks> & "one" model', caption="`no_sync` < *all* 2 * 3 * 4")
    assert ">two  spaces &lt;b&gt;</text>" in shown.page
    assert 'role="img" tabindex="0" aria-label="two &lt;ranks&gt; &amp; &quot;one&quot; model"' in shown.page
    assert "<figcaption><code>no_sync</code> &lt; <em>all</em> 2 * 3 * 4</figcaption>" in shown.page
    assert repr(shown) == 'Figure: two <ranks> & "one" model'
    assert "<figcaption>" not in show(fig, alt="a").page


def test_show_refuses_what_is_no_figure_and_an_empty_alt_text():
    fig, ax = canvas(200, 40)
    with pytest.raises(TypeError, match="Figure was expected, not Axes"):
        show(ax, "a")
    with pytest.raises(ValueError, match="alt text is empty"):
        show(fig, " ")


# --- the model behind ddp_overlap -------------------------------------------------------------------------------------


def test_all_reduces_wait_for_their_gradients_and_for_the_network():
    # Of two buckets each takes a latency of 1 ms + 2 * 3/4 * 50 MB / (10 GB/s) = 8.5 ms. The first is ready after half
    # of backward.
    assert overlap_schedule(4, 2, milliseconds_of_latency=1) == [
        ("compute", 0, 10, "forward"),
        ("compute", 10, 20, "backward"),
        ("network", 20, 28.5, "all-reduce"),
        ("compute", 20, 30, "backward"),
        ("network", 30, 38.5, "all-reduce"),
        ("compute", 30, 38.5, "wait"),
        ("compute", 38.5, 41.5, "step"),
    ]

    # Many buckets queue for the network, and each pays the latency.
    waits_by_buckets = {}
    for buckets in (1, 2, 4, 8, 16):
        waits_by_buckets[buckets] = exposed(overlap_schedule(4, buckets, milliseconds_of_latency=1))
    assert waits_by_buckets == pytest.approx({1: 16, 2: 8.5, 4: 4.75, 8: 5.5, 16: 12.25})


# --- sliders ----------------------------------------------------------------------------------------------------------


def word(text="a", size=1, **other):
    """A figure function: it writes the values of two controls, such as "a at 1"."""
    fig, ax = canvas(200, 40)
    ax.text(10, 20, f"{text} at {size}")
    return fig


def words_of(page):
    """The words in a page's frames, in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", page)


def test_there_is_one_frame_for_each_combination_and_the_last_slider_runs_fastest():
    page = explore(word, alt="a word", text=["x", "y"], size=[1, 2, 3]).page
    assert words_of(page) == ["x at 1", "x at 2", "x at 3", "y at 1", "y at 2", "y at 3"]
    alts = re.findall(r'aria-label="([^"]*)"', page)
    assert len(alts) == 6
    assert alts[0] == "a word (text x, size 1)"
    assert alts[-1] == "a word (text y, size 3)"
    assert page.count('class="wso-view wso-on"') == 1


def test_a_control_names_its_values_and_starts_at_the_functions_default():
    """Up to five values are buttons, more are a slider."""
    explorer = explore(word, alt="a", world_size=[None, "<two>"], size=[0.5, 1], step=range(6))
    assert repr(explorer) == "explore(word, world_size=[None, '<two>'], size=[0.5, 1], step=[0, 1, 2, 3, 4, 5])"
    page = explorer.page

    visible_frame = re.findall(r'wso-on" [^>]*aria-label="([^"]*)"', page)
    assert visible_frame == ["a (world size None, size 1, step 0)"]  # size is 1 by default; the others have no default

    names_of_values = []  # of each control
    for attribute in re.findall(r'data-labels="([^"]*)"', page):
        names_of_values.append(json.loads(html.unescape(attribute)))
    assert names_of_values == [["None", "<two>"], ["0.5", "1"], ["0", "1", "2", "3", "4", "5"]]

    names_of_groups_of_buttons = re.findall(r"<legend>(.*?)</legend>", page)
    assert names_of_groups_of_buttons == ["world size", "size"]
    chosen_buttons = re.findall(r" checked><span>(.*?)</span>", page)
    assert chosen_buttons == ["None", "1"]
    slider = '<button type="button" aria-label="Play the steps"></button><label><span>step</span><input'
    assert slider in page


def test_a_unit_stands_behind_the_number_and_a_short_name_is_said_in_words():
    page = explore(word, alt="a", save_seconds=[1, 60], restart_minutes=[1, 5], tp=[1, 8]).page
    assert re.findall(r"<legend>(.*?)</legend>", page) == ["save", "restart", "tensor parallel"]
    assert re.findall(r"<span>(.*?)</span>", page) == ["1 s", "60 s", "1 min", "5 min", "1", "8"]


@pytest.mark.parametrize(
    "controls, error",
    [
        ({}, "has no slider"),
        ({"size": []}, "no values"),
        ({"size": range(11), "text": range(6)}, "at most 64 frames, not 66"),
    ],
)
def test_what_cannot_be_explored_is_refused(controls, error):
    with pytest.raises(ValueError, match=error):
        explore(word, alt="a", **controls)


# --- sliders in a browser ---------------------------------------------------------------------------------------------


def two_explorers():
    """A page with two figures: the first has buttons for text and size, the second a slider for the step."""
    first = explore(word, alt="first", text=["x", "y"], size=[1, 2, 3])
    second = explore(word, alt="second", caption="c", step=range(6))
    return f"<!doctype html><title>t</title><main>{first.page}{second.page}</main>"


def visible_frames(page):
    """The alt texts of the visible frames."""
    return [view.get_attribute("aria-label") for view in page.locator(".wso-view:visible").all()]


def test_a_control_moves_its_own_figure_alone(browser):
    """By keyboard and by mouse; test_browser.py tries all controls of all pages."""
    page = browser.new_page()
    page.set_content(two_explorers())
    assert visible_frames(page) == ["first (text x, size 1)", "second (step 0)"]

    page.get_by_role("radio", name="x", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert visible_frames(page) == ["first (text y, size 1)", "second (step 0)"]

    page.get_by_text("3", exact=True).click()
    assert visible_frames(page) == ["first (text y, size 3)", "second (step 0)"]

    slider = page.get_by_role("slider", name="step")
    right_end = {"x": slider.bounding_box()["width"] - 10, "y": 10}
    slider.drag_to(slider, source_position={"x": 10, "y": 10}, target_position=right_end)
    assert visible_frames(page) == ["first (text y, size 3)", "second (step 5)"]
    assert slider.get_attribute("aria-valuetext") == "5"
    assert page.locator("output").text_content() == "5"

    page.locator(".wso-on").nth(1).press("ArrowLeft")  # the arrow keys work on the drawing too
    assert visible_frames(page) == ["first (text y, size 3)", "second (step 4)"]
    page.close()


def square(step=0):
    """A figure function: a square that comes from the left in each step but the first."""
    fig, ax = canvas(200, 40)
    ax.text(10, 20, f"{step}")
    if step == 0:
        gid = None
    else:
        gid = "move -20 0"  # tells the page from where the square comes
    drawing.boxes(ax, [(60 + 20 * step, 10, 10, 10)], facecolor=drawing.INK, gid=gid)
    return fig


def test_steps_are_played_and_shapes_move(browser):
    """A step takes about a second, and the button starts, stops and begins again. The page has a clock of the test."""
    page = browser.new_page(reduced_motion="no-preference")
    page.set_content(explore(square, alt="a", step=range(6)).page)
    page.clock.install()
    button = page.get_by_role("button", name="Play the steps")

    button.click()
    assert visible_frames(page) == ["a (step 1)"]
    transforms = page.evaluate("document.getAnimations().map(it => it.effect.getKeyframes()[0].transform)")
    assert transforms == ["translate(-20px, 0px)"]

    page.clock.run_for(1300)
    button.click()  # stops
    page.clock.run_for(5000)
    assert visible_frames(page) == ["a (step 2)"]

    button.click()  # goes on
    page.clock.run_for(10_000)
    assert visible_frames(page) == ["a (step 5)"]

    button.click()  # begins again
    assert visible_frames(page) == ["a (step 0)"]
    page.close()


def sanitized(html_of_notebook):
    """What JupyterLab leaves of an output's HTML if the notebook is not trusted: no drawing, and no script.

    It removes these elements and attributes. The attribute hidden="hidden" stays, and a bare hidden goes.
    """
    text = re.sub(r"(?s)<(script|style)>.*?</\1>", "", html_of_notebook)
    text = re.sub(r"</?(svg|g|path|text|defs|clipPath|rect|use|pattern)\b[^>]*>", "", text)
    return re.sub(r' (role|tabindex|aria-label)="[^"]*"| hidden(?=[ >])', "", text)


def test_a_notebook_that_is_not_trusted_asks_to_run_the_cell_and_shows_no_stray_words(browser):
    page = browser.new_page()
    two_untrusted_figures = sanitized(two_explorers())
    a_trusted_figure = show(word(), "a").page
    page.set_content(two_untrusted_figures + a_trusted_figure)
    assert page.locator("svg").count() == 1
    assert page.locator("svg:visible").count() == 1
    assert [note.is_visible() for note in page.locator(".wso-note").all()] == [True, True, False]
    words_of_untrusted_figures = page.locator("main").inner_text().split("\n\n")
    note = "Run this cell to draw the figure."
    assert words_of_untrusted_figures == [note, note, "c"]  # "c" is the second one's caption
    page.close()


# --- what nbval compares ----------------------------------------------------------------------------------------------


def test_nbval_masks_the_drawing_of_a_measured_figure_and_nothing_else():
    configuration = (ROOT / "tests" / "nbval_sanitize.cfg").read_text(encoding="utf-8")
    [(pattern, replacement)] = get_sanitize_patterns(configuration)

    def compared(value, **options):
        """What nbval compares of a figure with two bars, of which one shows this value."""
        page = show(drawing.bars({0: 2, 1: value}, "ms"), alt="two bars", **options).page
        return re.sub(pattern, replacement, page)

    assert compared(3, measured=True) == compared(1.5, measured=True)
    assert compared(3) != compared(1.5)
    assert compared(3, measured=True, caption="a") != compared(3, measured=True, caption="b")
