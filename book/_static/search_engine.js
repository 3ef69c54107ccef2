// Ranks the book's sections for a query, with MiniSearch. search.js loads this when somebody searches.

var bookSearch = (() => {
  const COMMON = new Set(
    ("a about an and are as at be been but by can could did do does for from get had has have how i if in into is it " +
      "its may me my no not of on or our should so some than that the their them then there these they this to use " +
      "used using was we were what when where which who why will with would you your").split(" "),
  );
  const SAME = new Map([
    ...["deadlock", "deadlocks", "freeze", "freezes", "frozen", "stall", "stalls", "stuck"].map((word) => [word, "hang"]),
    ...Object.entries({ async: "asynchronous", bf16: "bfloat16", fp16: "float16", fp32: "float32", oom: "memory" }),
  ]);
  const COMPARING = new Set("vs versus compar differenc difference between".split(" "));
  const NAME = /[\p{L}\p{N}]+(?:[_-][\p{L}\p{N}]+)*/gu;
  const PART = /\p{Lu}+(?!\p{Ll})\p{N}*|\p{Lu}?[\p{Ll}\p{N}]+|[\p{L}\p{N}]+/gu;

  // gradients, gradient; saves, saved, saving, save; accumulation, accumulate; copies, copy; clipping, clip.
  function stem(word) {
    if (word.length < 4 || /[^a-z]/.test(word)) return word;
    return word
      .replace(/([^su])s$/, "$1")
      .replace(/(?<=[a-z]{3})(?:ing|ed|ion)$/, "")
      .replace(/([bdgmnprt])\1$/, "$1")
      .replace(/(?<=[a-z]{3})e$/, "")
      .replace(/y$/, "i");
  }

  // The terms of a text: the parts of each name, and the name as one word. So all-reduce, all_reduce and allreduce are
  // the same, and DistributedSampler is found by "distributed sampler". LoRA and ZeRO are one word each: "lo" is another.
  function terms(text) {
    return (text.match(NAME) ?? []).flatMap((name) => {
      let parts = name.match(PART);
      if (parts.length > 1) {
        const whole = parts.join("");
        if (!/[_-]/.test(name)) parts = parts.filter((part) => part.length > 2);
        parts.push(whole);
      }
      return parts.map((part) => part.toLowerCase()).map((word) => stem(SAME.get(word) ?? word));
    });
  }

  // A text without all that differs between two prints of the same error: case, spaces, punctuation.
  const plain = (text) => (text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? []).join(" ");
  const isNumber = (term) => /^\d+$/.test(term);

  // [text, whether it is a hit] of each stretch of a text.
  function marked(text, hits) {
    const stretches = [];
    let end = 0;
    for (const { 0: name, index } of text.matchAll(NAME)) {
      if (!terms(name).some((term) => hits.has(term))) continue;
      stretches.push([text.slice(end, index), false], [name, true]);
      end = index + name.length;
    }
    return [...stretches, [text.slice(end), false]].filter(([stretch]) => stretch);
  }

  // Of a cell only names are in the index: a result shows those that were asked for, and says that they are code.
  function inCode(line, hits) {
    const isBag = /^[\w ]+$/.test(line) && line.includes(" ");
    const names = isBag ? line.split(" ").filter((name) => terms(name).some((term) => hits.has(term))) : [line];
    return `in code: ${names.slice(0, 6).join(", ")}`;
  }

  // A long sentence is cut before its first hit.
  function shortened(sentence, hits, longest = 240) {
    if (sentence.length <= longest) return sentence;
    const before = marked(sentence, hits)[0];
    const from = before[1] ? 0 : sentence.lastIndexOf(" ", Math.max(before[0].length - 60, 0)) + 1;
    const to = sentence.lastIndexOf(" ", from + longest);
    return (from ? "… " : "") + sentence.slice(from, sentence.length - from > longest ? to : undefined) + " …";
  }

  // A number that says how much a page's sections are worth. A list repeats what a chapter says better.
  const PAGE_WEIGHTS = {
    "book/questions": 0.2,
    "book/references": 0.5,
    "book/sabotage": 0.4,
  };
  const GLOSSARY = "book/glossary";
  const GUIDE = "notebooks/decision_guide";

  // What somebody asks for.
  function understand(query) {
    const isComparison = /\b(vs|versus|compared (to|with)|difference between)\b|\S \bor\b \S/i.test(query);
    const all = [...new Set(terms(query))];
    const telling = all.filter((term) => !COMMON.has(term) && !(isComparison && COMPARING.has(term)));
    return {
      terms: telling.length ? telling : all,
      lastTerm: all.at(-1), // somebody may still be typing it
      text: ` ${plain(query)} `,
      isComparison,
      isDefinition: /^\s*what('s| is| are)\b/i.test(query),
      isLong: telling.length > 3,
      isPastedError: telling.filter((term) => !isNumber(term)).length > 6,
    };
  }

  // The index is built here: that takes less time than it would to load it. `weights` has those of pages whose scores
  // are multiplied by another number than 1.
  function build(entries, weights = {}) {
    const sectionsWith = new Map(); // in how many sections a term stands
    const sectionsNamed = new Map(); // how many sections have a heading
    const cures = []; // {error: a plain message, id: of the section that says what to do}
    const index = new MiniSearch({
      fields: ["heading", "above", "text", "code"],
      tokenize: terms,
      processTerm: (term) => term,
    });
    index.addAll(
      entries.map(([page, anchor, headings, text, code, errors], id) => {
        const heading = headings.at(-1);
        const above = headings.slice(0, -1).join(" ");
        sectionsNamed.set(heading, (sectionsNamed.get(heading) ?? 0) + 1);
        for (const error of errors ?? []) cures.push({ error: plain(error), id });
        for (const term of new Set(terms([heading, above, text, code].join(" "))))
          sectionsWith.set(term, (sectionsWith.get(term) ?? 0) + 1);
        return { id, heading, above, text, code };
      }),
    );

    // The one of these sentences that has most of the hits, rare ones above all; none if they have no hit.
    function bestOf(sentences, hits) {
      let best = null;
      let bestScore = 0;
      for (const sentence of sentences) {
        let score = 0;
        for (const term of new Set(terms(sentence)))
          if (hits.has(term)) score += Math.log(1 + entries.length / sectionsWith.get(term));
        if (score > bestScore) [best, bestScore] = [sentence, score];
      }
      return best;
    }

    // What a result shows of its section: a sentence, or a line of the code, where no sentence has a hit.
    function excerpt([, , , text, code], hits) {
      const sentences = text.split(/(?<=[.!?]) +(?=\p{Lu})|\n/u);
      const lines = code.split("\n");
      const sentence = bestOf(sentences, hits);
      if (sentence) return sentence;
      const line = bestOf(lines, hits);
      if (line) return inCode(line, hits);
      if (sentences[0]) return sentences[0];
      return lines[0] && inCode(lines[0], new Set(terms(lines[0])));
    }

    // The ids of the sections that cure an error. The query holds its message, or is a part of it.
    function cured(asked) {
      const found = cures.filter(
        ({ error }) => asked.text.includes(` ${error} `) || (asked.isLong && ` ${error} `.includes(asked.text)),
      );
      return new Set(found.map(({ id }) => id));
    }

    function weightOf([page, , headings], asked) {
      const heading = headings.at(-1);
      let weight = PAGE_WEIGHTS[page] ?? weights[page] ?? 1;
      if (page === GLOSSARY) weight = asked.isDefinition ? 1.5 : 0.6;
      if (asked.isComparison && page === GUIDE && heading.startsWith("Which")) weight *= 5;
      if (sectionsNamed.get(heading) > 3) weight *= 0.4; // a heading that many chapters have says little
      return weight;
    }

    // The sections for a query, best first. What a chapter says comes before what a list says. Each word that a section
    // has counts, and none must be there. A word that the book lacks may be misspelt, and the last one unfinished.
    // Numbers decide little, and in a long query, which is a pasted error, next to nothing. An error message leads to the
    // section that cures it, and a comparison to the decision guide.
    function find(query, limit = 20) {
      const asked = understand(query);
      const weightOfNumbers = asked.isPastedError ? 0.01 : 0.3;
      const scored = index.search(query, {
        tokenize: () => asked.terms,
        boost: { heading: 2.5, code: 0.7 },
        boostDocument: (id) => weightOf(entries[id], asked),
        boostTerm: (term) => (isNumber(term) ? weightOfNumbers : 1),
        fuzzy: (term) => (sectionsWith.has(term) || term.length < 4 || /\d/.test(term) ? false : 0.25),
        prefix: (term) => term === asked.lastTerm && term.length > 2,
      });
      const cures = cured(asked);
      const results = scored.map(({ id, score, terms: hits, queryTerms }) => {
        // MiniSearch multiplies by the number of words that were found; numbers are not to count as words.
        const words = queryTerms.filter((term) => !isNumber(term)).length || 0.5;
        return { id, hits: new Set(hits), isCure: cures.has(id), score: (score * words) / queryTerms.length };
      });
      results.sort((one, other) => other.isCure - one.isCure || other.score - one.score);
      return results.slice(0, limit).map(({ id, hits }) => {
        const [page, anchor, headings] = entries[id];
        const sentence = shortened(excerpt(entries[id], hits), hits);
        return { page, anchor, headings, heading: marked(headings.at(-1), hits), sentence: marked(sentence, hits) };
      });
    }
    return find;
  }

  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const columns = await new Response(stream).json();
    return columns[0].map((_, number) => columns.map((column) => column[number]));
  }

  return { build, unpack };
})();
