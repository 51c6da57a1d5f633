// Decode step, one new token per row: the three branches, the selection and the gates in one call, reading the cache in place.
// Or, in a merged layer, the selection and one softmax over selected blocks and window.
//
// Keys are cut into pieces of a fixed length, each a softmax of its own; pieces are merged in order. So threads share
// the reading even at batch 1, and how many there are changes no bit. With many rows a thread computes whole groups.
#pragma once
#include <numeric>

#include "decode_piece.h"
#include "select_blocks.h"

namespace nsa {
namespace NSA_NAMESPACE {

constexpr int64_t kPieceKeys = 256;
constexpr int64_t kGroupsPerThread = 4;  // so many, and a thread computes whole groups: threads meet once, not three times

class Decode {
 public:
  explicit Decode(const Step& step)
      : step_(step), p_(step.compressed), merged_(step.far), K_(round_up(p_.K, W)), V_width_(round_up(p_.V, W)),
        size_(Partial::size(p_.R, V_width_)), groups_(p_.B * p_.G),
        per_piece_(std::max<int64_t>(1, kPieceKeys / p_.l_sel)),
        piece_keys_(std::max(kPieceKeys, per_piece_ * round_up(p_.l_sel, W))),
        n_chosen_((p_.n_sel + per_piece_ - 1) / per_piece_) {
    int64_t longest = 0, widest = 0;
    for (int64_t b = 0; b < p_.B; ++b) {
      longest = std::max(longest, pieces_of(visible(step.compressed, b, 0)));
      widest = std::max(widest, pieces_of(visible(step.sliding, b, 0)));
    }
    n_compressed_ = longest, n_window_ = widest, ld_ = std::max<int64_t>(1, longest) * kPieceKeys;
    Area area(groups_ * (p_.R * (K_ + ld_ + 3 * V_width_) + (n_compressed_ + n_window_ + n_chosen_) * size_));
    q_ = area.take(groups_ * p_.R * K_);
    scores_ = area.take(groups_ * p_.R * ld_);
    branches_ = area.take(groups_ * 3 * p_.R * V_width_);
    of_compressed_ = area.take(groups_ * n_compressed_ * size_);
    of_tokens_ = area.take(groups_ * (n_chosen_ + n_window_) * size_);
  }

  void run() {
    for (int64_t i = 0; i < groups_ * p_.R; ++i)
      Wide::load_query(p_, row(p_, p_.q, i / p_.R / p_.G, 0, i / p_.R % p_.G, i % p_.R), q_ + i * K_);
    if (groups_ >= kGroupsPerThread * p_.threads) return by_group();
    const int64_t first = groups_ * n_compressed_;
    parallel<Scratch>(first + groups_ * n_window_, p_.threads, [&](Scratch scratch, int64_t item) {
      item < first ? attend_compressed(item, scratch) : attend_window(item - first, scratch);
    });
    parallel<Scratch>(groups_, p_.threads, [&](Scratch scratch, int64_t group) { choose(group, scratch); });
    parallel<Scratch>(groups_ * n_chosen_, p_.threads, [&](Scratch scratch, int64_t item) {
      attend_chosen(item, scratch);
    });
    for (int64_t group = 0; group < groups_; ++group) mix(group);
  }

 private:
  // One item per row and group, the longest rows first, so that threads end together. Pieces and their order are the
  // same as where threads share a group, and so are all bits.
  void by_group() {
    std::vector<int64_t> rows(p_.B);
    std::iota(rows.begin(), rows.end(), 0);
    std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return p_.pos[a] > p_.pos[b]; });
    parallel<Scratch>(groups_, p_.threads, [&](Scratch scratch, int64_t item) {
      const int64_t group = rows[item / p_.G] * p_.G + item % p_.G;
      const auto each = [&](int64_t n, auto&& attend_piece) {
        for (int64_t i = group * n; i < (group + 1) * n; ++i) {
          Scratch of_piece = scratch;
          attend_piece(i, of_piece);
        }
      };
      each(n_compressed_, [&](int64_t i, Scratch& of_piece) { attend_compressed(i, of_piece); });
      each(n_window_, [&](int64_t i, Scratch& of_piece) { attend_window(i, of_piece); });
      each(1, [&](int64_t i, Scratch& of_piece) { choose(i, of_piece); });
      each(n_chosen_, [&](int64_t i, Scratch& of_piece) { attend_chosen(i, of_piece); });
      mix(group);
    });
  }

