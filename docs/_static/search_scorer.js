// Order of the search box's results (tools/docs/site_search.py measures it). Sphinx shows only pages that have every word of a
// query, and ranks them by one word. Here a page may lack words: rare words count more than common ones, words in headings
// more than words in the text, and a result leads to the heading that has most of them. Pages for newcomers come first.
var Scorer = {
  wholeTitle: 20,
  boosts: {
    FAQ: 1, reference: -1, ENV: -1, CONFIG: -1,
    ARCHITECTURE: -3, DEPENDENCIES: -3, DESIGN: -3, FAULTS: -3, GPU_RISKS: -3, OLDER_NAMES: -3, FIRST_HOUR_CHECKLIST: -3, RELEASING: -3, WALKTHROUGH: -3,
    LOG: -4, experiments: -4, kernels: -4,
  },

  score: (result) => {
    const [page, , , , score, , kind] = result;
    const boost = Scorer.boosts[page.split("/")[0]] ?? 0;
    return score + boost + (kind === "title" ? Scorer.wholeTitle : 0);
  },

  // Sphinx's own numbers.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// Words that people type → words of the pages.
const otherWords = {
  beginning: "first", chinese: "language encoding", cost: "price", cpu: "laptop", crash: "resume restart", days: "time",
  difference: "comparison", dollars: "price", fast: "speed", forget: "recall", freezes: "stall hung", friend: "share others",
  german: "language encoding", hangs: "stall hung", hf: "transformers", huggingface: "transformers", jumped: "spike",
  jumps: "spike", languages: "encoding", machines: "nodes", mac: "macos laptop", money: "price", normal: "dense", offline: "network",
  oom: "memory", pause: "stop", quantize: "dtype", random: "temperature greedy", remember: "recall far", ram: "memory",
  send: "share export", several: "multi", slow: "speed", slower: "speed slow", start: "first beginning", stuck: "stall hung",
  talk: "chat", turn: "convert", upload: "export share", vram: "memory", web: "http serve",
};

// Pages, as indices, with the score of a word: the best of its matches.
const pagesWith = (word) => {
  const { terms, titleterms } = Search._index;
  const scores = new Map();
  const add = (table, term, score) => {
    for (const page of [table[term]].flat()) scores.set(page, Math.max(score, scores.get(page) ?? 0));
  };
  for (const [table, exact, partial] of [
    [terms, Scorer.term, Scorer.partialTerm],
    [titleterms, Scorer.title, Scorer.partialTitle],
  ]) {
    if (Object.hasOwn(table, word)) add(table, word, exact);
    else if (word.length > 2)
      for (const term of Object.keys(table)) if (term.includes(word)) add(table, term, partial);
  }
  return scores;
};

// Stems of a word, with what they count: its own, and those of the words that pages use instead.
const stemmer = new Stemmer();
const synonyms = new Map(
  Object.entries(otherWords).map(([word, others]) => [
    stemmer.stemWord(word),
    others.split(" ").map((other) => stemmer.stemWord(other)),
  ]),
);
const alternatives = (stem) => [[stem, 1], ...(synonyms.get(stem) ?? []).map((other) => [other, 0.5])];

Search.performTermsSearch = (searchTerms, excludedTerms) => {
  const { docnames, filenames, titles, alltitles } = Search._index;
  const weights = new Map(); // of the words that some page has
  const matches = new Map(); // page → its words and their scores
  for (const word of searchTerms) {
    const scores = new Map();
    for (const [stem, value] of alternatives(word))
      for (const [page, score] of pagesWith(stem)) scores.set(page, Math.max(score * value, scores.get(page) ?? 0));
    if (scores.size === 0) continue;
    weights.set(word, Math.log(1 + docnames.length / scores.size));
    for (const [page, score] of scores) {
      if (!matches.has(page)) matches.set(page, new Map());
      matches.get(page).set(word, score);
    }
  }
  for (const word of excludedTerms) for (const page of pagesWith(word).keys()) matches.delete(page);

  const sum = (numbers) => [...numbers].reduce((total, number) => total + number, 0);
  const total = sum(weights.values());
  const share = (values) => sum([...values].map(([word, value]) => weights.get(word) * value)) / total;
  const covered = (words) => share([...words.keys()].map((word) => [word, 1]));
  const best = Math.max(0, ...[...matches.values()].map(covered));

  const sections = new Map(); // page → the heading with most of the words
  for (const [title, places] of Object.entries(alltitles)) {
    const stems = new Set(splitQuery(title.toLowerCase()).map((word) => stemmer.stemWord(word)));
    const value = (word) => Math.max(0, ...alternatives(word).map(([stem, value]) => (stems.has(stem) ? value : 0)));
    const named = share([...weights.keys()].map((word) => [word, value(word)]));
    for (const [page, id] of places)
      if (named > (sections.get(page)?.named ?? 0)) sections.set(page, { title, id, named });
  }

  const results = [];
  for (const [page, words] of matches) {
    if (covered(words) < 0.6 * best) continue;
    const section = sections.get(page) ?? { named: 0 };
    const leads = section.named >= 0.4 && section.title !== titles[page];
    results.push([
      docnames[page],
      leads ? `${titles[page]} > ${section.title}` : titles[page],
      leads && section.id !== null ? `#${section.id}` : "",
      null,
      share(words) + Scorer.title * section.named,
      filenames[page],
      SearchResultKind.text,
    ]);
  }
  return results;
};
