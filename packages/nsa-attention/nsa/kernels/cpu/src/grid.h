// Which keys a query sees, and the blocks of keys that the kernels load together.
//
// Sliding and compressed attention see one range of keys: their blocks lie on a fixed grid. Chosen blocks lie on the grid
// of their own document. A document is what queries of one row with the same `start` belong to.
#pragma once
#include <algorithm>
#include <unordered_map>
#include <vector>

#include "memory.h"
#include "problem.h"

namespace nsa {

struct Span {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

inline Span visible(const Problem& p, int64_t b, int64_t s) {
  const int64_t pos = p.pos[b * p.S + s], start = p.start[b * p.S + s];
  int64_t begin = start, end = start + pos + 1;
  if (p.branch == kSliding) {
    begin = start + std::max<int64_t>(0, pos - p.w + 1);
  } else if (p.branch == kCompressed) {
    end = start + (pos + 1 >= p.l ? (pos + 1 - p.l) / p.d + 1 : 0);
  }
  return {std::clamp<int64_t>(begin, 0, p.T), std::clamp<int64_t>(end, 0, p.T)};
}

// Selection blocks up to the one that a position lies in; none before the document.
inline int64_t blocks_up_to(const Problem& p, int64_t pos) { return pos < 0 ? 0 : pos / p.l_sel + 1; }

struct Block {
  int64_t b, begin, n;  // keys begin … begin + n − 1 of row b; begin may be negative where old keys are gone
};

class Grid {
 public:
  int64_t width;  // keys per block
  std::vector<Block> blocks;
  std::vector<Span> spans;       // per row and query
  std::vector<int64_t> first;    // range: per row, the number its key 0's block would have; else per query, block 0's
  bool documents_overlap = false;

  Grid(const Problem& p, int64_t run_keys) : width(p.branch == kSelected ? p.l_sel : run_keys), spans(p.B * p.S) {
    for (int64_t b = 0; b < p.B; ++b)
      for (int64_t s = 0; s < p.S; ++s) spans[b * p.S + s] = visible(p, b, s);
    p.branch == kSelected ? by_document(p) : by_range(p);
  }

 private:
  void by_range(const Problem& p) {
    for (int64_t b = 0; b < p.B; ++b) {
      Span all{p.T, 0};
      for (int64_t s = 0; s < p.S; ++s) {
        const Span& span = spans[b * p.S + s];
        if (!span.empty()) all = {std::min(all.begin, span.begin), std::max(all.end, span.end)};
      }
      const int64_t from = all.begin / width;
      first.push_back(static_cast<int64_t>(blocks.size()) - from);
      for (int64_t j = from; j * width < all.end; ++j)
        blocks.push_back({b, j * width, std::min(width, p.T - j * width)});
    }
  }

  void by_document(const Problem& p) {
    first.resize(p.B * p.S);
    struct Document {
      int64_t start, n_tokens, first;
    };
    for (int64_t b = 0; b < p.B; ++b) {
      std::vector<Document> documents;
      std::unordered_map<int64_t, size_t> known;
      std::vector<size_t> of_query(p.S);
      for (int64_t s = 0; s < p.S; ++s) {
        const int64_t start = p.start[b * p.S + s];
        const bool same = s && start == p.start[b * p.S + s - 1];
        const size_t i = same ? of_query[s - 1] : known.try_emplace(start, documents.size()).first->second;
        if (i == documents.size()) documents.push_back({start, 0, 0});
        of_query[s] = i;
        documents[i].n_tokens = std::max(documents[i].n_tokens, p.pos[b * p.S + s] + 1);
      }
      for (Document& document : documents) {
        // Blocks that end before key 0 are left out, however many there were.
        const int64_t gone = document.start < 0 ? -document.start / width : 0;
        document.first = static_cast<int64_t>(blocks.size()) - gone;
        const int64_t end = std::min(document.start + document.n_tokens, p.T);
        for (int64_t begin = document.start + gone * width; begin < end; begin += width)
          blocks.push_back({b, begin, std::min(width, end - begin)});
      }
      for (int64_t s = 0; s < p.S; ++s) first[b * p.S + s] = documents[of_query[s]].first;
      std::sort(documents.begin(), documents.end(), [](auto& x, auto& y) { return x.start < y.start; });
      for (size_t i = 1; i < documents.size(); ++i)
        documents_overlap |= documents[i - 1].start + documents[i - 1].n_tokens > documents[i].start;
    }
  }
};

// The blocks that query (b, s) of group g chose, in ascending order, without those it cannot see or that have no keys.
template <class Visit>
inline void chosen(const Problem& p, const Grid& grid, int64_t b, int64_t s, int64_t g, Visit&& visit) {
  const int32_t* idx = p.idx + ((b * p.S + s) * p.G + g) * p.n_sel;
  const int64_t pos = p.pos[b * p.S + s], start = p.start[b * p.S + s], first = grid.first[b * p.S + s];
  const Span& span = grid.spans[b * p.S + s];
  if (span.empty()) return;
  int64_t last = -1;
  for (int64_t i = 0; i < p.n_sel; ++i) {
    const int64_t j = idx[i];
    if (j <= last || j * p.l_sel > pos) continue;
    last = j;
    // The grid has every block that holds a key the query sees, and may lack others: idx is not to be trusted.
    const int64_t begin = start + j * p.l_sel;
    if (begin < span.end && begin + p.l_sel > span.begin) visit(first + j);
  }
}

}  // namespace nsa
