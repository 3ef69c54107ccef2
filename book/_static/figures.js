// What a page adds to its figures: a drawing for a phone's width, and steps that play once, by themselves, when seen.

addEventListener("load", () => {
  const MIN_LETTER = 9; // pixels
  const prefersNoMotion = matchMedia("(prefers-reduced-motion: reduce)");

  // An area of a drawing, and all that several of them cover.
  const area = (left, top, right, bottom) => ({ left, top, right, bottom });
  const around = (areas) =>
    area(
      Math.min(...areas.map(({ left }) => left)),
      Math.min(...areas.map(({ top }) => top)),
      Math.max(...areas.map(({ right }) => right)),
      Math.max(...areas.map(({ bottom }) => bottom)),
    );

  function drawingIn(view) {
    const svg = view.querySelector("svg");
    const { x, y, width, height } = svg.viewBox.baseVal;
    const words = [...svg.querySelectorAll("text, tspan")].filter((word) => word.style.fontSize);
    return {
      view,
      svg,
      words,
      sizes: words.map((word) => parseFloat(word.style.fontSize)),
      texts: [...svg.querySelectorAll("text")],
      whole: area(x, y, x + width, y + height),
    };
  }

  const figures = [...document.querySelectorAll("figure.wso:has(.wso-on svg)")].map((figure) => {
    const drawings = [...figure.querySelectorAll(".wso-view:has(svg)")].map(drawingIn);
    // Below this width a letter would be smaller than MIN_LETTER (helpers/figures/drawing.py).
    const minWidth = parseFloat(drawings[0].svg.style.minWidth);
    return { figure, drawings, minWidth, drawnFor: 0 };
  });

  // Show an area of a drawing, with no letter smaller than `size`.
  function show({ svg, words, sizes }, { left, top, right, bottom }, size, minWidth) {
    words.forEach((word, number) => (word.style.fontSize = `${Math.max(sizes[number], size)}px`));
    svg.setAttribute("viewBox", `${left} ${top} ${right - left} ${bottom - top}`);
    svg.setAttribute("width", right - left);
    svg.setAttribute("height", bottom - top);
    svg.style.minWidth = minWidth;
  }

  const overlap = (one, other) =>
    Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1 &&
    Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 3;

  // Where the words of a drawing are that shows an area: in its own units, and whether some cover others.
  function placesOfWords({ svg, texts }, { left, top, right }) {
    const sheet = svg.getBoundingClientRect();
    if (!sheet.width) return { areas: [], hasOverlap: false }; // it is not drawn
    const scale = (right - left) / sheet.width;
    const boxes = texts.map((text) => text.getBoundingClientRect());
    const hasOverlap = boxes.some((one, number) => boxes.slice(number + 1).some((other) => overlap(one, other)));
    const areas = boxes.map((box) =>
      area(
        left + (box.left - sheet.left) * scale,
        top + (box.top - sheet.top) * scale,
        left + (box.right - sheet.left) * scale,
        top + (box.bottom - sheet.top) * scale,
      ),
    );
    return { areas, hasOverlap };
  }

  // Draw all frames of a figure for a width, with larger letters and as tall as each other. The letters may need more
  // space, which makes them larger again: so it tries several times. It fails where words would cover each other.
  function drawNarrow({ drawings }, width) {
    let shown = around(drawings.map(({ whole }) => whole));
    for (let tries = 0; tries < 9; tries++) {
      const size = (MIN_LETTER * (shown.right - shown.left)) / width;
      const areas = [shown];
      for (const drawing of drawings) {
        drawing.view.style.setProperty("display", "block", "important"); // a hidden frame has no size
        show(drawing, shown, size, "0");
        const words = placesOfWords(drawing, shown);
        drawing.view.style.display = "";
        if (words.hasOverlap) return false;
        areas.push(...words.areas);
      }
      const needed = around(areas);
      if (Object.keys(needed).every((side) => Math.abs(needed[side] - shown[side]) < 2)) return true;
      shown = needed;
    }
    return false;
  }

  function fit(entry) {
    const { figure, drawings, minWidth } = entry;
    const width = figure.querySelector(".wso-on").clientWidth;
    if (!width || width === entry.drawnFor) return;
    entry.drawnFor = width;
    figure.querySelector(".wso-hint")?.remove();
    if (width < minWidth && drawNarrow(entry, width)) return;
    for (const drawing of drawings) show(drawing, drawing.whole, 0, `${minWidth}px`);
    if (width >= minWidth) return;
    const hint = Object.assign(document.createElement("p"), { className: "wso-hint" });
    hint.textContent = "Swipe: the drawing goes on to the right.";
    figure.querySelector(".wso-note").before(hint);
  }

  const fitAll = () => figures.forEach(fit);
  addEventListener("resize", fitAll);
  addEventListener("toggle", fitAll, true); // a closed box has no width
  fitAll();

  // Press the button that plays the steps when the figure is seen, unless the reader has touched the figure before.
  function playWhenSeen({ figure }) {
    const button = figure.querySelector(".wso-controls button");
    if (!button) return;
    const observer = new IntersectionObserver(
      ([{ isIntersecting }]) => {
        if (!isIntersecting || prefersNoMotion.matches) return;
        observer.disconnect();
        button.click();
      },
      { threshold: 0.9 },
    );
    function stop({ target }) {
      observer.disconnect();
      for (const kind of ["pointerdown", "keydown"]) figure.removeEventListener(kind, stop);
      if (figure.matches(".wso-playing") && !button.contains(target)) button.click();
    }
    for (const kind of ["pointerdown", "keydown"]) figure.addEventListener(kind, stop);
    observer.observe(figure);
  }
  figures.forEach(playWhenSeen);
});
