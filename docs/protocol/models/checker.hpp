// An explicit-state model checker: breadth first, and exact (whole states are stored and compared, never only hashes).
//
// A model is a class with
//   struct State    plain bytes, equal when the bytes are; what nobody can look at any more must be zeroed
//   (`canonical`) struct Options  the scope, the faults that may happen, and the rules that can be taken away one at a
//   time State first() const;  void next(const State&, Steps<State>&) const;  void canonical(State&) const;
//   Claims<State> claims() const;
// and `run_variants` plays it under a table of options, each with the result that is expected of it.
//
// Checked of each variant:
//   1. Every claim in `always` in every reachable state. Breadth first, so a counterexample is a shortest one.
//   2. "resolves": from every reachable state a resolved one can be reached without further faults. Faults are bounded
//      by budgets inside the state, so once they are spent, and if no step waits for ever, it will be reached.
//   3. "resolves promptly": the same without SLOW steps, that is without waiting for a heartbeat, deadline or time-out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

enum Kind : uint8_t {
  PROMPT,  // the system's own next step
  SLOW,    // what only the passing of time brings: heartbeat, deadline, TTL, time-out
  FAULT,   // crash, freeze, lost socket, lost answer, flush, fail-over, ...
};

template <class State>
struct Claim {
  const char* name;
  std::function<bool(const State&)> holds;
};

template <class State>
struct Claims {
  std::vector<Claim<State>> always;
  std::function<bool(const State&)> resolved;  // empty: not asked
  bool promptly = false;
};

// The steps out of one state. A label is a printf format for up to two numbers.
template <class State>
class Steps {
 public:
  using Sink = std::function<void(Kind, const char* label, int a, int b, State&)>;

  Steps(const State& from, const Sink& sink) : from_(from), sink_(sink) {}

  template <class Change>
  void step(Kind kind, const char* label, int a, int b, Change change) {
    State to = from_;
    change(to);
    sink_(kind, label, a, b, to);
  }
  template <class Change>
  void step(Kind kind, const char* label, int a, Change change) {
    step(kind, label, a, 0, change);
  }
  template <class Change>
  void step(Kind kind, const char* label, Change change) {
    step(kind, label, 0, 0, change);
  }

 private:
  const State& from_;
  const Sink& sink_;
};

// What came out: the claim that is broken (empty: none), after how many states, and whether all were seen.
struct Verdict {
  std::string broken;
  size_t states = 0;
  bool complete = true;
};

template <class Model>
class Checker {
  using State = typename Model::State;
  static_assert(std::is_trivially_copyable<State>::value, "states are compared as bytes");

 public:
  static constexpr const char* RESOLVES = "resolves";
  static constexpr const char* PROMPTLY = "resolves promptly";

  Checker(const Model& model, size_t states_max) : model_(model), states_max_(states_max) {}

  Verdict check() {
    const Claims<State> claims = model_.claims();
    State first = model_.first();
    model_.canonical(first);
    add(first, {"start", 0, 0, 0});
    for (uint32_t i = 0; i < states_.size(); i++) {
      for (const auto& claim : claims.always)
        if (!claim.holds(states_[i])) return broken(claim.name, i, /*doomed=*/false);
      expand(i);
      if (states_.size() > states_max_) return {"", states_max_, false};
    }
    if (claims.resolved) {
      if (!all_resolve(claims, SLOW)) return broken(RESOLVES, doomed_, /*doomed=*/true);
      if (claims.promptly && !all_resolve(claims, PROMPT)) return broken(PROMPTLY, doomed_, /*doomed=*/true);
    }
    return {"", states_.size(), true};
  }

  void print_trace() const {
    if (trace_.empty()) return;
    for (size_t n = 0; n < trace_.size(); n++) {
      printf("  %3zu. ", n + 1);
      printf(trace_[n].label, trace_[n].a, trace_[n].b);
      printf("\n");
    }
    if (ends_doomed_) printf("       ... and from here it cannot.\n");
  }

 private:
  struct Origin {
    const char* label;
    uint32_t parent;
    int8_t a, b;
  };

  const Model& model_;
  const size_t states_max_;
  std::vector<State> states_;
  std::vector<Origin> origins_;
  std::vector<uint32_t> slots_;  // open addressing: 1 + the number of a state
  // Edges that are no faults, for the way back from resolved states.
  std::vector<uint32_t> edge_from_, edge_to_;
  std::vector<uint8_t> edge_kind_;
  uint32_t doomed_ = 0;
  std::vector<Origin> trace_;
  bool ends_doomed_ = false;

