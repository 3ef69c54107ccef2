// A field above a long table hides the rows that lack one of its words. Without this script all rows are shown.

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.sabotage")) {
    const rows = [...table.tBodies[0].rows];
    const texts = rows.map((row) => row.textContent.toLowerCase());
    const label = Object.assign(document.createElement("label"), { className: "filter", textContent: "Show lies with" });
    const field = Object.assign(document.createElement("input"), { type: "search", placeholder: "a word, such as 04 or hang" });
    const count = document.createElement("output");
    const show = () => {
      const words = field.value.toLowerCase().split(/\s+/);
      rows.forEach((row, place) => (row.hidden = !words.every((word) => texts[place].includes(word))));
      count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
    };
    label.append(field, count);
    (table.closest(".pst-scrollable-table-container") ?? table).before(label);
    field.addEventListener("input", show);
    show();
  }
});
