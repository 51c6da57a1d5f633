// Arguments of the C interface: raw pointers, strides in elements, sizes. Mirrored by packages/nsa-attention/nsa/kernels/cpu/library.py.
//
// B batch · S queries · T keys · G kv groups · R heads per group · K key width · V value width
#pragma once
#include <cstdint>

namespace nsa {

enum Dtype : int64_t { kFloat = 0, kBfloat16 = 1, kHalf = 2 };
enum Branch : int64_t { kSliding = 0, kCompressed = 1, kSelected = 2 };
enum Isa : int64_t { kPlain = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// [batch, token, group, head, width]; the last stride is 1. Keys and values have no head axis. With a table, tokens lie in
// pages: token t of row b is number t % page_tokens of page table[b][t / page_tokens]; `batch` is not used then.
struct Rows {
  char* data;
  int64_t batch, token, group, head;
  const int32_t* table;         // [B, …], table_row apart; null: a row's tokens follow each other
  int64_t table_row, page, page_tokens, n_pages;
};

struct Problem {
  int64_t dtype, isa, threads, branch;
  int64_t B, S, T, G, R, K, V;
  int64_t w;                    // sliding
  int64_t l, d;                 // compressed, and selection
  int64_t l_sel, n_sel;         // selected, and selection
  double scale;
  Rows q, k, v, out, dout, dq, dk, dv;
  float* lse;                   // [B, S, G, R]
  const float* dlse;            // [B, S, G, R], or null where the log-sum-exp has no gradient
  const int64_t *pos, *start;   // [B, S]
  int32_t* idx;                 // [B, S, G, n_sel]
};

// One new token per row over a cache. `compressed` also carries q, the mixed output and the selection's idx. With `far`
// selected blocks and window are merged into one softmax: compressed keys have no values then, and the positions of the
// compressed and selected branch are `far`, which are computed here.
struct Step {
  Problem compressed, selected, sliding;
  const float* gates;           // [B, G, gates_per_group, 3]; not read with `far`
  int64_t gates_per_group;      // R or 1
  int64_t* far;                 // [B]; the last position before the window, −1: none. Null: three branches and gates.
};

// [n_gates, heads, V] contiguous, three times; a gate serves `heads` rows. With `dout`, gradients are computed.
struct Mix {
  int64_t dtype, isa, threads, n_gates, heads, V;
  const float* gates;           // [n_gates, 3]
  const void* branches[3];
  void* out;
  const void* dout;
  float* dgates;
  void* dbranches[3];
};

// New keys or values (`fresh`) and the ring of slots that they are written to.
struct Stream {
  Rows fresh, slots;
  int64_t n_slots, width;
};

// Streams: keys and values of the compressed branch (into its tail), the selected branch, the window.
struct CacheAppend {
  int64_t dtype, isa, B, G, l, d, w;
  int64_t means;                // whether compressed entries are means, which are computed here
  Stream streams[6];
  Rows compressed[2];
  int64_t n_compressed_slots;
  const int64_t* first;         // [B], the slot of a row's compressed entry 0
  int64_t *length, *n_compressed, *pos, *window_pos;  // [B]; the latter two: where the token stands, also in the window's ring
};

}  // namespace nsa
