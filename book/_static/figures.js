// What a page adds to its figures: a drawing for a phone's width, and steps that play once, by themselves, when seen.

addEventListener("load", () => {
  const LEAST = 9; // pixels that a letter has
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const drawings = [...document.querySelectorAll("figure.wso:has(.wso-on svg)")].map((figure) => {
    const views = [...figure.querySelectorAll(".wso-view:has(svg)")].map((view) => {
      const svg = view.querySelector("svg");
      const { x, y, width, height } = svg.viewBox.baseVal;
      const part = [x, y, x + width, y + height];
      const words = [...svg.querySelectorAll("text, tspan")].filter((word) => word.style.fontSize);
      const sizes = words.map((word) => parseFloat(word.style.fontSize));
      return { view, svg, words, sizes, texts: [...svg.querySelectorAll("text")], part };
    });
    return { figure, views, wide: parseFloat(views[0].svg.style.minWidth), drawnFor: 0 };
  });

  // Show a part of a drawing, [left, top, right, bottom], with no letter smaller than size.
  function set({ svg, words, sizes }, [left, top, right, bottom], size, least) {
    words.forEach((word, place) => (word.style.fontSize = `${Math.max(sizes[place], size)}px`));
    const [width, height] = [right - left, bottom - top];
    for (const [name, value] of Object.entries({ viewBox: `${left} ${top} ${width} ${height}`, width, height }))
      svg.setAttribute(name, value);
    svg.style.minWidth = least;
  }

  // Whether words cover others, and the part of the drawing that has all words.
  function measured({ svg, texts }, [left, top, right]) {
    const sheet = svg.getBoundingClientRect();
    if (!sheet.width) return [false, []]; // it is not drawn
    const scale = (right - left) / sheet.width;
    const places = texts.map((text) => text.getBoundingClientRect());
    const covered = places.some((a, first) =>
      places.some(
        (b, second) =>
          second > first &&
          Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
          Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3,
      ),
    );
    const x = (place) => left + (place - sheet.left) * scale;
    const y = (place) => top + (place - sheet.top) * scale;
    const sides = places.map((place) => [x(place.left), y(place.top), x(place.right), y(place.bottom)]);
    return [covered, sides];
  }

  const around = (sides) =>
    [0, 1, 2, 3].map((side) => Math[side < 2 ? "min" : "max"](...sides.map((place) => place[side])));

  // Draw all views for the width, as tall as each other. It fails where words would cover each other.
  function narrow({ views }, width) {
    let part = around(views.map(({ part }) => part));
    for (let tries = 0; tries < 9; tries++) {
      const size = (LEAST * (part[2] - part[0])) / width;
      let covered = false;
      const all = [part];
      for (const view of views) {
        view.view.style.setProperty("display", "block", "important");
        set(view, part, size, "0");
        const [over, sides] = measured(view, part);
        view.view.style.display = "";
        covered ||= over;
        all.push(...sides);
      }
      if (covered) return false;
      const needed = around(all);
      if (needed.every((side, place) => Math.abs(side - part[place]) < 2)) return true;
      part = needed;
    }
    return false;
  }

  function fit(drawing) {
    const { figure, views, wide } = drawing;
    const width = figure.querySelector(".wso-on").clientWidth;
    if (!width || width === drawing.drawnFor) return;
    drawing.drawnFor = width;
    figure.querySelector(".wso-hint")?.remove();
    if (width < wide && narrow(drawing, width)) return;
    for (const view of views) set(view, view.part, 0, `${wide}px`);
    if (width >= wide) return;
    const hint = Object.assign(document.createElement("p"), { className: "wso-hint" });
    hint.textContent = "Swipe: the drawing goes on to the right.";
    figure.querySelector(".wso-note").before(hint);
  }

  const look = () => drawings.forEach(fit);
  addEventListener("resize", look);
  addEventListener("toggle", look, true); // a closed box has no width
  look();

  function playWhenSeen({ figure }) {
    const button = figure.querySelector(".wso-controls button");
    if (!button) return;
    const seen = new IntersectionObserver(
      ([{ isIntersecting }]) => {
        if (!isIntersecting || still.matches) return;
        seen.disconnect();
        button.click();
      },
      { threshold: 0.9 },
    );
    function touched({ target }) {
      seen.disconnect();
      for (const kind of ["pointerdown", "keydown"]) figure.removeEventListener(kind, touched);
      if (figure.matches(".wso-playing") && !button.contains(target)) button.click();
    }
    for (const kind of ["pointerdown", "keydown"]) figure.addEventListener(kind, touched);
    seen.observe(figure);
  }
  drawings.forEach(playWhenSeen);
});
