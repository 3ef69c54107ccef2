// Lets the ranks of the first page's picture walk. Without this script, each choice shows where they end.

document.addEventListener("DOMContentLoaded", () => {
  const hero = document.querySelector(".hero");
  if (!hero || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const button = hero.querySelector(".hero-run");
  const moods = ["hero-meet", "hero-mixed", "hero-waiting"];
  let walk; // the walk that goes on, with the way to end it

  const number = (name) => hero.querySelector(`[name=hero-${name}]:checked`).id.at(-1);
  const place = (panel, lines) =>
    panel.querySelectorAll(".hero-rank").forEach((rank, k) => rank.style.setProperty("--line", lines[k]));

  async function run() {
    walk?.stop();
    const panel = document.getElementById(`hero-${number("place")}-${number("who")}`);
    const says = panel.querySelector(".hero-says");
    const frames = JSON.parse(panel.dataset.frames);
    const last = frames.at(-1);
    const my = (walk = {});
    const stopped = new Promise((stop) => (my.stop = () => ((my.ended = true), stop())));
    const sleep = (ms) => Promise.race([stopped, new Promise((wake) => setTimeout(wake, ms))]);

    panel.classList.add("hero-walking");
    button.textContent = "Stop";
    for (const { at, says: words, mood } of frames.slice(0, -1)) {
      if (my.ended) break;
      place(panel, at);
      if (words) says.textContent = words;
      panel.classList.remove(...moods);
      if (mood) panel.classList.add(`hero-${mood}`);
      await sleep(mood === "mixed" ? 1800 : mood ? 700 : 330);
    }
    place(panel, last.at);
    panel.classList.remove(...moods);
    if (panel.dataset.seconds > 0) panel.classList.add("hero-waiting");
    for (let tenth = 0; tenth <= 10 * panel.dataset.seconds && !my.ended; tenth++) {
      says.textContent = `They wait: ${(tenth / 10).toFixed(1)} s`;
      await sleep(100);
    }
    await sleep(400);
    panel.classList.remove("hero-walking", ...moods);
    says.textContent = last.says;
    if (walk === my) {
      walk = undefined;
      button.textContent = "Run";
    }
  }

  button.hidden = false;
  button.addEventListener("click", () => (walk ? walk.stop() : run()));
  hero.addEventListener("change", run);
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    run();
  }).observe(hero.querySelector(".hero-bar"));
});