  // Memory of the calling thread that outlives the call: at batch 1 asking the system for it would take longer than the
  // attention. The threads' Scratch begins anew with each item, so it cannot serve.
  class Area {
   public:
    explicit Area(int64_t n) {
      n += 8 * W;
      if (kept().size < n) kept().data.reset(n), kept().size = n;
      at_ = kept().data.get();
    }
    float* take(int64_t n) {
      float* outcome = at_;
      at_ += round_up(n, W);
      return outcome;
    }

   private:
    struct Kept {
      Array<float> data;
      int64_t size = 0;
    };
    static Kept& kept() {
      static thread_local Kept area;
      return area;
    }
    float* at_;
  };

  static int64_t pieces_of(const Span& span) { return (span.end - span.begin + kPieceKeys - 1) / kPieceKeys; }

  // Pieces of selected blocks, followed by those of the window.
  float* chosen_piece(int64_t group, int64_t i) { return of_tokens_ + (group * (n_chosen_ + n_window_) + i) * size_; }
  float* window_piece(int64_t group, int64_t i) { return chosen_piece(group, n_chosen_ + i); }

  float* branch(int64_t group, int64_t which) { return branches_ + (group * 3 + which) * p_.R * V_width_; }

  // Attends over runs of keys that follow each other in `scores`, which become weights. Empty runs leave no trace.
  void attend(const Problem& p, int64_t group, const Span* runs, int64_t n_runs, float* scores, float* to,
              Scratch& scratch, float* kept_scores = nullptr) {
    const int64_t b = group / p_.G, g = group % p_.G;
    float* memory = scratch.take<float>(std::max<int64_t>(W, kWidened) * std::max(K_, V_width_));
    int64_t n = 0;
    for (int64_t i = 0; i < n_runs; ++i) {
      decode_scores(p, b, g, q_ + group * p_.R * K_, runs[i], scores + n, piece_keys_, memory);
      n += round_up(runs[i].end - runs[i].begin, W);
    }
    if (kept_scores)
      for (int64_t r = 0; r < p_.R; ++r) memcpy(kept_scores + r * ld_, scores + r * piece_keys_, n * sizeof(float));
    Partial piece(to, p_.R);
    decode_soften(p, scores, piece_keys_, n, piece);
    if (!(kept_scores && merged_)) decode_weigh(p, b, g, runs, n_runs, scores, piece_keys_, piece, memory);
  }

  // The i-th piece of a branch whose keys are one range.
  void attend_range(const Problem& p, int64_t group, int64_t i, float* to, Scratch& scratch, float* kept_scores) {
    const Span all = visible(p, group / p_.G, 0);
    const int64_t begin = all.begin + i * kPieceKeys, end = std::min(all.end, begin + kPieceKeys);
    if (begin >= end) return;
    const Span run{begin, end};
    attend(p, group, &run, 1, scratch.take<float>(p_.R * piece_keys_), to, scratch, kept_scores);
  }

  void attend_compressed(int64_t item, Scratch& scratch) {
    const int64_t group = item / n_compressed_, i = item % n_compressed_;
    attend_range(step_.compressed, group, i, of_compressed_ + item * size_, scratch,
                 scores_ + group * p_.R * ld_ + i * kPieceKeys);
  }

  void attend_window(int64_t item, Scratch& scratch) {
    const int64_t group = item / n_window_, i = item % n_window_;
    attend_range(step_.sliding, group, i, window_piece(group, i), scratch, nullptr);
  }

