// How the search orders its results: as Sphinx does, but a heading that holds what was typed comes before the pages that
// have the words somewhere. They would tie at 15, and the alphabet would decide. A page's own title, which is worth 16,
// stays in front of both.
var Scorer = {
  score: ([docname, title, anchor, description, score]) => score + (anchor ? 1.9 : score > 15 ? 2 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
