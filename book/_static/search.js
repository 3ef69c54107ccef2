// The field of every search form: sections under it while one types, to walk through with the arrow keys.
// search_engine.js ranks them; it and the sections' texts are loaded when the field is first used.

document.addEventListener("DOMContentLoaded", () => {
  const root = document.documentElement.dataset.content_root;
  const make = (name, properties = {}, ...children) => {
    const tag = Object.assign(document.createElement(name), properties);
    tag.append(...children);
    return tag;
  };

  const load = (file) =>
    new Promise((loaded, failed) => {
      const src = `${root}_static/${file}`;
      document.head.append(
        make("script", { src, onload: loaded, onerror: () => failed(new Error(`${src} is missing.`)) }),
      );
    });
  let engine;
  const ready = () =>
    (engine ??= Promise.all(["minisearch.js", "search_engine.js", "search_entries.js"].map(load))
      .then(() => bookSearch.unpack(searchEntries))
      .then((entries) => bookSearch.build(entries, searchWeights)));

  const withMarks = (stretches) =>
    stretches.map(([text, isHit]) => (isHit ? make("mark", { textContent: text }) : text));

  document.querySelectorAll("form.bd-search").forEach((form, number) => {
    const field = form.querySelector("input");
    const dialog = form.closest("dialog");
    const status = make("p", { className: "search-status", role: "status" });
    const list = make("div", { className: "search-list", id: `search-list-${number}`, role: "listbox", hidden: true });
    list.ariaLabel = "Sections";
    form.after(status, list);
    if (dialog) dialog.ariaLabel = "Search";
    Object.assign(field, { role: "combobox", ariaAutoComplete: "list", ariaExpanded: "false" });
    field.setAttribute("aria-controls", list.id);

    function choose(option) {
      list.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
      option?.setAttribute("aria-selected", "true");
      option?.scrollIntoView({ block: "nearest" });
      field.setAttribute("aria-activedescendant", option?.id ?? "");
    }

    function option({ page, anchor, headings, heading, sentence }, place) {
      const above = headings.slice(0, -1).join(" › ");
      const link = make(
        "a",
        { href: `${root}${page}.html#${anchor}`, id: `${list.id}-${place}`, role: "option", ariaSelected: "false" },
        make("span", { className: "search-heading" }, ...withMarks(heading)),
        ...(above ? [make("span", { className: "search-above", textContent: above })] : []),
        make("span", { className: "search-sentence" }, ...withMarks(sentence)),
      );
      link.addEventListener("focus", () => choose(link));
      link.addEventListener("click", () => dialog?.close());
      return link;
    }

    async function show() {
      const query = field.value.trim();
      if (query === list.dataset.query) return; // its results are in the list
      if (!engine) status.textContent = "Loading …";
      let found;
      try {
        found = (await ready())(query);
      } catch (error) {
        status.textContent = `The search does not work here: ${error.message}`;
        return;
      }
      if (query !== field.value.trim()) return; // somebody typed on
      list.dataset.query = query;
      list.replaceChildren(...found.map(option));
      list.hidden = !found.length;
      list.scrollTop = 0;
      field.ariaExpanded = String(found.length > 0);
      choose(list.firstElementChild);
      const none = query ? "No section has any of these words." : "";
      status.textContent = found.length ? `${found.length} section${found.length > 1 ? "s, best first" : ""}` : none;
    }

    field.addEventListener("focus", () => {
      field.select();
      ready().catch(() => {}); // what is typed shows the error
    });
    field.addEventListener("input", show);
    field.addEventListener("keydown", (event) => {
      const chosen = list.querySelector("[aria-selected=true]");
      const next = { ArrowDown: chosen?.nextElementSibling, ArrowUp: chosen?.previousElementSibling };
      if (event.key in next) {
        event.preventDefault();
        if (next[event.key]) choose(next[event.key]);
      }
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      show().then(() => list.querySelector("[aria-selected=true]")?.click());
    });

    const asked = new URLSearchParams(location.search).get("q");
    if (!dialog && asked) {
      field.value = asked;
      show();
    }
    if (!dialog) field.focus();
  });
});