  void choose(int64_t group, Scratch& scratch) {
    const int64_t b = group / p_.G, n_blocks = blocks_up_to(p_, p_.pos[b]), R = p_.R;
    float *at = scratch.take<float>(R), *share = scratch.take<float>(R);
    const Span all = visible(step_.compressed, b, 0), window = visible(step_.sliding, b, 0);
    float* compressed = merged_ ? nullptr : branch(group, 0);
    decode_merge(p_, of_compressed_ + group * n_compressed_ * size_, pieces_of(all), compressed, at, share);
    if (!merged_) decode_merge(p_, window_piece(group, 0), pieces_of(window), branch(group, 2));
    int32_t* idx = p_.idx + group * p_.n_sel;
    if (n_blocks <= p_.n_sel) return all_blocks(n_blocks, p_.n_sel, idx);
    const int64_t lead = p_.l / p_.d - 1 + std::max<int64_t>(0, -p_.start[b]);
    const int64_t size_of_mass = n_blocks * (p_.l_sel / p_.d) + p_.l / p_.d - 1;
    const int64_t n = std::min(all.end - all.begin, size_of_mass - lead);
    float* mass = scratch.take<float>(size_of_mass + 2 * W);
    float* of_blocks = scratch.take<float>(n_blocks + W);
    float* taps = scratch.take<float>(p_.l_sel / p_.d + p_.l / p_.d - 1);
    overlap_weights(p_, taps);
    memset(mass, 0, (size_of_mass + 2 * W) * sizeof(float));
    for (int64_t r = 0; r < R; ++r)
      for (int64_t c = 0; c < n; c += W) {
        const V x = exp2v((load(scores_ + (group * R + r) * ld_ + c) - set1(at[r])) * set1(kLog2e)) * set1(share[r]);
        store(mass + lead + c, load(mass + lead + c) + lanes_in(x, 0, n - c, 0.f));
      }
    block_scores(p_, taps, mass, n_blocks, of_blocks, scratch);
    select_top_blocks(of_blocks, n_blocks, p_.n_sel, idx, scratch);
  }

  void attend_chosen(int64_t item, Scratch& scratch) {
    const Problem& p = step_.selected;
    const int64_t group = item / n_chosen_, b = group / p_.G, from = item % n_chosen_ * per_piece_;
    const Span all = visible(p, b, 0);
    const int32_t* idx = p_.idx + group * p_.n_sel;
    Span* runs = scratch.take<Span>(per_piece_);
    int64_t n_runs = 0;
    for (int64_t i = from; i < std::min(p_.n_sel, from + per_piece_); ++i) {
      if (idx[i] < 0) continue;
      const int64_t begin = p.start[b] + idx[i] * p_.l_sel;
      const Span run{std::max(begin, all.begin), std::min(begin + p_.l_sel, all.end)};
      if (!run.empty()) runs[n_runs++] = run;
    }
    float* to = chosen_piece(group, item % n_chosen_);
    if (n_runs) return attend(p, group, runs, n_runs, scratch.take<float>(p_.R * piece_keys_), to, scratch);
    const Partial piece(to, p_.R);
    std::fill_n(piece.at, p_.R, -INFINITY), std::fill_n(piece.total, p_.R, 0.f);
    memset(piece.sums, 0, p_.R * V_width_ * sizeof(float));
  }

  void mix(int64_t group) {
    if (merged_) {
      const int64_t n_window = pieces_of(visible(step_.sliding, group / p_.G, 0));
      decode_merge(p_, chosen_piece(group, 0), n_chosen_ + n_window, branch(group, 1));
      for (int64_t r = 0; r < p_.R; ++r)
        narrow_row(p_.dtype, branch(group, 1) + r * V_width_, row(p_, p_.out, group / p_.G, 0, group % p_.G, r), p_.V);
      return;
    }
    decode_merge(p_, chosen_piece(group, 0), n_chosen_, branch(group, 1));
    float *compressed = branch(group, 0), *selected = branch(group, 1), *window = branch(group, 2);
    for (int64_t r = 0; r < p_.R; ++r) {
      const float* gates = step_.gates + 3 * (group * step_.gates_per_group + (step_.gates_per_group > 1 ? r : 0));
      for (int64_t c = r * V_width_; c < (r + 1) * V_width_; c += W)
        store(compressed + c, load(compressed + c) * set1(gates[0]) + load(selected + c) * set1(gates[1]) +
                                  load(window + c) * set1(gates[2]));
      narrow_row(p_.dtype, compressed + r * V_width_, row(p_, p_.out, group / p_.G, 0, group % p_.G, r), p_.V);
    }
  }

  const Step& step_;
  const Problem& p_;  // the compressed branch's; what it shares with the others is read from it
  const bool merged_;
  const int64_t K_, V_width_, size_, groups_, per_piece_, piece_keys_, n_chosen_;
  int64_t n_compressed_, n_window_, ld_;
  float *q_, *scores_, *branches_, *of_compressed_, *of_tokens_;
};

}  // namespace NSA_NAMESPACE
}  // namespace nsa
