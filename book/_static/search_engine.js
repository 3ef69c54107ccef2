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

  // The index is built here: that takes less time than it would to load it. `weights` has those of pages whose scores
  // are multiplied by another number than 1.
  function build(entries, weights = {}) {
    const sections = new Map(); // in how many sections a term stands
    const titles = new Map(); // how many sections have a heading
    const cures = []; // [plain error message, the section that says what to do]
    const index = new MiniSearch({
      fields: ["heading", "above", "text", "code"],
      tokenize: terms,
      processTerm: (term) => term,
    });
    index.addAll(
      entries.map(([page, anchor, headings, text, code, errors], id) => {
        const [heading, above] = [headings.at(-1), headings.slice(0, -1).join(" ")];
        titles.set(heading, (titles.get(heading) ?? 0) + 1);
        cures.push(...(errors ?? []).map((error) => [plain(error), id]));
        for (const term of new Set(terms([heading, above, text, code].join(" "))))
          sections.set(term, (sections.get(term) ?? 0) + 1);
        return { id, heading, above, text, code };
      }),
    );

    // The sentence that has most of the hits, rare ones above all; a line of the code, where no sentence has a hit.
    function best(entry, hits) {
      const weigh = (sentence) =>
        [...new Set(terms(sentence))]
          .filter((term) => hits.has(term))
          .reduce((sum, term) => sum + Math.log(1 + entries.length / sections.get(term)), 0);
      const [text, code] = [entry[3].split(/(?<=[.!?]) +(?=\p{Lu})|\n/u), entry[4].split("\n")];
      for (const sentences of [text, code]) {
        const weights = sentences.map(weigh);
        const most = Math.max(...weights);
        const sentence = sentences[weights.indexOf(most)];
        if (most) return sentences === code ? inCode(sentence, hits) : sentence;
      }
      return text[0] || (code[0] && inCode(code[0], new Set(terms(code[0]))));
    }

    // The sections for a query, best first. What a chapter says comes before what a list says. Each word that a section
    // has counts, and none must be there. A word that the book lacks may be misspelt, and the last one unfinished.
    // Numbers decide little, and in a long query, which is a pasted error, next to nothing. An error message leads to the
    // section that cures it, and a comparison to the decision guide. A heading that many chapters have says little.
    function find(query, limit = 20) {
      const typed = [...new Set(terms(query))];
      const isComparison = /\b(vs|versus|compared (to|with)|difference between)\b|\S \bor\b \S/i.test(query);
      const telling = typed.filter((term) => !COMMON.has(term) && !(isComparison && COMPARING.has(term)));
      const asked = ` ${plain(query)} `;
      const cured = new Set(
        cures
          .filter(([error]) => asked.includes(` ${error} `) || (telling.length > 3 && ` ${error} `.includes(asked)))
          .map(([, id]) => id),
      );
      const weightOfNumbers = telling.filter((term) => !isNumber(term)).length > 6 ? 0.01 : 0.3;
      const isDefinition = /^\s*what('s| is| are)\b/i.test(query);
      const place = {
        ...weights,
        "book/glossary": isDefinition ? 1.5 : 0.6,
        "book/questions": 0.2,
        "book/references": 0.5,
        "book/sabotage": 0.4,
      };
      const scored = index
        .search(query, {
          tokenize: () => (telling.length ? telling : typed),
          boost: { heading: 2.5, code: 0.7 },
          boostDocument: (id) => {
            const [page, , headings] = entries[id];
            const isPattern = titles.get(headings.at(-1)) > 3;
            const isGuide = page === "notebooks/decision_guide" && headings.at(-1).startsWith("Which");
            return (isPattern ? 0.4 : 1) * (isComparison && isGuide ? 5 : 1) * (place[page] ?? 1);
          },
          boostTerm: (term) => (isNumber(term) ? weightOfNumbers : 1),
          fuzzy: (term) => (sections.has(term) || term.length < 4 || /\d/.test(term) ? false : 0.25),
          prefix: (term) => term == typed.at(-1) && term.length > 2,
        })
        .map(({ id, score, terms: found, queryTerms }) => {
          // MiniSearch multiplies by the number of words that were found; numbers are not to count as words.
          const words = queryTerms.filter((term) => !isNumber(term)).length || 0.5;
          return { id, found, score: (score * words) / queryTerms.length };
        })
        .sort((one, other) => other.score - one.score);
      const isCure = ({ id }) => cured.has(id);
      return [...scored.filter(isCure), ...scored.filter((result) => !isCure(result))]
        .slice(0, limit)
        .map(({ id, found }) => {
          const [page, anchor, headings] = entries[id];
          const hits = new Set(found);
          const sentence = marked(shortened(best(entries[id], hits), hits), hits);
          return { page, anchor, headings, heading: marked(headings.at(-1), hits), sentence };
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
