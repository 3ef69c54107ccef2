// Ranks the book's sections for a query, with MiniSearch. search.js loads this when somebody searches.

var bookSearch = (() => {
  const COMMON = new Set(
    ("a about also an and any are as at be been being bug but by can cannot correctly could d did do does " +
      "doesn don during each every example feature for from get gets getting give given good had has have help " +
      "here how i if implement in into is isn issue it its ll m many may me most multi multipl multiple my " +
      "necessary need needs no not now of on or our please possible problem properly question re really right " +
      "s several should simple so some still support supported t than that the their them then there these " +
      "they thing this to torch try trying understand until us use used using ve very via want was way we were what " +
      "when where which while who why will with work working works would you your").split(" "),
  );
  // Words for the same thing. The first of a line stands for all of them.
  const SAME = new Map(
    [
      "hang hung deadlock deadlocks freeze freezes frozen stall stalls stuck",
      "evaluation eval val validate validated validates validating validation",
      "preemption spot sigterm",
      "synchronize sync synced",
      "initialize init",
      "profile profiler profilers profiled",
      "trace tracing",
      "log logger logged logging",
      "average averaged averaging averages mean means",
      "parallel parallelize parallelized",
      "kill terminate terminated terminates",
      "uneven unequal imbalanced unbalanced",
      "checkpoint ckpt ckpts",
      "gradient grad grads",
      "node host hosts machine machines computer multinode internode",
      "gpu multigpu",
      "memory ram",
      "slow slower",
      "utilization utilisation util",
      "fail failed fails failure failures crash crashes crashed",
      "fast faster",
      "loader dataloader dataloaders",
      "1 one single",
      "2 two both",
      "4 four",
      "8 eight",
      "asynchronous async",
      "bfloat16 bf16",
      "float16 fp16",
      "float32 fp32",
    ].flatMap((line) => {
      const [first, ...others] = line.split(" ");
      return others.map((word) => [word, first]);
    }),
  );
  // Words that are not the same, and yet answer one another: who types that training is slow may find a section on
  // speed. Such a word counts for less than the one that was typed.
  const WORTH_OF_RELATED = 0.6;
  const RELATED = [
    "slow fast speed speedup throughput performance bottleneck efficient efficiency",
    "hang wait timeout block blocked",
    "oom memory",
    "fail error exception die dies died kill abort exit",
    "save checkpoint store write",
    "resume restart continue load",
    "gpu device card cuda",
    "node cluster server",
    "loss accuracy result metric",
    "different differ differs mismatch wrong incorrect unequal disagree",
    "convert migrate port adapt change",
    "split shard divide partition distribute",
    "evaluation test metric",
    "diverge explode spike nan inf unstable",
    "estimate plan calculate predict planner",
    "install setup",
    "weight parameter model",
    "rank process",
    "seed random reproducible deterministic",
    "communication bandwidth network interconnect link",
    "uneven different unequal",
    "batch sample",
    "connect rendezvous meet",
    "cost price money days hours",
    "precision bfloat16 float16 half",
    "dataset data loader sampler",
    "big large huge",
  ];
  // What is written out in one place is abbreviated in another: a text that has either is found by both.
  const ABBREVIATIONS = [
    [/\bdistributed ?data ?parallel(?:ism)?\b/gi, "ddp"],
    [/\bfully ?sharded ?data ?parallel(?:ism)?\b|\bfully_shard\b/gi, "fsdp"],
    [/\bdata ?parallel\b/gi, "dp"],
    [/\bsync(?:hronized)? ?batch ?norm(?:alization)?\b/gi, "syncbn"],
    [/\btensor[- ]parallel(?:ism)?\b/gi, "tp"],
    [/\bpipeline[- ]parallel(?:ism)?\b/gi, "pp"],
    [/\bcontext[- ]parallel(?:ism)?\b/gi, "cp"],
    [/\bexpert[- ]parallel(?:ism)?\b/gi, "ep"],
    [/\bmixture of experts/gi, "moe"],
    [/\b(?:main|master) process\b|\brank[- ](?:0|zero)\b/gi, "rankzero"],
    [/\bmixed precision/gi, "amp"],
    [/\blearning rate/gi, "lr"],
    [/\bout of memory|memory runs out|runs out of \w*memory/gi, "oom"],
    [/\btim(?:e|es|ed|ing) out\b/gi, "timeout"],
    [/\b(?:gradient|activation) checkpointing|\brecomput\w+/gi, "activation checkpointing"],
  ];
  // What the decision guide compares. A run that is slow "compared to" another is no question for it.
  const METHODS = new Set(
    "ddp dp fsdp fsdp1 fsdp2 hsdp tp pp cp ep zero deepspeed megatron shard tensor pipelin".split(" "),
  );
  const COMPARING = new Set("vs versus compar differenc difference between".split(" "));
  const NAME = /[\p{L}\p{N}]+(?:[_-][\p{L}\p{N}]+)*/gu;
  const PART = /\p{Lu}+(?!\p{Ll})\p{N}*|\p{Lu}?[\p{Ll}\p{N}]+|[\p{L}\p{N}]+/gu;

  // gradients, gradient; saves, saved, saving, save; accumulation, accumulate; copies, copy; clipping, clip.
  function stem(word) {
    if (word.length < 4 || /[^a-z]/.test(word)) return word;
    return word
      .replace(/([^su])s$/, "$1")
      .replace(/ism$/, "")
      .replace(/i[sz](?:e|ed|ing|ation)$/, "iz")
      .replace(/(?<=[a-z]{3})(?:ing|ed|ion)$/, "")
      .replace(/([bdgmnprt])\1$/, "$1")
      .replace(/(?<=[a-z]{3})e$/, "")
      .replace(/y$/, "i");
  }

  // {a term: those that are related to it}
  const RELATED_TO = new Map();
  for (const line of RELATED) {
    const group = line.split(" ").map((word) => stem(SAME.get(word) ?? word));
    for (const term of group) {
      const others = group.filter((other) => other !== term);
      RELATED_TO.set(term, [...(RELATED_TO.get(term) ?? []), ...others]);
    }
  }
  const relatedTo = (term) => RELATED_TO.get(term) ?? [];

  // The terms of a text: the parts of each name, and the name as one word. So all-reduce, all_reduce and allreduce are
  // the same, and DistributedSampler is found by "distributed sampler". LoRA and ZeRO are one word each: "lo" is another.
  function termsOfName(name) {
    let parts = name.match(PART);
    if (parts.length > 1) {
      const whole = parts.join("");
      if (!/[_-]/.test(name)) parts = parts.filter((part) => part.length > 2);
      parts.push(whole);
    }
    const version = name.match(/^(\p{L}{3,})[12]$/u); // FSDP2 is also an FSDP
    if (version) parts.push(version[1]);
    return parts.map((part) => part.toLowerCase()).map((word) => stem(SAME.get(word) ?? word));
  }

  const termsOfWords = (text) => (text.match(NAME) ?? []).flatMap(termsOfName);

  function terms(text) {
    const abbreviations = ABBREVIATIONS.flatMap(([long, short]) => (text.match(long) ?? []).map(() => short));
    return [...termsOfWords(text), ...abbreviations.flatMap(termsOfName)];
  }

  // The terms of a query. What has an abbreviation counts as one term, or "distributed data parallel" would be about data
  // three times more than about anything else that was typed. A name such as fully_shard is kept beside it.
  function termsOfQuery(query) {
    let text = query;
    for (const [long, short] of ABBREVIATIONS)
      text = text.replace(long, (words) => (words.includes("_") ? `${words} ${short}` : short));
    return termsOfWords(text);
  }

  // A text without all that differs between two prints of the same error: case, spaces, punctuation, numbers.
  const plain = (text) => (text.toLowerCase().match(/[\p{L}_][\p{L}\p{N}_]*/gu) ?? []).join(" ");
  const isNumber = (term) => /^\d+$/.test(term);

  // [text, whether it is a hit] of each stretch of a text.
  function marked(text, hits) {
    const stretches = [];
    let end = 0;
    for (const { 0: name, index } of text.matchAll(NAME)) {
      if (!termsOfName(name).some((term) => hits.has(term))) continue;
      stretches.push([text.slice(end, index), false], [name, true]);
      end = index + name.length;
    }
    return [...stretches, [text.slice(end), false]].filter(([stretch]) => stretch);
  }

  // Of a cell only names are in the index: a result shows those that were asked for, and says that they are code.
  function inNames(names, hits) {
    const asked = names.split(" ").filter((name) => terms(name).some((term) => hits.has(term)));
    return `in code: ${asked.slice(0, 6).join(", ")}`;
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
    "book/bench": 0.6,
    "book/changelog": 0.4,
    "book/questions": 0.2,
    "book/references": 0.5,
    "book/sabotage": 0.4,
  };
  const GLOSSARY = "book/glossary";
  const GUIDE = "notebooks/decision_guide";
  const VARIABLES = "notebooks/environment_variables";

  const DEFINITION =
    /^\s*(?:what(?:'?s|\s+(?:is|are|does))|define|explain|definition of|meaning of)\s+(?:(?:an?|the)\s+)?(.+?)(?:\s+(?:actually\s+)?(?:means?|do|stands? for).*|\s+meaning)?[?\s]*$/i;

  // What somebody asks for.
  function understand(query) {
    const isComparison = /\b(vs|versus|compared (to|with)|difference between)\b|\S \bor\b \S/i.test(query);
    const all = [...new Set(termsOfQuery(query))];
    const telling = all.filter((term) => !COMMON.has(term) && !(isComparison && COMPARING.has(term)));
    return {
      terms: telling.length ? telling : all,
      lastTerm: termsOfWords(query).at(-1), // somebody may still be typing it
      pairs: pairsOf(query),
      text: ` ${plain(query)} `,
      comparesMethods: isComparison && telling.some((term) => METHODS.has(term)),
      defined: query.match(DEFINITION)?.[1], // the word whose meaning is asked for
      hasVariable: /\b[A-Z]+_[A-Z_\d]+\b/.test(query),
      isLong: telling.length > 3,
      isPastedError: telling.filter((term) => !isNumber(term)).length > 6,
    };
  }

  // The words of a text that tell something, two neighbours each: "gradient accumul".
  function pairsOf(text) {
    const telling = termsOfWords(text).filter((term) => !COMMON.has(term));
    return telling.slice(1).map((term, place) => `${telling[place]} ${term}`);
  }

  // The names of a chapter: the words of its title, and of its file, such as ddp.
  const NO_NAMES = new Set("in practice real projects full first run".split(" ").map(stem));
  const namesOf = (page, heading) =>
    new Set(terms(`${page.split("/").at(-1)} ${heading}`.replaceAll("_", " ")).filter((term) => !NO_NAMES.has(term)));

  // The index is built here: that takes less time than it would to load it. `weights` has those of pages whose scores
  // are multiplied by another number than 1.
  function build(entries, weights = {}) {
    const sectionsWith = new Map(); // in how many sections a term stands
    const sectionsNamed = new Map(); // how many sections have a heading
    const cures = []; // {parts: of a plain message, id: of the section that says what to do}
    const index = new MiniSearch({
      fields: ["heading", "asked", "above", "text", "code"],
      tokenize: terms,
      processTerm: (term) => term,
    });
    index.addAll(
      entries.map(([page, anchor, headings, text, listings, names, errors, questions], id) => {
        const code = `${listings}\n${names}`;
        const heading = headings.at(-1);
        const above = headings.slice(0, -1).join(" ");
        const asked = (questions ?? []).join("\n");
        sectionsNamed.set(heading, (sectionsNamed.get(heading) ?? 0) + 1);
        for (const error of errors ?? []) cures.push({ parts: error.split("…").map(plain), id });
        for (const term of new Set(terms([heading, asked, above, text, code].join(" "))))
          sectionsWith.set(term, (sectionsWith.get(term) ?? 0) + 1);
        return { id, heading, asked, above, text, code };
      }),
    );
    const rarity = (term) => Math.log(1 + entries.length / (sectionsWith.get(term) ?? 1));
    const sumOf = (terms) => terms.reduce((sum, term) => sum + (isNumber(term) ? 0.3 : 1) * rarity(term), 0);
    // The telling terms of a section's heading, and of each question that it answers.
    const titles = entries.map(([, , headings, , , , , questions]) =>
      [headings.at(-1), ...(questions ?? [])].map((text) => [...new Set(terms(text))].filter((term) => !COMMON.has(term))),
    );
    const pairs = new Map(); // {id: the pairs of a section}, of sections that were once found
    const pairsOfTitles = new Map(); // {id: those in its heading and in the questions that it answers}

    // The one of these sentences that has most of the hits, rare ones above all; none if they have no hit.
    function bestOf(sentences, hits) {
      let best = null;
      let bestScore = 0;
      for (const sentence of sentences) {
        let score = 0;
        for (const term of new Set(terms(sentence)))
          if (hits.has(term)) score += rarity(term);
        if (score > bestScore) [best, bestScore] = [sentence, score];
      }
      return best;
    }

    // What a result shows of its section: a sentence, or a line of the code, where no sentence has a hit.
    function excerpt([, , , text, code, names], hits) {
      const sentences = text.split(/(?<=[.!?]) +(?=\p{Lu})|\n/u);
      const sentence = bestOf(sentences, hits);
      if (sentence) return sentence;
      const line = bestOf(code.split("\n"), hits);
      if (line) return `in code: ${line}`;
      if (terms(names).some((term) => hits.has(term))) return inNames(names, hits);
      return sentences[0] || code.split("\n")[0] || inNames(names, new Set(terms(names)));
    }

    // {id: how long the message is} of the sections that cure an error. The query holds it, or is a part of it.
    function cured(asked) {
      const found = new Map();
      for (const { parts, id } of cures) {
        const isHeld = parts.every((part) => asked.text.includes(` ${part} `));
        const isPart = asked.isLong && parts.some((part) => ` ${part} `.includes(asked.text));
        if (isHeld || isPart) found.set(id, Math.max(found.get(id) ?? 0, parts.join(" ").length));
      }
      return found;
    }

    function weightOf([page, , headings], asked) {
      const heading = headings.at(-1);
      let weight = PAGE_WEIGHTS[page] ?? weights[page] ?? 1;
      if (/\/\d+[a-z]_/.test(page)) weight *= 0.8; // a practice page comes after its chapter
      if (page === GLOSSARY) weight = asked.defined ? 1.5 : asked.terms.length > 2 ? 0.4 : 0.6;
      if (page === VARIABLES && asked.hasVariable) weight = 1;
      if (asked.comparesMethods && page === GUIDE && heading.startsWith("Which")) weight *= 16;
      if (sectionsNamed.get(heading) > 3) weight *= 0.4; // a heading that many chapters have says little
      return weight;
    }

    // Whether an entry of the glossary says what the word means that somebody asks about. It may have two names,
    // such as MFU (model FLOPs utilisation).
    function isMeaning([page, , headings], asked) {
      if (page !== GLOSSARY || !asked.defined) return false;
      const meant = asked.defined;
      return [headings.at(-1), ...headings.at(-1).split(/[()]/)].some((name) => sameName(name, meant));
    }

    // Whether two names are the same, such as all-reduce, all reduce and all-reduces.
    function sameName(one, other) {
      const [these, those] = [one, other].map((name) => stem(name.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "")));
      return these.length > 0 && these === those;
    }

    function pairsOfEntry(id) {
      if (!pairs.has(id)) {
        const [, , headings, text, , , , questions] = entries[id];
        pairs.set(id, new Set([headings.at(-1), ...(questions ?? []), ...text.split("\n")].flatMap(pairsOf)));
      }
      return pairs.get(id);
    }

    function pairsOfTitle(id) {
      if (!pairsOfTitles.has(id)) {
        const [, , headings, , , , , questions] = entries[id];
        pairsOfTitles.set(id, new Set([headings.at(-1), ...(questions ?? [])].flatMap(pairsOf)));
      }
      return pairsOfTitles.get(id);
    }

    // The sum of the words that were asked for and that stand among these terms. For a word that is only related to one
    // of them, a part counts.
    function sumOfShared(ofText, asked) {
      const present = new Set(ofText);
      let sum = 0;
      for (const term of asked.terms) {
        if (present.has(term)) sum += sumOf([term]);
        else if (relatedTo(term).some((other) => present.has(other))) sum += WORTH_OF_RELATED * sumOf([term]);
      }
      return sum;
    }

    // How much of a text was asked for, and how much of what was asked for is in the text: from 0 to 1.
    function likeness(ofText, asked) {
      return (2 * sumOfShared(ofText, asked)) / (sumOf(ofText) + sumOf(asked.terms) || 1);
    }

    // How much of what was asked for a section has, from 0 to 1. Rare words count more than others.
    function shareOf(found, asked) {
      return sumOfShared(found, asked) / (sumOf(asked.terms) || 1);
    }

    // By how much a section is better than its words alone say: 1 if it is not.
    function fit(id, asked) {
      const [page, , headings] = entries[id];
      let factor = 1;
      // Its heading, or a question that it answers, is much like the query.
      factor += 5 * Math.max(...titles[id].map((ofText) => likeness(ofText, asked))) ** 1.75;
      // Neighbours in the query are neighbours in the section.
      if (asked.pairs.length) {
        const found = pairsOfEntry(id);
        const inTitles = pairsOfTitle(id);
        factor += (0.8 * asked.pairs.filter((pair) => found.has(pair)).length) / asked.pairs.length;
        factor += (1.4 * asked.pairs.filter((pair) => inTitles.has(pair)).length) / asked.pairs.length;
      }
      // It is a chapter, and its name was typed.
      if (headings.length === 1 && page.startsWith("notebooks/")) {
        const names = namesOf(page, headings[0]);
        if (asked.terms.every((term) => names.has(term))) factor += 2;
      }
      return factor;
    }

    // The sections for a query, best first. What a chapter says comes before what a list says. Each word that a section
    // has counts, the more the fewer sections have it, and none must be there. A word that is related to one that was
    // typed counts for less. A word that the book lacks may be misspelt, and the last one unfinished. Numbers decide
    // little, and in a long query, which is a pasted error, next to nothing. An error message leads to the section that
    // cures it, a word to its meaning, and a comparison to the decision guide.
    function find(query, limit = 20) {
      const asked = understand(query);
      const weightOfNumbers = asked.isPastedError ? 0.01 : 0.3;
      const known = asked.terms.filter((term) => sectionsWith.has(term));
      const isPartOf = (term) => (other) => other !== term && term.startsWith(other);
      // all_reduced is three terms. If the book lacks the whole, its parts are enough.
      asked.terms = asked.terms.filter((term) => sectionsWith.has(term) || !known.some(isPartOf(term)));
      const typed = new Set(asked.terms);
      const related = new Set(asked.terms.flatMap(relatedTo).filter((term) => sectionsWith.has(term) && !typed.has(term)));
      const scored = index.search(query, {
        tokenize: () => [...typed, ...related],
        boost: { heading: 2.5, asked: 2.5, code: 0.4 },
        boostDocument: (id) => weightOf(entries[id], asked),
        boostTerm: (term) =>
          (related.has(term) ? 0.2 : 1) * (isNumber(term) ? weightOfNumbers : 1) * Math.sqrt(rarity(term)),
        fuzzy: (term) => (sectionsWith.has(term) || term.length < 4 || /\d/.test(term) ? false : 0.25),
        prefix: (term) => term === asked.lastTerm && term.length > 2,
      });
      const cures = cured(asked);
      const results = scored.map(({ id, score, terms: hits, queryTerms }) => {
        // MiniSearch multiplies by the number of words that were found, related ones among them.
        const share = shareOf(queryTerms, asked) ** 1.2;
        const isFirst = isMeaning(entries[id], asked) ? 1 : 0;
        const typedHits = hits.filter((term) => !related.has(term));
        return {
          id,
          hits: new Set(typedHits.length ? typedHits : hits), // a result shows why it was found
          first: cures.get(id) ?? isFirst,
          score: (score / queryTerms.length) * share * fit(id, asked),
        };
      });
      // A message that a section cures may have no word of the section.
      for (const [id, length] of cures)
        if (!results.some((result) => result.id === id)) results.push({ id, hits: new Set(), first: length, score: 0 });
      results.sort((one, other) => other.first - one.first || other.score - one.score);
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
