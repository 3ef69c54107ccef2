// Lets the ranks of the first page's picture walk. Without this script, each choice shows where they end.

document.addEventListener("DOMContentLoaded", () => {
  const hero = document.querySelector(".hero");
  if (!hero || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const button = hero.querySelector(".hero-run");
  const MOODS = ["hero-meet", "hero-mixed", "hero-waiting"];
  const DURATION = { "": 330, meet: 700, mixed: 1800 }; // milliseconds of a frame, by its mood
  let current = null; // the walk that goes on

  const chosen = (name) => hero.querySelector(`[name=hero-${name}]:checked`).id.at(-1);

  function placeRanks(panel, lines) {
    panel.querySelectorAll(".hero-rank").forEach((rank, number) => rank.style.setProperty("--line", lines[number]));
  }

  // A walk has pauses, which are over at once when it is stopped.
  function newWalk() {
    const walk = { isStopped: false };
    const stopped = new Promise((resolve) => {
      walk.stop = () => {
        walk.isStopped = true;
        resolve();
      };
    });
    walk.pause = (milliseconds) => Promise.race([stopped, new Promise((resolve) => setTimeout(resolve, milliseconds))]);
    return walk;
  }

  async function run() {
    current?.stop();
    const walk = newWalk();
    current = walk;
    const panel = document.getElementById(`hero-${chosen("place")}-${chosen("who")}`);
    const text = panel.querySelector(".hero-says");
    const frames = JSON.parse(panel.dataset.frames);
    const last = frames.pop();

    panel.classList.add("hero-walking");
    button.textContent = "Stop";
    for (const frame of frames) {
      if (walk.isStopped) break;
      placeRanks(panel, frame.at);
      if (frame.says) text.textContent = frame.says;
      panel.classList.remove(...MOODS);
      if (frame.mood) panel.classList.add(`hero-${frame.mood}`);
      await walk.pause(DURATION[frame.mood]);
    }

    placeRanks(panel, last.at);
    panel.classList.remove(...MOODS);
    const seconds = Number(panel.dataset.seconds); // that the ranks wait until launch() ends them
    if (seconds > 0) panel.classList.add("hero-waiting");
    for (let tenth = 0; tenth <= 10 * seconds && !walk.isStopped; tenth++) {
      text.textContent = `They wait: ${(tenth / 10).toFixed(1)} s`;
      await walk.pause(100);
    }
    await walk.pause(400);

    panel.classList.remove("hero-walking", ...MOODS);
    text.textContent = last.says;
    if (current === walk) {
      current = null;
      button.textContent = "Run";
    }
  }

  button.hidden = false;
  button.addEventListener("click", () => {
    if (current) current.stop();
    else run();
  });
  hero.addEventListener("change", run);
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    run();
  }).observe(hero.querySelector(".hero-bar"));
});
