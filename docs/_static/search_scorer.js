// Order of the search box's results: headings that contain the whole query first, then pages written for newcomers.
// tools/docs/site_search.py reads the two lines of numbers below and gives the same order.
var Scorer = {
  wholeTitle: 20,
  boosts: {"FAQ": 4, "TUTORIAL": 2, "HOW_TO": 1, "LOG": -4, "experiments/": -4, "kernels/": -4},

  score: (result) => {
    const [page, , , , score, , kind] = result;
    const boost = Object.entries(Scorer.boosts)
      .filter(([name]) => (name.endsWith("/") ? page.startsWith(name) : page === name))
      .reduce((sum, [, value]) => sum + value, 0);
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
