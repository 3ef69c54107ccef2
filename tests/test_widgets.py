"""``explore`` shows the same frames in a live kernel and on a static page."""

import functools
import html
import json
import re
from types import SimpleNamespace

import pytest

from helpers.figures import sliders as widgets
from helpers.figures.ddp import ddp_overlap
from helpers.figures.drawing import canvas, show
from helpers.figures.sliders import explore

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


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
    assert page.count("<script>") == 1 and "http" not in page


def test_a_slider_has_a_label_names_values_of_any_type_and_starts_at_the_function_s_default():
    explorer = explore(functools.partial(word, size=0.5), alt="a", world_size=[None, "<two>"], size=[3, 0.5])
    assert repr(explorer) == "explore(word, world_size=[None, '<two>'], size=[3, 0.5])"
    page = explorer.page()
    assert re.findall(r'wso-on" [^>]*aria-label="([^"]*)"', page) == ["a (world size None, size 0.5)"]
    assert re.findall(r' value="(\d)"', page) == ["0", "1"]
    assert '<label><span>world size</span><input type="range"' in page
    for start in ("None", "0.5"):
        assert f'aria-valuetext="{start}"' in page and f'<output aria-live="off">{start}</output>' in page
    labels = [json.loads(html.unescape(label)) for label in re.findall(r'data-labels="([^"]*)"', page)]
    assert labels == [["None", "<two>"], ["3", "0.5"]]
    assert [knob.value for knob in explorer.live().children[:2]] == [0, 1]


def test_frames_are_small():
    explorer = explore(ddp_overlap, alt="a", world_size=[1, 2, 4, 8], buckets=[1, 2, 4, 8, 16])
    assert len(explorer.page()) / len(explorer.views) < 12_000


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
        (ValueError, "at most 64 frames, not 66", word, {"size": range(11), "text": range(6)}),
        (TypeError, "Figure was expected, not Axes", lambda size: word().axes[0], {"size": [1]}),
        (ValueError, "alt text is empty", word, {"size": [1], "alt": ""}),
    ],
)
def test_what_cannot_be_explored_is_refused_in_one_line(error, match, fn, sliders):
    with pytest.raises(error, match=match) as raised:
        explore(fn, **{"alt": "a", **sliders})
    assert "\n" not in str(raised.value)


# --- in a browser -----------------------------------------------------------------------------------------------------


def two_explorers():
    first = explore(word, alt="first", text=["x", "y"], size=[1, 2, 3])
    second = explore(word, alt="second", caption="c", size=[7, 8])
    return f"<!doctype html><title>t</title><main>{first.page()}{second.page()}</main>"


def shown(page):
    """The alt texts of the visible frames."""
    return [view.get_attribute("aria-label") for view in page.locator(".wso-view").all() if view.is_visible()]


def test_sliders_move_by_keyboard_and_by_mouse_each_its_own_figure(browser):
    page = browser.new_page()
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_content(two_explorers())
    assert shown(page) == ["first (text x, size 1)", "second (size 7)"]

    text = page.get_by_role("slider", name="text", exact=True)
    size = page.locator("figure").nth(0).get_by_role("slider", name="size", exact=True)
    text.focus()
    page.keyboard.press("ArrowRight")
    assert shown(page) == ["first (text y, size 1)", "second (size 7)"]
    assert (text.get_attribute("aria-valuetext"), size.get_attribute("aria-valuetext")) == ("y", "1")
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    assert shown(page)[0] == "first (text y, size 3)"
    assert page.locator("output").all_text_contents() == ["y", "3", "7"]

    track = page.locator("figure").nth(1).get_by_role("slider").bounding_box()
    page.mouse.click(track["x"] + track["width"] - 3, track["y"] + track["height"] / 2)
    assert shown(page) == ["first (text y, size 3)", "second (size 8)"]
    assert (requests, errors) == ([], [])
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
