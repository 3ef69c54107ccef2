// What pages use of Bootstrap's script, which has 80 kB: menus that open, and a list of contents that follows the reader.

document.addEventListener("DOMContentLoaded", () => {
  const openers = document.querySelectorAll("[data-bs-toggle=dropdown]");

  function open(button, yes) {
    button.setAttribute("aria-expanded", String(yes));
    button.nextElementSibling.classList.toggle("show", yes);
  }

  document.addEventListener("click", ({ target }) => {
    const pressed = target.closest("[data-bs-toggle=dropdown]");
    for (const button of openers) open(button, button === pressed && button.getAttribute("aria-expanded") !== "true");
  });
  document.addEventListener("keydown", ({ key }) => {
    const opened = [...openers].find((button) => button.getAttribute("aria-expanded") === "true");
    if (key !== "Escape" || !opened) return;
    open(opened, false);
    opened.focus();
  });

  const links = [...document.querySelectorAll(".page-toc a.nav-link")];
  const sections = links.map((link) => document.getElementById(decodeURIComponent(link.hash.slice(1))));

  function follow() {
    const here = sections.findLast((section) => section?.getBoundingClientRect().top < innerHeight * 0.4);
    const above = here ? sections.map((section) => Boolean(section?.contains(here))) : [];
    links.forEach((link, place) => link.classList.toggle("active", above[place] === true && scrollY > 0));
  }

  let waits = false;
  document.addEventListener(
    "scroll",
    () => {
      if (waits) return;
      waits = true;
      requestAnimationFrame(() => {
        waits = false;
        follow();
      });
    },
    { passive: true },
  );
  follow();
});