  static uint64_t hash(const State& state) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&state);
    uint64_t h = 1469598103934665603ull;
    for (size_t i = 0; i < sizeof(State); i += 8) {
      uint64_t word = 0;
      memcpy(&word, bytes + i, std::min<size_t>(8, sizeof(State) - i));
      h = (h ^ word) * 0x9E3779B97F4A7C15ull;
      h ^= h >> 32;
    }
    return h;
  }

  void grow() {
    slots_.assign(slots_.empty() ? 1 << 16 : slots_.size() * 2, 0);
    const size_t mask = slots_.size() - 1;
    for (uint32_t i = 0; i < states_.size(); i++) {
      size_t slot = hash(states_[i]) & mask;
      while (slots_[slot]) slot = (slot + 1) & mask;
      slots_[slot] = i + 1;
    }
  }

  uint32_t add(const State& state, const Origin& origin) {
    if (states_.size() * 2 >= slots_.size()) grow();
    const size_t mask = slots_.size() - 1;
    size_t slot = hash(state) & mask;
    while (slots_[slot]) {
      if (!memcmp(&states_[slots_[slot] - 1], &state, sizeof(State))) return slots_[slot] - 1;
      slot = (slot + 1) & mask;
    }
    states_.push_back(state);
    origins_.push_back(origin);
    slots_[slot] = states_.size();
    return states_.size() - 1;
  }

  void expand(uint32_t i) {
    const State from = states_[i];  // a copy: `states_` grows meanwhile
    const typename Steps<State>::Sink sink = [&](Kind kind, const char* label, int a, int b, State& to) {
      model_.canonical(to);
      const uint32_t j = add(to, {label, i, static_cast<int8_t>(a), static_cast<int8_t>(b)});
      if (kind == FAULT || j == i) return;
      edge_from_.push_back(i);
      edge_to_.push_back(j);
      edge_kind_.push_back(kind);
    };
    Steps<State> steps(from, sink);
    model_.next(from, steps);
  }

  // Walks back from the resolved states over edges up to `slowest`; leaves the first state not met in `doomed_`.
  bool all_resolve(const Claims<State>& claims, Kind slowest) {
    std::vector<uint32_t> into(states_.size() + 1, 0);  // edges by their end: those of j are [into[j], into[j + 1])
    for (uint32_t to : edge_to_) into[to + 1]++;
    for (size_t i = 1; i < into.size(); i++) into[i] += into[i - 1];
    std::vector<uint32_t> edges(edge_to_.size()), next(into);
    for (uint32_t e = 0; e < edge_to_.size(); e++) edges[next[edge_to_[e]]++] = e;
    std::vector<uint8_t> met(states_.size(), 0);
    std::vector<uint32_t> open;
    for (uint32_t i = 0; i < states_.size(); i++)
      if (claims.resolved(states_[i])) {
        met[i] = 1;
        open.push_back(i);
      }
    while (!open.empty()) {
      const uint32_t to = open.back();
      open.pop_back();
      for (uint32_t k = into[to]; k < into[to + 1]; k++) {
        const uint32_t from = edge_from_[edges[k]];
        if (edge_kind_[edges[k]] > slowest || met[from]) continue;
        met[from] = 1;
        open.push_back(from);
      }
    }
    doomed_ = std::find(met.begin(), met.end(), 0) - met.begin();
    return doomed_ == met.size();
  }

  Verdict broken(const char* claim, uint32_t at, bool doomed) {
    ends_doomed_ = doomed;
    for (uint32_t i = at; i; i = origins_[i].parent) trace_.push_back(origins_[i]);
    std::reverse(trace_.begin(), trace_.end());
    return {claim, states_.size(), true};
  }
};

// ---- variants and their expected results

struct Expected {
  Verdict verdict;
};

// Every reachable state was seen, and all claims hold in them.
inline Expected holds(size_t states) { return {{"", states, true}}; }
// No claim is broken in the first `states` states, breadth first; there are more.
inline Expected holds_in_first(size_t states) { return {{"", states, false}}; }
// This claim is the first to break, with so many states seen.
inline Expected breaks(const char* claim, size_t states) { return {{claim, states, true}}; }

template <class Model>
struct Variant {
  const char* name;
  Expected expected;
  std::function<void(typename Model::Options&)> set;
};

// Plays the variants and compares; returns the exit status.
//   MODEL                    all of them, one line each
//   MODEL --states-max N     only those that are expected to take at most N states
//   MODEL NAME...            these, with the trace of what breaks
template <class Model>
int run_variants(int argc, char** argv, const std::vector<Variant<Model>>& variants) {
  size_t largest = SIZE_MAX;
  std::vector<std::string> names;
  for (int i = 1; i < argc; i++) {
    if (std::string(argv[i]) == "--states-max" && i + 1 < argc)
      largest = std::stoull(argv[++i]);
    else
      names.push_back(argv[i]);
  }
  for (const auto& name : names)
    if (std::none_of(variants.begin(), variants.end(), [&](const auto& v) { return name == v.name; })) {
      fprintf(stderr, "no variant is called %s\n", name.c_str());
      return 2;
    }
  int status = 0;
  for (const auto& variant : variants) {
    const bool named = std::find(names.begin(), names.end(), variant.name) != names.end();
    const Verdict& expected = variant.expected.verdict;
    if (names.empty() ? expected.states > largest : !named) continue;
    Model model;
    variant.set(model.o);
    Checker<Model> checker(model, expected.complete ? 60'000'000 : expected.states);
    const Verdict seen = checker.check();
    const bool as_expected =
        seen.broken == expected.broken && seen.states == expected.states && seen.complete == expected.complete;
    printf("%-10s %-7s %9zu  %s%s%s\n", as_expected ? "expected" : "UNEXPECTED",
           !seen.broken.empty() ? "breaks"
           : seen.complete      ? "holds"
                                : "no end",
           seen.states, variant.name, seen.broken.empty() ? "" : ": ", seen.broken.c_str());
    if (named || !as_expected) checker.print_trace();
    fflush(stdout);
    if (!as_expected) status = 1;
  }
  return status;
}
